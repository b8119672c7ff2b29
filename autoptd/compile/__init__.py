"""From a model to a plan and to a program: `traced` traces and folds, `make_plan` searches and writes
the plan down, `program` emits the stage files, `layout` derives what the runtime reads. Imports
passes, search and codegen, never the runtime.
"""
