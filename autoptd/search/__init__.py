"""The search for the fastest plan that fits in memory.

`planner` visits the candidates of `space` in the order of their lower bounds; for each, `sharding` splits the tensors
and `pipeline` cuts the model into stages. Other packages import the submodules (`task`, `planner`, `solver`, …). The
package builds on layout, schedule, passes and cost models; it must not import codegen, plans or the runtime.
"""
