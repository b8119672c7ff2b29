"""Products with weights beside the communication of their operand or result.

A tensor is gathered for products, or whole on all ranks; the sum over ranks of its gradient travels beside the products
of the weights' gradients, as in Megatron-LM (Korthikanti et al. 2022, section 4.2.2). What backward re-gathers travels
beside the products of that gradient.

Taken apart around a ring, products and communication overlap in both passes (Wang et al. 2023, Overlap Communication
with Dependent Computation via Decomposition):

    gather and multiply     whole x wᵀ        rows of one rank are multiplied while those of the rank before it arrive
    multiply and scatter    own Σ x wᵀ        this rank's product is made while the sum of those of others arrives

They are `all_gather` before `F.linear`, and `F.linear` before `reduce_scatter`, of an axis. The gradient of the operand
of each is the other. The gradient of a weight is one product of all rows.

A node splits its backward pass (`runtime.split_backward`) by `ctx.part`: gradients of "inputs", of "weights", or both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from autoptd.ops.axis.ring import around, summed_around
from autoptd.ops.axis.slices import from_slices, own_slice, to_slices
from autoptd.ops.group import Done, Group, Handle

Gradients = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class WholeRows:
    """Rows that all ranks of a group hold."""

    group: Group

    def multiplied(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], *, keep: bool = False
    ) -> tuple[list[Tensor], Tensor]:
        """Return x wᵀ for each weight, and x."""
        return _each(x, weights, biases), x

    def scattered_later(self, xs: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, Handle]:
        """Return the sum of x wᵀ over ranks, and over the pairs of x and weight, once the handle has been awaited."""
        total = _summed(xs, weights)
        return total, self.group.all_reduce_later(total)


@dataclass(frozen=True)
class RowSplit:
    """A dim of rows, not the last one, that is split over ranks in `groups`. `ring`: see above."""

    group: Group
    dim: int
    groups: int = 1
    ring: bool = False

    def of(self, x: Tensor, rank: int) -> Tensor:
        return own_slice(x, self.dim, self.groups, self.group.size, rank)

    def gathered_later(self, x: Tensor) -> tuple[Tensor, Handle]:
        """Return the slices [size, ...] of all ranks, once the handle has been awaited; see `whole`."""
        slices = x.new_empty(self.group.size, *x.shape)
        return slices, self.group.all_gather_later(slices.view(-1), x.contiguous().view(-1))

    def whole(self, slices: Tensor) -> Tensor:
        return from_slices(slices, self.dim, self.groups)

    def multiplied(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], *, keep: bool = False
    ) -> tuple[list[Tensor], Tensor]:
        """Return x wᵀ of all ranks' rows for each weight, and the x of all if it is to be kept."""
        if not self.ring:
            gathered, arriving = self.gathered_later(x)
            arriving.wait()
            x = self.whole(gathered)
            return _each(x, weights, biases), x
        size = self.group.size
        slices = x.new_empty(size, *x.shape) if keep else None
        if slices is not None:
            slices[self.group.rank] = x
        shape = [n * size if i == self.dim else n for i, n in enumerate(x.shape[:-1])]
        results = [x.new_empty(*shape, weight.shape[0]) for weight in weights]
        for rank, (rows,) in around(self.group, (x.contiguous(),), () if slices is None else (slices,)):
            for result, weight, bias in zip(results, weights, biases, strict=True):
                blocks = result.unflatten(self.dim, (self.groups, size, -1)).select(self.dim + 1, rank)
                blocks.copy_(F.linear(rows, weight, bias).unflatten(self.dim, (self.groups, -1)))
        return results, x if slices is None else self.whole(slices)

    def scattered(self, xs: Sequence[Tensor], weights: Sequence[Tensor], bias: Tensor | None = None) -> Tensor:
        """Return this rank's rows of the sum of x wᵀ over ranks, and over the pairs of x and weight, by the ring."""
        return summed_around(self.group, lambda rank: _summed([self.of(x, rank) for x in xs], weights, bias))

    def scattered_later(self, xs: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, Handle]:
        """Return this rank's rows of these sums, once the handle has been awaited."""
        if self.ring:
            return self.scattered(xs, weights), Done()
        slices = to_slices(_summed(xs, weights), self.dim, self.groups, self.group.size)
        own = slices.new_empty(slices.shape[1:])
        return own, self.group.reduce_scatter_later(own.view(-1), slices.view(-1))


