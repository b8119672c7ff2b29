"""Megatron-LM's placements, read off the graphs of models of many kinds."""

from __future__ import annotations

from fnmatch import fnmatch

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

import autoptd
from autoptd.errors import PlanError
from autoptd.passes.sharding.megatron_splits import megatron_splits
from tests.parity.parity_check import source

# model -> (pattern of parameters, placement, number that tp must divide); all other parameters are whole
EXPECTED = {
    "llama": [
        *(("*_proj.weight", "S0", 4), ("*.o_proj.weight", "S1", 4)),
        *(("*.gate_proj.weight", "S0", 64), ("*.up_proj.weight", "S0", 64), ("*.down_proj.weight", "S1", 64)),
        *(("lm_head.weight", "S0", 64), ("*.embed_tokens.weight", "S0", 64)),
    ],
    "llama_2_kv": [  # 4 heads that share 2 keys and values
        *(("*_proj.weight", "S0", 2), ("*.o_proj.weight", "S1", 2)),
        *(("*.gate_proj.weight", "S0", 64), ("*.up_proj.weight", "S0", 64), ("*.down_proj.weight", "S1", 64)),
        *(("lm_head.weight", "S0", 64), ("*.embed_tokens.weight", "S0", 64)),
    ],
}


def placed(name: str) -> dict[str, tuple[str, int]]:
    found = megatron_splits(source(name).folded).parameters
    return {name: (str(split), split.parts) for name, split in found.items() if split.split is not None}


@pytest.mark.parametrize("name", EXPECTED)
def test_columns_and_rows(name: str):
    rows = EXPECTED[name]
    every = megatron_splits(source(name).folded).parameters
    expected = {}
    for parameter in every:
        for pattern, text, parts in rows:
            if fnmatch(parameter, pattern):
                expected[parameter] = text, parts  # the last pattern counts
    assert placed(name) == expected


@pytest.mark.parametrize(
    ("name", "split"),
    [
        # weights [in, out], and three parts joined; the head is the table
        (
            "gpt2",
            {
                "transformer.h.0.attn.c_attn.weight": "S1/3",
                "transformer.h.0.attn.c_attn.bias": "S0/3",
                "transformer.h.0.attn.c_proj.weight": "S0",
                "transformer.h.0.mlp.c_fc.weight": "S1",
                "transformer.h.0.mlp.c_fc.bias": "S0",
                "transformer.h.0.mlp.c_proj.weight": "S0",
            },
        ),
        # the router is whole; gates and ups of experts are joined
        (
            "mixtral",
            {
                "model.layers.0.self_attn.q_proj.weight": "S0",
                "model.layers.0.self_attn.k_proj.weight": "S0",
                "model.layers.0.self_attn.v_proj.weight": "S0",
                "model.layers.0.self_attn.o_proj.weight": "S1",
                "model.layers.0.mlp.experts.gate_up_proj": "S1/2",
                "model.layers.0.mlp.experts.down_proj": "S2",
            },
        ),
        # what is compressed is whole
        (
            "deepseek",
            {
                "model.layers.0.self_attn.q_b_proj.weight": "S0",
                "model.layers.0.self_attn.kv_b_proj.weight": "S0",
                "model.layers.0.self_attn.o_proj.weight": "S1",
                "model.layers.0.mlp.gate_proj.weight": "S0",
                "model.layers.0.mlp.up_proj.weight": "S0",
                "model.layers.0.mlp.down_proj.weight": "S1",
            },
        ),
        # the second product is in another module than the first, and the last of its own
        (
            "bert",
            {
                "bert.encoder.layer.0.attention.self.query.weight": "S0",
                "bert.encoder.layer.0.attention.self.query.bias": "S0",
                "bert.encoder.layer.0.attention.self.key.weight": "S0",
                "bert.encoder.layer.0.attention.self.key.bias": "S0",
                "bert.encoder.layer.0.attention.self.value.weight": "S0",
                "bert.encoder.layer.0.attention.self.value.bias": "S0",
                "bert.encoder.layer.0.attention.output.dense.weight": "S1",
                "bert.encoder.layer.0.intermediate.dense.weight": "S0",
                "bert.encoder.layer.0.intermediate.dense.bias": "S0",
                "bert.encoder.layer.0.output.dense.weight": "S1",
            },
        ),
    ],
)
def test_a_layer(name: str, split: dict[str, str]):
    layer = next(iter(split)).partition(".0.")[0] + ".0."
    assert {n: text for n, (text, _) in placed(name).items() if n.startswith(layer)} == split


