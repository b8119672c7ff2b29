"""Models of transformers whose key-value cache, which a trace leaves out, would change what training computes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import autoptd
from autoptd.errors import InputsError, TraceError
from autoptd.passes.trace.skeleton import without_caches
from autoptd.testing.parity import differences, train_alone, train_in_lockstep

SAMPLES, TOKENS, WORDS = 4, 8, 24


def model(use_cache: bool) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": WORDS}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "use_cache": use_cache}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).double().train()


def batch(**more: Tensor) -> dict[str, Tensor]:
    ids = torch.randint(WORDS, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(TOKENS).repeat(SAMPLES, 1)
    for sample in range(SAMPLES):
        positions[sample, 2 + sample :] -= 2 + sample
    return {"input_ids": ids, "labels": ids, "position_ids": positions, **more}


@pytest.mark.parametrize(("use_cache", "masked"), [(False, False), (True, True)])
def test_trains_as_one_process(use_cache: bool, masked: bool) -> None:
    plain = model(use_cache)
    given = batch(attention_mask=torch.ones(SAMPLES, TOKENS, dtype=torch.int64)) if masked else batch()
    asked: dict[str, Any] = {"world": 2, "cluster": "local", "batch": SAMPLES, "precision": "fp64", "optimizer": "sgd"}
    parallel = autoptd.parallelize(plain, inputs=given, fix={"dp": 2}, optimizer_options={"lr": 0.1}, **asked)
    ours = train_in_lockstep(parallel, [given])
    alone = train_alone(plain, [given], loss=None, optimizer="sgd", optimizer_options={"lr": 0.1}, clip_norm=None)
    assert {n: d for n, d in differences(ours.gradients, alone.gradients).items() if not d <= 1e-10} == {}


def test_positions_that_a_model_with_a_cache_ignores_are_refused() -> None:
    with pytest.raises(InputsError) as caught:
        autoptd.plan(model(use_cache=True), inputs=batch(), world=2, cluster="local")
    assert "use_cache=True" in caught.value.what
    assert "config.use_cache = False" in caught.value.fix


def copied(use_cache: bool) -> nn.Module:
    """Return a model with a copy of its only layer, which has the same number as that."""
    deep = model(use_cache)
    deep.model.layers.append(copy.deepcopy(deep.model.layers[0]))  # type: ignore[union-attr,operator]
    deep.config.num_hidden_layers = 2  # type: ignore[union-attr]
    return deep


def test_layers_that_share_an_entry_of_the_cache() -> None:
    given = {name: batch()[name] for name in ("input_ids", "labels")}
    plain, asked = copied(use_cache=False), {"world": 2, "cluster": "local", "batch": SAMPLES, "optimizer": "sgd"}
    parallel = autoptd.parallelize(plain, inputs=given, fix={"pp": 2}, precision="fp64", **asked)  # type: ignore[arg-type]
    ours = train_in_lockstep(parallel, [given])
    alone = train_alone(plain, [given], loss=None, optimizer="sgd", clip_norm=None)
    assert {n: d for n, d in differences(ours.gradients, alone.gradients).items() if not d <= 1e-10} == {}
    with pytest.raises(TraceError, match="share an entry of the key-value cache") as caught:
        autoptd.plan(copied(use_cache=True), inputs=given, world=2, cluster="local")
    assert caught.value.where == "model.layers.0.self_attn, model.layers.1.self_attn: layer_idx 0"
    assert "config.use_cache = False" in caught.value.fix


def test_a_shared_block_that_is_told_its_number_has_an_entry_at_each_place() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "vocab_size": WORDS}
    heads = {"num_attention_heads": 2, "n_mamba_heads": 4, "mamba_d_state": 8, "mamba_ngroups": 1, "num_mem_blocks": 1}
    kinds = ["linear_attention", "hybrid", "hybrid"]
    plain = transformers.Zamba2ForCausalLM(transformers.Zamba2Config(**sizes, **heads, layers_block_type=kinds))
    given = {name: batch()[name] for name in ("input_ids", "labels")}
    with_cache = plain.train()(**given)
    without_caches(plain)
    assert with_cache.past_key_values is not None and plain(**given).past_key_values is None
    assert torch.equal(with_cache.loss, plain(**given).loss)
