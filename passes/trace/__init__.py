"""Tracing: turns a model and its loss into one fx graph of ATen ops with symbolic sizes, using torch.export. Import
`trace`, `traced` (the result), `loss` (objectives), and `unwrap` (checks of the model). Each private part of torch is
used in one file. Must not import `plans`, `search`, `codegen` or `runtime`."""
