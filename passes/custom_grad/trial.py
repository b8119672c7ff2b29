"""Trial run of a user-defined autograd function or hook on data-free tensors during tracing, forward and backward.

Its results must depend on its arguments only. A random op, a tensor from outside (which the trace would miss) or a
change to an argument raises UnsupportedOp with the user's line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autoptd.errors import UnsupportedOp

_PASS = "pass every tensor as an argument, parameters and buffers too, or create it inside forward"


class _Watch(TorchDispatchMode):
    """Mode that raises UnsupportedOp for an op that is random or reads a tensor that was not given."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        self.known = {_storage(x): x for x in given}  # the tensors stay alive, so that no storage id is reused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise UnsupportedOp(
                f"{func} draws random numbers in a user-defined autograd function",
                fix="draw them outside and pass them as an argument",
            )
        fresh = func in _MAKING
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor) and not fresh and _storage(x) not in self.known:
                raise UnsupportedOp(
                    f"a user-defined autograd function reads a tensor {list(x.shape)} that it is not given",
                    fix=_PASS,
                )
        result = func(*args, **(kwargs or {}))
        self.add(result)
        return result

    def add(self, tensors: Any) -> None:
        self.known |= {_storage(x): x for x in tree_leaves(tensors) if isinstance(x, Tensor)}


_MAKING = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)


def _identity(x: Tensor) -> Tensor:
    return x


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


class FunctionTrial:
    """Results of a call on copies of its tensors, run and differentiated once."""

    def __init__(self, run: Callable[[Sequence[Tensor]], Any], given: Sequence[Tensor]) -> None:
        leaves = [x.detach().requires_grad_(x.requires_grad) for x in given]
        copies = [x.clone() for x in leaves]
        watch = _Watch((*leaves, *copies))
        with watch, saved_tensors_hooks(_identity, _identity):  # override those of a checkpoint, which recompute
            self.result = run(copies)
        if any(x._version for x in copies):
            raise UnsupportedOp(
                "a user-defined autograd function changes its arguments in place",
                fix="compute a new tensor instead, without mark_dirty",
            )
        self.outputs = _outputs(self.result)
        if any(free_unbacked_symbols(y) for y in self.outputs):
            raise UnsupportedOp(
                "a user-defined autograd function returns a tensor whose size depends on data",
                fix="use a form whose shapes do not depend on values (torch.where, a mask, torch.topk with a fixed k)",
            )
        self.view = self._check_aliases(copies)
        self.reached = self._differentiate(leaves, watch)

    def _check_aliases(self, copies: Sequence[Tensor]) -> bool:
        """Return whether the result is a view of the first tensor. Raises UnsupportedOp for any other aliasing."""
        mine, theirs = [_storage(y) for y in self.outputs], [_storage(x) for x in copies]
        if len(set(mine)) == len(mine) and not set(mine) & set(theirs):
            return False
        if isinstance(self.result, Tensor) and mine[0] == theirs[0]:
            return True
        raise UnsupportedOp(
            "a user-defined autograd function returns tensors that share memory with one another or with an argument",
            fix="return copies: x.clone(); only a single result may be a view, of the first tensor",
        )

    def _differentiate(self, leaves: Sequence[Tensor], watch: _Watch) -> tuple[bool, ...]:
        """Return whether each tensor may get a gradient: the backward pass returns None for the others."""
        wanted = [x for x in leaves if x.requires_grad]
        roots = [y for y in self.outputs if y.requires_grad]
        if wanted and roots:
            incoming = [torch.empty_like(y) for y in roots]
            watch.add(incoming)
            with watch:
                found = iter(torch.autograd.grad(roots, wanted, incoming, allow_unused=True))
            return tuple(not x.requires_grad or next(found) is not None for x in leaves)
        return (True,) * len(leaves)


def _outputs(result: Any) -> list[Tensor]:
    results = [result] if isinstance(result, Tensor) else list(result) if type(result) in (tuple, list) else []
    outputs = [y for y in results if isinstance(y, Tensor)]
    if not outputs or len(outputs) < len(results):
        raise UnsupportedOp(
            "a user-defined autograd function returns something other than tensors",
            fix="return a tensor or a tuple of tensors; compute numbers outside of it",
        )
    return outputs


def try_hook(hook: Callable[[Tensor], Any], tensor: Tensor) -> None:
    """Raise UnsupportedOp for a hook that depends on more than the gradient, or returns no gradient."""
    gradient = torch.empty_like(tensor).detach()
    before = gradient.clone()
    with _Watch((gradient, before)):
        result = hook(before)
    if before._version:
        raise UnsupportedOp("a hook changes the gradient in place", fix="return a new tensor from it")
    if result is None:
        raise UnsupportedOp(
            "a hook that returns no gradient only looks at one: the emitted program would not call it",
            fix="remove it; gradients of parameters are in parallel.gradients() after a step",
        )
    if not isinstance(result, Tensor) or result.shape != tensor.shape:
        raise UnsupportedOp("a hook returns something other than a gradient", fix="return a tensor of its shape")
