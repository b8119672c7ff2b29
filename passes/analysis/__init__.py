"""Read-only analyses of a normalised graph: dataflow, liveness, saved activations, workspace, FLOPs, kernel fusion and
tp collectives. Import from its modules; this file exports nothing. It may import `layout`, `ops` and the rest of
`passes`, never `plans`, `search`, `codegen` or `runtime`.
"""
