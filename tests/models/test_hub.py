"""Models by their id on the Hub, of files in the local cache: nothing is downloaded, and no weights are made up."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from transformers import LlamaConfig, LlamaForCausalLM

import autoptd
from autoptd.cli.main import main
from autoptd.errors import ModelError
from autoptd.models.hub import is_hub_id
from autoptd.models.load import configuration_of, load_model

ID, REVISION = "someone/Tiny-Llama.1", "0123456789abcdef0123456789abcdef01234567"
ALONE: dict[str, Any] = {"world": 1, "batch": 4, "seq": 8, "precision": "fp32", "cluster": "local"}
IDS = torch.arange(32).view(4, 8)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def model() -> LlamaForCausalLM:
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a cache as the hub writes it: files are links to blobs."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    home = tmp_path / "models--someone--Tiny-Llama.1"
    snapshot, blobs = home / "snapshots" / REVISION, home / "blobs"
    snapshot.mkdir(parents=True), blobs.mkdir(), (home / "refs").mkdir()
    (home / "refs" / "main").write_text(REVISION)
    model().save_pretrained(tmp_path / "written")
    for number, path in enumerate(sorted((tmp_path / "written").iterdir())):
        path.rename(blobs / f"{number:064x}")
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", f"{number:064x}"))
    return snapshot


def test_a_cached_model_is_planned_and_trained(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    built, name = load_model(ID)
    assert name == "Tiny-Llama.1" and built.config.name_or_path == name
    assert next(built.parameters()).is_meta
    found = configuration_of(ID)
    assert found is not None and (found.called, found.name) == (name, name)
    assert load_model(f"{ID}@{REVISION}")[1] == name
    assert autoptd.trace(ID, seq=8, precision="fp32").name == name
    assert main(["plan", ID, "--world", "2", "--seq", "8", "--batch", "4"]) == 0
    assert "Tiny-Llama.1 on 2" in capsys.readouterr().out
    par = autoptd.parallelize(ID, **ALONE)
    expected = model()(input_ids=IDS, labels=IDS).loss.detach()
    torch.testing.assert_close(par.eval_step({"input_ids": IDS, "labels": IDS}), expected, rtol=1e-6, atol=0)


def test_what_is_not_in_the_cache_says_how_to_get_it(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for missing, command in (
        ("someone/else", "hf download someone/else config.json"),
        (f"{ID}@v2", "hf download someone/Tiny-Llama.1 --revision v2 config.json"),
    ):
        with pytest.raises(ModelError, match="not in the local cache") as caught:
            load_model(missing)
        assert command in caught.value.fix and caught.value.where == constants.HF_HUB_CACHE
    assert main(["plan", "someone/else", "--world", "2"]) == 2
    assert "hf download someone/else" in capsys.readouterr().err


def test_a_model_without_its_weights_is_not_initialised(cache: Path) -> None:
    (cache / "model.safetensors").unlink()
    assert autoptd.plan(ID, **ALONE).model == "Tiny-Llama.1"
    with pytest.raises(ModelError, match=r"model\.safetensors of .* is not in the local cache") as caught:
        autoptd.parallelize(ID, **ALONE)
    assert caught.value.fix == "download it once: hf download someone/Tiny-Llama.1"


def test_a_link_out_of_the_cache_is_refused(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere.json").write_bytes((cache / "config.json").read_bytes())
    (cache / "config.json").unlink()
    (cache / "config.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(ModelError, match="a link out of the folder"):
        load_model(ID)


def test_a_folder_of_that_name_counts_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model().save_pretrained("someone/here")
    assert not is_hub_id("someone/here") and load_model("someone/here")[1] == "here"


@pytest.mark.parametrize(
    "name", ["a/b/c", "../b", "a/..", "/a/b", "a/b:c", "a\\b", "a/b\0", "a/-b", "llama3-8b", "./a"]
)
def test_what_is_no_id(name: str) -> None:
    assert not is_hub_id(name)
