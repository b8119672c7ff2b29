"""Weights of Hugging Face folders, read slice by slice, and written so that `from_pretrained` loads them."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import autoptd
from autoptd.checkpoint.huggingface import INDEX, ONE, Weights, export
from autoptd.cli.main import main
from autoptd.errors import CheckpointError, ModelError
from autoptd.ops.axis.slices import own_slice
from autoptd.runtime.lazy_tensor import Stored
from autoptd.testing.parity import train_in_lockstep

NO_DROPOUT = {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}


@cache
def model_of(kind: str) -> PreTrainedModel:
    """Make a tiny model: GPT-2 ties its head to its embedding, this Llama does not."""
    torch.manual_seed(3)
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(vocab_size=66, n_positions=16, n_embd=32, n_layer=2, n_head=4, **NO_DROPOUT))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes, **heads))


def folder_of(kind: str, path: Path, shard: str = "5GB") -> Path:
    model_of(kind).save_pretrained(path, max_shard_size=shard)
    return path


BATCH: Mapping[str, Tensor] = {
    name: torch.randint(60, (4, 8), generator=torch.Generator().manual_seed(0)) for name in ("input_ids", "labels")
}
ALONE: Mapping[str, Any] = {"world": 1, "batch": 4, "seq": 8, "precision": "fp32", "cluster": "local"}


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_in_a_step_and_out_with_equal_logits(kind: str, tmp_path: Path) -> None:
    source = folder_of(kind, tmp_path / "source", "30KB")
    assert (source / INDEX).is_file()
    parallel = autoptd.parallelize(str(source), **ALONE)
    expected = model_of(kind)(**BATCH).loss.detach()
    torch.testing.assert_close(parallel.eval_step(BATCH), expected, rtol=1e-6, atol=0)
    parallel.train_step(BATCH)
    parallel.save(tmp_path / "checkpoints")
    export(tmp_path / "checkpoints", tmp_path / "target", None, shard_bytes=30_000)
    assert (tmp_path / "target" / INDEX).is_file()
    loaded = type(model_of(kind)).from_pretrained(tmp_path / "target")
    trained = type(model_of(kind))(model_of(kind).config)
    trained.load_state_dict(parallel.state_dict())
    assert torch.equal(loaded(BATCH["input_ids"]).logits, trained(BATCH["input_ids"]).logits)
    assert list(loaded.state_dict()) == list(trained.state_dict())
    tied = kind == "gpt2"
    assert (loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight) == tied


def test_the_command_writes_the_type_that_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parallel = autoptd.parallelize(str(folder_of("llama", tmp_path / "source")), **ALONE)
    parallel.save(tmp_path / "checkpoints")
    out = str(tmp_path / "target")
    assert main(["checkpoint", "export", str(tmp_path / "checkpoints"), "--out", out, "--precision", "bf16"]) == 0
    assert "21 tensors of step 0, bfloat16: model.safetensors" in capsys.readouterr().out
    assert LlamaForCausalLM.from_pretrained(out, dtype="auto").dtype == torch.bfloat16
    assert main(["checkpoint", "export", str(tmp_path / "checkpoints"), "--out", out]) == 2
    assert "the folder is not empty" in capsys.readouterr().err


def test_each_rank_reads_its_own_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training matches the model in memory, and no rank reads more of a split parameter than its part."""
    source = folder_of("llama", tmp_path)
    fix = {"dp": 1, "tp": 2, "pp": 2, "micro": 2}
    plan = {**ALONE, "world": 4, "fix": fix, "optimizer": "sgd"}
    parallel = autoptd.parallelize(str(source), **plan)
    read: list[int] = []
    slices = Stored.own_slice

    def counted(self: Stored, dim: int, groups: int, size: int, rank: int) -> Tensor:
        part = slices(self, dim, groups, size, rank)
        read.append(part.numel() * size - math.prod(self.shape))
        return part

    monkeypatch.setattr(Stored, "own_slice", counted)
    found = train_in_lockstep(parallel, [BATCH])
    assert read and not any(read)
    expected = train_in_lockstep(autoptd.parallelize(model_of("llama"), **plan), [BATCH])
    assert found.losses == expected.losses
    assert all(torch.equal(x, expected.state[name]) for name, x in found.state.items())


