"""Random ops as draws keyed by sample and element: stochastic depth as a mask, any distribution as ops on a draw.
Import `draws` and `drop_path` (normalising passes) and `distributions` (the table). Must not import `plans`, `search`,
`codegen` or `runtime`."""
