"""Keys and values that are copied for query heads become those of grouped attention, where the copies are such."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoptd.passes.graph import info
from autoptd.passes.normalise.normalise import normalise
from autoptd.passes.trace.trace import trace
from autoptd.passes.trace.traced import Traced
from tests.passes.interpret import assert_unchanged

WIDTH, HEADS, KEY_HEADS, SHARED = 8, 6, 2, 3
BATCH = {"x": torch.randn(6, 5, 8, dtype=torch.float64)}
Copies = Callable[[Tensor], Tensor]


class Attention(nn.Module):
    """Causal attention of 6 query heads and 2 key heads, copied by `copies` [b, s, h, d] -> [b, 6, s, d]."""

    def __init__(self, copies: Copies, heads: int = KEY_HEADS, dropout: float = 0.0, **options: Any) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, HEADS * WIDTH), nn.Linear(8, heads * WIDTH)
        self.v = nn.Linear(8, heads * WIDTH)
        self.copies, self.heads, self.options = copies, heads, {"is_causal": True, "dropout_p": dropout} | options
        self.double()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x.to(self.q.weight.dtype)
        q = self.q(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
        k, v = (self.copies(f(x).unflatten(-1, (self.heads, WIDTH))) for f in (self.k, self.v))
        mask = None if mask is None else mask[:, None, None]
        return F.scaled_dot_product_attention(q, k, v, mask, **self.options).square().mean()


def by_expand(x: Tensor) -> Tensor:
    b, s, h, d = x.shape
    return x.transpose(1, 2)[:, :, None].expand(b, h, SHARED, s, d).reshape(b, h * SHARED, s, d)


def by_interleave(x: Tensor) -> Tensor:
    return x.transpose(1, 2).repeat_interleave(SHARED, 1)


def before_heads_move(x: Tensor) -> Tensor:
    return x.repeat_interleave(SHARED, dim=-2).permute(0, 2, 1, 3)


def by_repeat(x: Tensor) -> Tensor:
    return x.unsqueeze(3).repeat(1, 1, 1, SHARED, 1).flatten(2, 3).transpose(1, 2)


def one_head(x: Tensor) -> Tensor:
    return x.transpose(1, 2).expand(-1, HEADS, -1, -1)


def in_turn(x: Tensor) -> Tensor:
    return x.transpose(1, 2).repeat(1, SHARED, 1, 1)


def in_turn_by_expand(x: Tensor) -> Tensor:
    b, s, h, d = x.shape
    return x.transpose(1, 2)[:, None].expand(b, SHARED, h, s, d).reshape(b, h * SHARED, s, d)


def of_sums(x: Tensor) -> Tensor:
    return by_expand(x) + by_expand(x).flip(1)


def key_heads(traced: Traced) -> tuple[int, bool]:
    """Return the key heads of the only attention, and whether it is grouped."""
    (node,) = (n for n in traced.graph.graph.nodes if "scaled_dot" in str(n.target))
    heads = info(node.args[1]).shape[1]
    assert info(node.args[2]).shape[1] == heads
    return heads, bool(node.kwargs.get("enable_gqa"))


@pytest.mark.parametrize("copies", [by_expand, by_interleave, before_heads_move, by_repeat])
def test_copies_are_not_made(copies: Copies) -> None:
    assert key_heads(assert_unchanged(Attention(copies), BATCH)) == (KEY_HEADS, True)


def test_one_key_head_is_not_copied() -> None:
    assert key_heads(assert_unchanged(Attention(one_head, heads=1), BATCH)) == (1, True)


@pytest.mark.parametrize("copies", [in_turn, in_turn_by_expand, of_sums])
def test_heads_in_another_order_stay_copied(copies: Copies) -> None:
    """Query head i would read key head i // 3, but the model's reads i % 2."""
    assert key_heads(assert_unchanged(Attention(copies), BATCH)) == (HEADS, False)


@pytest.mark.parametrize(
    ("precision", "options", "grouped"),
    [
        ("bf16", {}, True),
        ("fp16", {}, True),
        ("fp64", {}, True),
        ("fp32", {}, False),
        ("bf16", {"is_causal": False}, False),
        ("bf16", {"dropout": 0.1}, True),
        ("fp32", {"dropout": 0.1}, True),
    ],
)
def test_copies_stay_where_torch_has_no_kernel_without(precision: str, options: dict[str, Any], grouped: bool) -> None:
    """torch's memory-efficient kernel, for float32 and masks, takes no groups: it would store the scores."""
    mask = {"mask": torch.ones(6, 5, dtype=torch.bool)} if "is_causal" in options else {}
    traced = normalise(trace(Attention(by_expand, **options), {**BATCH, **mask}, precision=precision))
    assert key_heads(traced) == ((KEY_HEADS, True) if grouped else (HEADS, False))
