"""Costs of the end of a step: `costs` has reduction, optimizer and all-gather, `whole_updates` what optimizers of whole
tensors add. `search/pipeline` builds on it; it never imports `plans` or `explain`."""
