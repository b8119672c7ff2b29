"""Code generation: one readable Python file per distinct pipeline stage. Import `emit_program`, `Program` and
`load_stage` from `codegen.emit`. Imports passes, `ops` and what is below them, never the search, plans or the runtime.
"""
