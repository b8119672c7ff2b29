"""Exact losses under any split of the batch: rewrites a loss to sums over microbatches and to counts of the global
batch, which are known before the first forward pass.

Other packages import `loss_form` (the result); normalisation imports the passes. Like all of `passes`, it must not
import `plans`, `search`, `codegen` or `runtime`.
"""
