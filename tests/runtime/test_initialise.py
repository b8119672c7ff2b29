"""A model on meta gets the initial values of one built on the CPU, and the same values under every plan."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

import autoptd
from autoptd.errors import PlanError
from autoptd.models.nanogpt import GPTSizes, NanoGPT
from autoptd.runtime.comm.threaded import run_lockstep
from autoptd.runtime.initialise import values_for

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT2 = transformers.GPT2Config(n_embd=64, n_layer=4, n_head=4, vocab_size=512, n_positions=32, resid_pdrop=0.0)


class Layers(nn.Module):
    """One of each of torch's usual layers, the last two tied."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 4, stride=4)
        self.norm = nn.LayerNorm(32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.batch = nn.BatchNorm1d(32)
        self.linear = nn.Linear(32, 64, bias=False)
        self.words = nn.Embedding(100, 64)
        self.head = nn.Linear(64, 100, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        patches = self.norm(self.patches(x).flatten(2).transpose(1, 2))
        mixed = self.batch(self.attention(patches, patches, patches)[0].mean(1))
        return self.head(self.linear(mixed)).square().mean()


def build(name: str) -> nn.Module:
    match name:
        case "gpt2":
            return transformers.GPT2LMHeadModel(GPT2)
        case "llama":
            config = transformers.LlamaConfig(
                **SMALL, num_key_value_heads=2, vocab_size=256, max_position_embeddings=32
            )
            return transformers.LlamaForCausalLM(config)
        case "bert":
            config = transformers.BertConfig(
                **SMALL,
                vocab_size=256,
                max_position_embeddings=32,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
            return transformers.BertForMaskedLM(config)
        case "vit":
            return transformers.ViTForImageClassification(transformers.ViTConfig(**SMALL, image_size=32, patch_size=8))
        case "nanogpt":
            return NanoGPT(GPTSizes(vocab=256, max_seq=32, width=64, layers=2, heads=4))
        case _:
            return Layers()


MODELS = ["gpt2", "llama", "bert", "vit", "nanogpt", "layers"]


def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return build(name)


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def inputs(name: str) -> dict[str, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(0, 256, (3, 16))
    match name:
        case "vit":
            return {"pixel_values": torch.randn(3, 3, 32, 32), "labels": torch.tensor([0, 1, 0])}
        case "layers":
            return {"x": torch.randn(3, 3, 16, 16)}
        case "nanogpt":
            return {"idx": ids, "targets": ids}
        case _:
            return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("name", MODELS)
def test_the_spread_is_that_of_a_model_built_on_the_cpu(name: str):
    torch.manual_seed(0)
    real = tensors(build(name))
    made = values_for(on_meta(name), list(real), seed=0)
    for tensor, value in real.items():
        value, mine = value.detach(), made[tensor]
        assert (mine.shape, mine.dtype) == (value.shape, value.dtype), tensor
        if not value.is_floating_point() or value.numel() < 2000:
            continue
        # the sample deviation of n draws is within sigma / sqrt(2 n) of the true one; allow five of those
        margin = 5 * math.sqrt(1 / value.numel()) * float(value.std())
        assert float(mine.std()) == pytest.approx(float(value.std()), abs=max(margin, 1e-9)), tensor
        assert float(mine.mean()) == pytest.approx(float(value.mean()), abs=max(2 * margin, 1e-9)), tensor


@pytest.mark.parametrize("name", MODELS)
def test_what_is_not_drawn_is_exact(name: str):
    """Norms, biases, rotary tables, position ids: all values on which two seeds agree."""
    model = on_meta(name)
    a, b = (values_for(model, list(tensors(model)), seed) for seed in (0, 1))
    real = tensors(build(name))
    fixed = [tensor for tensor in a if torch.equal(a[tensor], b[tensor])]
    assert any(fixed) or name == "nanogpt"
    assert [tensor for tensor in fixed if not torch.equal(a[tensor], real[tensor])] == []
    drawn = [tensor for tensor in a if tensor not in fixed]
    assert len(drawn) >= len(a) // 4
    assert [tensor for tensor in drawn if tensor.endswith(("position_ids", "inv_freq"))] == []


@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_these_values_runs(name: str):
    """The loss of the filled meta model equals that of a real module which loads the values: none is missing."""
    meta, real = on_meta(name), build(name).train(False)
    values = values_for(meta, list(tensors(meta)), seed=3)
    filled = meta.to_empty(device="cpu").train(False)
    with torch.no_grad():
        for model in (filled, real):
            for tensor, place in tensors(model).items():
                place.copy_(values[tensor])
        losses = [model(**inputs(name)) for model in (filled, real)]
    losses = [loss if isinstance(loss, Tensor) else loss.loss for loss in losses]
    assert losses[0].isfinite()
    assert torch.equal(losses[0], losses[1])
    if name in ("gpt2", "llama", "bert"):  # an untrained model: all words are equally likely
        vocabulary = 512 if name == "gpt2" else 256
        assert float(losses[0]) == pytest.approx(math.log(vocabulary), abs=0.3)


def test_residual_projections_of_gpt2_are_scaled():
    model = on_meta("gpt2")
    made = values_for(model, ["transformer.h.1.mlp.c_proj.weight", "transformer.h.1.mlp.c_fc.weight"], 0)
    assert float(made["transformer.h.1.mlp.c_fc.weight"].std()) == pytest.approx(0.02, rel=0.05)
    assert float(made["transformer.h.1.mlp.c_proj.weight"].std()) == pytest.approx(0.02 / math.sqrt(8), rel=0.05)


def test_values_depend_on_name_and_seed_alone():
    model = on_meta("gpt2")
    names = list(tensors(model))
    whole = values_for(model, names, seed=0)
    torch.manual_seed(99)
    before = torch.random.get_rng_state()
    for part in (names[7:9], list(reversed(names)), names[-3:]):
        some = values_for(on_meta("gpt2"), part, seed=0)
        assert [name for name in part if not torch.equal(some[name], whole[name])] == []
    assert torch.equal(torch.random.get_rng_state(), before)
    a, b = whole["transformer.h.0.mlp.c_fc.weight"], whole["transformer.h.1.mlp.c_fc.weight"]
    assert not torch.equal(a, b)
    other = values_for(model, names, seed=1)
    assert not torch.equal(other["transformer.h.0.mlp.c_fc.weight"], a)


@pytest.mark.parametrize("name", ["gpt2", "nanogpt", "bert", "layers"])
def test_tied_names_are_one_tensor(name: str):
    model = on_meta(name)
    held = dict(model.named_parameters(remove_duplicate=False))
    made = values_for(model, held, seed=0)
    tied = [(a, b) for a in held for b in held if a < b and held[a] is held[b]]
    assert tied
    assert all(made[a] is made[b] for a, b in tied)


def test_values_that_are_there_are_kept():
    model = on_meta("nanogpt")
    model.norm = nn.LayerNorm(64, bias=False)
    with torch.no_grad():
        model.norm.weight.fill_(7)
    made = values_for(model, list(tensors(model)), seed=0)
    assert made["norm.weight"].unique().tolist() == [7]
    assert values_for(model, ["c"], 0, {"c": torch.ones(2)})["c"].sum() == 2
    assert all(parameter.is_meta for name, parameter in model.named_parameters() if name != "norm.weight")


class Own(nn.Module):
    """Parameters and a buffer without an initialiser, as a constructor on meta leaves them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("allowed", torch.ones(4, dtype=torch.bool))
        self.register_buffer("steps", torch.arange(4))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.layer(x) * self.scale).masked_fill(~self.allowed, 0.0).sum()


def test_a_tensor_without_initialiser_is_an_error():
    with torch.device("meta"):
        model = Own()
    with pytest.raises(PlanError) as caught:
        values_for(model, list(tensors(model)), 0)
    assert caught.value.where.splitlines() == ["scale", "allowed", "steps"]
    assert "reset_parameters()" in caught.value.fix
    assert sorted(values_for(model, ["layer.weight", "layer.bias"], 0)) == ["layer.bias", "layer.weight"]


def test_a_half_written_tensor_is_an_error():
    class Half(nn.Linear):
        def reset_parameters(self) -> None:
            nn.init.zeros_(self.weight[:2])
            nn.init.zeros_(self.bias)

    with torch.device("meta"):
        model = Half(4, 4)
    with pytest.raises(PlanError, match="1 tensors"):
        values_for(model, ["weight", "bias"], 0)


def test_an_initialiser_of_its_own_makes_up_for_it():
    class Reset(Own):
        def reset_parameters(self) -> None:
            nn.init.ones_(self.scale)
            self.allowed.fill_(True)
            self.steps.copy_(torch.arange(4))

    with torch.device("meta"):
        model = Reset()
    made = values_for(model, list(tensors(model)), 0)
    assert made["allowed"].tolist() == [True] * 4
    assert made["steps"].tolist() == [0, 1, 2, 3]


def trained(mesh: dict[str, int]) -> dict[str, Tensor]:
    """Return the state of a meta model before the first step, gathered from all ranks of a plan."""
    model = on_meta("nanogpt")
    options: dict[str, Any] = {"cluster": "dgx-h100", "batch": 8, "precision": "fp32", "fix": mesh, "seed": 5}
    parallel = autoptd.parallelize(model, world=8, **options)
    values = parallel.initial_values()
    for stage in range(parallel.plan.mesh.pp):  # import here, not in eight threads at once
        parallel.stage_module(stage * parallel.plan.mesh.dp * parallel.plan.mesh.tp)

    def body(communicators: Any) -> dict[str, Tensor]:
        mine = copy.copy(parallel)
        mine.start(communicators, values)
        return mine.state_dict()

    return run_lockstep(parallel.layout.mesh, body)[0]


def test_every_plan_starts_from_the_same_model():
    a, b = trained({"tp": 2, "pp": 2}), trained({"tp": 4, "pp": 1})
    assert a.keys() == b.keys() == build("nanogpt").state_dict().keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []
