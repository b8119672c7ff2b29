"""The evaluation of metrics on a rank: rows of each sample, and the share of the samples that a rank takes.
As part of `runtime` it never imports `passes`, `explain`, `search` or `codegen`."""
