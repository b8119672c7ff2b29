"""Comparison of a model in eval mode with the program of training as an evaluation step runs it. Import
`first_difference` from `difference`."""
