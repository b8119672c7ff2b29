"""Questions of a model to torch.distributed: a program computes what one process computes, so a trace has no ranks.

    if dist.is_initialized():     is false, also on ranks that run
        x = gathered(x)           is not traced

Whoever asks for a rank or the number of ranks without that gets the error of one process.

`module.to(device)` in forward moves nothing: the plan says where a module is.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn
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
    """Wrap a trace: in this thread, torch.distributed has not been initialised, and all modules are where they are."""
    kept, move = vars(distributed_c10d._WorldMeta)["WORLD"], nn.Module.to  # the first is private; seen in torch 2.13.0

    def world(cls: type) -> ProcessGroup | None:
        return None if getattr(_tracing, "here", False) else kept.fget(cls)

    def moved(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        here = getattr(_tracing, "here", False) and _moves_only(module, *args, **kwargs)
        return module if here else move(module, *args, **kwargs)

    with (
        patch.object(distributed_c10d._WorldMeta, "WORLD", property(world, kept.fset)),
        patch.object(nn.Module, "to", moved),
    ):
        _tracing.here = True
        try:
            yield
        finally:
            _tracing.here = False


def _moves_only(module: nn.Module, *args: Any, **kwargs: Any) -> bool:
    """Return whether `module.to` with these arguments leaves the types and the strides of its tensors as they are."""
    _, dtype, _, strides = torch._C._nn._parse_to(*args, **kwargs)  # private, what `to` calls; seen in torch 2.13.0
    tensors = (x for x in (*module.parameters(), *module.buffers()) if x.is_floating_point() or x.is_complex())
    return strides is None and (dtype is None or all(x.dtype == dtype for x in tensors))


def refuse_communication(graph: fx.Graph) -> None:
    """Raise UnsupportedOp for a collective in a trace, over a group that the model was given."""
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in _NAMESPACES:
            name = node.target._schema.name.partition("::")[2].strip("_")
            what = f"forward communicates between processes ({name}), but a program computes what one process computes"
            raise UnsupportedOp(what, where=source_line(node), fix=OF_ONE_PROCESS)
