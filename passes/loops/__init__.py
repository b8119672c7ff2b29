"""Python loops over the samples of a batch: their results are joined into one tensor, computed in one pass. Import
`sample_loops` (while tracing) and `write_joined` (in the graph). Must not import `plans`, `search`, `codegen` or
`runtime`."""
