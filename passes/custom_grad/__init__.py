"""Backward passes of the user's own (`autograd.Function`, custom ops, hooks): kept as one opaque op
each, proved by execution, or refused.
"""
