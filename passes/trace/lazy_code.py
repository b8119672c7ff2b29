"""No Python code for graphs that are never run.

torch.export copies its graph module in each of its passes, and every copy writes and compiles its code: 0.3 s of the
2.8 s that deepseek-v3 takes. Modules that write it on first use are private to torch (seen in 2.13.0); no other file of
autoptd uses them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch.fx._lazy_graph_module import _use_lazy_graph_module


def without_code() -> AbstractContextManager[None]:
    """Return a context manager in which new graph modules write their code when they are first run."""
    lazy: AbstractContextManager[None] = _use_lazy_graph_module(True)
    return lazy
