"""The cut of segments into pipeline stages (inter-op parallelism): time and memory of every run of segments,
recomputation, lower bounds, the optimal cut, and its evaluation by simulation.

Other packages import `evaluate`, `stage_parameters` and `chunk_cost`. The package imports `search.sharding`, never the
planner.
"""
