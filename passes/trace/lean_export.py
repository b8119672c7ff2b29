"""Skip two things that torch.export spends a fifth of its time on and no plan reads (seen in torch 2.13.0):

- the Python code of graph modules, which each of its passes copies: modules that write it on first use are private to
  torch, in `torch.fx._lazy_graph_module`;
- the memory format of every tensor, in `meta["tensor_meta"]`, found by comparing symbolic sizes and strides.

No other file of autoptd uses these parts of torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from torch.fx._lazy_graph_module import _use_lazy_graph_module


@contextmanager
def lean_export() -> Iterator[None]:
    """Wrap a call of torch.export.export whose graph is read but not run."""
    describe = "torch.fx.experimental.proxy_tensor._extract_tensor_metadata"
    with _use_lazy_graph_module(True), patch(describe, lambda tensor: None):
        yield
