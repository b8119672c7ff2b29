"""Exact losses under any split of the batch: rewrites a loss to sums over microbatches and to counts of the global
batch, which are known before the first forward pass. Import `loss_form` (the result); the other files are steps of
normalisation. Must not import `plans`, `search`, `codegen` or `runtime`."""
