"""Ops with an implementation of their own: vocabulary-parallel embedding and loss, sums for losses, keyed dropout,
experts and attention.

Vocabulary-parallel cross entropy (Shoeybi et al. 2019, §3), with v split over ranks, is per position

    loss = log Σ_v exp(x_v − M) − (x_label − M),   M = max_v x_v

It takes one all-reduce of M and one of the pair (Σ exp, x_label); the gradient softmax − onehot is local.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from autoptd.errors import InputsError
from autoptd.ops.attention import SCORES, additive_mask, attention
from autoptd.ops.context_attention import ring_attention, ulysses_attention
from autoptd.ops.dropout import FIRST_DIM, MICROBATCH, DimSlice, DropoutKey, SamplePosition, Samples
from autoptd.ops.fused_attention import tile_kernel
from autoptd.ops.group import SingleRankGroup
from autoptd.ops.linear_cross_entropy import LOGITS, linear_cross_entropy, linear_row_cross_entropy
from autoptd.ops.random import DRAWS, dropout_mask, exponential, integers, normal, uniform
from autoptd.ops.tp_axis import Axis

_ALONE = Axis(SingleRankGroup())

# imported from here by emitted programs and by passes
__all__ = [
    "DRAWS",
    "LOGITS",
    "MICROBATCH",
    "SCORES",
    "DropoutKey",
    "Samples",
    "additive_mask",
    "attention",
    "dropout_mask",
    "exponential",
    "integers",
    "linear_cross_entropy",
    "linear_row_cross_entropy",
    "normal",
    "ring_attention",
    "tile_kernel",
    "ulysses_attention",
    "uniform",
]


def vocab_embedding(weight: Tensor, indices: Tensor, tp: Axis, padding_idx: int = -1) -> Tensor:
    """Look up rows of a table split over the vocabulary: weight [v/t, h], indices [...] -> partial value [..., h].

    Rows of other ranks are zeros (placement P). `padding_idx` is global; its row takes no gradient.
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
    """Sum the cross entropy of valid positions: logits [..., v], labels [...] -> 0-dim, in float32 at least.

    `in_place`: probabilities overwrite the logits if these are float32 or wider, and the gradient overwrites both.
    """
    if in_place:
        return _CrossEntropy.apply(logits, labels, _ALONE, ignore_index, label_smoothing, True).sum()
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
    """Compute `cross_entropy` of logits [..., v/t] split over the vocabulary; every rank returns the whole sum."""
    if tp.size == 1:
        return cross_entropy(logits, labels, ignore_index, in_place=in_place)
    return _CrossEntropy.apply(logits, labels, tp, ignore_index, 0.0, in_place).sum()


def row_cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Compute the cross entropy of each position, 0 for ignored labels: logits [..., v], labels [...] -> [...]."""
    flat = logits.reshape(-1, logits.shape[-1])
    return F.cross_entropy(flat, labels.reshape(-1), ignore_index=ignore_index, reduction="none").reshape(labels.shape)


def vocab_row_cross_entropy(logits: Tensor, labels: Tensor, tp: Axis, ignore_index: int = -100) -> Tensor:
    """Compute `row_cross_entropy` of logits [..., v/t] split over the vocabulary; every rank returns all rows."""
    if tp.size == 1:
        return row_cross_entropy(logits, labels, ignore_index)
    return _CrossEntropy.apply(logits, labels, tp, ignore_index, 0.0, False).to(logits.dtype)


class _CrossEntropy(torch.autograd.Function):
    """Cross entropies of rows. Saves the local softmax and three tensors of the labels' shape for backward.

    Smoothing e over v unsplit classes makes labels (1 - e) onehot + e / v (Szegedy et al. 2016, section 7).
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, tp: Axis, ignore_index: int, smoothing: float, in_place: bool
    ) -> Tensor:
        width = logits.shape[-1]
        # detached, so that autograd does not take the saved tensor for a view of a base that was written to
        x = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))
        largest = tp.max(x.amax(-1)).unsqueeze(-1)
        x = x.sub_(largest) if in_place else x - largest
        valid = own = labels != ignore_index
        local = labels - tp.rank * width
        if tp.size > 1:  # with one rank, `gather` raises for a label out of range
            own = valid & (local >= 0) & (local < width)
        local = local.masked_fill(~own, 0).unsqueeze(-1)
        at_label = x.gather(-1, local).squeeze(-1).masked_fill(~own, 0)
        spread = x.sum(-1) * (smoothing / width) if smoothing else 0.0
        softmax = x.exp_()
        total, at_label = tp.sum(torch.stack((softmax.sum(-1), at_label)))
        softmax /= total.unsqueeze(-1)
        ctx.save_for_backward(softmax, local, own, valid)
        ctx.dtype, ctx.smoothing, ctx.in_place = logits.dtype, smoothing, in_place
        return (total.log() - (1 - smoothing) * at_label - spread).masked_fill(~valid, 0)

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
    """Count the valid labels, 0-dim float64, exact for any batch; with a weight per class [c], sum their weights."""
    valid = labels != ignore_index
    if weight is None:
        return valid.sum().to(torch.float64)
    return (weight.to(torch.float64)[labels.masked_fill(~valid, 0)] * valid).sum()


