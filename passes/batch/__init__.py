"""The batch in a graph. Import `batch_dims` (which dim of a tensor counts samples) and `batch_independence` (the proof
that no op mixes them, one of the normalising passes). Must not import `plans`, `search`, `codegen` or `runtime`."""
