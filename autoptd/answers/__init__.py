"""Answers about plans, each from several searches: sweeps, time against memory, sensitivity, the cost of a constraint,
the alternatives to an op's split, and why nothing fits. `cli` imports them; all build on `query`. This package may
import `api` and all below it, never `testing`, `verification` or `cli`.
"""
