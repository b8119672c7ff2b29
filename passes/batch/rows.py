"""States of tensors in the check for mixed samples: which samples the rows of a tensor belong to.

    None       independent of the batch: parameters, tables, token positions
    FILLED     one value everywhere, for any number of samples: `zeros(b, 8)`
    Rows       each row along one dim is computed from one sample only (a sample may have many rows)
    Across     computed from several samples, their number or their positions

Rows have an order: that of the batch, or that of a sort. Their dim is (outer, order, inner). Integers may be row
indices: each points to a row of its own sample in a dim that is (outer, order, inner) too.

    arange(b * s)           rows b of (b s)               point at b of (b s)
    i = argsort(keys)       rows in the order of `i`      point at b of (b s), where keys are b of (b s)
    i // k                  rows in the order of `i`      point at b of (b s / k)
    argsort(i)              rows b of (b s)               point at rows in the order of `i`

So `x[i]` has rows in the order of `i`, and `x[i][argsort(i)]` has them in batch order again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal, TypeAlias

from torch import fx

from autoptd.errors import UnsupportedOp
from autoptd.passes.batch.batch_dims import SamplePlace, grows, place_in
from autoptd.passes.graph import source_line, user_op_name
from autoptd.passes.opcall import OpCall, Size
from autoptd.passes.rules.factor_notation import Loops
from autoptd.passes.rules.lookup import resolve
from autoptd.passes.trace.traced import BATCH

PAIRS = "pairs samples with each other"
UNKNOWN = "is not proved to treat samples independently"
_RESTORE_ORDER = (
    "restore the order of rows with the indices that sorted them (index_add, or the inverse permutation as index)"
)
MIXED_INPUTS = (
    "to mix each sample with another one (mixup, CutMix), let the data loader do it: pass the mixed batch, or both "
    "samples, both labels and the share as inputs of forward"
)
_TOKENS_FIRST = (
    "samples are dim 0 of each input: give what has tokens first, [tokens, samples], as [samples, tokens], and "
    "transpose it in forward, or make layers with batch_first=True"
)
FIXES = {"flip": MIXED_INPUTS, "roll": MIXED_INPUTS, "scaled_dot_product_attention": _TOKENS_FIRST}  # by op


class Fill(Enum):
    """Type of the single state FILLED, compared by identity."""

    FILLED = "filled"


FILLED = Fill.FILLED


@dataclass(frozen=True)
class Order:
    """Order of `size` rows: that of the sort `by`, or batch order if that is None."""

    size: Size = BATCH
    by: fx.Node | None = None


BATCH_ORDER = Order()


@dataclass(frozen=True)
class Points:
    """Row indices into a dim that is (outer, order, inner), each pointing to a row of its own sample.

    A number below `slack` may be added without leaving the sample. `each`: the indices are a permutation of all rows.
    """

    order: Order
    outer: Size = 1
    inner: Size = 1
    slack: Size = 1
    each: bool = False

    def at(self, place: SamplePlace, order: Order) -> bool:
        """Return whether these indices point into a dim with rows at this place and in this order."""
        return (self.order, self.outer, self.inner) == (order, place.outer, place.inner)


@dataclass(frozen=True)
class Rows:
    """Rows that are each computed from one sample. `points`: set if the values are row indices."""

    place: SamplePlace
    order: Order = BATCH_ORDER
    points: Points | None = None

    def aligned(self, ndim: int, other: Rows, others: int) -> bool:
        """Return whether broadcasting aligns the rows of a tensor of `ndim` dims with another's, of `others` dims."""
        here, there = self.place, other.place
        same = (here.outer, here.inner, self.order) == (there.outer, there.inner, other.order)
        return same and ndim - here.dim == others - there.dim


@dataclass(frozen=True)
class Tally:
    """Counts of the numbers 0, 1 … `bins` - 1 among `keys`; their cumulative sums if `ends`."""

    keys: fx.Node
    bins: Size
    ends: bool = False


@dataclass(frozen=True)
class Across:
    """State of a tensor that mixes samples: the node that mixed them, and the reason. `pairs`: the samples combined
    depend on their order, which is refused in the loss too."""

    node: fx.Node
    reason: str
    fix: str = "compute it for each sample separately, or from sums over samples, such as means and variances"
    pairs: bool = False
    tally: Tally | None = None


State: TypeAlias = "Rows | Across | Literal[Fill.FILLED] | None"


def placed(call: OpCall, rows: Mapping[int, Rows]) -> Rows | None:
    """Return the rows of an op's first output, from those of its operands, which have one order."""
    loops = resolve(call).loops
    return None if loops is None else placed_by(call, loops, rows)[0]


def placed_by(call: OpCall, loops: Loops, rows: Mapping[int, Rows]) -> tuple[Rows | None, ...]:
    """Return the rows of each output, at the places that the loops give them."""
    order = next(iter(rows.values())).order
    places = {i: r.place for i, r in rows.items()}
    found = [place_in(call, loops, i, places, order.size) for i in range(len(call.outputs))]
    crossed = [sum(map(grows, t.shape)) != 1 for t in call.outputs]  # two batch dims, or none
    return tuple(
        None if place is None or cross else Rows(place, order) for place, cross in zip(found, crossed, strict=True)
    )


def pointing(rows: Rows | None, points: Points | None) -> Rows | None:
    """Return the rows with row indices as values."""
    return None if rows is None else replace(rows, points=points)


def orders_differ(node: fx.Node, orders: set[Order]) -> Across:
    """Return the state of an op whose operands have rows in these orders, or whose rows are not known at all."""
    if not orders:
        return Across(node, UNKNOWN)
    sources = [o.by for o in orders if o.by is not None]
    named = ", ".join(sorted({f"{user_op_name(by)} at {source_line(by)}" for by in sources}))
    return Across(
        node,
        f"{PAIRS}: some of its operands have rows in the order of {named}, others in another order",
        MIXED_INPUTS if any(user_op_name(by) == "randperm" for by in sources) else _RESTORE_ORDER,
        pairs=True,
    )


def check_order(node: fx.Node, states: Sequence[State]) -> None:
    """Raise UnsupportedOp unless a tensor has a row of dim 0 for each sample, in the order of the batch."""
    if list(states) not in ([FILLED], [Rows(SamplePlace(0))]):
        raise UnsupportedOp(
            "a metric is no value of each sample, in the order of the samples",
            where=source_line(node),
            fix="return [samples, …], each value computed from its own sample; combine or sort what `predict` returns",
        )
