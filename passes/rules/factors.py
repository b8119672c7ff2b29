"""Strategies of an op, derived from the factors of its loop nest (notation: `factor_notation`).

If factor f is split over t ranks, a tensor that has f is `Split` at its dim (for an inner factor, in as many groups as
the outer factors make slices), an operand without f is `Bp` (its gradient is partial on each rank), and an output
without f is `P`. Besides, every rank may run an op in full, with whole or partial gradients (backward is linear in the
incoming gradient), and a linear op maps `P` to `P`.

Group counts arise at composed dims, as in `(3 n d)`, and spread through adjacent ops to a fixpoint, so that the weight
of a fused query-key-value projection is split in 3 groups too. No other dims are offered group counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sympy

from autoptd.layout.placements import BP, B, O, P, Placement, Split
from autoptd.passes.opcall import OpCall, Size, Sizes, TensorInfo
from autoptd.passes.rules.factor_notation import (
    MAX_GROUPS,
    FactorPlace,
    Groups,
    Loops,
    bind,
    divide,
    group_counts,
    groups_fit,
)
from autoptd.passes.trace.traced import LOCAL, SEQUENCE


@dataclass(frozen=True)
class Strategy:
    """One legal choice for an op on one axis. `str` is unique among an op's strategies: `S1, Bp -> S1`."""

    needs: tuple[Placement, ...]  # one per entry of OpCall.operands
    gives: tuple[Placement, ...]  # one per output
    ranks: int = 1  # each rank does 1/ranks of the work
    implementation: str = ""  # the op's own distributed implementation, see IMPLEMENTATIONS in table.py
    collectives: tuple[tuple[str, Size], ...] = ()  # (name, elements per rank), issued by the implementation itself

    @property
    def share(self) -> sympy.Rational:
        """The fraction of the op's work that each rank does."""
        return sympy.Rational(1, self.ranks)

    def __str__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:
        text = f"{', '.join(map(str, self.needs))} -> {', '.join(map(str, self.gives))}"
        return f"{text} [{self.implementation}]" if self.implementation else text


@dataclass(frozen=True)
class Implementation:
    """An op's own distributed implementation for one factor, which cannot be split otherwise.

    With a `notation` it splits that factor of another loop nest, where the factor of the rule's does not divide.
    """

    name: str
    factor: str
    gives: tuple[Placement, ...] | None = None  # None: as the factors say
    collectives: Callable[[OpCall], tuple[tuple[str, Size], ...]] = lambda call: ()
    applies: Callable[[OpCall], bool] = lambda call: True
    notation: Callable[[OpCall], str] | None = None


@dataclass(frozen=True)
class Rule:
    """An op's sharding rule: its notation (may depend on the call), linear operands, and arguments that are sizes."""

    notation: str | Callable[[OpCall], str]
    linear: Callable[[OpCall], Sequence[frozenset[int]]] = lambda call: ()  # operands that may be P together
    local: Callable[[OpCall, Strategy, int], Mapping[int | str, Any]] = lambda call, strategy, ranks: {}
    implementations: tuple[Implementation, ...] = ()
    linear_backward: bool = True  # False for some user-defined backward passes: they rule out partial gradients

    def text(self, call: OpCall) -> str:
        """Return the notation for this call."""
        return self.notation if isinstance(self.notation, str) else self.notation(call)


@dataclass(frozen=True)
class Op:
    """A call with its sharding rule; without a rule, every rank runs it in full."""

    call: OpCall
    rule: Rule | None

    @cached_property
    def loops(self) -> Loops | None:
        """The loop nest of the call in the notation of its rule."""
        return None if self.rule is None else bind(self.rule.text(self.call), self.call)


