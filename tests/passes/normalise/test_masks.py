"""A mask is causal if it evaluates to a causal one, however it is written; every other mask stays correct."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from tests.passes.interpret import assert_unchanged

aten = torch.ops.aten
SAMPLES, LENGTH, HEADS, WIDTH, TABLE = 6, 5, 2, 8, 16


class Attention(nn.Module):
    """Self-attention with the mask that `mask(module, valid [b, s], s)` gives, bool or additive."""

    def __init__(self, mask: Callable[[nn.Module, Tensor, int], Tensor | None], window: int = 12) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.mask = mask
        ones = torch.ones(TABLE, TABLE, dtype=torch.bool)
        self.register_buffer("lower", ones.tril(), persistent=False)
        self.register_buffer("banded", ones.tril() & ones.triu(1 - window), persistent=False)

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(self, valid, x.shape[1]))
        return out.square().mean()


def grid(s: int) -> tuple[Tensor, Tensor]:
    positions = torch.arange(s)
    return positions[:, None], positions[None, :]


def compared(_: nn.Module, __: Tensor, s: int) -> Tensor:
    rows, columns = grid(s)
    return columns <= rows


def tril(_: nn.Module, __: Tensor, s: int) -> Tensor:
    return torch.ones(s, s, dtype=torch.bool).tril()[None, None]


def additive(_: nn.Module, __: Tensor, s: int) -> Tensor:
    return torch.full((s, s), -math.inf, dtype=torch.float64).triu(1)


def additive_smallest(_: nn.Module, __: Tensor, s: int) -> Tensor:
    return torch.full((s, s), torch.finfo(torch.float64).min, dtype=torch.float64).triu(1)


def table(self: nn.Module, _: Tensor, s: int) -> Tensor:
    return self.lower[:s, :s]


def all_true(_: nn.Module, valid: Tensor, s: int) -> Tensor:
    return torch.ones(s, s, dtype=torch.bool)


def zeros(_: nn.Module, __: Tensor, s: int) -> Tensor:
    return torch.zeros(1, 1, s, s, dtype=torch.float64)


def window(size: int) -> Callable[[nn.Module, Tensor, int], Tensor]:
    def mask(_: nn.Module, __: Tensor, s: int) -> Tensor:
        rows, columns = grid(s)
        return (columns <= rows) & (columns > rows - size)

    return mask


def banded_table(self: nn.Module, _: Tensor, s: int) -> Tensor:
    return self.banded[:s, :s]


def one_too_many(_: nn.Module, __: Tensor, s: int) -> Tensor:
    rows, columns = grid(s)
    return columns <= rows + 1


def strictly_before(_: nn.Module, __: Tensor, s: int) -> Tensor:
    rows, columns = grid(s)
    return (columns < rows) | (columns == 0)


def slopes(_: nn.Module, __: Tensor, s: int) -> Tensor:
    rows, columns = grid(s)
    return (columns - rows).double().masked_fill(columns > rows, -math.inf)


def only_for_short(_: nn.Module, __: Tensor, s: int) -> Tensor:
    """Return a mask that is causal only at the short lengths that a careless check might try."""
    rows, columns = grid(s)
    return (columns <= rows) & ~((rows >= 40) & (columns == 0))


def padding(_: nn.Module, valid: Tensor, s: int) -> Tensor:
    rows, columns = grid(s)
    return (columns <= rows) & valid[:, None, None, :]


CAUSAL = [compared, tril, additive, additive_smallest, table]
NOTHING = [all_true, zeros]
DENSE = [
    window(1),
    window(3),
    window(8),
    window(40),
    banded_table,
    one_too_many,
    strictly_before,
    slopes,
    only_for_short,
    padding,
]


def batch() -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(2)
    valid = torch.arange(LENGTH) < torch.tensor([[5], [1], [3], [2], [4], [1]])
    return {"x": torch.randn(SAMPLES, LENGTH, WIDTH, generator=rng, dtype=torch.float64), "valid": valid}


def attention_of(mask: Callable[[nn.Module, Tensor, int], Tensor]) -> tuple[object, bool]:
    """Return (mask argument, is_causal) of the attention op, after checking its value and gradient."""
    torch.manual_seed(0)
    traced = assert_unchanged(Attention(mask).double(), batch())
    (node,) = [n for n in traced.graph.graph.nodes if n.target is aten.scaled_dot_product_attention.default]
    found = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    return found, len(node.args) > 5 and bool(node.args[5])


@pytest.mark.parametrize("mask", CAUSAL)
def test_causal(mask: Callable[[nn.Module, Tensor, int], Tensor]) -> None:
    assert attention_of(mask) == (None, True)


@pytest.mark.parametrize("mask", NOTHING)
def test_nothing_masked(mask: Callable[[nn.Module, Tensor, int], Tensor]) -> None:
    assert attention_of(mask) == (None, False)


@pytest.mark.parametrize("mask", DENSE)
def test_dense(mask: Callable[[nn.Module, Tensor, int], Tensor]) -> None:
    found, causal = attention_of(mask)
    assert found is not None and not causal


class HandWritten(nn.Module):
    """nanoGPT's attention without flash: a table of ones, masked_fill, softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.register_buffer("bias", torch.tril(torch.ones(TABLE, TABLE)).view(1, 1, TABLE, TABLE))

    def forward(self, x: Tensor) -> Tensor:
        s = x.size(1)
        q, k, v = (t.view(*x.shape[:2], HEADS, -1).transpose(1, 2) for t in self.qkv(x).split(WIDTH, dim=2))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        scores = scores.masked_fill(self.bias[:, :, :s, :s] == 0, -math.inf)
        return (scores.softmax(-1) @ v).square().mean()


def test_hand_written_attention_stays_right() -> None:
    torch.manual_seed(0)
    assert_unchanged(HandWritten().double(), {"x": batch()["x"]})


@pytest.mark.parametrize("padded", [False, True])
def test_hugging_face_causal_mask(padded: bool) -> None:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).double()
    ids = torch.randint(0, 32, (SAMPLES, LENGTH))
    given = {"input_ids": ids, "labels": ids}  # one tensor object: export alone would merge the two
    if padded:
        given["attention_mask"] = batch()["valid"].long()
    from tests.passes.interpret import in_microbatches, normalised, whole

    traced = normalised(model, given)
    nodes = [n for n in traced.graph.graph.nodes if n.target is aten.scaled_dot_product_attention.default]
    assert len(nodes) == 2
    for node in nodes:
        mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
        assert (mask is None) != padded
    assert set(traced.inputs.values()) == set(given)
    found, wanted = in_microbatches(model, traced, given, [1, 3, 2]), whole(model, given)
    torch.testing.assert_close(found.loss, wanted.loss.double(), rtol=1e-6, atol=0)
    for name, gradient in wanted.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient, rtol=1e-6, atol=1e-9)