@pytest.mark.parametrize(("dim", "groups"), [(0, 1), (1, 1), (1, 3)])
def test_a_slice_is_that_of_the_whole(dim: int, groups: int) -> None:
    whole = torch.arange(8 * 12).view(8, 12)
    stored = Stored((8, 12), lambda places: whole[places])
    for rank in range(2):
        assert torch.equal(stored.own_slice(dim, groups, 2, rank), own_slice(whole, dim, groups, 2, rank))
    assert torch.equal(stored.whole(), whole)


def test_files_of_the_bare_model(tmp_path: Path) -> None:
    """Files of the model without its head, as of the released GPT-2: names lack the prefix of the whole model."""
    bare = model_of("gpt2").transformer
    bare.save_pretrained(tmp_path)
    weights = Weights(tmp_path, model_of("gpt2"))
    weights.check(name for name, _ in model_of("gpt2").named_parameters())
    for name, x in model_of("gpt2").named_parameters():
        assert torch.equal(weights[name].whole(), x)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    folder_of("gpt2", tmp_path)
    with pytest.raises(ModelError, match="parameters of the model are not among the weights"):
        autoptd.parallelize(model_of("llama"), weights=tmp_path, **ALONE)
    with pytest.raises(ModelError, match="holds no safetensors"):
        autoptd.parallelize(model_of("llama"), weights=tmp_path / "none", **ALONE)


def test_tensors_that_the_model_lacks_are_named(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 2, bias=False)
    save_file({"weight": torch.ones(2, 4), "bias": torch.ones(2)}, tmp_path / ONE)
    weights = Weights(tmp_path, model)
    with pytest.warns(UserWarning, match="1 tensors are not in the model: 'bias'"):
        weights.check(["weight"])
    model._keys_to_ignore_on_load_unexpected = [r"^bi"]  # type: ignore[assignment]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Weights(tmp_path, model).check(["weight"])
        folder_of("gpt2", tmp_path)  # tied
        Weights(tmp_path, model_of("gpt2")).check(name for name, _ in model_of("gpt2").named_parameters())


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.bool, torch.float8_e4m3fn])
def test_quantised_weights_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    """Their codes would be taken for weights."""
    save_file({"weight": torch.ones(2, 4).to(dtype), "weight_scale": torch.ones(2)}, tmp_path / ONE)
    with pytest.raises(ModelError, match=r"'weight' is of type .*, not a floating-point type of 16 bits"):
        Weights(tmp_path, torch.nn.Linear(4, 2, bias=False))["weight"]
    save_file({"count": torch.ones(2).to(dtype)}, tmp_path / ONE)
    model = torch.nn.Module()
    model.register_buffer("count", torch.ones(2, dtype=torch.int64))
    assert Weights(tmp_path, model)["count"].whole().tolist() == [1, 1]


@pytest.mark.parametrize("harm", ["index", "file"])
def test_damaged_weights_name_the_file(tmp_path: Path, harm: str) -> None:
    folder_of("gpt2", tmp_path, "30KB" if harm == "index" else "5GB")
    name = INDEX if harm == "index" else ONE
    (tmp_path / name).write_text(json.dumps({"weight_map": 3}))
    with pytest.raises(ModelError, match=name):
        Weights(tmp_path, model_of("gpt2"))


def test_a_model_that_is_not_of_transformers_has_nothing_to_export(tmp_path: Path) -> None:
    from autoptd.models.nanogpt import GPTSizes, NanoGPT

    tiny = NanoGPT(GPTSizes(vocab=16, max_seq=8, width=8, layers=1, heads=2))
    autoptd.parallelize(tiny, **ALONE).save(tmp_path)
    with pytest.raises(CheckpointError, match="no configuration to export"):
        export(tmp_path, tmp_path / "out", None)
