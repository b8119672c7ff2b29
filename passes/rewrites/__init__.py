"""Rewrites of groups of ops to forms that splits and proofs of samples can follow: batch norm as sums over samples,
products of several tensors, projections that are cut apart, features placed into tokens. Each is a pass in the list of
`normalise`. Must not import `plans`, `search`, `codegen` or `runtime`."""
