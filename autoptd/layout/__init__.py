"""Facts about ranks and tensors that passes, search and runtime all read: the mesh, placements,
buckets of flat buffers, and the bytes of training state. Imports schedules, cost models and errors
only.
"""