def expand(op: Op, ranks: int, sizes: Sizes, groups: Groups | None = None) -> list[Strategy]:
    """Return all strategies of an op over `ranks` ranks, in a fixed order; without a rule, only those in full.

    `groups`: group counts besides 1 for the dims of operands (numbered from 0) and outputs (numbered after them).
    """
    found = list(_whole(op.call, op.rule is None or op.rule.linear_backward))
    if op.rule is not None and ranks > 1:
        found += _splits(op.rule, op, ranks, sizes, groups or {})
        found += _linear(op.rule, op.call)
    first: dict[str, Strategy] = {}
    for strategy in found:
        first.setdefault(str(strategy), strategy)
    return list(first.values())


def _broadcast(tensor: TensorInfo, partial_grad: bool) -> Placement:
    return BP if partial_grad and tensor.requires_grad else B


def _whole(call: OpCall, linear: bool) -> Iterator[Strategy]:
    for partial in (False, True) if linear else (False,):
        needs = tuple(_broadcast(t, partial) for t in call.operands)
        yield Strategy(needs, tuple(_broadcast(t, partial) for t in call.outputs))


def _splits(rule: Rule, op: Op, ranks: int, sizes: Sizes, groups: Groups) -> Iterator[Strategy]:
    call, loops = op.call, op.loops
    assert loops is not None
    own = {i.factor: i for i in rule.implementations if i.notation is None}
    for name, places in loops.places.items():
        if name in own and not own[name].applies(call):
            continue
        # An implementation relies on each rank's part being one contiguous slice: no groups.
        for count in sorted({1} if name in own else group_counts(places, groups)):
            fits = sizes.divisible(loops.sizes[name], ranks, count) and groups_fit(places, count)
            strategy = split_factor(call, loops, places, count, ranks) if fits else None
            if strategy is not None:
                yield _implemented(strategy, own[name], call) if name in own else strategy
    for other in rule.implementations:
        if other.notation is not None and other.applies(call):
            yield from _other_splits(other, other.notation(call), op, ranks, sizes)


def _other_splits(own: Implementation, notation: str, op: Op, ranks: int, sizes: Sizes) -> Iterator[Strategy]:
    """Yield the strategy of an implementation with a loop nest of its own, where the rule's factor does not divide."""
    loops, usual = bind(notation, op.call), op.loops
    assert usual is not None
    if sizes.divisible(loops.sizes[own.factor], ranks) and not sizes.divisible(usual.sizes[own.factor], ranks):
        strategy = split_factor(op.call, loops, loops.places[own.factor], 1, ranks)
        if strategy is not None:
            yield _implemented(strategy, own, op.call)


def split_factor(
    call: OpCall, loops: Loops, places: Sequence[FactorPlace | None], count: int, ranks: int
) -> Strategy | None:
    """Return the strategy that splits the factor at `places`; None if a result would be a partial value of integers."""

    def split(place: FactorPlace) -> Placement:
        assert isinstance(place.outer, int)
        return Split(place.dim, place.outer * count)

    here, there = places[: len(call.operands)], places[len(call.operands) :]
    gives = tuple(P if place is None else split(place) for place in there)
    if any(p == P and not _has_partials(t) for p, t in zip(gives, call.outputs, strict=True)):
        return None
    partial_sums = loops.additive if P in gives else frozenset()
    needs = tuple(
        split(place) if place is not None else P if i in partial_sums else _broadcast(tensor, True)
        for i, (place, tensor) in enumerate(zip(here, call.operands, strict=True))
    )
    return Strategy(needs, gives, ranks)


def _has_partials(tensor: TensorInfo) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def _implemented(strategy: Strategy, own: Implementation, call: OpCall) -> Strategy:
    gives = strategy.gives if own.gives is None else own.gives
    return Strategy(strategy.needs, gives, strategy.ranks, own.name, own.collectives(call))


def _linear(rule: Rule, call: OpCall) -> Iterator[Strategy]:
    """Yield the strategies from P to P, in which each rank runs the whole op on its partial value."""
    for partial_sums in rule.linear(call):
        if all(_has_partials(t) for t in (*(call.operands[i] for i in partial_sums), *call.outputs)):
            needs = tuple(P if i in partial_sums else _broadcast(t, True) for i, t in enumerate(call.operands))
            yield Strategy(needs, (P,) * len(call.outputs))


