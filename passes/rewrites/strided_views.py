"""Rewrite `as_strided` to slices, windows (`unfold`), permutations and expansions of a tensor without gaps.

Each dim of the result takes steps along one dim of the tensor, that of the largest stride that divides its own; two
dims along the same one are windows:

    x [b, n, d]      strides n d, d, 1
    result           strides n d, 4 d, d, 1   ->  unfold(1, 8, 4) of x, if the sizes of the two dims are ⌊n / 4⌋ - 1, 8

An index leads to the same element if no dim is left: start + Σ (size - 1) step < size of the tensor's dim. Where that
is not so, neighbouring dims of the tensor are taken as one. Strides are those of the trace, as the model's code sees
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import sympy
import torch
from torch import fx

from autoptd.errors import UnsupportedOp
from autoptd.passes.graph import info, numel, plain, source_line, write_op
from autoptd.passes.normalise.sizes import in_our_symbols
from autoptd.passes.opcall import Size
from autoptd.passes.rules.views import quotient, same
from autoptd.passes.trace.traced import Traced

aten = torch.ops.aten


@dataclass(frozen=True)
class _Strides:
    """A dim of the result: its position, its size, and how far a step leads along a dim of the tensor."""

    at: int
    size: Size
    step: Size


@dataclass(frozen=True)
class _Along:
    """A dim of the tensor: its size, where the result begins, and the result's dims along it."""

    size: Size
    start: Size
    dims: tuple[_Strides, ...]

    def fits(self) -> bool:
        """Return whether every index of the result's dims stays within this one."""
        last = self.start + sum((d.size - 1) * d.step for d in self.dims)
        return never_negative(self.size - 1 - last)

    def joined(self, inner: _Along) -> _Along:
        """Return this dim and the next inner one as one."""
        times = inner.size
        dims = tuple(_Strides(d.at, d.size, d.step * times) for d in self.dims)
        return _Along(self.size * times, self.start * times + inner.start, (*dims, *inner.dims))


def write_strided_views(graph: fx.Graph, traced: Traced) -> None:
    """Rewrite every `as_strided`. Raises UnsupportedOp where the elements that it reads are not known."""
    for node in [n for n in graph.nodes if n.target is aten.as_strided.default]:
        with graph.inserting_before(node):
            made = _written(graph, node, traced)
        if made is None:
            raise UnsupportedOp(
                "as_strided reads elements that are not proved to be windows, slices or a view of its tensor",
                where=source_line(node),
                fix="write it as x.unfold(dim, size, step), slices, x.view or x.expand",
            )
        node.replace_all_uses_with(made)
        graph.erase_node(node)


def _written(graph: fx.Graph, node: fx.Node, traced: Traced) -> fx.Node | None:
    args: Any = (*node.args, *node.kwargs.values())
    source, sizes, strides, *rest = args
    given = source.meta.get("val")
    if not isinstance(source, fx.Node) or not isinstance(given, torch.Tensor) or given.ndim != info(source).ndim:
        return None
    own = [in_our_symbols(x, traced, node) for x in given.stride()]
    offset = in_our_symbols(given.storage_offset(), traced, node)
    start = 0 if not rest or rest[0] is None else plain(sympy.expand(rest[0] - offset))
    order = _order(given, own, info(source).shape)
    if order is None:
        return None
    shape = [info(source).shape[d] for d in order]
    wanted = [_Strides(i, n, step) for i, (n, step) in enumerate(zip(sizes, strides, strict=True))]
    alongs = _divided(shape, [d for d in wanted if d.size != 1 and d.step != 0], start)
    if alongs is None:
        return None
    x = source
    if order != list(range(len(order))):
        x = write_op(graph, node, aten.permute.default, (x, order), tuple(shape))
    return _Writer(graph, node, x).write(alongs, wanted)


def _order(given: torch.Tensor, strides: Sequence[Size], shape: Sequence[Size]) -> list[int] | None:
    """Return a tensor's dims from the largest stride to the smallest; None if its elements have gaps."""
    hints = [int(x.node.hint) if isinstance(x, torch.SymInt) else int(x) for x in given.stride()]
    order = sorted(range(len(shape)), key=lambda d: (-hints[d], d))
    for i, d in enumerate(order):
        if shape[d] != 1 and not same(strides[d], numel(shape[k] for k in order[i + 1 :])):
            return None
    return order


def _divided(shape: Sequence[Size], dims: Sequence[_Strides], start: Size) -> list[_Along] | None:
    """Return the dims of a tensor without gaps, some of them joined, with the result's dims along each."""
    found: list[_Along] = []
    left = list(dims)
    for i, size in enumerate(shape):
        stride = numel(shape[i + 1 :])
        mine = [d for d in left if quotient(d.step, stride) is not None]
        left = [d for d in left if d not in mine]
        steps = tuple(_Strides(d.at, d.size, quotient(d.step, stride)) for d in mine)  # type: ignore[arg-type]
        begun, start = _begun(start, stride)
        found.append(_Along(size, begun, steps))
    i = 0
    while i < len(found):
        if found[i].dims and not found[i].fits():
            if i == 0:
                return None
            found[i - 1 : i + 1] = [found[i - 1].joined(found[i])]
            i -= 1
        else:
            i += 1
    whole = all(along.fits() for along in found)
    return found if whole and not left and start == 0 else None


