"""Products with weights beside the communication of their operand or result, taken apart around a ring.

    gather and multiply     whole x wᵀ        rows of one rank are multiplied while those of the rank before it arrive
    multiply and scatter    own Σ x wᵀ        this rank's product is made while the sum of those of others arrives

They are `all_gather` before `F.linear`, and `F.linear` before `reduce_scatter`, of an axis (Wang et al. 2023, Overlap
Communication with Dependent Computation via Decomposition). The gradient of the operand of each is the other. The
gradient of a weight is one product of all rows.

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
from autoptd.ops.axis.slices import from_slices, own_slice
from autoptd.ops.group import Group

Gradients = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class RowSplit:
    """A dim of rows, not the last one, that is split over ranks in `groups`."""

    group: Group
    dim: int
    groups: int = 1

    def of(self, x: Tensor, rank: int) -> Tensor:
        return own_slice(x, self.dim, self.groups, self.group.size, rank)

    def whole(self, slices: Tensor) -> Tensor:
        return from_slices(slices, self.dim, self.groups)

    def multiplied(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        slices: Tensor | None = None,
    ) -> list[Tensor]:
        """Return x wᵀ of all ranks' rows for each weight. `slices` [size, ...] is overwritten with the x of all."""
        size = self.group.size
        if slices is not None:
            slices[self.group.rank] = x
        shape = [n * size if i == self.dim else n for i, n in enumerate(x.shape[:-1])]
        results = [x.new_empty(*shape, weight.shape[0]) for weight in weights]
        for rank, (rows,) in around(self.group, (x.contiguous(),), () if slices is None else (slices,)):
            for result, weight, bias in zip(results, weights, biases, strict=True):
                blocks = result.unflatten(self.dim, (self.groups, size, -1)).select(self.dim + 1, rank)
                blocks.copy_(F.linear(rows, weight, bias).unflatten(self.dim, (self.groups, -1)))
        return results

    def scattered(self, xs: Sequence[Tensor], weights: Sequence[Tensor], bias: Tensor | None = None) -> Tensor:
        """Return this rank's rows of the sum of x wᵀ over ranks, and over the pairs of x and weight."""

        def part(rank: int) -> Tensor:
            total = F.linear(self.of(xs[0], rank), weights[0], bias)
            for x, weight in zip(xs[1:], weights[1:], strict=True):
                total += F.linear(self.of(x, rank), weight)
            return total

        return summed_around(self.group, part)


class GatheredProducts(torch.autograd.Function):
    """Products of a gathered tensor. Saves all of it, or with `again` this rank's rows, which backward re-gathers.

    The first `count` given tensors are weights, the others their biases.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, rows: RowSplit, again: bool, count: int, *given: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights, biases = _weights(given[:count]), given[count:]
        trained = any(ctx.needs_input_grad[4 : 4 + count])
        slices = x.new_empty(rows.group.size, *x.shape) if trained and not again else None
        results = rows.multiplied(x, weights, biases, slices)
        saved = x if slices is None else rows.whole(slices)
        ctx.save_for_backward(saved if trained else None, *weights)
        ctx.rows, ctx.again, ctx.part = rows, again, "both"
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Gradients:
        x, *weights = ctx.saved_tensors
        rows, wanted = ctx.rows, _wanted(ctx)
        of_weights, of_biases = wanted[4 : 4 + len(weights)], wanted[4 + len(weights) :]
        arriving = None
        if ctx.again and any(of_weights):
            slices = x.new_empty(rows.group.size, *x.shape)
            arriving = rows.group.all_gather_later(slices.view(-1), x.contiguous().view(-1))
        to_x = rows.scattered(grads, [weight.t() for weight in weights]) if wanted[0] else None
        if arriving is not None:
            arriving.wait()
            x = rows.whole(slices)
        to_weights = [_to_weight(grad, x) if w else None for grad, w in zip(grads, of_weights, strict=True)]
        to_biases = [_to_bias(grad) if w else None for grad, w in zip(grads, of_biases, strict=True)]
        return to_x, None, None, None, *to_weights, *to_biases


class ScatteredProduct(torch.autograd.Function):
    """A product whose sum over ranks is scattered. Saves its operand; backward gathers the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: RowSplit, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[2] else None, weight)
        ctx.rows, ctx.part, ctx.whole = rows, "both", None
        return rows.scattered([x], [weight], bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        x, weight = ctx.saved_tensors
        rows, wanted = ctx.rows, _wanted(ctx)
        whole, ctx.whole = ctx.whole, None  # gathered by the part before
        to_x = None
        if whole is None:
            slices = grad.new_empty(rows.group.size, *grad.shape)
            if wanted[0]:
                (to_x,) = rows.multiplied(grad, [weight.t()], [None], slices)
            else:
                rows.group.all_gather_later(slices.view(-1), grad.contiguous().view(-1)).wait()
            whole = rows.whole(slices)
        to_weight = _to_weight(whole, x) if wanted[2] else None
        to_bias = _to_bias(whole) if wanted[3] else None
        if ctx.part == "inputs":
            ctx.whole = whole
        return to_x, None, to_weight, to_bias


def _weights(given: Sequence[Tensor | None]) -> list[Tensor]:
    return [weight for weight in given if weight is not None]


def _wanted(ctx: Any) -> list[bool]:
    """Return which gradients this part of the backward pass computes: the first operand is the only input."""
    first, *others = ctx.needs_input_grad
    return [first and ctx.part != "weights", *(other and ctx.part != "inputs" for other in others)]


def _to_weight(grad: Tensor, x: Tensor) -> Tensor:
    return grad.flatten(0, -2).t() @ x.flatten(0, -2)


def _to_bias(grad: Tensor) -> Tensor:
    return grad.flatten(0, -2).sum(0)
