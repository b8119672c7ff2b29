"""The visit of a task's candidates: what they cost, the order in which they are examined, and what that proves.

The package imports `search.sharding` and `search.pipeline`, never the planner.
"""
