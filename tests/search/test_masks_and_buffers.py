"""Memory of what the blocks of a stage share: a stage converts a boolean mask once, and all its attentions save the
copy; attention over tokens of several ranks converts its own. What all blocks receive is held once, with its gradient.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.passes.fold import Folded
from autoptd.search.pipeline import block_cost

SAMPLES, TOKENS, WIDTH, HEADS, LAYERS, CLASSES = 8, 256, 32, 2, 4, 64
SCORES = TOKENS**2  # elements of a mask


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        samples, tokens, _ = x.shape
        q, k, v = (t.view(samples, tokens, HEADS, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return x + self.out(heads.transpose(1, 2).reshape(x.shape))


class Model(nn.Module):
    """A decoder whose tokens see the last `window`; 0: all before them."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window, self.layers = window, nn.ModuleList(Layer() for _ in range(LAYERS))
        self.embed, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)

    def mask(self, tokens: int, device: torch.device) -> Tensor | None:
        at = torch.arange(tokens, device=device)
        ahead = at[:, None] - at[None]
        return (ahead >= 0) & (ahead < self.window) if self.window else None

    def forward(self, idx: Tensor, y: Tensor) -> Tensor:
        x, mask = self.embed(idx), self.mask(idx.size(1), idx.device)
        for layer in self.layers:
            x = layer(x, mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), y.flatten())


class Table(nn.Module):
    """A classifier of rows of a fixed table."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(CLASSES, 4096))
        self.head = nn.Linear(4096, CLASSES)

    def forward(self, idx: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(F.embedding(idx, self.table)).flatten(0, 1), y.flatten())


class Gated(nn.Module):
    """A network whose layers all read what the first one made."""

    def __init__(self, layers: int, shares: bool) -> None:
        super().__init__()
        self.layers, self.shares = nn.ModuleList(Layer() for _ in range(layers)), shares
        self.embed, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, idx: Tensor, y: Tensor) -> Tensor:
        x = first = torch.tanh(self.embed(idx))
        for layer in self.layers:
            x = layer(x, None) * (first if self.shares else 2.0)
        return F.cross_entropy(self.head(x).flatten(0, 1), y.flatten())


def repeated(folded: Folded) -> frozenset[int]:
    return frozenset(i for unit in folded.units if unit.count > 1 for i in range(unit.first, unit.last + 1))


@cache
def traced(window: int) -> autoptd.TracedModel:
    return trace(Model(window))


def trace(model: nn.Module) -> autoptd.TracedModel:
    idx = torch.randint(CLASSES, (SAMPLES, TOKENS))
    return autoptd.trace(model, inputs={"idx": idx, "y": idx})


def memory(source: autoptd.TracedModel, world: int = 1, **fix: Any) -> list[dict[str, int]]:
    fix = {"micro": 1, "recompute": "none", "kernels": "eager", "schedule": "1f1b", "zero": 1} | fix
    plan = autoptd.plan(source, world=world, batch=SAMPLES, cluster="dgx-h100", fix=fix)
    return list(plan.predicted.memory)


def added(world: int = 1, **fix: Any) -> list[int]:
    """Return the bytes of activations that a mask adds to each stage."""
    both = zip(memory(traced(16), world, **fix), memory(traced(0), world, **fix), strict=True)
    return [masked["activations"] - plain["activations"] for masked, plain in both]


@pytest.mark.parametrize("kernels", ["eager", "compiled"])
def test_all_attentions_save_one_copy_of_a_boolean_mask(kernels: str) -> None:
    assert added(kernels=kernels) == [2 * SCORES], "in bf16, in place of the mask"


def test_every_attention_of_the_model_converts_the_mask_itself() -> None:
    model, idx = Model(16).bfloat16(), torch.randint(CLASSES, (1, TOKENS))
    saved: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        saved[x.untyped_storage()._cdata] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        model(idx, idx)
    scores = [x.untyped_storage().nbytes() for x in saved.values() if x.shape[-2:] == (TOKENS, TOKENS)]
    assert scores == [2 * SCORES] * LAYERS


def test_ranks_that_share_heads_or_layers_have_the_whole_mask() -> None:
    assert added(2, tp=2) == [2 * SCORES]
    first, last = added(2, pp=2, stages="even")
    assert first == 2 * last == 4 * SCORES, "two microbatches in flight"


def test_ranks_that_share_tokens() -> None:
    assert added(2, cp=2, context="ring") == [SCORES], "a ring converts the mask for each tile"
    assert added(2, cp=2, context="ulysses") == [(2 * LAYERS + 1) * SCORES]


def test_recomputed_attention_reads_the_converted_mask() -> None:
    for policy in ("selective", "full"):
        assert added(recompute=policy) == [2 * SCORES]
        with_mask, without = memory(traced(16), recompute=policy)[0], memory(traced(0), recompute=policy)[0]
        assert with_mask["temporary"] == without["temporary"]


def grown(shares: bool, world: int = 1, **fix: Any) -> list[int]:
    """Return the bytes of activations that four layers more add to each stage, in hidden states of a microbatch."""
    more, less = (memory(trace(Gated(layers, shares)), world, **fix) for layers in (12, 8))
    hidden = 2 * TOKENS * WIDTH
    return [(a["activations"] - b["activations"]) // hidden for a, b in zip(more, less, strict=True)]


def test_blocks_hold_what_all_receive_once() -> None:
    """A recomputed layer keeps its input alone, another its result too, which the product saves."""
    assert grown(True, recompute="full") == grown(False, recompute="full") == [4]
    assert grown(True)[0] - grown(False)[0] == 4


def test_stages_hold_it_for_their_own_microbatches() -> None:
    fix = {"pp": 2, "stages": "even", "recompute": "full"}
    assert grown(True, 2, **fix) == grown(False, 2, **fix) == [4, 2]


def test_the_sum_of_the_gradients_of_all_blocks_is_held_beside_each_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputed are blocks of one layer each: sharing leaves two in the first one and the last one."""
    monkeypatch.setattr(block_cost, "layer_segments", repeated)
    shared, alone = (memory(trace(Gated(8, shares)), recompute="full")[0]["temporary"] for shares in (True, False))
    assert shared - alone == 2 * TOKENS * WIDTH


def test_buffers_are_on_the_device() -> None:
    source = trace(Table())
    trained = sum(p.numel() for p in source.model.parameters())
    for fix in ({}, {"dp": 2}):
        (found,) = memory(source, world=2 if fix else 1, **fix)
        assert 0 <= found["parameters"] - 2 * trained - 4 * CLASSES * 4096 < 2048, "the table in float32"