def sum_by_index(source: Tensor, index: Tensor, size: int) -> Tensor:
    """Sum elements with equal indices along the last dim: source and index [..., n] -> [..., size]."""
    return source.new_zeros(*source.shape[:-1], size).scatter_add(-1, index, source)


def marked_rows(kept: Tensor, mask: Tensor) -> Tensor:
    """Return, for each place [b, s] that mask marks, the number of the row of its sample that kept [b, t] marks.

    The first place of a sample gets its first row, and so on; other places get any number. All ranks of a sample's
    tokens find it for all of them. Raises RuntimeError if a sample has another number of rows than places.
    """
    wrong = "a sample selects another number of rows, such as features of an image, than it has places for them"
    torch._assert_async((mask.sum(1) == kept.sum(1)).all(), wrong)
    order = (~kept).to(torch.uint8).argsort(dim=1, stable=True)
    return order.take_along_dim((mask.cumsum(1) - 1).clamp(0, kept.shape[1] - 1), 1)


def take_rows(source: Tensor, index: Tensor) -> Tensor:
    """Return the rows of source [b, t, h] of these numbers [b, s], of each sample its own: [b, s, h]."""
    return source.take_along_dim(index[..., None], 1)


def marked_columns(x: Tensor, mask: Tensor, count: int) -> Tensor:
    """Return the elements of x [n, m] that mask [n, m] marks, in order: `count` in each row, [n, count].

    Raises RuntimeError if a row has another number of them.
    """
    wrong = "a mask selects another number of elements in some row than planned for this number of samples"
    torch._assert_async((mask.sum(1) == count).all(), wrong)
    order = mask.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
    return x.gather(1, order[:, :count])


def sample_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | list[int] = 1,
    padding: int | list[int] = 0,
    dilation: int | list[int] = 1,
    groups: int = 1,
) -> Tensor:
    """Convolve each sample with its own filters: x [b, c, …], weight [b, o, c / groups, …], bias [b, o]: [b, o, …]."""
    convolve = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[x.ndim]
    b, flat = x.shape[0], None if bias is None else bias.flatten()
    made: Tensor = convolve(x.flatten(0, 1)[None], weight.flatten(0, 1), flat, stride, padding, dilation, b * groups)  # type: ignore[operator]
    return made.view(b, -1, *made.shape[2:])


def sum_over_dp(x: Tensor) -> Tensor:
    """Mark a sum over a microbatch, to be summed over those of the dp ranks: `dp.sum(x)` in an emitted program."""
    return x


def sum_over_batch(x: Tensor) -> Tensor:
    """Mark a sum over samples that samples read: `dp.batch_sum(x)`, of the whole batch, in an emitted program."""
    return x


def more_than_one(count: Tensor) -> Tensor:
    """Return a count of elements. Raises InputsError, on all ranks, if there is only one, which has no variance."""
    if not count.is_meta and count.item() < 2:
        raise InputsError(
            "a batch norm in training got one element per channel, which has no variance",
            where="the batch",
            fix="give the whole batch more than one sample; drop an incomplete last batch",
        )
    return count


def in_training(x: Tensor, running: Tensor) -> Tensor:
    """Mark a statistic of the batch that a running one replaces in evaluation: `dp.in_training(x, running)`."""
    return x


