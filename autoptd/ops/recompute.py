"""Run a part of the forward pass again in the backward pass, instead of keeping what autograd saves of it.

    recompute(fn, *args)    keeps the arguments alone; when the backward pass first asks for a tensor that autograd
                            would have saved, fn runs again and hands over all of them, in the order of the first time
    keep(fn, *args)         within such an fn: what fn returns is kept, and so is what it saves of its own; it does not
                            run again, its operands are those of the second run
    spare(fn, *args)        the same for a result that nothing else of fn reads: not even that is kept

So `full` is `recompute(block, x)`, `selective` is `recompute(core, q, k, v)` within a block, `ops` is a recomputed
block in which some results are kept, and what is gathered for products, and again for their gradients, is a recomputed
function of the gather and the spared products. The graph is that of the first run: the second makes no gradient, it
ends with the last tensor that is wanted, and it draws the same random numbers because these have no state. (Chen et al.
2016; hooks for saved tensors as in torch.utils.checkpoint without reentrance, which cannot keep what a collective
returned.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def recompute(fn: Callable[..., T], *args: Any) -> T:
    """`fn(*args)`, of which nothing is kept but `args` and what `keep` keeps. `fn` must do the same every time."""
    if not torch.is_grad_enabled():
        return fn(*args)
    run = _RecomputedCall(fn, args)
    with _under_way(run), torch.autograd.graph.saved_tensors_hooks(run.pack, run.unpack):
        return fn(*args)


def keep(fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """`fn(*args, **kwargs)`, one tensor or a tuple of them, that a recompute around it does not do again."""
    run: _RecomputedCall | None = getattr(_HERE, "run", None)
    return fn(*args, **kwargs) if run is None else run.keep(fn, args, kwargs)


def spare(fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """`keep` of one tensor that a second run does not read: it gets None."""
    run: _RecomputedCall | None = getattr(_HERE, "run", None)
    return fn(*args, **kwargs) if run is None else run.keep(fn, args, kwargs, hold=False)


_HERE = threading.local()  # `run`: what is being run, or run again, on this thread


@contextmanager
def _under_way(run: _RecomputedCall) -> Iterator[None]:
    before = getattr(_HERE, "run", None)
    _HERE.run = run
    try:
        yield
    finally:
        _HERE.run = before


class _Enough(Exception):
    """The second run has made all that is wanted of it."""


@dataclass
class _Kept:
    """Of one `keep`: its results, and which saved tensors are views of which operand (index, size, stride, offset)."""

    results: Any = None
    operands: tuple[Tensor, ...] = ()  # of the first run, while it lasts
    views: list[tuple[int, tuple[int, ...], tuple[int, ...], int]] = field(default_factory=list)


class _RecomputedCall:
    """A function with its arguments, and the tensors that autograd wants of it, by number."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.fn, self.args = fn, args
        self.wanted = 0
        self.kept: list[_Kept] = []
        self.within: _Kept | None = None  # in the first run, within a `keep`
        self.again = False
        self.made: dict[int, Tensor] = {}  # by the second run, not yet asked for
        self.met = 0  # kept results that the second run has come to
        self.count = 0  # tensors that it has made

    def pack(self, x: Tensor) -> int | Tensor:
        """In the first run: the number of a tensor that is to be made again, or the tensor."""
        if self.within is not None:
            storage = x.untyped_storage()._cdata
            of = [i for i, operand in enumerate(self.within.operands) if operand.untyped_storage()._cdata == storage]
            if not of:
                return x.detach()
            self.within.views.append((of[0], tuple(x.shape), x.stride(), int(x.storage_offset())))
        self.wanted += 1
        return self.wanted - 1

    def unpack(self, packed: int | Tensor) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if packed not in self.made:
            self._run_again()
        return self.made.pop(packed)

    def _run_again(self) -> None:
        self.made, self.met, self.count, self.again = {}, 0, 0, True
        hooks = torch.autograd.graph.saved_tensors_hooks(self._make, _refuse)
        try:
            with torch.enable_grad(), _under_way(self), hooks:
                self.fn(*self.args)
        except _Enough:
            pass
        finally:
            self.again = False
        assert self.count == self.wanted, f"{self.fn} did not do the same again: {self.count} of {self.wanted} tensors"

    def _make(self, x: Tensor) -> None:
        self.made[self.count] = x.detach()
        self.count += 1
        if self.count == self.wanted:
            raise _Enough

    def keep(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], hold: bool = True) -> Any:
        operands = tuple(_tensors((*args, *kwargs.values())))
        if self.again:
            return self._handed_over(operands)
        self.within = kept = _Kept(operands=operands)
        try:
            results = fn(*args, **kwargs)
        finally:
            self.within, kept.operands = None, ()
        kept.results = _each(results, _bare) if hold else None
        self.kept.append(kept)
        return results

    def _handed_over(self, operands: Sequence[Tensor]) -> Any:
        """In the second run: the results of the first, after the tensors that it saved of its operands."""
        kept = self.kept[self.met]
        self.met += 1
        for of, size, stride, offset in kept.views:
            self._make(operands[of].detach().as_strided(size, stride, offset))
        return None if kept.results is None else _each(kept.results, _bare)


def _bare(x: Tensor) -> Tensor:
    """Without its graph, but with a gradient if it has one."""
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
    raise AssertionError("nobody differentiates a second run")
