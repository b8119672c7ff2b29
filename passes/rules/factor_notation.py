"""Notation for the factors of an op's loop nest, and their sizes and positions in a call.

A notation names the factors of every dim of every operand and output, in order:

    "... k, o k, +o -> ... o"      linear with bias
    "b s (n d) -> b s n d"         a view; n is the outermost factor of the last dim
    "b s (3 o) -> b s o, b s o, b s o"

    k        a factor; one that no output has is summed over
    (c o)    a dim composed of factors, outermost first
    .        a dim (or, inside parentheses, a factor) that stays whole
    3        a factor of that size which stays whole; `1` is a broadcast dim
    ...      leading dims, each its own factor, aligned from the right as broadcasting does
    +        this operand is only added: if the result is a partial value, the operand must be one too

(Factors as in OpenXLA's Shardy; the partial values are ours.)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import TypeAlias

import sympy

from autoptd.passes.opcall import OpCall, Size, TensorInfo

# Fused projections have 2 to 4 parts. More groups would split within heads, which is legal but useless.
MAX_GROUPS = 4

Groups: TypeAlias = "Mapping[tuple[int, int], frozenset[int]]"  # (operand, or operands + output; dim) -> group counts


@dataclass(frozen=True)
class Atom:
    """One factor of a dim: named, or whole (no name) with or without a given size."""

    name: str = ""
    size: int | None = None


WHOLE = Atom()
Dim: TypeAlias = "tuple[Atom, ...]"


@dataclass(frozen=True)
class NotationTerm:
    """One operand or output of a notation; `leading` is the position of `...` among its dims, if any."""

    dims: tuple[Dim, ...]
    leading: int | None = None
    additive: bool = False


@cache
def parse(text: str) -> tuple[tuple[NotationTerm, ...], tuple[NotationTerm, ...]]:
    """Return the operands and the outputs of a notation."""
    left, arrow, right = text.partition("->")
    assert arrow, f"notation {text!r} has no ->"
    return tuple(map(_term, left.split(","))), tuple(map(_term, right.split(",")))


def _term(text: str) -> NotationTerm:
    tokens = re.findall(r"\.\.\.|[.()+]|\w+", text)
    dims: list[Dim] = []
    leading: int | None = None
    inner: list[Atom] | None = None
    for token in tokens:
        match token:
            case "+":
                pass
            case "...":
                leading = len(dims)
            case "(":
                inner = []
            case ")":
                assert inner is not None, f"unbalanced parentheses in {text!r}"
                dims.append(tuple(inner))
                inner = None
            case _:
                atom = WHOLE if token == "." else Atom(size=int(token)) if token.isdigit() else Atom(token)
                if inner is None:
                    dims.append((atom,))
                else:
                    inner.append(atom)
    return NotationTerm(tuple(dims), leading, "+" in tokens)


@dataclass(frozen=True)
class FactorPlace:
    """The position of a factor in a tensor: its dim, and the number of slices that that dim's outer factors make."""

    dim: int
    outer: Size


@dataclass(frozen=True)
class Loops:
    """A notation bound to a call: the size of every factor, and its position in each operand and output."""

    sizes: Mapping[str, Size]
    places: Mapping[str, tuple[FactorPlace | None, ...]]  # operands, then outputs
    additive: frozenset[int] = field(default_factory=frozenset)


def divide(size: Size, by: Size) -> Size:
    """Return the exact quotient of two sizes."""
    if isinstance(size, int) and isinstance(by, int):
        assert size % by == 0, f"{size} is not a multiple of {by}"
        return size // by
    if isinstance(by, int) and by == 1:
        return size
    quotient = sympy.cancel(sympy.sympify(size) / by)
    return int(quotient) if quotient.is_Integer else quotient