def _begun(start: Size, stride: Size) -> tuple[Size, Size]:
    """Return how many steps of a stride an offset is, and the rest of it."""
    if isinstance(start, int) and isinstance(stride, int):
        return divmod(start, stride)
    return 0, start


def never_negative(size: Size) -> bool:
    """Return whether a size is zero or more for all values of its symbols, which are at least 1."""
    low = sympy.expand(size)
    while parts := sorted(low.atoms(sympy.floor, sympy.ceiling), key=str):
        apart = [p for p in parts if low.coeff(p).is_number and not (low - low.coeff(p) * p).has(p)]
        if not apart:
            return False
        within, rate = apart[0].args[0], low.coeff(apart[0])
        below = sympy.fraction(sympy.together(within))[1]
        if not below.is_Integer:
            return False
        off = 1 - sympy.Rational(1, below)  # how far a fraction is at most from its floor or ceiling
        up = isinstance(apart[0], sympy.ceiling)
        bound = within + (off if up else 0) if rate < 0 else within - (0 if up else off)
        low = sympy.expand(low - rate * apart[0] + rate * bound)
    if not low.free_symbols:
        return bool(low >= 0)
    grown = sympy.Poly(low.subs({s: s + 1 for s in low.free_symbols}), *low.free_symbols)
    return all(c >= 0 for c in grown.coeffs())


class _Writer:
    """Writes the result, dim by dim of the tensor."""

    def __init__(self, graph: fx.Graph, like: fx.Node, x: fx.Node) -> None:
        self.graph, self.like, self.x = graph, like, x
        self.shape = list(info(x).shape)

    def write(self, alongs: Sequence[_Along], wanted: Sequence[_Strides]) -> fx.Node | None:
        """Return the result, whose dims are `wanted`; None if more than two of them are along one dim."""
        self._op(aten.reshape.default, [along.size for along in alongs], [along.size for along in alongs])
        made: list[_Strides] = []  # dims so far
        for along in alongs:
            if (dims := self._take(len(made), along)) is None:
                return None
            made += dims
        places = [d.at for d in made]
        order = sorted(range(len(places)), key=places.__getitem__)
        if order != list(range(len(order))):
            self._op(aten.permute.default, [self.shape[i] for i in order], order)
        kept = [d.size if d.at in places else 1 for d in wanted]
        self._op(aten.reshape.default, kept, kept)
        full = [d.size for d in wanted]
        if any(not same(a, b) for a, b in zip(kept, full, strict=True)):
            self._op(aten.expand.default, full, full)
        return self.x

    def _take(self, dim: int, along: _Along) -> list[_Strides] | None:
        """Write the result's dims along `dim`; return them in their order."""
        dims = _by_step(along.dims)
        if dims is None:
            return None
        if not dims:
            self._slice(dim, along.start, along.start + 1, 1)
            self._op(aten.reshape.default, rest := self.shape[:dim] + self.shape[dim + 1 :], rest)
            return []
        runs = _runs(dims)
        if len(runs) > 2:
            return None
        inner = runs[-1][-1].step
        last = along.start + sum((d.size - 1) * d.step for d in dims)
        if along.start != 0 or inner != 1 or not same(last + 1, self.shape[dim]):
            self._slice(dim, along.start, last + 1, inner)
        if len(runs) == 2:
            step = quotient(runs[0][-1].step, inner)
            if step is None:
                return None
            width, count = numel(d.size for d in runs[1]), numel(d.size for d in runs[0])
            after = self.shape[dim + 1 :]
            self._op(aten.unfold.default, [*self.shape[:dim], count, *after, width], dim, width, step)
            order = [*range(dim + 1), len(self.shape) - 1, *range(dim + 1, len(self.shape) - 1)]
            self._op(aten.permute.default, [self.shape[i] for i in order], order)
        sizes = [d.size for d in dims]
        found = [*self.shape[:dim], *sizes, *self.shape[dim + len(runs) :]]
        if len(runs) != len(sizes):
            self._op(aten.reshape.default, found, found)
        return dims

    def _slice(self, dim: int, start: Size, end: Size, step: Size) -> None:
        steps = quotient(end - start - 1, step)
        assert steps is not None
        size = 1 + steps
        self._op(aten.slice.Tensor, [*self.shape[:dim], size, *self.shape[dim + 1 :]], dim, start, end, step)

    def _op(self, target: Any, shape: Sequence[Size], *args: Any) -> None:
        self.x = write_op(self.graph, self.like, target, (self.x, *args), tuple(shape))
        self.shape = list(info(self.x).shape)


def _by_step(dims: Sequence[_Strides]) -> list[_Strides] | None:
    """Return dims from the largest step to the smallest, each a multiple of the next; None if that is not known."""
    left, found = list(dims), list[_Strides]()
    while left:
        most = next((d for d in left if all(quotient(d.step, e.step) is not None for e in left)), None)
        if most is None:
            return None
        left.remove(most)
        found.append(most)
    return found


def _runs(dims: Sequence[_Strides]) -> list[list[_Strides]]:
    """Return dims in runs, in each of which a step is as long as the whole next dim: together they are one dim."""
    found = [[dims[0]]]
    for before, after in pairwise(dims):
        if same(before.step, after.step * after.size):
            found[-1].append(after)
        else:
            found.append([after])
    return found