class SummedProducts(torch.autograd.Function):
    """Products of a tensor whose gradient is summed over ranks. Saves the whole tensor, or with `again` this rank's
    rows, which backward re-gathers.

    The first `count` given tensors are weights, the others their biases.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, rows: RowSplit | WholeRows, again: bool, count: int, *given: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights, biases = _weights(given[:count]), given[count:]
        trained = any(ctx.needs_input_grad[4 : 4 + count])
        keep = trained and not again
        results, whole = rows.multiplied(x, weights, biases, keep=keep)
        ctx.save_for_backward((whole if keep else x) if trained else None, *weights)
        ctx.rows, ctx.again, ctx.part = rows, again, "both"
        return tuple(x.data for x in results)  # not as written in place: see `_Conversion` of `tp_axis.py`

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Gradients:
        x, *weights = ctx.saved_tensors
        rows, wanted = ctx.rows, _wanted(ctx)
        of_weights, of_biases = wanted[4 : 4 + len(weights)], wanted[4 + len(weights) :]
        slices, arriving = rows.gathered_later(x) if ctx.again and any(of_weights) else (None, Done())
        to_x, summing = None, Done()
        if wanted[0]:
            to_x, summing = rows.scattered_later(grads, [weight.t().conj() for weight in weights])
        arriving.wait()
        x = x if slices is None else rows.whole(slices)
        to_weights = [_to_weight(grad, x) if w else None for grad, w in zip(grads, of_weights, strict=True)]
        to_biases = [_to_bias(grad) if w else None for grad, w in zip(grads, of_biases, strict=True)]
        summing.wait()
        return to_x, None, None, None, *to_weights, *to_biases


class ScatteredProduct(torch.autograd.Function):
    """A product whose sum over ranks is scattered. Saves its operand; backward gathers the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: RowSplit, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[2] else None, weight)
        ctx.rows, ctx.part, ctx.whole = rows, "both", None
        return rows.scattered([x], [weight], bias).data

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        x, weight = ctx.saved_tensors
        rows, wanted = ctx.rows, _wanted(ctx)
        whole, ctx.whole = ctx.whole, None  # gathered by the part before
        to_x = None
        if whole is None and wanted[0]:
            (to_x,), whole = rows.multiplied(grad, [weight.t().conj()], [None], keep=True)
        elif whole is None:
            slices, arriving = rows.gathered_later(grad)
            arriving.wait()
            whole = rows.whole(slices)
        to_weight = _to_weight(whole, x) if wanted[2] else None
        to_bias = _to_bias(whole) if wanted[3] else None
        if ctx.part == "inputs":
            ctx.whole = whole
        return to_x, None, to_weight, to_bias


def _each(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    return [F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def _summed(xs: Sequence[Tensor], weights: Sequence[Tensor], bias: Tensor | None = None) -> Tensor:
    total = F.linear(xs[0], weights[0], bias)
    for x, weight in zip(xs[1:], weights[1:], strict=True):
        total += F.linear(x, weight)
    return total


def _weights(given: Sequence[Tensor | None]) -> list[Tensor]:
    return [weight for weight in given if weight is not None]


def _wanted(ctx: Any) -> list[bool]:
    """Return which gradients this part of the backward pass computes: the first operand is the only input."""
    first, *others = ctx.needs_input_grad
    return [first and ctx.part != "weights", *(other and ctx.part != "inputs" for other in others)]


def _to_weight(grad: Tensor, x: Tensor) -> Tensor:
    return _rows(grad).t() @ _rows(x).conj()


def _to_bias(grad: Tensor) -> Tensor:
    return _rows(grad).sum(0)


def _rows(x: Tensor) -> Tensor:
    """Return x [..., n] as [rows, n]; x [n] is one row."""
    return x.reshape(-1, x.shape[-1])
