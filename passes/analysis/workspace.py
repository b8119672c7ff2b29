"""What an op allocates for itself while it runs: found by running it, and its backward, on meta tensors.

Of all storages alive at the fullest moment, those count that are neither operands, results, gradients that go in or
come out, nor kept for the backward pass: the float32 copy of the logits in a cross entropy, for instance, and the two
gradients of that size in its backward. Kernels of an accelerator allocate what their meta versions show, but for

    attention   forward nothing; backward a float32 accumulator of the query's gradient and one float32 per query (Dao
                2023, FlashAttention-2, algorithm 2: dQ is accumulated over blocks of keys)
                With dropout it is written out: what a stretch of scores takes (`attention.py`)
    dropout     one kernel, nothing
    rms_norm    the same
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
    at_sizes_that_work,
    meta_call,
    name_sizes,
    size_named,
    surroundings,
)
from autoptd.passes.analysis.storages import StorageWatch
from autoptd.passes.opcall import OpCall, Size, Stretched, TensorInfo
from autoptd.passes.rules.prove import as_list, frozen


@dataclass(frozen=True)
class Workspace:
    """Storages besides operands, results and what is kept, at the fullest moment of each pass."""

    forward: tuple[TensorInfo, ...] = ()
    backward: tuple[TensorInfo, ...] = ()


def workspace(call: OpCall) -> Workspace:
    """What a call allocates for itself, in the call's symbols where its sizes match."""
    if call.target in ATTENTION:
        query, key = call.operands[:2]
        if (form := form_of(call)).dropped:
            scores = *query.shape[:-1], key.shape[-2]
            first, second = (_stretch(scores, one.temporary) for one in passes_of(form))
            return Workspace((first,), (second,))
        accumulator = TensorInfo(query.shape, torch.float32, False)
        return Workspace(backward=(accumulator, TensorInfo(query.shape[:-1], torch.float32, False)))
    if call.target in DROPOUT | RMS_NORM:
        return Workspace()
    return _observe(call.target, frozen(call.args), frozen(tuple(call.kwargs.items())), call.outputs)


def _stretch(scores: tuple[Size, ...], nbytes: float) -> TensorInfo:
    """Scores that take so many bytes each, of as many as are there at once."""
    return Stretched((math.ceil(nbytes), *scores), torch.uint8, False, most=math.ceil(nbytes) * ops.SCORES)


@cache
def _observe(target: Callable[..., Any], args: Any, kwargs: Any, outputs: tuple[TensorInfo, ...]) -> Workspace:
    call = OpCall(target, args, dict(kwargs), outputs)
    return at_sizes_that_work(lambda numbers: _workspace_of(call, numbers))


def _workspace_of(call: OpCall, numbers: Sequence[int]) -> Workspace:
    with surroundings(call):
        return _workspace_within(call, numbers)


def _workspace_within(call: OpCall, numbers: Sequence[int]) -> Workspace:
    run, operands, values = meta_call(call, numbers)
    kept: set[int] = set()

    def keep(x: Tensor) -> Tensor:
        kept.add(x.untyped_storage()._cdata)
        return x

    alive: list[Any] = []  # nothing is freed that has to be told apart by its address
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
        except NotImplementedError:  # its backward has no meta version: as much as the forward pass
            return Workspace(_named(first, known), _named(first, known))
        outgoing = {g.untyped_storage()._cdata for g in gradients if g is not None}
        second = backward.fullest(stores | kept | outgoing | {x.untyped_storage()._cdata for x in incoming})
    return Workspace(_named(first, known), _named(second, known))


def _named(found: Sequence[tuple[torch.Size, torch.dtype]], known: Any) -> tuple[TensorInfo, ...]:
    return tuple(TensorInfo(tuple(size_named(n, known) for n in shape), dtype, False) for shape, dtype in found)
