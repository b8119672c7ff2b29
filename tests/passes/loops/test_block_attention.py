"""Masks that keep the samples of one long attention apart, and those that do not."""

from __future__ import annotations

import torch
from torch import Tensor

from autoptd.passes.loops.block_attention import attend_apart, block_of

SAMPLES, TOKENS = 3, 4


def mask_of(block: Tensor, outside: float | bool) -> Tensor:
    found = torch.full((SAMPLES * TOKENS, SAMPLES * TOKENS), outside, dtype=block.dtype)
    for i in range(SAMPLES):
        at = slice(i * TOKENS, (i + 1) * TOKENS)
        found[at, at] = block
    return found


def test_the_block_of_each_sample() -> None:
    causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    assert torch.equal(block_of(mask_of(causal, False), SAMPLES), causal)  # type: ignore[arg-type]
    lowest = torch.finfo(torch.float64).min
    zeros = torch.zeros(TOKENS, TOKENS, dtype=torch.float64)
    assert torch.equal(block_of(mask_of(zeros, lowest)[None, None], SAMPLES), zeros)  # type: ignore[arg-type]


def test_other_masks_are_left_alone() -> None:
    zeros = torch.zeros(TOKENS, TOKENS, dtype=torch.float64)
    assert block_of(mask_of(zeros, -1e4), SAMPLES) is None  # others have a share of the softmax
    assert block_of(mask_of(zeros == 1, False), SAMPLES) is None  # rows that see nothing
    mixed = mask_of(zeros == 0, False)
    mixed[0, 1] = False
    assert block_of(mixed, SAMPLES) is None  # samples differ


def test_attention_of_each_sample_is_that_of_all_with_the_mask() -> None:
    q, k, v = torch.randn(3, 1, 2, SAMPLES * TOKENS, 8, dtype=torch.float64)
    for block in (torch.ones(TOKENS, TOKENS, dtype=torch.bool), torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()):
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask_of(block, False))
        torch.testing.assert_close(attend_apart(q, k, v, block, SAMPLES), expected)
