"""The tp axis of an emitted program: one differentiable method per row of `layout.placements.CONVERSIONS`.

Each row is a pair of linear maps on local tensors, one forward and its conjugate for the gradient:

    whole x  ─slice─▶  own slice  ─gather─▶  whole x        slice and pad need no communication
    partial  ─sum─▶    whole      ─first─▶   partial        first takes rank 0's copy and zeroes the others
    partial  ─reduce_scatter─▶ own slice

A split of `dim` in `groups` views the dim as (groups, size, width) and gives rank r the block [:, r, :].
For tensors without gradient (integers, masks) only the forward map applies. With one rank every method is the identity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from autoptd.ops.axis.products import RowSplit, ScatteredProduct, SummedProducts, WholeRows
from autoptd.ops.axis.slices import Slice, from_slices, own_slice, to_slices
from autoptd.ops.dropout import DimSlice
from autoptd.ops.group import Group

Map: TypeAlias = Callable[[Tensor], Tensor]


class _Conversion(torch.autograd.Function):
    """Two maps: one for the value, one for the gradient.

    The value does not count as written in place, as a collective's output does: `offload` copies it once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Map, gradient: Map) -> Tensor:
        ctx.gradient = gradient
        return value(x).data

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.gradient(grad), None, None


class Axis:
    """Conversions over one group. `dim` may be negative; tensors are local ones."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.rank = group.rank
        self.size = group.size

    def part(self, dim: int, groups: int = 1) -> DimSlice:
        """Return the slice of a split dim that this rank holds."""
        return Slice(dim, groups, self.size, self.rank)

    # Broadcast -> ...

    def sum_gradient(self, x: Tensor) -> Tensor:
        """B -> Bp: identity; gradient summed over ranks."""
        return self._convert(x, _same, self._sum)

    def first_rank(self, x: Tensor) -> Tensor:
        """B -> P: rank 0's copy and zeros; gradient as it is (whole on every rank)."""
        return self._convert(x, self._first, _same)

    def slice(self, x: Tensor, dim: int, groups: int = 1) -> Tensor:
        """B -> S: own slice; gradient gathered."""
        take, gather = self._slice(x, dim, groups), self._gather(x, dim, groups)
        return self._convert(x, take, gather)

    # Broadcast with partial gradient -> ...

    def first_gradient(self, x: Tensor) -> Tensor:
        """Bp -> B: identity; the whole gradient counted on rank 0 only."""
        return self._convert(x, _same, self._first)

    def first_rank_and_gradient(self, x: Tensor) -> Tensor:
        """Bp -> P: rank 0's copy and zeros; gradient likewise."""
        return self._convert(x, self._first, self._first)

    def slice_partial(self, x: Tensor, dim: int, groups: int = 1) -> Tensor:
        """Bp -> S: own slice; gradient padded with zeros."""
        return self._convert(x, self._slice(x, dim, groups), self._pad(x, dim, groups))

    # PartialSum -> ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """P -> B: sum; gradient as it is."""
        return self._convert(x, self._sum, _same)

    def all_reduce_both(self, x: Tensor) -> Tensor:
        """P -> Bp: sum; gradient summed too."""
        return self._convert(x, self._sum, self._sum)

    def reduce_scatter(self, x: Tensor, dim: int, groups: int = 1) -> Tensor:
        """P -> S: own slice of the sum; gradient gathered."""
        return self._convert(x, self._sum_slice(x, dim, groups), self._gather(x, dim, groups))

    # Split -> ...

    def all_gather_whole(self, x: Tensor, dim: int, groups: int = 1) -> Tensor:
        """S -> B: gathered; own slice of the gradient (whole on every rank)."""
        return self._convert(x, self._gather(x, dim, groups), self._slice(x, dim, groups))

    def all_gather(self, x: Tensor, dim: int, groups: int = 1) -> Tensor:
        """S -> Bp: gathered; own slice of the gradients' sum."""
        return self._convert(x, self._gather(x, dim, groups), self._sum_slice(x, dim, groups))

    def pad(self, x: Tensor, dim: int, groups: int = 1) -> Tensor:
        """S -> P: own slice amid zeros; own slice of the gradient."""
        return self._convert(x, self._pad(x, dim, groups), self._slice(x, dim, groups))

    def all_to_all(self, x: Tensor, source: tuple[int, int], target: tuple[int, int]) -> Tensor:
        """S -> S: from slices of `source` (dim, groups) to slices of `target`; gradient back again."""
        return self._convert(x, self._exchange(x, source, target), self._exchange(x, target, source))

    # Conversions with the products beside them (`axis.products`)

    def sum_gradient_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """B -> Bp, then `F.linear`: see `sum_gradient_linears`."""
        return self.sum_gradient_linears(x, [weight], [bias])[0]

    def sum_gradient_linears(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None
    ) -> tuple[Tensor, ...]:
        """B -> Bp, then `F.linear` with each weight: the sum of x's gradient travels beside the weights' products."""
        return self._linears(x, WholeRows(self.group), False, weights, biases)

    def gather_linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        dim: int,
        groups: int = 1,
        again: bool = False,
        ring: bool = False,
    ) -> Tensor:
        """S -> Bp, then `F.linear`: see `gather_linears`."""
        return self.gather_linears(x, [weight], [bias], dim=dim, groups=groups, again=again, ring=ring)[0]

    def gather_linears(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None] | None = None,
        *,
        dim: int,
        groups: int = 1,
        again: bool = False,
        ring: bool = False,
    ) -> tuple[Tensor, ...]:
        """S -> Bp, then `F.linear` with each weight: the sum of x's gradient travels beside the weights' products.

        `ring`: the next rows travel beside the products of those that are here, and backward sums the gradients of rows
        around the ring. `again`: it gathers x again instead of keeping all of it.
        """
        return self._linears(x, RowSplit(self.group, dim % x.ndim, groups, ring), again, weights, biases)

    def linear_scatter(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, dim: int, groups: int = 1
    ) -> Tensor:
        """`F.linear` with a partial result (and bias), then P -> S: sums of rows travel beside the products of others.

        The rows of rank r are summed in the order r + 1, r + 2, …, r. Backward gathers their gradients around the ring.
        """
        if self.size == 1:
            return F.linear(x, weight, bias)
        found: Tensor = ScatteredProduct.apply(x, RowSplit(self.group, dim % x.ndim, groups, ring=True), weight, bias)
        return found

    # For ops whose operands are whole on every rank

    def own_keys(self, x: Tensor, heads: int) -> Tensor:
        """Return the key heads [..., h, s, d] that this rank's share of `heads` query heads reads.

        It is the one head that they all share, or one copy for each of them.
        """
        mine, shared = heads // self.size, heads // x.shape[-3]
        start = self.rank * mine
        first, last = start // shared, (start + mine - 1) // shared
        x = x.narrow(-3, first, last - first + 1)
        return x if first == last else x.repeat_interleave(shared, -3).narrow(-3, start - first * shared, mine)

    # Not differentiable, for ops with a distributed implementation of their own

    @torch.no_grad()
    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over ranks, a new tensor."""
        return x if self.size == 1 else self._sum(x)

    @torch.no_grad()
    def max(self, x: Tensor) -> Tensor:
        """Return the elementwise maximum over ranks, a new tensor."""
        return x if self.size == 1 else self.group.all_reduce(_copy(x), "max")

    # The maps

    def _convert(self, x: Tensor, value: Map, gradient: Map) -> Tensor:
        if self.size == 1:
            return x
        if x.requires_grad and torch.is_grad_enabled():
            return _Conversion.apply(x, value, gradient)
        return value(x)

    def _linears(
        self,
        x: Tensor,
        rows: RowSplit | WholeRows,
        again: bool,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None] | None,
    ) -> tuple[Tensor, ...]:
        biases = [None] * len(weights) if biases is None else biases
        if self.size == 1:
            return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))
        found: tuple[Tensor, ...] = SummedProducts.apply(x, rows, again, len(weights), *weights, *biases)
        return found

    def _sum(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(_copy(x))

    def _first(self, x: Tensor) -> Tensor:
        return x.view_as(x) if self.rank == 0 else torch.zeros_like(x)

    def _own(self, x: Tensor, dim: int, groups: int) -> Tensor:
        return own_slice(x, dim, groups, self.size, self.rank)

    def _parts(self, x: Tensor, dim: int, groups: int) -> Tensor:
        return to_slices(x, dim, groups, self.size)

    def _joined(self, slices: Tensor, dim: int, groups: int) -> Tensor:
        return from_slices(slices, dim, groups)

    def _slice(self, x: Tensor, dim: int, groups: int) -> Map:
        dim %= x.ndim
        # a copy: a view would keep the whole tensor alive for as long as the slice
        return lambda t: _copy(self._own(t, dim, groups))

    def _gather(self, x: Tensor, dim: int, groups: int) -> Map:
        dim %= x.ndim
        return lambda t: self._joined(self.group.all_gather(t.contiguous()), dim, groups)

    def _sum_slice(self, x: Tensor, dim: int, groups: int) -> Map:
        dim %= x.ndim
        return lambda t: self.group.reduce_scatter(self._parts(t, dim, groups))

    def _pad(self, x: Tensor, dim: int, groups: int) -> Map:
        dim %= x.ndim

        def pad(t: Tensor) -> Tensor:
            slices = t.new_zeros(self.size, *t.shape)
            slices[self.rank] = t
            return self._joined(slices, dim, groups)

        return pad

    def _exchange(self, x: Tensor, source: tuple[int, int], target: tuple[int, int]) -> Map:
        (from_dim, from_groups), (to_dim, to_groups) = (source[0] % x.ndim, source[1]), (target[0] % x.ndim, target[1])

        def exchange(t: Tensor) -> Tensor:
            if from_dim == to_dim:  # the same dim in other groups: slices of one dim do not form a grid with themselves
                whole = self._joined(self.group.all_gather(t.contiguous()), from_dim, from_groups)
                return _copy(self._own(whole, to_dim, to_groups))
            return self._joined(self.group.all_to_all(self._parts(t, to_dim, to_groups)), from_dim, from_groups)

        return exchange


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)
