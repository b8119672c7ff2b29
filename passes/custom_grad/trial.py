"""Run a function of the user's own on tensors without data while a model is traced, forward and backward.

What it computes must follow from the tensors that it is given: an op that draws random numbers, a tensor from elsewhere
(which the trace would not see), or a change to an argument is an error, with the user's line.
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

_PASS = "pass tensors, numbers and strings as arguments, buffers and parameters too; leave the rest inside forward"


class _Watch(TorchDispatchMode):
    """Raises UnsupportedOp where an op reads a tensor that was not given, or is random."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        self.known = {_storage(x): x for x in given}  # kept, so that no other storage can have its place

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise UnsupportedOp(
                f"{func} draws random numbers in a function with a backward pass of its own",
                fix="draw them outside and pass them as an argument",
            )
        fresh = func in _MAKING
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor) and not fresh and _storage(x) not in self.known:
                raise UnsupportedOp(
                    f"a function with a backward pass of its own reads a tensor {list(x.shape)} that it is not given",
                    fix=_PASS,
                )
        result = func(*args, **(kwargs or {}))
        self.add(result)
        return result

    def add(self, tensors: Any) -> None:
        self.known |= {_storage(x): x for x in tree_leaves(tensors) if isinstance(x, Tensor)}


_MAKING = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


class FunctionTrial:
    """The results of a call on copies of its tensors, made and differentiated once."""

    def __init__(self, run: Callable[[Sequence[Tensor]], Any], given: Sequence[Tensor]) -> None:
        leaves = [x.detach().requires_grad_(x.requires_grad) for x in given]
        copies = [x.clone() for x in leaves]
        watch = _Watch((*leaves, *copies))
        with watch, saved_tensors_hooks(_as_it_is, _as_it_is):  # in place of a checkpoint's, which compute again
            self.result = run(copies)
        if any(x._version for x in copies):
            raise UnsupportedOp(
                "a function with a backward pass of its own changes its arguments in place",
                fix="compute a new tensor instead, without mark_dirty",
            )
        self.outputs = _outputs(self.result)
        if any(free_unbacked_symbols(y) for y in self.outputs):
            raise UnsupportedOp(
                "a function with a backward pass of its own gives a tensor whose size depends on data",
                fix="use a form whose shapes do not depend on values (torch.where, a mask, torch.topk with a fixed k)",
            )
        self.view = self._check_aliases(copies)
        self._differentiate(leaves, watch)

    def _check_aliases(self, copies: Sequence[Tensor]) -> bool:
        """Whether the result is a view of the first tensor. Raises UnsupportedOp for any other sharing of memory."""
        mine, theirs = [_storage(y) for y in self.outputs], [_storage(x) for x in copies]
        if len(set(mine)) == len(mine) and not set(mine) & set(theirs):
            return False
        if isinstance(self.result, Tensor) and mine[0] == theirs[0]:
            return True
        raise UnsupportedOp(
            "a function with a backward pass of its own gives back an argument that is not its first and only result",
            fix="return a copy of it: x.clone()",
        )

    def _differentiate(self, leaves: Sequence[Tensor], watch: _Watch) -> None:
        wanted = [x for x in leaves if x.requires_grad]
        roots = [y for y in self.outputs if y.requires_grad]
        if wanted and roots:
            incoming = [torch.empty_like(y) for y in roots]
            watch.add(incoming)
            with watch:
                torch.autograd.grad(roots, wanted, incoming, allow_unused=True)


def _outputs(result: Any) -> list[Tensor]:
    results = [result] if isinstance(result, Tensor) else list(result) if type(result) in (tuple, list) else []
    outputs = [y for y in results if isinstance(y, Tensor)]
    if not outputs or len(outputs) < len(results):
        raise UnsupportedOp(
            "a function with a backward pass of its own returns something other than tensors",
            fix="return a tensor or a tuple of tensors; compute numbers outside of it",
        )
    return outputs


def try_hook(hook: Callable[[Tensor], Any], tensor: Tensor) -> None:
    """Raise UnsupportedOp for a hook that is no function of the gradient alone, or gives nothing back."""
    gradient = torch.empty_like(tensor).detach()
    before = gradient.clone()
    with _Watch((gradient, before)):
        result = hook(before)
    if before._version:
        raise UnsupportedOp("a hook changes the gradient in place", fix="return a new tensor from it")
    if result is None:
        raise UnsupportedOp(
            "a hook that gives no gradient back only looks at one: a program would never call it",
            fix="remove it; gradients of parameters are in parallel.gradients() after a step",
        )
    if not isinstance(result, Tensor) or result.shape != tensor.shape:
        raise UnsupportedOp("a hook gives back something other than a gradient", fix="return a tensor of its shape")
