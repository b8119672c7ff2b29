"""Read-only analyses of a normalised graph: dataflow, liveness, saved tensors, FLOPs, fusion,
collectives.
"""
