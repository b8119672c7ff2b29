"""The optimizer step of a rank: named optimizers and parameter groups, updates of flat pieces and of whole tensors.
Other packages import `groups`. As part of `runtime` it never imports `passes`, `explain`, `search` or `codegen`."""
