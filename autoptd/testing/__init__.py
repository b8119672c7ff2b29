"""Parity tools: training of all ranks in lockstep beside the plain model, and a pool of gloo processes.
`verification`, tests and examples import `parity` and `process_pool`. This package may import `api` and all below it,
never `answers`, `verification` or `cli`.
"""
