"""Shipped models have the published sizes; every other way to name a model is resolved or refused."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoptd.errors import InputsError, ModelError
from autoptd.models import describe_models, example_inputs, load_model, model_names, sequence_limit
from autoptd.models.inputs import default_sequence
from autoptd.models.nanogpt import GPTSizes, NanoGPT

# Parameters, tied ones once. llama, gpt2, bert, vit, mixtral, qwen3, t5: counts of the released checkpoints (those of
# the last three quoted from memory; the sums below say the same);
# gpt3-175b: 96 * (12 h^2 + 13 h) + (50257 + 2048 + 2) h with h = 12288.
# deepseek-v3, glm-4.5-air, gpt-oss-120b, llama4-scout: the sums below.
PARAMETERS = {
    "bert-large": 335_174_458,
    "deepseek-v3": 671_026_404_352,
    "glm-4.5-air": 106_852_245_504,
    "gpt-oss-120b": 116_829_156_672,
    "gpt2": 124_439_808,
    "gpt3-175b": 96 * (12 * 12288**2 + 13 * 12288) + (50257 + 2048 + 2) * 12288,
    "llama3.1-8b": 8_030_261_248,
    "llama3-405b": 405_853_388_800,
    "llama3-70b": 70_553_706_496,
    "llama3-8b": 8_030_261_248,
    "llama4-scout": 107_769_861_120,
    "mixtral-8x22b": 140_620_634_112,
    "mixtral-8x7b": 46_702_792_704,
    "nanogpt": 12 * (12 * 768**2 + 2 * 768) + (50304 + 1024 + 1) * 768,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-30b-a3b": 30_532_122_624,
    "t5-3b": 2_851_598_336,
    "vit-large": 304_326_632,
}
LIMITS = {
    "bert-large": 512,
    "deepseek-v3": 163840,
    "glm-4.5-air": 131072,
    "gpt-oss-120b": 131072,
    "gpt2": 1024,
    "gpt3-175b": 2048,
    "llama3.1-8b": 131072,
    "llama3-405b": 131072,
    "llama3-70b": 8192,
    "llama3-8b": 8192,
    "llama4-scout": 10485760,
    "mixtral-8x22b": 65536,
    "mixtral-8x7b": 32768,
    "nanogpt": 1024,
    "qwen3-235b-a22b": 40960,
    "qwen3-30b-a3b": 40960,
    "t5-3b": None,
    "vit-large": None,
}


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a model reached for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_names():
    assert model_names() == sorted(PARAMETERS) == list(describe_models())
    assert all(describe_models().values())


@pytest.mark.parametrize("name", PARAMETERS)
def test_sizes(name: str):
    model, short = load_model(name)
    assert short == name
    assert model.training
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]
    assert all(parameter.is_meta for parameter in model.parameters())
    assert sequence_limit(model) == LIMITS[name]


def test_sums_of_the_mixtures_and_of_t5():
    """Parameters counted from the published shapes: h hidden, f of an expert, e experts, q and kv widths."""

    def mixture(layers: int, h: int, f: int, e: int, q: int, kv: int, vocab: int, head_norms: int) -> int:
        attention = 2 * h * q + 2 * h * kv + head_norms
        return layers * (attention + e * h + 3 * e * h * f + 2 * h) + 2 * vocab * h + h

    assert mixture(32, 4096, 14336, 8, 4096, 1024, 32000, 0) == PARAMETERS["mixtral-8x7b"]
    assert mixture(56, 6144, 16384, 8, 6144, 1024, 32000, 0) == PARAMETERS["mixtral-8x22b"]
    assert mixture(94, 4096, 1536, 128, 8192, 512, 151936, 2 * 128) == PARAMETERS["qwen3-235b-a22b"]
    assert mixture(48, 2048, 768, 128, 4096, 512, 151936, 2 * 128) == PARAMETERS["qwen3-30b-a3b"]
    h, inner, f, buckets = 1024, 32 * 128, 16384, 32 * 32
    attention, perceptron = 4 * h * inner + h, 2 * h * f + h
    encoder, decoder = 24 * (attention + perceptron) + buckets + h, 24 * (2 * attention + perceptron) + buckets + h
    assert encoder + decoder + 32128 * h == PARAMETERS["t5-3b"]


def test_sums_of_the_other_mixtures():
    """Published as 671 B, 106 B, 116.83 B and 109 B (with the vision part), of which 37, 12, 5.13 and 17 B compute each
    token. attention: a layer's; dense: a perceptron's with three matrices; f of an expert; e experts."""

    def dense(h: int, f: int) -> int:
        return 3 * h * f

    h, heads, q_rank, kv_rank = 7168, 128, 1536, 512
    queries = h * q_rank + q_rank + q_rank * heads * (128 + 64)
    keys = h * (kv_rank + 64) + kv_rank + kv_rank * heads * (128 + 128)
    attention, ends = queries + keys + heads * 128 * h + 2 * h, 2 * 129280 * h + h
    deepseek = 61 * attention + 3 * dense(h, 18432) + ends

    def deepseek_v3(experts: int) -> int:
        return deepseek + 58 * (256 * h + (experts + 1) * dense(h, 2048))

    assert deepseek_v3(256) == PARAMETERS["deepseek-v3"] and deepseek_v3(8) // 10**9 == 37

    h, q, kv = 4096, 96 * 128, 8 * 128
    attention, ends = 2 * h * q + 2 * h * kv + q + 2 * kv + 2 * h, 2 * 151552 * h + h

    def glm(experts: int) -> int:
        return 46 * attention + dense(h, 10944) + 45 * (128 * h + (experts + 1) * dense(h, 1408)) + ends

    assert glm(128) == PARAMETERS["glm-4.5-air"] and glm(8) // 10**9 == 13  # 12 without table and head

    h, q, kv, e = 2880, 64 * 64, 8 * 64, 128
    attention = 2 * h * q + 2 * h * kv + q + 2 * kv + h + 64  # with biases and a sink for each head
    experts = e * (dense(h, h) + 3 * h) + e * h + e  # of which the router has e h + e
    assert 36 * (attention + experts + 2 * h) + 2 * 201088 * h + h == PARAMETERS["gpt-oss-120b"]
    assert [round(36 * x / 1e9, 2) for x in (attention, experts)] == [0.96, 114.71]  # as in the model card

    h, q, kv = 5120, 40 * 128, 8 * 128
    attention, ends = 2 * h * q + 2 * h * kv + 2 * h, 2 * 202048 * h + h

    def scout(experts: int) -> int:
        return 48 * (attention + 16 * h + (experts + 1) * dense(h, 8192)) + ends

    assert scout(16) == PARAMETERS["llama4-scout"] and scout(1) // 10**9 == 17


@pytest.mark.parametrize(
    ("name", "seq"), [("llama3.1-8b", 4096), ("t5-3b", 512), ("mixtral-8x7b", 4096), ("llama3-405b", 4096)]
)
def test_the_sequence_of_a_shipped_model(name: str, seq: int):
    model, _ = load_model(name)
    assert default_sequence(model) == seq
    assert example_inputs(model, 1)["labels"].shape == (1, seq)
    assert example_inputs(model, 1, 256)["labels"].shape == (1, 256)


@pytest.mark.parametrize("name", LIMITS)
def test_a_default_sequence_is_at_most_what_the_help_says(name: str):
    assert default_sequence(load_model(name)[0]) <= min(LIMITS[name] or 4096, 4096)


@pytest.mark.parametrize("name", [name for name in PARAMETERS if name != "bert-large"])
def test_inputs_are_separate_and_give_a_loss(name: str):
    model, _ = load_model(name)
    model.to(torch.bfloat16)  # on meta, torch multiplies grouped experts in no other type
    inputs = example_inputs(model, batch=2, seq=8)
    assert len({id(value) for value in inputs.values()}) == len(inputs) >= 2
    assert all(value.is_meta and value.shape[0] == 2 for value in inputs.values())
    output = model(**inputs)
    loss = output if isinstance(output, torch.Tensor) else output.loss
    assert loss.shape == ()
    assert loss.requires_grad


def test_inputs_of_a_masked_language_model(tmp_path: Path):
    """Traced on the CPU: with an attention mask the model reads its values, which meta tensors lack."""
    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "vocab_size": 9,
    }
    config = {"model_type": "bert", "architectures": ["BertForMaskedLM"], **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model, _ = load_model(str(tmp_path), device="cpu")
    inputs = {name: torch.ones_like(value, device="cpu") for name, value in example_inputs(model, 2, 8).items()}
    assert list(inputs) == ["input_ids", "attention_mask", "labels"]
    assert model(**inputs).loss.isfinite()


def test_which_inputs():
    assert list(example_inputs(load_model("bert-large")[0], 1, 8)) == ["input_ids", "attention_mask", "labels"]
    assert {name: tuple(value.shape) for name, value in example_inputs(load_model("vit-large")[0], 3).items()} == {
        "pixel_values": (3, 3, 224, 224),
        "labels": (3,),
    }
    assert list(example_inputs(load_model("t5-3b")[0], 1, 8)) == ["input_ids", "decoder_input_ids", "labels"]
    assert example_inputs(load_model("llama3-405b")[0], 1)["input_ids"].shape == (1, 4096)
    assert example_inputs(load_model("gpt3-175b")[0], 1)["labels"].shape == (1, 2048)


def test_a_sequence_longer_than_the_positions():
    with pytest.raises(InputsError, match="a sequence of 2048 is longer than the 1024 positions"):
        example_inputs(load_model("gpt2")[0], 1, 2048)


@pytest.mark.parametrize("answer", [None, {}, [torch.zeros(1)], {"x": 1}, dict.fromkeys("xy", torch.zeros(1))], ids=str)
def test_example_inputs_of_a_module_are_checked(answer: Any):
    model = nn.Linear(2, 2)
    model.example_inputs = lambda batch, seq: answer
    with pytest.raises(InputsError):
        example_inputs(model, 1, 8)


def test_example_inputs_that_fail_are_the_models_own():
    model = nn.Linear(2, 2)
    model.example_inputs = lambda: {"input": torch.zeros(1, 2)}
    with pytest.raises(InputsError, match=r"example_inputs\(1, 8\) of the model failed: TypeError") as caught:
        example_inputs(model, 1, 8)
    assert "example_inputs(self, batch, seq)" in caught.value.fix


def test_a_module_that_does_not_say():
    with pytest.raises(InputsError, match="pass inputs="):
        example_inputs(nn.Linear(2, 2), 1, 8)


# --- the plain module ---------------------------------------------------------------------------------------------


def test_nanogpt_learns_ignores_and_is_causal():
    torch.manual_seed(0)
    model = NanoGPT(GPTSizes(vocab=17, max_seq=12, width=16, layers=2, heads=2))
    idx, targets = torch.randint(0, 17, (2, 3, 12))
    assert model(idx).shape == (3, 12, 17)
    later = idx.clone()
    later[:, 6:] = (later[:, 6:] + 1) % 17
    assert torch.equal(model(idx)[:, :6], model(later)[:, :6])
    assert not torch.equal(model(idx)[:, 6:], model(later)[:, 6:])
    half = targets.clone()
    half[:, 6:] = -1
    by_hand = nn.functional.cross_entropy(model(idx)[:, :6].flatten(0, 1), targets[:, :6].flatten())
    assert torch.allclose(model(idx, half), by_hand)
    assert model.head.weight is model.tokens.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = model(idx, targets)
    for _ in range(20):
        optimizer.zero_grad()
        model(idx, targets).backward()
        optimizer.step()
    assert model(idx, targets) < 0.8 * first


def test_every_parameter_of_nanogpt_is_of_a_layer_that_resets():
    with torch.device("meta"):
        model = NanoGPT()
    owners = [module for module in model.modules() if list(module.parameters(recurse=False))]
    assert all(callable(getattr(module, "reset_parameters", None)) for module in owners)


# --- names, files, callables --------------------------------------------------------------------------------------

TINY = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 1, "n_embd": 8, "n_head": 2}


def test_a_config_and_its_folder(tmp_path: Path):
    folder = tmp_path / "my-gpt"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    for name in (str(folder), str(folder / "config.json")):
        model, short = load_model(name)
        assert (type(model).__name__, short, model.config.n_layer) == ("GPT2LMHeadModel", "my-gpt", 1)
    (tmp_path / "small.json").write_text(json.dumps(TINY))
    assert load_model(str(tmp_path / "small.json"))[1] == "small"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("{", "not JSON"),
        ("[1]", "it holds a JSON list"),
        ("{}", "'model_type' is None"),
        (json.dumps(TINY | {"model_type": "gpt-2"}), "did you mean"),
        (json.dumps(TINY | {"architectures": []}), "'architectures' is []"),
        (json.dumps(TINY | {"architectures": [5]}), "'architectures' is [5]"),
        (json.dumps(TINY | {"architectures": ["pipeline"]}), "no model class 'pipeline'"),
        (json.dumps(TINY | {"architectures": ["GPT5LMHeadModel"]}), "no model class 'GPT5LMHeadModel'"),
        (json.dumps(TINY | {"n_embd": 9}), "cannot build a GPT2LMHeadModel"),
    ],
)
def test_bad_configs(tmp_path: Path, data: str, said: str):
    (tmp_path / "config.json").write_text(data)
    with pytest.raises(ModelError) as caught:
        load_model(str(tmp_path))
    assert said in str(caught.value)


SCRIPT = """
from torch import nn
def late():
    import my_layers
    return my_layers.layer()
