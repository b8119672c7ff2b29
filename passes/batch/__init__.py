"""The batch in a graph: which dim counts samples, and the proof that no op mixes them.

Other packages import `batch_dims` (where the samples of a tensor are); normalisation imports `batch_independence` (the
proof). Like all of `passes`, it must not import `plans`, `search`, `codegen` or `runtime`.
"""
