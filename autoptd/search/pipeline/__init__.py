"""How segments are cut into pipeline stages (inter-op parallelism): the time and memory of every run
of segments, recomputation, lower bounds, the exact partition, and its evaluation by simulation.
Imports `sharding`, never the planner.
"""
