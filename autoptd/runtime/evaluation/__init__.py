"""Evaluation of metrics, with a value of each sample."""
