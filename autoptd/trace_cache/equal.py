"""Exact comparison of an object with its copy read from bytes: the proof that it may be kept.

It knows the types that graphs are made of, and calls everything else different. Objects that may change must be shared
in the copy where they are shared in the original, and nowhere else; values such as numbers, texts and sizes need not.
"""

from __future__ import annotations

import types
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from autoptd.errors import AutoptdError
from autoptd.passes.custom_grad.trace_calls import OwnCalls
from autoptd.trace_cache.to_bytes import kept_meta, kept_module_meta

_VALUES = (type(None), bool, int, str, bytes, torch.dtype, torch.device, torch.memory_format, torch.layout)
_SAME = (torch._ops.OpOverload, types.FunctionType, types.BuiltinFunctionType, type, Enum)  # there is one of each


def equal(one: Any, other: Any) -> bool:
    """Return whether `other` is an exact copy of `one`, without what `to_bytes` leaves out."""
    return _ExactComparison().of(one, other)


class _ExactComparison:
    """A comparison in progress."""

    def __init__(self) -> None:
        self._copies: dict[int, Any] = {}  # id of an object -> its copy
        self._originals: dict[int, Any] = {}  # and of a copy -> the object; both keep what they name alive

    def of(self, a: Any, b: Any) -> bool:
        if isinstance(a, _SAME):
            return a is b
        if type(a) is not type(b) and not isinstance(a, fx.GraphModule):
            return False
        if isinstance(a, _VALUES):
            return bool(a == b)
        if isinstance(a, (float, complex)):
            return repr(a) == repr(b)  # not a number is equal, 0.0 and -0.0 are not
        if isinstance(a, sympy.Basic):
            return bool(a == b) and str(a) == str(b)
        if isinstance(a, Tensor):
            return (a.dtype, a.shape) == (b.dtype, b.shape) and _bits(a) == _bits(b)
        if isinstance(a, frozenset):
            return _plain(a) and bool(a == b)
        if isinstance(a, tuple) and type(a) is tuple:
            return self.all(a, b)
        if id(a) in self._copies or id(b) in self._originals:
            return self._copies.get(id(a)) is b and self._originals.get(id(b)) is a
        self._copies[id(a)], self._originals[id(b)] = b, a
        return self._contents(a, b)

    def all(self, a: Any, b: Any) -> bool:
        return len(a) == len(b) and all(map(self.of, a, b))

    def _contents(self, a: Any, b: Any) -> bool:
        if isinstance(a, fx.Node):
            return self._nodes(a, b)
        if isinstance(a, fx.Graph):
            taken, others = a._graph_namespace, b._graph_namespace
            alike = taken._used_names == others._used_names and taken._base_count == others._base_count
            return alike and self.all(list(a.nodes), list(b.nodes))
        if isinstance(a, fx.GraphModule):
            return isinstance(b, fx.GraphModule) and self.all(_of_module(a), _of_module(b))
        if isinstance(a, list):
            return self.all(a, b)
        if isinstance(a, dict):
            return self.all(list(a), list(b)) and self.all(list(a.values()), list(b.values()))
        if isinstance(a, set):
            return _plain(a) and bool(a == b)
        if isinstance(a, AutoptdError):
            return self.all([a.args, vars(a)], [b.args, vars(b)])
        if is_dataclass(a) and type(a).__module__.startswith("autoptd."):
            names = [field.name for field in fields(a)]
            return self.all([getattr(a, n) for n in names], [getattr(b, n) for n in names])
        if isinstance(a, OwnCalls):
            return self.of(vars(a), vars(b))
        return False

    def _nodes(self, a: fx.Node, b: fx.Node) -> bool:
        """Compare nodes whose graphs were compared up to here; readers come later in these."""
        here = self.all((a.graph, a.op, a.name, a.target, a.type), (b.graph, b.op, b.name, b.target, b.type))
        return (
            here
            and self.all((a.args, a.kwargs), (b.args, b.kwargs))
            and [user.name for user in a.users] == [user.name for user in b.users]
            and self.of(kept_meta(a), kept_meta(b))
        )


def _of_module(module: fx.GraphModule) -> list[Any]:
    return [module.graph, kept_module_meta(module)]


def _plain(values: Any) -> bool:
    """Return whether a set holds nothing but texts, numbers and sizes."""
    return all(isinstance(x, (str, int, sympy.Basic)) for x in values)


def _bits(x: Tensor) -> bytes:
    return x.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
