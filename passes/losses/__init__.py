"""Losses as sums over the global batch: how a loss divides into shares of microbatches, and the counts
it needs before the first forward pass.
"""
