"""The search for the fastest plan that fits in memory.

`planner` visits the candidates of a `task` in the order of their lower bounds; for each, `sharding` splits the tensors
and `pipeline` cuts the model into stages. Other packages import the submodules that they need. The package builds on
passes and cost models; it must not import runtime, codegen, plans or explain.
"""
