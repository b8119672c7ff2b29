"""Tools for proving parity: a pool of gloo processes, and lockstep training beside the plain model.
Used by `verify` and by the tests.
"""
