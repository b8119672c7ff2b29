"""Flat buffers of parameters and gradients, sharded over data-parallel ranks (ZeRO 0 to 3; Rajbhandari et al. 2020):
gradient reduction and parameter all-gather. Other packages import `ParameterShard`. As part of `runtime` it never
imports `passes`, `explain`, `search` or `codegen`."""