def local_shape(tensor: TensorInfo, placement: Placement, ranks: int) -> tuple[Size, ...]:
    """Return the shape of one rank's part of a tensor."""
    if placement == O:
        return tuple(of_own_tokens(n, ranks) for n in tensor.shape)
    if not isinstance(placement, Split):
        return tensor.shape
    return tuple(divide(n, ranks) if dim == placement.dim else n for dim, n in enumerate(tensor.shape))


def of_own_tokens(size: Size, ranks: int) -> Size:
    """Return a size that counts tokens for one rank's own tokens."""
    if isinstance(size, int):
        return size
    return size.subs({SEQUENCE: SEQUENCE / ranks, LOCAL: LOCAL / ranks})


def local_args(op: Op, strategy: Strategy, ranks: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the op's arguments on one rank, with local shapes for tensors and local values for sizes."""
    shapes = iter(zip(op.call.operands, strategy.needs, strict=True))

    own_tokens = O in (*strategy.needs, *strategy.gives)

    def localise(value: Any) -> Any:
        if isinstance(value, TensorInfo):
            tensor, placement = next(shapes)
            return TensorInfo(local_shape(tensor, placement, ranks), tensor.dtype, tensor.requires_grad)
        if isinstance(value, (tuple, list)):
            return type(value)(map(localise, value))
        return of_own_tokens(value, ranks) if own_tokens and isinstance(value, sympy.Basic) else value

    args = [localise(a) for a in op.call.args]
    kwargs = {k: localise(v) for k, v in op.call.kwargs.items()}
    if own_tokens:
        return tuple(args), kwargs
    for key, value in (op.rule.local(op.call, strategy, ranks) if op.rule else {}).items():
        if isinstance(key, int):
            args[key] = value
        else:
            kwargs[key] = value
    return tuple(args), kwargs


@dataclass(frozen=True)
class Wired:
    """A call with its rule and the names of its operands' and outputs' tensors, in order."""

    op: Op
    tensors: tuple[str, ...]  # operands, then outputs


def propagate_groups(calls: Sequence[Wired]) -> dict[tuple[str, int], frozenset[int]]:
    """Return the group counts to offer per (tensor, dim), propagated through adjacent ops to a fixpoint.

    `linear` then `view(…, 3, n, d)` offers 3 to the linear's output, its weight's rows and its bias.
    """
    places = [
        (wired.tensors, tuple(p))
        for wired in calls
        if wired.op.loops is not None
        for p in wired.op.loops.places.values()
    ]
    offered: dict[tuple[str, int], frozenset[int]] = {}
    progress = True
    while progress:
        progress = False
        for tensors, factor in places:
            for key, count in _offers(tensors, factor, offered):
                known = offered.get(key, frozenset({1}))
                if count not in known and len(known) < MAX_GROUPS:
                    offered[key] = known | {count}
                    progress = True
    return offered


def _offers(
    tensors: Sequence[str], factor: Sequence[FactorPlace | None], offered: Mapping[tuple[str, int], frozenset[int]]
) -> Iterator[tuple[tuple[str, int], int]]:
    here = {(i, p.dim): offered.get((tensors[i], p.dim), frozenset()) for i, p in enumerate(factor) if p}
    for count in sorted(group_counts(factor, here)):
        if groups_fit(factor, count):
            for name, place in zip(tensors, factor, strict=True):
                if place is not None and place.outer * count > 1:
                    yield (name, place.dim), place.outer * count


def groups_of(wired: Wired, offered: Mapping[tuple[str, int], frozenset[int]]) -> Groups:
    """Return the group counts of a call's tensors by (position, dim), as `expand` takes them."""
    tensors = wired.op.call.operands + wired.op.call.outputs
    return {
        (i, dim): offered[name, dim]
        for i, (name, tensor) in enumerate(zip(wired.tensors, tensors, strict=True))
        for dim in range(tensor.ndim)
        if (name, dim) in offered
    }
