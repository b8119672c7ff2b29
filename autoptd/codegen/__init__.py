"""Emitted programs: one readable stage module per pipeline stage. Import `emit_program` from
`codegen.emit`. Imports passes and `ops`, never the search or the runtime.
"""
