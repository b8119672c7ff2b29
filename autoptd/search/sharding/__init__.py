"""How tensors are split over the tp axis (what Alpa calls intra-op parallelism): the legal strategies
of every op, their cost, and the integer program that chooses among them. Does not know of pipeline
stages.
"""
