"""Splits of tensors over the tp axis (intra-op parallelism in Alpa): strategies, their costs, and the ILP that chooses.

Other packages import `cache`, `tensors` and `kind_cost`. The package knows nothing of pipeline stages.
"""
