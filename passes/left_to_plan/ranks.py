"""Questions of a model to torch.distributed: a program computes what one process computes, so a trace has no ranks.

    if dist.is_initialized():     is false, also on ranks that run
        x = gathered(x)           is not traced

Whoever asks for a rank or the number of ranks without that gets the error of one process.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import fx
from torch.distributed import ProcessGroup, distributed_c10d

from autoptd.errors import UnsupportedOp
from autoptd.passes.graph import source_line

RANKS_ASKED = "forward asks torch.distributed for its ranks, but a program computes what one process computes"
OF_ONE_PROCESS = (
    "remove it: microbatches and ranks are the plan's; torch.distributed.is_initialized() is False while a model is "
    "traced, and what it guards is left out"
)
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")
_tracing = threading.local()


@contextmanager
def as_one_process() -> Iterator[None]:
    """Wrap a trace: in this thread, torch.distributed has not been initialised."""
    kept = vars(distributed_c10d._WorldMeta)["WORLD"]  # private; seen in torch 2.13.0

    def world(cls: type) -> ProcessGroup | None:
        return None if getattr(_tracing, "here", False) else kept.fget(cls)

    with patch.object(distributed_c10d._WorldMeta, "WORLD", property(world, kept.fset)):
        _tracing.here = True
        try:
            yield
        finally:
            _tracing.here = False


def refuse_communication(graph: fx.Graph) -> None:
    """Raise UnsupportedOp for a collective in a trace, over a group that the model was given."""
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in _NAMESPACES:
            name = node.target._schema.name.partition("::")[2].strip("_")
            what = f"forward communicates between processes ({name}), but a program computes what one process computes"
            raise UnsupportedOp(what, where=source_line(node), fix=OF_ONE_PROCESS)
