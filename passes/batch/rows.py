"""Whose the rows of a tensor are: what the check for mixed samples knows of each tensor.

    None       the same for every batch: parameters, tables, positions of tokens
    Filled     one value everywhere, however many samples there are: `zeros(b, 8)`
    Rows       along one dim, each row is of one sample (a sample may have many): made from that sample alone
    Across     made from several samples, or from how many there are or where they stand

Rows come in an order: samples in their turn, or as a sort put them. A dim that has them is (outer, order, inner).
Some integers are numbers of rows. They point into a dim that is (outer, order, inner) again, each at a row of the very
sample that it belongs to:

    arange(b * s)           rows b of (b s)               point at b of (b s)
    i = argsort(keys)       rows as `i` sorted them       point at b of (b s), where keys are b of (b s)
    i // k                  rows as `i` sorted them       point at b of (b s / k)
    argsort(i)              rows b of (b s)               point at rows as `i` sorted them

So `x[i]` has rows in the order of `i`, and `x[i][argsort(i)]` has them in their turn again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal, TypeAlias

from torch import fx

from autoptd.passes.batch.batch_dims import SamplePlace, grows, handed_on, loops_of
from autoptd.passes.opcall import OpCall, Size
from autoptd.passes.rules.factor_notation import Loops
from autoptd.passes.trace.traced import BATCH


class Fill(Enum):
    """The one state of its kind, told apart by identity."""

    FILLED = "filled"


FILLED = Fill.FILLED


@dataclass(frozen=True)
class Order:
    """In which order rows come: `size` of them, as the node `by` sorted them; samples in their turn without one."""

    size: Size = BATCH
    by: fx.Node | None = None


TURN = Order()


@dataclass(frozen=True)
class Points:
    """Numbers of rows of a dim that is (outer, order, inner): of the row's own sample.

    Anything below `room` may be added, and they still are. `each`: as many as there are rows, and no two are equal.
    """

    order: Order
    outer: Size = 1
    inner: Size = 1
    room: Size = 1
    each: bool = False

    def at(self, place: SamplePlace, order: Order) -> bool:
        """Whether these are numbers of rows of a dim with rows in this order."""
        return (self.order, self.outer, self.inner) == (order, place.outer, place.inner)


@dataclass(frozen=True)
class Rows:
    """Rows that were each made from one sample; `points`: the values are numbers of rows."""

    place: SamplePlace
    order: Order = TURN
    points: Points | None = None

    def aligned(self, ndim: int, other: Rows, others: int) -> bool:
        """Whether a tensor of `ndim` dims has its rows beside another's when they are broadcast together."""
        here, there = self.place, other.place
        same = (here.outer, here.inner, self.order) == (there.outer, there.inner, other.order)
        return same and ndim - here.dim == others - there.dim


@dataclass(frozen=True)
class Tally:
    """How many of `keys` are 0, 1 … `bins` - 1; summed up to each if `ends`."""

    keys: fx.Node
    bins: Size
    ends: bool = False


@dataclass(frozen=True)
class Across:
    """Why a tensor is of no sample, and where that came about. `pairs`: which samples meet depends on their order."""

    node: fx.Node
    reason: str
    fix: str = "compute it for every sample by itself; only the loss may sum over them"
    pairs: bool = False
    tally: Tally | None = None


State: TypeAlias = "Rows | Across | Literal[Fill.FILLED] | None"


def placed(call: OpCall, rows: Mapping[int, Rows]) -> Rows | None:
    """The rows of an op's first output: those of its operands, which come in one order."""
    loops = loops_of(call)
    return None if loops is None else placed_by(call, loops, rows)[0]


def placed_by(call: OpCall, loops: Loops, rows: Mapping[int, Rows]) -> tuple[Rows | None, ...]:
    """The rows of each output, where the loops place those of the operands."""
    order = next(iter(rows.values())).order
    places = {i: r.place for i, r in rows.items()}
    found = [handed_on(call, loops, i, places, order.size) for i in range(len(call.outputs))]
    crossed = [sum(map(grows, t.shape)) != 1 for t in call.outputs]  # samples beside samples, or none
    return tuple(
        None if place is None or cross else Rows(place, order) for place, cross in zip(found, crossed, strict=True)
    )


def pointing(rows: Rows | None, points: Points | None) -> Rows | None:
    """The same rows, with these values."""
    return None if rows is None else replace(rows, points=points)
