"""The ep axis of an emitted program: ranks that hold different experts of a mixture, and send each other rows.

    route = ep.route(ends)              counts of rows, exchanged: what each rank has for which expert
    x = ep.dispatch(x, route)           own rows, sorted by expert ──► all ranks' rows of the own experts, sorted too
    ends = ep.own_ends(ends, route)
    …                                   ops that work row by row: products with the own experts, activations
    y = ep.combine(y, route)            the inverse of dispatch

Dispatch and combine are permutations of rows across ranks, so each is the other's gradient. Ranks without rows take
part with none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autoptd.errors import RuntimeFault
from autoptd.ops.group import Group


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

    def own_ends(self, ends: Tensor, route: Tensor) -> Tensor:
        """Return the ends of the own experts' rows after `dispatch`, in the form of `ends`."""
        return route[1].sum(0).cumsum(0).to(ends)

    def dispatch(self, x: Tensor, route: Tensor) -> Tensor:
        """Send rows [r, ...], sorted by expert, to their experts' ranks; return those of the own experts, sorted."""
        if x.shape[0] != int(route[0].sum()):
            raise RuntimeFault(
                f"{x.shape[0]} rows are sorted by expert, but the experts take {int(route[0].sum())} of them",
                fix="give every row to an expert, or train without ep",
            )
        moved: Tensor = _Moved.apply(x, self.group, route, False)
        return moved

    def combine(self, y: Tensor, route: Tensor) -> Tensor:
        """Send rows back to where `dispatch` took them from, in their first order."""
        moved: Tensor = _Moved.apply(y, self.group, route, True)
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
    here, there = (counts.sum(1).tolist() for counts in route)
    order = _by_expert(route[1]).to(x.device)
    if back:
        return group.exchange(torch.empty_like(x).index_copy_(0, order, x), there, here)
    return group.exchange(x.contiguous(), here, there)[order]


def _by_expert(counts: Tensor) -> Tensor:
    """Return the order that sorts rows by expert, given by rank and then expert: counts [ranks, e] -> [rows]."""
    experts = torch.arange(counts.shape[1]).repeat(counts.shape[0])
    return experts.repeat_interleave(counts.flatten()).argsort(stable=True)
