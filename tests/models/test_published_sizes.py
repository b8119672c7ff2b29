"""Models of published runs: each family trains on a CPU, and traces and plans on meta."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import autoptd
from benchmarks.published.fix import fix_of
from benchmarks.published.rows import Row, Unsupported
from benchmarks.published.shapes import build, padded_vocabulary, shape_of
from benchmarks.published.transformer import Attention, Transformer, rotary_tables, rotate
from tests.benchmarks.sample_runs import OF_ROW, TINY, tiny

FAMILIES = {
    "gpt, unfused": Row(
        id="g:0", group="g", arch="gpt", attention_impl="unfused", framework="Megatron-LM 2022", **TINY
    ),
    "mpt": Row(id="m:0", group="m", arch="gpt(MPT: learned pos emb, LN, GELU, biases)", attention_impl="flash", **TINY),
    "llama, joined": Row(id="l:0", group="l", arch="llama", framework="nanotron", **TINY | {"n_kv_heads": 2}),
    "llama, separate": Row(id="l:1", group="l", arch="llama", framework="torchtitan", **TINY | {"n_kv_heads": 2}),
    "nemotron": Row(
        id="n:0", group="n", arch="gpt(squared-relu,rope)", framework="Megatron-Core", **TINY | {"n_kv_heads": 2}
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_learns_on_a_cpu(family: str) -> None:
    torch.manual_seed(0)
    model = Transformer(replace(shape_of(FAMILIES[family]), dropout=0.0))
    ids = torch.randint(0, 250, (2, 17))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        loss = model(ids[:, :-1], ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(model.head.out_features), rel=0.1)  # a guess among the vocabulary
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_planned_on_meta_with_the_splits_of_megatron(family: str) -> None:
    row = FAMILIES[family].model_copy(update={"tp": 2})
    shape = shape_of(row)
    splits = fix_of(tiny(), shape)["splits"]
    plan = autoptd.plan(build(shape), world=8, batch=8, seq=16, fix={"tp": 2, "pp": 1, "micro": 1, "splits": splits})
    placed = plan.splits.parameters
    assert placed["blocks.1.attention.out.weight"] == placed["blocks.1.perceptron.down.weight"] == "S1"
    assert placed["tokens.weight"] == "S0"
    gated = family == "llama, joined"
    assert placed["blocks.0.perceptron.up.weight"] == ("S0/2" if gated else "S0")


def test_written_out_attention_equals_the_fused_one() -> None:
    torch.manual_seed(0)
    shape = replace(shape_of(FAMILIES["nemotron"]), unfused=True, dropout=0.0)
    mine = Attention(shape).double()
    fused = Attention(replace(shape, unfused=False)).double()
    fused.load_state_dict(mine.state_dict())
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    torch.testing.assert_close(mine(x, None), fused(x, None))


@pytest.mark.parametrize("family", ["gpt, unfused", "llama, joined", "llama, separate"])
def test_no_position_sees_a_later_one(family: str) -> None:
    model = Transformer(replace(shape_of(FAMILIES[family]), dropout=0.0)).double()
    states: list[torch.Tensor] = []
    model.norm.register_forward_hook(lambda _, __, output: states.append(output.detach()))
    ids = torch.randint(0, 250, (1, 16))
    changed = ids.clone()
    changed[0, 9] = (ids[0, 9] + 1) % 250
    model(ids, ids), model(changed, ids)
    torch.testing.assert_close(states[0][:, :9], states[1][:, :9])
    assert not torch.allclose(states[0][:, 9:], states[1][:, 9:])


def test_parameters_are_those_of_the_published_model() -> None:
    # Korthikanti et al. 2022, table 3: GPT 22B, 12 h² L + 13 h L + (V + s) h + 2 h with V padded to 51,200
    shape, h, layers = shape_of(OF_ROW["korthikanti_table5:0000"]), 6144, 48
    counted = sum(p.numel() for p in build(shape).parameters())
    assert counted == 12 * h * h * layers + 13 * h * layers + (51200 + 2048) * h + 2 * h


def test_the_vocabulary_is_padded_as_megatron_does() -> None:
    assert padded_vocabulary(tiny(vocab_size=50257)) == 50432  # 256 × 197
    assert shape_of(tiny(vocab_size=50257)).vocab == 50432
    assert padded_vocabulary(tiny(vocab_size=50257, tp=8)) == 51200
    assert padded_vocabulary(tiny(vocab_size=50257, framework="nanotron")) == 50257


def test_rotary_scores_depend_on_distance_alone() -> None:
    torch.manual_seed(0)
    tables = rotary_tables(6, 8, torch.device("cpu"))
    q, k = (rotate(torch.randn(8).expand(1, 1, 6, 8), tables)[0, 0] for _ in range(2))
    scores = q @ k.T
    for distance in range(-5, 6):
        along = scores.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along))
    assert scores[0].std() > 0.01


def test_shape_reads_heads_that_do_not_make_the_width_and_dropout() -> None:
    shape = shape_of(tiny(head_dim=24, attention_impl="unfused (kernel)"))
    assert (shape.head_dim, shape.unfused, shape.dropout) == (24, True, 0.1)
    assert shape_of(tiny(attention_impl="flash-attn")).dropout == 0.0
    assert build(shape) is build(shape_of(tiny(head_dim=24, attention_impl="unfused")))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"arch": "moe(MLA)"}, "does not state n_experts, moe_top_k"),
        ({"arch": "mamba"}, "'mamba' is not modelled"),
        ({"arch": None, "n_layers": None}, "does not state arch, n_layers"),
    ],
)
def test_what_is_not_modelled_says_so(changes: dict, reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        shape_of(tiny(**changes))
