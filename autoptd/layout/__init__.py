"""Descriptions of ranks and tensors that passes, search and runtime share: the mesh, placements, the buckets of flat
buffers, and the bytes of training state. Every module may be imported from above. Imports schedules, cost models and
errors only.
"""
