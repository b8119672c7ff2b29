"""The compiler's steps between a model, its plan and its program. Import `read_model` from `read`
(trace and fold), `make_plan` from `make_plan` (search), `make_program` from `program` (stage files),
`make_layout` from `layout` (input of the runtime). Imports passes, search, plans and codegen, never
`explain` or the API.
"""