def dropout(
    x: Tensor,
    p: float,
    key: str,
    rng: DropoutKey | None,
    samples: SamplePosition = FIRST_DIM,
    parts: Sequence[DimSlice] = (),
) -> Tensor:
    """Zero elements with probability p and scale the rest by 1/(1-p); the identity without an active `rng`.

    The choice depends on `key` and on an element's position in the whole tensor. `samples`: position of the
    microbatch's samples in x. `parts`: the dims of which x holds a slice (`Axis.part`).
    """
    if p == 0 or rng is None or not rng.active:
        return x
    if p == 1:
        return x * 0
    return x * rng.elements(x.shape, key, samples, parts, x.device).keep(p) * (1 / (1 - p))


def hooked(x: Tensor, hook: Callable[[Tensor], Tensor]) -> Tensor:
    """Return x with its gradient passed through `hook`."""
    if not x.requires_grad:
        return x
    x = x.view_as(x)
    x.register_hook(hook)
    return x


def grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply each group of rows by a matrix of its own: x [r, k], weight [e, k, n], ends [e] -> [r, n].

    Group i is the rows from ends[i - 1] (or 0) up to ends[i]; rows after the last end are zeros.
    """
    if x.is_cuda and x.dtype == torch.bfloat16 and _aligned(x) and _aligned(weight):
        return F.grouped_mm(x, weight, offs=ends)
    result: Tensor = _GroupedMM.apply(x, weight, ends)
    return result


def expert_mm(x: Tensor, weight: Tensor, ends: Tensor, tp: Axis) -> Tensor:
    """`grouped_mm` with the groups split over ranks: x [r, k], weight [e/t, k, n], ends [e] -> partial value [r, n].

    Rows of other ranks' groups are zeros (placement P). Reads two of the ends on the host.
    """
    count = weight.shape[0]
    ends = torch.cat((ends.new_zeros(1), ends))[tp.rank * count : (tp.rank + 1) * count + 1]
    first, last = torch.stack((ends[0], ends[-1])).tolist()
    return F.pad(grouped_mm(x[first:last], weight, ends[1:] - first), (0, 0, first, x.shape[0] - last))


class _GroupedMM(torch.autograd.Function):
    """One product per group, for types and layouts that torch's kernel does not accept; saves its operands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sizes = _group_sizes(ends)
        return _per_group(x, weight, ctx.sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        wanted_x, wanted_weight, _ = ctx.needs_input_grad
        to_x = _per_group(grad, weight.transpose(1, 2), ctx.sizes) if wanted_x else None
        to_weight = torch.zeros_like(weight) if wanted_weight else None
        if to_weight is not None:
            groups = zip(_groups(x, ctx.sizes), _groups(grad, ctx.sizes), to_weight.unbind(), strict=False)
            for rows, to_rows, out in groups:
                if rows.shape[0]:
                    torch.mm(rows.t(), to_rows, out=out)
        return to_x, to_weight, None


def _per_group(x: Tensor, weight: Tensor, sizes: Sequence[int]) -> Tensor:
    result = x.new_zeros(x.shape[0], weight.shape[2])
    for rows, own, out in zip(_groups(x, sizes), weight.unbind(), _groups(result, sizes), strict=False):
        if rows.shape[0]:
            torch.mm(rows, own, out=out)
    return result


def _group_sizes(ends: Tensor) -> list[int]:
    """Read the rows of each group, on the host; none on meta, where they are unknown and only shapes matter."""
    last = [] if ends.is_meta else ends.tolist()
    return [b - a for a, b in zip([0, *last], last, strict=False)]


def _groups(x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    return x.split_with_sizes([*sizes, x.shape[0] - sum(sizes)])[:-1]


def _aligned(x: Tensor) -> bool:
    """Return whether rows or columns are contiguous and 16-byte aligned, as torch's grouped kernel requires."""
    *_, rows, columns = x.stride()
    return 1 in (rows, columns) and max(rows, columns) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0


def element_count(count: int) -> Tensor:
    """Return a count that is known from the sizes in the form of `valid_count`."""
    return torch.tensor(count, dtype=torch.float64)


def as_complex(x: Tensor) -> Tensor:
    """Return x [..., 2] as complex numbers: a view, or that of a copy where memory does not begin at an even element.

    In a flat buffer, a parameter begins anywhere.
    """
    *strides, last = x.stride()
    aligned = last == 1 and not x.storage_offset() % 2 and not any(n % 2 for n in strides)
    return torch.view_as_complex(x if aligned else x.clone(memory_format=torch.contiguous_format))
