"""FlexAttention by dense masks: the values of torch's op, and the steps of one process on every axis."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import autoptd
from autoptd.errors import InputsError
from autoptd.passes.known.flex_attention import dense_attention
from autoptd.testing.parity import differences, train_alone, train_in_lockstep

SAMPLES, TOKENS, WIDTH, HEADS = 4, 8, 16, 4
SLOPES = 2.0 ** -torch.arange(1, HEADS + 1)
Form = Callable[["Attention", Tensor, Tensor, Tensor, Tensor], Tensor]


def mask_of(documents: Tensor) -> Any:
    def alike(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (documents[b, i] == documents[b, j]) & (i >= j)

    samples, tokens = documents.shape
    return create_block_mask(alike, samples, None, tokens, tokens, device="cpu")


def packed(self: Attention, q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    return flex_attention(q, k, v, block_mask=mask_of(documents))


def compiled(self: Attention, q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    attend = torch.compile(flex_attention)
    return attend(q, k[:, :2], v[:, :2], block_mask=mask_of(documents), enable_gqa=True, scale=0.3)


def biased(self: Attention, q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    """A trained bias by distance, capped scores, and a result that reads the sums."""

    def change(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return 20 * torch.tanh((score + self.bias[h, i - j + TOKENS] + SLOPES[h] * (j - i)) / 20)

    y, sums = flex_attention(q, k, v, score_mod=change, block_mask=mask_of(documents), return_lse=True)
    return y * sums.sigmoid().unsqueeze(-1)


class Attention(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.randn(HEADS, 2 * TOKENS) * 0.1)
        self.form = form

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = self.form(self, q, k, v, documents)
        return F.mse_loss(self.out(y.transpose(1, 2).flatten(2)), x)


FORMS: dict[str, Form] = {"packed": packed, "compiled": compiled, "biased": biased}
MESHES: list[dict[str, Any]] = [{"tp": 2}, {"cp": 2}, {"dp": 2, "micro": 1}]


def batches() -> list[dict[str, Tensor]]:
    rng = torch.Generator().manual_seed(1)
    documents = torch.randint(3, (SAMPLES, TOKENS), generator=rng).sort(-1).values
    x = torch.randn(2, SAMPLES, TOKENS, WIDTH, generator=rng, dtype=torch.float64)
    return [{"x": x[0], "documents": documents}, {"x": x[1], "documents": documents.roll(1, 0)}]


@cache
def traced(form: str) -> tuple[nn.Module, autoptd.TracedModel]:
    torch.manual_seed(0)
    model = Attention(FORMS[form]).double()
    return model, autoptd.trace(model, inputs=batches()[0], precision="fp64")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fix", MESHES, ids=str)
def test_trains_as_one_process(form: str, fix: dict[str, Any]) -> None:
    model, source = traced(form)
    asked: dict[str, Any] = {"world": 2, "cluster": "local", "batch": SAMPLES, "precision": "fp64", "optimizer": "sgd"}
    parallel = autoptd.parallelize(source, fix=fix, optimizer_options={"lr": 0.1}, **asked)
    ours = train_in_lockstep(parallel, batches())
    alone = train_alone(model, batches(), optimizer="sgd", optimizer_options={"lr": 0.1})
    for found, expected in ((ours.gradients, alone.gradients), (ours.state, alone.state)):
        assert {n: d for n, d in differences(found, expected).items() if not d <= 1e-10} == {}


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("capped", [True, False])
def test_the_values_of_torchs_op(masked: bool, capped: bool) -> None:
    """Against the op itself, which on the CPU has no gradient."""
    q, k, v = torch.randn(3, SAMPLES, HEADS, TOKENS, 16, generator=torch.Generator().manual_seed(2))
    mask = mask_of(batches()[0]["documents"]) if masked else None
    change = (lambda score, *_: torch.tanh(score)) if capped else (lambda score, *_: score)
    wanted = flex_attention(q, k, v, score_mod=change, block_mask=mask)
    blocks = flex._create_empty_block_mask(q, k) if mask is None else mask
    found, _, _ = dense_attention(q, k, v, change, blocks.as_tuple(), 16**-0.5)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("listed", [True, False])
def test_blocks_that_are_listed_by_hand(listed: bool) -> None:
    """A mask without a function sees what is listed; one that was made outside forward sees what its function says."""
    q, k, v = torch.randn(3, 1, HEADS, 6, 16, generator=torch.Generator().manual_seed(2))
    if listed:
        counts = torch.tensor([[[1, 2, 1]]], dtype=torch.int32)
        columns = torch.tensor([[[[0, 0, 0], [0, 2, 0], [1, 0, 0]]]], dtype=torch.int32)
        mask = BlockMask.from_kv_blocks(counts, columns, BLOCK_SIZE=2)
        rows = [[1, 0, 0], [1, 0, 1], [0, 1, 0]]
        seen = torch.tensor(rows).repeat_interleave(2, 0).repeat_interleave(2, 1).bool()
    else:
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 6, 6, device="cpu", BLOCK_SIZE=2)
        seen = torch.ones(6, 6).tril().bool()
    found, _, _ = dense_attention(q, k, v, lambda score, *_: score, mask.as_tuple(), 0.25)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(q, k, v, seen))


def test_a_block_mask_as_an_input_is_refused() -> None:
    model, _ = traced("packed")
    given = {**batches()[0], "mask": mask_of(batches()[0]["documents"])}
    with pytest.raises(InputsError, match="input 'mask' is BlockMask"):
        autoptd.trace(model, inputs=given)