def test_of_tables_only_the_vocabulary_is_split():
    found = megatron_splits(source("t5").folded).parameters
    assert str(found["shared.weight"]) == "S0" and found["shared.weight"].padded
    biases = [str(split) for name, split in found.items() if "relative_attention_bias" in name]
    assert biases and set(biases) == {"B"}
    assert str(megatron_splits(source("gpt2").folded).parameters["transformer.wpe.weight"]) == "B"


def test_compressed_projections_are_noticed():
    assert megatron_splits(source("deepseek").folded).compressed
    for name in ("mixtral", "llama4"):  # columns of experts read rows that a router chose, or weighs
        assert not megatron_splits(source(name).folded).compressed


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.conv(image).relu().mean((2, 3)))


def test_a_model_without_layers_is_refused():
    traced = autoptd.trace(
        Conv(),
        inputs={"image": torch.zeros(2, 3, 8, 8)},
        loss=nn.CrossEntropyLoss(),
        targets=torch.zeros(2, dtype=torch.long),
    )
    with pytest.raises(PlanError, match="no layer has a matrix product") as error:
        autoptd.plan(traced, world=4, cluster="dgx-h100", fix={"splits": "megatron"})
    assert error.value.where == "fix['splits']" and error.value.fix


def test_joined_parts_of_unequal_size_are_refused():
    config = transformers.Phi3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.Phi3ForCausalLM(config)
    with pytest.raises(PlanError, match="needs it whole") as error:
        megatron_splits(autoptd.trace(model, seq=16).folded)
    assert "qkv_proj" in error.value.where


class Paired(nn.Module):
    """Two matrices without a module, one of them transposed, between norms."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 12)
        self.up, self.down = nn.Parameter(torch.randn(16, 32)), nn.Parameter(torch.randn(16, 32))
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.norm(x) @ self.up) * self.scale
        return self.head(x + y @ self.down.t())


class Unbound(nn.Module):
    """Queries, keys and values of one product, taken apart along a dim of their own as in timm."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.head = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.head(x + self.out(y))


def test_joined_projections_may_be_unbound():
    traced = autoptd.trace(
        Unbound(),
        inputs={"x": torch.zeros(2, 8, 16)},
        loss=lambda out, labels: F.cross_entropy(out.flatten(0, 1), labels.flatten()),
        targets={"labels": torch.zeros(2, 8, dtype=torch.long)},
    )
    found = megatron_splits(traced.folded).parameters
    assert {name: str(found[name]) for name in ("qkv.weight", "qkv.bias", "out.weight")} == {
        "qkv.weight": "S0/3", "qkv.bias": "S0/3", "out.weight": "S1",
    }  # fmt: skip
    assert found["qkv.weight"].parts == 4


def test_matrices_need_no_modules():
    traced = autoptd.trace(
        Paired(),
        inputs={"x": torch.zeros(2, 8, 16)},
        loss=lambda out, labels: F.cross_entropy(out.flatten(0, 1), labels.flatten()),
        targets={"labels": torch.zeros(2, 8, dtype=torch.long)},
    )
    found = {name: str(split) for name, split in megatron_splits(traced.folded).parameters.items()}
    assert {name: found[name] for name in ("up", "scale", "down", "norm.weight")} == {
        "up": "S1", "scale": "S0", "down": "S1", "norm.weight": "B",
    }  # fmt: skip


def test_heads_that_are_joined_with_samples_are_refused():
    """Bloom's scores have samples and heads in one dim, of which heads are no slice."""
    config = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)
    with torch.device("meta"):
        model = transformers.BloomForCausalLM(config)
    with pytest.raises(PlanError, match="needs it whole") as error:
        megatron_splits(autoptd.trace(model, seq=16).folded)
    assert "self_attention.query_key_value" in error.value.where
