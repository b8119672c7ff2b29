"""Ops with an implementation of their own: the vocabulary-parallel pair, sums for losses, keyed dropout and attention.

Vocabulary-parallel cross entropy (Shoeybi et al. 2019, §3): with v cut over ranks, per position

    loss = log Σ_v exp(x_v − M) − (x_label − M),   M = max_v x_v

takes one all-reduce of M and one of the pair (Σ exp, x_label); the gradient softmax − onehot is local.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from autoptd.ops.attention import SCORES, attention
from autoptd.ops.context_attention import ring_attention, ulysses_attention
from autoptd.ops.dropout import FIRST_DIM, MICROBATCH, DimSlice, DropoutKey, Samples, Where
from autoptd.ops.fused_attention import is_fused
from autoptd.ops.group import SingleRankGroup
from autoptd.ops.tp_axis import Axis

_ALONE = Axis(SingleRankGroup())

# for emitted programs, which say where samples lie, and call these here; and for passes that look at what ops do
__all__ = [
    "MICROBATCH",
    "SCORES",
    "DropoutKey",
    "Samples",
    "attention",
    "is_fused",
    "ring_attention",
    "ulysses_attention",
]


def vocab_embedding(weight: Tensor, indices: Tensor, tp: Axis, padding_idx: int = -1) -> Tensor:
    """Lookup in a table cut over the vocabulary: weight [v/t, h], indices [...] -> partial value [..., h].

    Rows of other ranks come out as zeros (placement P). `padding_idx` is global; its row takes no gradient.
    """
    rows = weight.shape[0]
    first = tp.rank * rows
    if tp.size == 1:
        return F.embedding(indices, weight, padding_idx if padding_idx >= 0 else None)
    local = indices - first
    foreign = (local < 0) | (local >= rows)
    padding = padding_idx - first if first <= padding_idx < first + rows else None
    return F.embedding(local.masked_fill(foreign, 0), weight, padding).masked_fill(foreign.unsqueeze(-1), 0)


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    in_place: bool = False,
) -> Tensor:
    """Sum over valid positions: logits [..., v], labels [...] -> 0-dim, computed in float32 at least.

    `in_place`: probabilities overwrite the logits, where these are as wide, and their gradient the probabilities.
    """
    if in_place:
        return _CrossEntropy.apply(logits, labels, _ALONE, ignore_index, label_smoothing, True)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        labels.reshape(-1),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="sum",
    )


def vocab_cross_entropy(
    logits: Tensor, labels: Tensor, tp: Axis, ignore_index: int = -100, in_place: bool = False
) -> Tensor:
    """`cross_entropy` of logits [..., v/t] cut over the vocabulary, labels [...]: the same 0-dim sum on every rank."""
    if tp.size == 1:
        return cross_entropy(logits, labels, ignore_index, in_place=in_place)
    return _CrossEntropy.apply(logits, labels, tp, ignore_index, 0.0, in_place)


class _CrossEntropy(torch.autograd.Function):
    """Saves the local softmax and two tensors of the labels' shape; `smoothing` where the vocabulary is not cut.

    With smoothing e over v classes (Szegedy et al. 2016, section 7) the labels are (1 - e) onehot + e / v.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, tp: Axis, ignore_index: int, smoothing: float, in_place: bool
    ) -> Tensor:
        width = logits.shape[-1]
        # detached: what is saved is no view that autograd would have to follow to a base that was written to
        x = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))
        largest = tp.max(x.amax(-1)).unsqueeze(-1)
        x = x.sub_(largest) if in_place else x - largest
        valid = own = labels != ignore_index
        local = labels - tp.rank * width
        if tp.size > 1:  # a label that no rank has would be an error of `gather`
            own = valid & (local >= 0) & (local < width)
        local = local.masked_fill(~own, 0).unsqueeze(-1)
        at_label = x.gather(-1, local).squeeze(-1).masked_fill(~own, 0)
        spread = x.sum(-1) * (smoothing / width) if smoothing else 0.0
        softmax = x.exp_()
        total, at_label = tp.sum(torch.stack((softmax.sum(-1), at_label)))
        softmax /= total.unsqueeze(-1)
        ctx.save_for_backward(softmax, local, own, valid)
        ctx.dtype, ctx.smoothing, ctx.in_place = logits.dtype, smoothing, in_place
        return (total.log() - (1 - smoothing) * at_label - spread).masked_fill(~valid, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        softmax, local, own, valid = ctx.saved_tensors
        scale = (grad * valid).unsqueeze(-1)
        result = softmax.mul_(scale) if ctx.in_place else softmax * scale
        if ctx.smoothing:
            result -= scale * (ctx.smoothing / result.shape[-1])
        result.scatter_add_(-1, local, ((ctx.smoothing - 1) * grad * own).to(result.dtype).unsqueeze(-1))
        return result.to(ctx.dtype), None, None, None, None, None


def valid_count(labels: Tensor, ignore_index: int = -100, weight: Tensor | None = None) -> Tensor:
    """How many labels count, 0-dim float64: exact for any batch. With a weight per class [c], these added up."""
    valid = labels != ignore_index
    if weight is None:
        return valid.sum().to(torch.float64)
    return (weight.to(torch.float64)[labels.masked_fill(~valid, 0)] * valid).sum()


def dropout(
    x: Tensor,
    p: float,
    key: str,
    rng: DropoutKey | None,
    samples: Where = FIRST_DIM,
    parts: Sequence[DimSlice] = (),
) -> Tensor:
    """Zero elements with probability p and scale the rest by 1/(1-p); the identity without an active `rng`.

    Which elements, depends on `key` and on where they stand in the whole tensor: `samples` tells where the microbatch's
    samples lie in x, `parts` of which dims x holds a slice (`Axis.part`).
    """
    if p == 0 or rng is None or not rng.active:
        return x
    if p == 1:
        return x * 0
    return x * rng.elements(x.shape, key, samples, parts, x.device).keep(p) * (1 / (1 - p))


def hooked(x: Tensor, hook: Callable[[Tensor], Tensor]) -> Tensor:
    """x, whose gradient goes through `hook` on its way to what x was computed from."""
    if not x.requires_grad:
        return x
    x = x.view_as(x)
    x.register_hook(hook)
    return x


def grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows in groups, each group times a matrix of its own: x [r, k], weight [e, k, n], ends [e] -> [r, n].

    Group i is the rows from ends[i - 1] (or 0) up to ends[i]; rows behind the last end come out as zeros.
    """
    if x.is_cuda and x.dtype == torch.bfloat16 and _aligned(x) and _aligned(weight):
        return F.grouped_mm(x, weight, offs=ends)
    result: Tensor = _GroupedMM.apply(x, weight, ends)
    return result


def expert_mm(x: Tensor, weight: Tensor, ends: Tensor, tp: Axis) -> Tensor:
    """`grouped_mm` with the groups cut over ranks: x [r, k], weight [e/t, k, n], ends [e] -> partial value [r, n].

    Rows of other ranks' groups come out as zeros (placement P). Reads two of the ends on the host.
    """
    count = weight.shape[0]
    ends = torch.cat((ends.new_zeros(1), ends))[tp.rank * count : (tp.rank + 1) * count + 1]
    first, last = int(ends[0]), int(ends[-1])
    return F.pad(grouped_mm(x[first:last], weight, ends[1:] - first), (0, 0, first, x.shape[0] - last))


class _GroupedMM(torch.autograd.Function):
    """One product per group, for types and layouts that torch's kernel does not take; saves its operands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        return _per_group(x, weight, ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, ends = ctx.saved_tensors
        wanted_x, wanted_weight, _ = ctx.needs_input_grad
        to_x = _per_group(grad, weight.transpose(1, 2), ends) if wanted_x else None
        to_weight = torch.zeros_like(weight) if wanted_weight else None
        if to_weight is not None:
            for i, rows in enumerate(_groups(ends)):
                to_weight[i] = x[rows].t() @ grad[rows]
        return to_x, to_weight, None


def _per_group(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    result = x.new_zeros(x.shape[0], weight.shape[2])
    for i, rows in enumerate(_groups(ends)):
        result[rows] = x[rows] @ weight[i]
    return result


def _groups(ends: Tensor) -> list[slice]:
    """The rows of each group; none on meta, where nobody knows them and shapes are all that matters."""
    last = [] if ends.is_meta else ends.tolist()
    return [slice(a, b) for a, b in zip([0, *last], last, strict=False)]


def _aligned(x: Tensor) -> bool:
    """Whether rows or columns are contiguous and begin every 16 bytes, as torch's grouped kernel wants them."""
    *_, rows, columns = x.stride()
    return 1 in (rows, columns) and max(rows, columns) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0


def element_count(count: int) -> Tensor:
    """A count that is known from the sizes, as `valid_count` gives those that are not."""
    return torch.tensor(count, dtype=torch.float64)