def bind(text: str, call: OpCall) -> Loops:
    """Return the factors of `text` with their sizes in this call."""
    operands, outputs = parse(text)
    tensors = call.operands + call.outputs
    if not call.operands and operands == (NotationTerm(()),):
        operands = ()
    terms = operands + outputs
    assert len(operands) == len(call.operands) and len(outputs) == len(call.outputs), (
        f"{call.target}: {text!r} for {len(call.operands)} operands and {len(call.outputs)} outputs"
    )
    widest = max(
        (t.ndim - len(n.dims) for t, n in zip(tensors, terms, strict=True) if n.leading is not None), default=0
    )
    dims = [_unroll(term, tensor, widest) for term, tensor in zip(terms, tensors, strict=True)]
    for term, tensor in zip(dims, tensors, strict=True):
        assert len(term) == tensor.ndim, f"{call.target}: {text!r} does not suit shape {tensor.shape}"
    sizes = _solve(dims, tensors)
    names = dict.fromkeys(atom.name for term in dims for dim in term for atom in dim if atom.name)
    places = {}
    for name in names:
        found = [_find(name, term, tensor, sizes) for term, tensor in zip(dims, tensors, strict=True)]
        if all(len(f) <= 1 for f in found):  # a diagonal (twice in one tensor) cannot be split
            places[name] = tuple(f[0] if f else None for f in found)
    return Loops(sizes, places, frozenset(i for i, term in enumerate(operands) if term.additive))


def _unroll(term: NotationTerm, tensor: TensorInfo, widest: int) -> tuple[Dim, ...]:
    """Return the term's dims with `...` replaced by dims named by their distance from its right end."""
    if term.leading is None:
        return term.dims
    count = tensor.ndim - len(term.dims)
    names = [f"_{widest - count + i}" for i in range(count)]
    shape = tensor.shape[term.leading : term.leading + count]
    leading = tuple((Atom(size=1) if size == 1 else Atom(name),) for name, size in zip(names, shape, strict=True))
    return term.dims[: term.leading] + leading + term.dims[term.leading :]


def _solve(dims: Sequence[tuple[Dim, ...]], tensors: Sequence[TensorInfo]) -> dict[str, Size]:
    """Return the sizes of named factors: from dims of one factor, then from composed dims with one unknown."""
    sizes: dict[str, Size] = {}
    pairs = [
        (dim, size) for term, t in zip(dims, tensors, strict=True) for dim, size in zip(term, t.shape, strict=True)
    ]
    progress = True
    while progress:
        progress = False
        for dim, size in pairs:
            unknown = [a for a in dim if a.size is None and a.name not in sizes]
            if len(unknown) == 1 and unknown[0].name:
                known = prod(_size(a, sizes) for a in dim if a is not unknown[0])
                sizes[unknown[0].name] = divide(size, known)
                progress = True
    return sizes


def _size(atom: Atom, sizes: Mapping[str, Size]) -> Size:
    return sizes[atom.name] if atom.size is None else atom.size


def _find(name: str, term: tuple[Dim, ...], tensor: TensorInfo, sizes: Mapping[str, Size]) -> list[FactorPlace]:
    found = []
    for index, dim in enumerate(term):
        for at, atom in enumerate(dim):
            if atom.name == name:
                before, after = dim[:at], dim[at + 1 :]
                if WHOLE in before:  # a whole factor without a size: its size is what the others leave
                    outer = divide(tensor.shape[index], prod(_size(a, sizes) for a in (atom, *after)))
                else:
                    outer = prod(_size(a, sizes) for a in before)
                found.append(FactorPlace(index, outer))
    return found


def group_counts(places: Sequence[FactorPlace | None], groups: Groups) -> set[int]:
    """Return the group counts for a factor: those offered to its dims, divided by the slices of its outer factors."""
    counts = {1}
    for position, place in enumerate(places):
        if place is not None and isinstance(place.outer, int):
            offered = groups.get((position, place.dim), frozenset())
            counts |= {g // place.outer for g in offered if g % place.outer == 0}
    return counts


def groups_fit(places: Sequence[FactorPlace | None], count: int) -> bool:
    return all(p is None or (isinstance(p.outer, int) and p.outer * count <= MAX_GROUPS) for p in places)
