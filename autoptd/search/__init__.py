"""The search for the fastest plan that fits: `planner` visits candidates from `meshes` by their lower
bound, `sharding` splits tensors, `pipeline` cuts into stages. Imports passes and cost models, never
the runtime or codegen.
"""
