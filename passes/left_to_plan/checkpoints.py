"""Calls of `torch.utils.checkpoint` in forward: what they run is traced as if without, for the plan decides what is
recomputed. What one process has of it beyond that is refused:

    buffers that it updates     in the second run, too
    use_reentrant=True          no gradient of what it runs, if no argument has one
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves

from autoptd.errors import UnsupportedOp
from autoptd.passes.graph import made_since, module_path, writes_unread
from autoptd.passes.normalise.view_writes import is_write, written_views


@contextmanager
def plain_checkpoints(root: nn.Module) -> Iterator[None]:
    """Wrap a trace of `root`: functions are called without checkpoints.

    Raises UnsupportedOp, from within the trace, for one whose second run would do more than compute the same again.
    """

    def reentrant(cls: Any, function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        with _run_once(root):
            result = function(*args)
        inner = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(result))
        if inner and not any(isinstance(x, Tensor) and x.requires_grad for x in args):
            raise UnsupportedOp(
                "torch.utils.checkpoint with use_reentrant=True gives no gradient to the parameters of what it runs, "
                "because none of its arguments has one",
                fix="pass use_reentrant=False; if none is meant, call it under torch.no_grad() instead",
            )
        return result

    def other(*args: Any, **kwargs: Any) -> Iterator[None]:
        with _run_once(root):
            yield

    with (
        patch.object(checkpoint.CheckpointFunction, "apply", classmethod(reentrant)),
        patch.object(checkpoint, "_checkpoint_without_reentrant_generator", other),
    ):
        yield


@contextmanager
def _run_once(root: nn.Module) -> Iterator[None]:
    """Refuse what changes buffers within."""
    mode: Any = get_proxy_mode()
    made_within = made_since(mode.tracer.graph) if mode is not None else list
    before = dict(root.named_buffers())
    yield
    if not torch.is_grad_enabled():
        return  # and no second run
    assigned = [name for name, x in root.named_buffers() if before.get(name) is not x]
    for node in (n for n in made_within() if n.op == "call_function" and _updates(n)):
        raise _repeated(module_path(node))
    if assigned:
        raise _repeated(assigned[0].removeprefix("model.").rpartition(".")[0])


def _updates(node: fx.Node) -> bool:
    """Return whether a node writes to an input of the graph, or to statistics of a norm."""
    return written_views(node)[-1].op != "call_function" if is_write(node) else writes_unread(node)


def _repeated(module: str) -> UnsupportedOp:
    return UnsupportedOp(
        f"torch.utils.checkpoint runs code a second time, which updates buffers of {module or 'the model'} twice in "
        "one process: a program updates them once",
        fix="leave out checkpoint here, since the plan decides what is recomputed",
    )
