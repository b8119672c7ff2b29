"""The ep axis of an emitted program: ranks that hold different experts of a mixture, and send each other rows.

    route = ep.route(ends)              counts of rows, exchanged: what each rank has for which expert
    x = ep.dispatch(x, route)           own rows, sorted by expert ──► all ranks' rows of the own experts, sorted too
    ends = ep.own_ends(ends, route)
    …                                   ops that work row by row: products with the own experts, activations
    y = ep.combine(y, route)            the inverse of dispatch

Where experts have a dim of their own, all have equally many rows: x [e, r, ...] ──► [e / ranks, all ranks' r, ...].

    route = ep.batch_route(x, rows=1)
    x = ep.dispatch(x, route, experts=0, rows=1)
    z = ep.gather(z, route, rows=0)     rows that all experts read
    …
    y = ep.combine(y, route, experts=0, rows=1)

Dispatch and combine are permutations of rows across ranks, so each is the other's gradient. Ranks without rows take
part with none.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autoptd.errors import RuntimeFault
from autoptd.ops.group import Group, on_device


class Experts:
    """Rows of experts over one group. Experts are split over it in equal parts, in order."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def route(self, ends: Tensor) -> Tensor:
        """Exchange the sizes of groups of rows: `ends` [e] as of `ops.grouped_mm` -> int64 [2, ranks, e / ranks].

        The result, on the host, has the rows that this rank has for each rank's experts, and those that each rank has
        for this rank's. Reads the ends on the host.
        """
        counts = ends.to(torch.int64).diff(prepend=ends.new_zeros(1, dtype=torch.int64)).view(self.group.size, -1)
        return torch.stack((counts, self.group.all_to_all(counts.contiguous()))).cpu()

    def batch_route(self, x: Tensor, rows: int) -> Tensor:
        """Exchange the sizes of dim `rows` of x, equal for all experts: int64 [2, ranks, 1], on the host, as `route`.

        Raises RuntimeFault, on all ranks, if their x differ in another size.
        """
        here = on_device(torch.tensor([x.shape] * self.group.size), torch.int64, x.device)
        both = torch.stack((here, self.group.all_to_all(here))).cpu()
        others = [i for i in range(x.ndim) if i != rows]
        if not torch.equal(both[0, :, others], both[1, :, others]):
            raise RuntimeFault(
                f"ranks that exchange rows of experts have tensors of different sizes: {both[1].tolist()}",
                fix="pad the batch to one length on all ranks, or train without ep",
            )
        return both[:, :, rows : rows + 1]

    def own_ends(self, ends: Tensor, route: Tensor) -> Tensor:
        """Return the ends of the own experts' rows after `dispatch`, in the form of `ends`."""
        return on_device(route[1].sum(0).cumsum(0), ends.dtype, ends.device)

    def dispatch(self, x: Tensor, route: Tensor, *, rows: int = 0, experts: int | None = None) -> Tensor:
        """Send rows [r, ...], sorted by expert, to their experts' ranks; return those of the own experts, sorted.

        `rows` and `experts`: dims of x, if experts have one of their own.
        """
        if experts is not None:
            return self._batch(x, route, rows, experts, back=False)
        if x.shape[0] != (taken := int(route[0].sum())):
            raise RuntimeFault(
                f"{x.shape[0]} rows are sorted by expert, but the experts take {taken} of them",
                fix="give every row to an expert, or train without ep",
            )
        return self._moved(x, route, back=False)

    def combine(self, y: Tensor, route: Tensor, *, rows: int = 0, experts: int | None = None) -> Tensor:
        """Send rows back to where `dispatch` took them from, in their first order."""
        if experts is not None:
            return self._batch(y, route, rows, experts, back=True)
        return self._moved(y, route, back=True)

    def gather(self, x: Tensor, route: Tensor, *, rows: int, experts: int | None = None) -> Tensor:
        """Return the rows of all ranks, which all experts read; `experts`: a dim of copies, of which this rank's stay.

        Rows are in the order of those that `dispatch` returns for one expert.
        """
        whole = x if experts is None else x.narrow(experts, 0, 1)
        flat = whole.movedim(rows, 0)
        copies = flat.expand(self.group.size, *flat.shape).flatten(0, 1)
        found = self._moved(copies, route, back=False).movedim(0, rows)
        if experts is None:
            return found
        return found.expand(*(x.shape[i] // self.group.size if i == experts else n for i, n in enumerate(found.shape)))

    def _batch(self, x: Tensor, route: Tensor, rows: int, experts: int, back: bool) -> Tensor:
        """Move x with a dim for experts, all of which have `route`'s rows."""
        flat = x.movedim((experts, rows), (0, 1))
        ranks, count = self.group.size, flat.shape[0]
        own, there = (count, int(route[0, 0])) if back else (count // ranks, int(route[1].sum()))
        found = self._moved(flat.flatten(0, 1), route.expand(-1, -1, own), back)
        if back:
            own *= ranks
        return found.unflatten(0, (own, there)).movedim((0, 1), (experts, rows))

    def _moved(self, x: Tensor, route: Tensor, back: bool) -> Tensor:
        moved: Tensor = _Moved.apply(x, self.group, route, back)
        return moved


class _Moved(torch.autograd.Function):
    """Rows sent to the ranks of their experts, or `back`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, route: Tensor, back: bool) -> Tensor:
        ctx.group, ctx.route, ctx.back = group, route, back
        return _move(x, group, route, back)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _move(grad, ctx.group, ctx.route, not ctx.back), None, None, None


def _move(x: Tensor, group: Group, route: Tensor, back: bool) -> Tensor:
    counts = route.numpy()  # several times as fast as torch on a few numbers
    here, there = counts.sum(2).tolist()
    order = on_device(_by_expert(counts[1]), torch.int64, x.device)
    if back:
        return group.exchange(torch.empty_like(x).index_copy_(0, order, x), there, here)
    return group.exchange(x.contiguous(), here, there)[order]


def _by_expert(counts: np.ndarray) -> Tensor:
    """Return the order that sorts rows by expert, given by rank and then expert: counts [ranks, e] -> [rows]."""
    ranks, experts = counts.shape
    each = np.tile(np.arange(experts), ranks).repeat(counts.ravel())
    return torch.from_numpy(each.argsort(kind="stable"))
