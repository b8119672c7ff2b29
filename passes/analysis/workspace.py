"""Workspace of an op: its temporary allocations, found by running it and its backward pass on meta tensors.

Workspace is every storage alive at the peak that is no operand, result, incoming or outgoing gradient and not saved for
backward: for instance the float32 copy of the logits in a cross entropy, and the two gradients of that size in its
backward. Kernels of an accelerator allocate the same as their meta versions, except

    attention   nothing in forward; in backward a float32 accumulator of the query's gradient and one float32 per query
                (Dao 2023, FlashAttention-2, algorithm 2: dQ is accumulated over blocks of keys). With dropout it is
                not fused and takes a chunk of scores (`attention.py`)
    dropout     nothing, since it is one kernel; and so for other random numbers
    rms_norm    nothing, likewise
    a head      a chunk of logits, in the type of the product and in that of the loss; in backward the operand times the
                gradient, the sum of the operand's gradients over the chunks, and the last of these
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from autoptd.ops import library as ops
from autoptd.passes.analysis.attention import form_of, passes_of
from autoptd.passes.analysis.saved_tensors import (
    ATTENTION,
    DROPOUT,
    RMS_NORM,
    meta_call,
    meta_context,
    name_sizes,
    size_named,
    try_sizes,
)
from autoptd.passes.analysis.storages import StorageWatch
from autoptd.passes.opcall import Chunked, OpCall, Size, TensorInfo
from autoptd.passes.rules.prove import as_list, frozen

HEADS = frozenset({ops.linear_cross_entropy, ops.linear_row_cross_entropy})


@dataclass(frozen=True)
class Workspace:
    """Temporary storages at the peak of each pass."""

    forward: tuple[TensorInfo, ...] = ()
    backward: tuple[TensorInfo, ...] = ()


def workspace(call: OpCall) -> Workspace:
    """Return the workspace of a call, with shapes in the call's symbols."""
    if call.target in ATTENTION:
        query, key = call.operands[:2]
        if (form := form_of(call)).dropped:
            scores = *query.shape[:-1], key.shape[-2]
            first, second = (_chunk(scores, one.temporary) for one in passes_of(form))
            return Workspace((first,), (second,))
        accumulator = TensorInfo(query.shape, torch.float32, False)
        return Workspace(backward=(accumulator, TensorInfo(query.shape[:-1], torch.float32, False)))
    if call.target in HEADS:
        return _of_head(call)
    if call.target in DROPOUT | RMS_NORM | ops.DRAWS:
        return Workspace()
    return _observe(call.target, frozen(call.args), frozen(tuple(call.kwargs.items())), call.outputs)


def _of_head(call: OpCall) -> Workspace:
    (x, weight), dtype = call.operands[:2], call.kwargs["dtype"]
    logits, size = (*x.shape[:-1], weight.shape[0]), dtype.itemsize + (dtype != x.dtype) * x.dtype.itemsize
    chunk = Chunked((size, *logits), torch.uint8, False, max_elements=size * ops.LOGITS)
    wide = torch.promote_types(x.dtype, torch.float32)
    sums = () if wide == x.dtype else (TensorInfo(x.shape, wide, False), x)
    return Workspace((chunk,), (chunk, x, *sums))


def _chunk(scores: tuple[Size, ...], nbytes: float) -> TensorInfo:
    """Return the chunk of scores that is allocated at once, at `nbytes` for each."""
    return Chunked((math.ceil(nbytes), *scores), torch.uint8, False, max_elements=math.ceil(nbytes) * ops.SCORES)


@cache
def _observe(target: Callable[..., Any], args: Any, kwargs: Any, outputs: tuple[TensorInfo, ...]) -> Workspace:
    call = OpCall(target, args, dict(kwargs), outputs)
    return try_sizes(lambda numbers: _workspace_of(call, numbers))


def _workspace_of(call: OpCall, numbers: Sequence[int]) -> Workspace:
    with meta_context(call):
        return _workspace_within(call, numbers)


def _workspace_within(call: OpCall, numbers: Sequence[int]) -> Workspace:
    run, operands, values = meta_call(call, numbers)
    kept: set[int] = set()

    def keep(x: Tensor) -> Tensor:
        kept.add(x.untyped_storage()._cdata)
        return x

    alive: list[Any] = []  # tensors identified by address must not be freed
    known = name_sizes(call, values)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), torch.enable_grad(), StorageWatch() as forward:
        results = as_list(run())
    alive += [results, operands]
    stores = {x.untyped_storage()._cdata for x in (*operands, *results)}
    first = forward.fullest(stores | kept)
    wanted = [x for x in operands if x.requires_grad]
    given = [y for y in results if y.requires_grad]
    second: list[tuple[torch.Size, torch.dtype]] = []
    if wanted and given:
        incoming = [torch.empty_like(y) for y in given]
        try:
            with StorageWatch() as backward:
                gradients = torch.autograd.grad(given, wanted, incoming, allow_unused=True)
        except NotImplementedError:  # backward has no meta version: assume as much as forward
            return Workspace(_named(first, known), _named(first, known))
        outgoing = {g.untyped_storage()._cdata for g in gradients if g is not None}
        second = backward.fullest(stores | kept | outgoing | {x.untyped_storage()._cdata for x in incoming})
    return Workspace(_named(first, known), _named(second, known))


def _named(found: Sequence[tuple[torch.Size, torch.dtype]], known: Any) -> tuple[TensorInfo, ...]:
    return tuple(TensorInfo(tuple(size_named(n, known) for n in shape), dtype, False) for shape, dtype in found)
