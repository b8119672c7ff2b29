"""FlexAttention while a model is traced: attention with a dense mask, of the same values.

    flex_attention(q, k, v, block_mask=m)             scaled_dot_product_attention(q, k, v, mask), mask[b, h, i, j] = m
    flex_attention(q, k, v, score_mod=f, …)           softmax(f(scale · q kᵀ, b, h, i, j) where mask, else -inf) v

torch's op takes Python functions of the indices, and has no backward pass on the CPU, so it cannot be traced as it is.
The functions are evaluated at all indices at once by vmap, as torch's own `create_mask` does, and become ops like any
others: an index into a tensor of documents, a bias by distance. Their samples, heads and tokens are split by the rules
of these ops. Blocks that the mask leaves out are computed and masked.

Private parts of torch that are replaced while tracing (seen in 2.13.0), all of `torch.nn.attention.flex_attention` but
`mod_index`: `flex_attention_hop`, which `flex_attention` calls; the flag that makes it do so without a compiler;
`_validate_device`, which refuses gradients on the CPU; and the lookup by a 0-dim index, which has its own backward pass
for the sake of the compiled kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo import _trace_wrapped_higher_order_op as lookups
from torch._higher_order_ops.flex_attention import math_attention
from torch.nn.attention import flex_attention as flex

Modifier = Callable[..., Tensor]


@contextmanager
def dense_flex_attention() -> Iterator[None]:
    """Wrap a trace: `flex_attention` is computed with dense masks."""
    create, made = flex._create_sparse_block_from_block_mask, list[Modifier]()

    def created(blocks: Any, mask_mod: Modifier, *rest: Any) -> Any:
        made.append(mask_mod)
        return create(blocks, mask_mod, *rest)

    def attend(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        return dense_attention(*args, made=made)

    with (
        _computed_by(attend),
        patch.object(lookups, "mod_index", torch.ops.aten.index),
        patch.object(flex, "_create_sparse_block_from_block_mask", created),
    ):
        yield


@contextmanager
def eager_flex_attention() -> Iterator[None]:
    """Wrap passes of a plain model: `flex_attention` is torch's own eager form, with gradients on the CPU as well."""
    with _computed_by(math_attention):
        yield


@contextmanager
def _computed_by(attention: Callable[..., Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for name, value in (
            ("_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True),
            ("flex_attention_hop", attention),
            ("setup_compilation_env", nullcontext),
            ("_validate_device", lambda *_: None),
        ):
            stack.enter_context(patch.object(flex, name, value))
        yield


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Modifier,
    block_mask: Sequence[Any],
    scale: float,
    *unused: object,
    made: Sequence[Modifier] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output [b, h, i, d], the logarithm of the sums and the largest scores [b, h, i].

    The latter two are in units of log 2, as those of torch's op are. `block_mask`: the fields of a BlockMask, the last
    of which is the function of the indices. `made`: functions whose blocks `create_block_mask` has made of them, so
    that they say everything. Results without a reader are dropped from the graph.
    """
    (samples, heads, tokens, _), keys = query.shape, key.shape[-2]
    indices = [torch.arange(n, device=query.device) for n in (samples, heads, tokens, keys)]
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    shared = heads // key.shape[1]
    if key.shape[0] != samples:  # one sample's keys serve all
        key, value = (x.expand(samples, *x.shape[1:]) for x in (key, value))
    scores = (query.to(wide) @ _per_head(key, shared).to(wide).mT) * scale
    plain = _changes_nothing(score_mod, query)
    with lookups.TransformGetItemToIndex():
        mask = None if block_mask[-1] is flex.noop_mask else flex._vmap_for_bhqkv(block_mask[-1], prefix=())(*indices)
        if not any(function is block_mask[-1] for function in made):
            mask = _within_blocks(block_mask, mask)
        if not plain:
            scores = flex._vmap_for_bhqkv(score_mod, prefix=(0,))(scores, *indices).to(wide)
    if mask is not None:
        scores = torch.where(mask, scores, -torch.inf)
    if plain:
        out = F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=shared > 1)
    else:
        out = (torch._safe_softmax(scores, -1) @ _per_head(value, shared).to(wide)).to(query.dtype)
    return out, scores.logsumexp(-1) / math.log(2), scores.amax(-1) / math.log(2)


def _within_blocks(block_mask: Sequence[Any], mask: Tensor | None) -> Tensor | None:
    """Return a mask restricted to the blocks that are listed as partial, and all of those that are listed as full."""
    queries, keys, counts, columns, full_counts, full_columns, *_, height, width, _ = block_mask
    if height == width == flex._LARGE_SPARSE_BLOCK_SIZE:  # there is no block mask
        return mask
    partial = _listed(counts, columns, queries, keys, height, width)
    mask = partial if mask is None else mask & partial
    return mask if full_counts is None else mask | _listed(full_counts, full_columns, queries, keys, height, width)


def _listed(counts: Tensor, columns: Tensor, queries: int, keys: int, height: int, width: int) -> Tensor:
    """Return which scores are in listed blocks: [b, h, i, j], for counts [b, h, rows] and columns [b, h, rows, …]."""
    listed = torch.arange(columns.shape[-1], device=columns.device) < counts.unsqueeze(-1)
    wanted = columns.unsqueeze(-1) == torch.arange(-(-keys // width), device=columns.device)
    blocks = (wanted & listed.unsqueeze(-1)).any(-2)
    return blocks.repeat_interleave(height, -2)[..., :queries, :].repeat_interleave(width, -1)[..., :keys]


def _per_head(x: Tensor, shared: int) -> Tensor:
    """Return keys or values of every query head. `shared`: query heads of one key head."""
    return x.repeat_interleave(shared, 1) if shared > 1 else x


def _changes_nothing(score_mod: Modifier, query: Tensor) -> bool:
    """Return whether a function of scores returns the score that it is given."""
    score, index = query.new_zeros(()), torch.zeros((), dtype=torch.int64, device=query.device)
    with lookups.TransformGetItemToIndex():
        return score_mod(score, index, index, index, index) is score
