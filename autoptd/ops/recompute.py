"""Activation recomputation: run a part of the forward pass a second time in backward instead of saving its tensors.

    recompute(fn, *args)    saves only the arguments; when backward first needs a tensor that autograd would have
                            saved, runs fn again, which recreates all of them in the order of the first run
    keep(fn, *args)         within such an fn: saves the result of this inner fn, and what it saves itself; it is not
                            run again, and its operands are those of the second run
    spare(fn, *args)        `keep` for a result that nothing else of the recomputed fn reads; it is not saved either

Thus `full` is `recompute(block, x)`, `selective` is `recompute(core, q, k, v)` within a block, and `ops` is a
recomputed block that keeps some results. Re-gather in backward is a recomputed function of the all-gather and the
spared products.

Gradients are those of the first run's graph. The second run computes no gradient, stops at the last tensor that is
needed, and draws equal random numbers, because these have no state. (Chen et al. 2016; hooks for saved tensors as in
the non-reentrant torch.utils.checkpoint, which cannot keep the result of a collective.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from autoptd.errors import RuntimeFault

T = TypeVar("T")
Kind = tuple[torch.dtype, torch.Size]


def recompute(fn: Callable[..., T], *args: Any) -> T:
    """Return `fn(*args)`, saving only `args` and the results of `keep`. `fn` must be deterministic."""
    if not torch.is_grad_enabled():
        return fn(*args)
    run = _RecomputedCall(fn, args)
    with _under_way(run), torch.autograd.graph.saved_tensors_hooks(run.pack, run.unpack):
        return fn(*args)


def keep(fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Return `fn(*args, **kwargs)`, a tensor or several, which an enclosing `recompute` saves."""
    run: _RecomputedCall | None = getattr(_HERE, "run", None)
    return fn(*args, **kwargs) if run is None else run.keep(fn, args, kwargs)


def spare(fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Return `fn(*args, **kwargs)`, a tensor that the second run does not read; it gets None in its place."""
    run: _RecomputedCall | None = getattr(_HERE, "run", None)
    return fn(*args, **kwargs) if run is None else run.keep(fn, args, kwargs, hold=False)


_HERE = threading.local()  # `run`: the innermost recomputed call of this thread, in its first or second run


@contextmanager
def _under_way(run: _RecomputedCall) -> Iterator[None]:
    before = getattr(_HERE, "run", None)
    _HERE.run = run
    try:
        yield
    finally:
        _HERE.run = before


class _Complete(Exception):
    """The second run has recreated all tensors that are needed."""


@dataclass
class _Kept:
    """One `keep`: its results, and the saved tensors that are views of operands (index, size, stride, offset)."""

    results: Any = None
    operands: tuple[Tensor, ...] = ()  # of the first run, while it lasts
    views: list[tuple[int, tuple[int, ...], tuple[int, ...], int]] = field(default_factory=list)


class _RecomputedCall:
    """A recomputed function with its arguments, and the tensors that autograd saves of it, by number."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.fn, self.args = fn, args
        self.wanted: list[Kind] = []  # of the tensors to recreate
        self.kept: list[_Kept] = []
        self.within: _Kept | None = None  # the current `keep` of the first run
        self.second_run = False
        self.made: dict[int, Tensor] = {}  # recreated by the second run, not yet read by backward
        self.met = 0  # `keep` calls that the second run has reached
        self.count = 0  # tensors that it has recreated

    def pack(self, x: Tensor) -> int | Tensor:
        """Return the number of a tensor that the second run recreates, or a tensor to save."""
        if self.within is not None:
            storage = x.untyped_storage()._cdata
            of = [i for i, operand in enumerate(self.within.operands) if operand.untyped_storage()._cdata == storage]
            if not of:
                return x.detach()
            self.within.views.append((of[0], tuple(x.shape), x.stride(), int(x.storage_offset())))
        self.wanted.append((x.dtype, x.shape))
        return len(self.wanted) - 1

    def unpack(self, packed: int | Tensor) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if packed not in self.made:
            self._run_again()
        return self.made.pop(packed)

    def _run_again(self) -> None:
        self.made, self.met, self.count, self.second_run = {}, 0, 0, True
        hooks = torch.autograd.graph.saved_tensors_hooks(self._make, _refuse)
        try:
            with torch.enable_grad(), _under_way(self), hooks:
                self.fn(*self.args)
        except _Complete:
            pass
        finally:
            self.second_run = False
        if self.count != len(self.wanted):
            raise self._unlike(f"saves {self.count} tensors in its second run, and {len(self.wanted)} in its first")

    def _make(self, x: Tensor) -> None:
        if (x.dtype, x.shape) != (first := self.wanted[self.count]):
            both = f"{x.dtype} {[*x.shape]} in its second run, and {first[0]} {[*first[1]]} in its first"
            raise self._unlike(f"saves as tensor {self.count} {both}")
        self.made[self.count] = x.detach()
        self.count += 1
        if self.count == len(self.wanted):
            raise _Complete

    def _unlike(self, what: str) -> RuntimeFault:
        return RuntimeFault(
            f"a recomputed part of the forward pass is not deterministic: it {what}",
            where=getattr(self.fn, "__qualname__", type(self.fn).__name__),
            fix='plan with fix={"recompute": "none"}; if blocks are compiled, pass compile=False',
        )

    def keep(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], hold: bool = True) -> Any:
        operands = tuple(_tensors((*args, *kwargs.values())))
        if self.second_run:
            return self._saved_results(operands)
        self.within = kept = _Kept(operands=operands)
        try:
            results = fn(*args, **kwargs)
        finally:
            self.within, kept.operands = None, ()
        if isinstance(results, (tuple, list)):  # plain, as in the second run: torch.compile has a graph for each type
            results = tuple(results)
        kept.results = _each(results, _bare) if hold else None
        self.kept.append(kept)
        return results

    def _saved_results(self, operands: Sequence[Tensor]) -> Any:
        """Recreate the saved views of operands in the second run, and return the first run's results."""
        kept = self.kept[self.met]
        self.met += 1
        for of, size, stride, offset in kept.views:
            self._make(operands[of].detach().as_strided(size, stride, offset))
        return None if kept.results is None else _each(kept.results, _bare)


def _bare(x: Tensor) -> Tensor:
    """Detach a tensor from its graph, but leave `requires_grad` as it is."""
    return x.detach().requires_grad_(x.requires_grad)


def _each(results: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    return tuple(map(fn, results)) if isinstance(results, tuple) else fn(results)


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _refuse(packed: None) -> Tensor:
    raise AssertionError("a second run is never differentiated")
