"""Ops with a user-defined backward pass: one node each, running the user's forward and backward.

    OwnFunction   a torch.autograd.Function:       own.Clip.apply(x, 0.5)
    OwnHook       a hook on a tensor's gradient:   ops.hooked(x, own.halve)
    OpOverload    an op of torch.library that is not torch's own, called by its name

`own` is the module of an emitted program that imports or defines each of them (`codegen/custom_grad.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from autoptd.ops import library as ops

_TORCHS = frozenset({"aten", "prims", "prim"})  # namespaces of ops whose derivatives are torch's


@dataclass(frozen=True)
class OwnFunction:
    """A `torch.autograd.Function` as the target of a node, whose arguments are those of `apply`."""

    function: type[torch.autograd.Function]
    name: str  # unique name in emitted programs
    differentiable: tuple[bool, ...]  # per output: whether a gradient can flow to it
    view: bool = False  # whether its result is a view of its first tensor
    reached: tuple[bool, ...] = ()  # per tensor that it is given: whether its backward pass returns a gradient of it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.apply(*args, **kwargs)

    def __str__(self) -> str:
        return f"own.{self.name}"

    __repr__ = __str__

    @property
    def __name__(self) -> str:
        return self.name


@dataclass(frozen=True)
class OwnHook:
    """A function of a tensor's gradient as the target of a node: the identity, whose backward pass applies it."""

    function: Callable[[Tensor], Tensor]
    name: str
    view: bool = True

    def __call__(self, x: Tensor) -> Tensor:
        return ops.hooked(x, self.function)

    def __str__(self) -> str:
        return f"own.{self.name}"

    __repr__ = __str__

    @property
    def __name__(self) -> str:
        return self.name


def is_own(target: object) -> TypeGuard[OwnFunction | OwnHook | torch._ops.OpOverload]:
    """Return whether a node's target has a backward pass that is not torch's."""
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace not in _TORCHS
    return isinstance(target, (OwnFunction, OwnHook))


def described(function: Any) -> str:
    """Return a class or function with its location, as in `layers.Clip (layers.py:41)`."""
    code = getattr(function, "forward", function)
    code = getattr(getattr(code, "__func__", code), "__code__", None)
    place = f" ({code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno})" if code is not None else ""
    name = getattr(function, "__qualname__", type(function).__qualname__).replace(".<locals>", "")
    return f"{getattr(function, '__module__', '')}.{name}{place}"
