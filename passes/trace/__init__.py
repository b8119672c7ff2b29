"""Tracing: turns a model and its loss into one fx graph of ATen ops with symbolic sizes, using torch.export.

Repeated modules are traced once. Import `trace.trace`, `traced.Traced`, `loss.Objective` and the model checks of
`unwrap`. Like all of `passes`, it must not import `plans`, `search`, `codegen` or `runtime`. Each private part of torch
is used in one file only.
"""