def build(): return nn.Linear(3, 4)
def wrong(): return 5
made = nn.Linear(3, 4)
def broken():
    raise KeyError("no such layer")
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_script.py").write_text(SCRIPT)
    (tmp_path / "my_layers.py").write_text("from torch import nn\ndef layer(): return nn.ReLU()\n")
    (tmp_path / "torn.py").write_text("def build(:\n")
    monkeypatch.delitem(sys.modules, "my_script", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("script")
def test_a_callable_in_the_current_folder():
    before = list(sys.path)
    assert isinstance(load_model("my_script:late")[0], nn.ReLU)
    assert sys.path == before
    model, short = load_model("my_script:build")
    assert short == "build"
    assert isinstance(model, nn.Linear)
    assert model.weight.is_meta


def test_a_callable_of_a_file_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    here, there = tmp_path / "here", tmp_path / "out there"
    here.mkdir(), there.mkdir()
    (there / "of_another_folder.py").write_text("from torch import nn\ndef build():\n    return nn.Linear(1, 1)\n")
    (there / "json.py").write_text("def build(): ...\n")
    monkeypatch.chdir(here)
    before = list(sys.path)
    for path in (f"{there}/of_another_folder.py", "../out there/of_another_folder.py"):
        assert isinstance(load_model(f"{path}:build")[0], nn.Linear)
    monkeypatch.chdir(there)
    assert isinstance(load_model("./of_another_folder.py:build")[0], nn.Linear)
    for name, said in (("json.py:build", "the name of another module"), (f"{there}/no.py:build", "No module named")):
        with pytest.raises(ModelError, match=said):
            load_model(name)
    assert sys.path == before


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("my_script:biuld", "did you mean 'build'"),
        ("my_script:wrong", "returned int, not an nn.Module"),
        ("my_script:broken", "my_script.py:10"),
        ("my_script:made", "is a module, not a function that returns one"),
        ("my_script.py", "name what returns the model: my_script.py:make"),
        ("my_scrypt:build", "cannot import 'my_scrypt'"),
        ("gpt2-", "did you mean 'gpt2'"),
        ("", "there is no model ''"),
        ("../models/gpt2", "there is no model"),
        (":", "cannot import ''"),
        ("torn:build", "SyntaxError"),
    ],
)
def test_names_that_lead_nowhere(name: str, said: str):
    with pytest.raises(ModelError) as caught:
        load_model(name)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("code", "line", "fix"),
    [
        ("x = 1\ndef f(:\n", 2, "correct the code there"),
        ("\n\nimport no_such_package.inside\n", 3, "install no_such_package, or import it where it is used"),
        ("raise RuntimeError('at import')\n", 1, "correct the code there"),
        ("def f():\n    import no_such_package\n", 2, "install no_such_package, or import it where it is used"),
    ],
)
def test_an_error_of_a_module_that_was_found_names_its_line(
    code: str, line: int, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"broken_{abs(hash(code))}"
    (tmp_path / f"{name}.py").write_text(code)
    with pytest.raises(ModelError) as caught:
        load_model(f"{name}:f")
    assert (caught.value.where, caught.value.fix) == (f"{tmp_path / name}.py:{line}", fix)
