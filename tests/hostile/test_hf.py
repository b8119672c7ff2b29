"""Hugging Face folders made to read other files, to fetch or run code, or to exhaust a machine."""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import autoptd
from autoptd.checkpoint.huggingface import INDEX, ONE, Weights, has_weights
from autoptd.errors import ModelError
from autoptd.models import downloaded
from autoptd.models.load import from_config, load_model
from tests.hostile.bounded import plain, refused
from tests.hostile.conftest import CONFIG

Change = dict[str, Any]

# --- configurations -----------------------------------------------------------------------------------------------

NESTED = {"text_config": {"model_type": "gpt2", "vision": [{"attn_implementation": "evil/kernel"}]}}
CONFIGS: dict[str, tuple[Change, str]] = {
    "a kernel of the hub": ({"attn_implementation": "evil/kernel"}, "may be fetched and run"),
    "a kernel at a revision": ({"_attn_implementation": "kernels-community/flash-attn@main:f"}, "may be fetched"),
    "an internal field": ({"_attn_implementation_internal": "evil/kernel"}, "may be fetched and run"),
    "flash attention, which falls back to the hub": ({"attn_implementation": "flash_attention_2"}, "may be fetched"),
    "paged": ({"attn_implementation": "paged|evil/kernel"}, "may be fetched and run"),
    "by part": ({"attn_implementation": {"": "sdpa", "text_config": "evil/kernel"}}, "may be fetched and run"),
    "experts": ({"experts_implementation": "evil/kernel"}, "may be fetched and run"),
    "nested": (NESTED, "text_config.vision\\[0\\].attn_implementation"),
    "no text": ({"attn_implementation": ["evil/kernel"]}, "may be fetched and run"),
    "code of the folder": ({"auto_map": {"AutoConfig": "evil.Config"}}, "would be run: auto_map"),
    "code of another one": ({"auto_map": {"AutoModel": "evil/repo--modeling.Model"}}, "would be run: auto_map"),
    "trust": ({"trust_remote_code": True}, "to be run"),
    "pipelines": ({"custom_pipelines": {"x": {"impl": "evil.Pipeline"}}}, "would be run"),
    "quantized": ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantization_config"),
    "compressed": ({"compression_config": {"quant_method": "x"}}, "compression_config"),
    "kernels": ({"use_kernels": True}, "fetched and run"),
    "a backbone of the hub": ({"backbone": "evil/resnet", "use_timm_backbone": True}, "to be fetched"),
    "a backbone by scheme": ({"backbone": "hf-hub:evil/resnet"}, "to be fetched"),
    "its weights": ({"use_pretrained_backbone": True}, "to be fetched"),
    "10^7 layers": ({"n_layer": 10**7}, "n_layer 10000000"),
    "10^7 layers by another name": ({"num_hidden_layers": 10**7}, "num_hidden_layers 10000000"),
    "minus three layers": ({"n_layer": -3}, "n_layer -3"),
    "layers in a nested part": ({"text_config": {"num_layers": 10**9}}, "text_config.num_layers"),
    "10^9 experts": ({"num_local_experts": 10**9}, "num_local_experts"),
    "stages of 10^7 layers": ({"depths": [2, 10**7]}, r"depths\[1\]"),
    "10^12 heads": ({"n_head": 10**12}, "n_head"),
    "no heads": ({"n_head": 0}, "ZeroDivisionError"),
    "a width below 0": ({"n_embd": -16}, "cannot build|negative"),
    "a width of 10^18": ({"n_embd": 10**18}, "the number 1000"),
    "a width of 10^15": ({"n_embd": 10**15}, "cannot build"),
    "a width that is text": ({"n_embd": "\x1b[2J"}, "cannot build"),
    "no type": ({"model_type": None}, "not a Hugging Face configuration"),
    "a type with escapes": ({"model_type": "\x1b[2J\u202e"}, "transformers has no model_type"),
    "a class with escapes": ({"architectures": ["\x1b[2J"]}, "no model class"),
    "a class that is none": ({"architectures": ["__builtins__"]}, "no model class"),
    "a function": ({"architectures": ["pipeline"]}, "no model class"),
    "an activation with lines": ({"activation_function": "\nautoptd: fine\x1b[2J"}, "KeyError"),
    "a method of the class": ({"to_dict": 1, "get_text_config": 1, "__class__": "x"}, "cannot build"),
    "a type with escapes of numbers": ({"dtype": "\x1b[2J"}, "cannot build"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_configuration_is_refused_at_once(case: str, tmp_path: Path) -> None:
    change, said = CONFIGS[case]
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | change))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')")
    message = refused("plan", tmp_path, "--world", "8")
    assert re.search(said, message), message
    assert not (tmp_path / "mark").exists()


TEXTS: dict[str, tuple[Callable[[], str], str]] = {
    "10^5 levels": (lambda: "[" * 10**5 + "]" * 10**5, "not JSON"),
    "10^5 objects": (lambda: '{"a":' * 10**5, "not JSON"),
    "10^6 digits": (lambda: '{"n_layer": ' + "9" * 10**6 + "}", "not JSON"),
    "4,000 digits": (lambda: json.dumps(CONFIG | {"n_embd": 10**4000 + 1}), "the number 1000"),
    "200 MB": (lambda: " " * 200 * 10**6, "too large"),
    "5 10^6 lists": (lambda: '{"a": [' + "[]," * (5 * 10**6) + "[]]}", "commas"),
    "a list": (lambda: "[1, 2]", "is not a configuration"),
    "not a number": (lambda: '{"n_layer": NaN}', "not a JSON number"),
    "nothing": (lambda: "", "not JSON"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_json_is_refused_at_once(case: str, tmp_path: Path) -> None:
    text, said = TEXTS[case]
    (tmp_path / "config.json").write_text(text())
    assert said in refused("plan", tmp_path, "--world", "8")


def test_a_configuration_that_is_a_pipe_or_leads_out_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    os.mkfifo(folder / "config.json")
    assert "not a regular file" in refused("plan", folder, "--world", "8")
    for target, said in (("../secret.json", "link out"), ("config.json", "no file"), ("/dev/zero", "link out")):
        (tmp_path / "secret.json").write_text(json.dumps(CONFIG))
        (folder / "config.json").unlink()
        (folder / "config.json").symlink_to(target)
        assert said in refused("plan", folder, "--world", "8")


def test_models_of_very_many_modules_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloaded, "MOST_MODULES", 20)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ModelError, match="more than 20 modules"):
        from_config(tmp_path / "config.json")
    monkeypatch.undo()
    assert from_config(tmp_path / "config.json") is not None  # no hook is left behind


def test_nothing_is_fetched_while_a_model_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No model class of transformers can access the hub while it is constructed."""
    import transformers
    from huggingface_hub import HfApi, constants

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a connection was opened")

    class Curious(transformers.GPT2LMHeadModel):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            HfApi().model_info("evil/kernel")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(transformers, "GPT2LMHeadModel", Curious)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ModelError, match="OfflineModeIsEnabled"):
        from_config(tmp_path / "config.json")
    assert not constants.HF_HUB_OFFLINE


def test_the_log_of_transformers_shows_no_control_characters(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"num_labels": 3, "id2label": {"0": "\x1b[2J\u202e"}}))
    from_config(tmp_path / "config.json")
    with downloaded.contained("x"):
        logging.getLogger("transformers.models").error("a field of the file: %s", "\x1b[2J\u202e")
    assert plain(capfd.readouterr().err)


def test_what_is_allowed_stays_so(tmp_path: Path) -> None:
    fields = {"_attn_implementation": "eager", "auto_map": None, "torch_dtype": "bfloat16", "n_positions": 2**20}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | fields))
    assert load_model(str(tmp_path))[0].config.n_layer == 2


# --- weights ------------------------------------------------------------------------------------------------------

PARTS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


class Tiny(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder of two files and their index, beside a file that must not be read."""
    made = tmp_path / "model"
    made.mkdir()
    for name, file in zip(("a.weight", "b.weight"), PARTS, strict=True):
        save_file({name: torch.ones(2, 2)}, made / file)
    save_file({"a.weight": torch.zeros(2, 2)}, tmp_path / "secret.safetensors")
    (made / INDEX).write_text(json.dumps({"weight_map": {"a.weight": PARTS[0], "b.weight": PARTS[1]}}))
    return made


def read(folder: Path) -> list[float]:
    weights = Weights(folder, Tiny())
    weights.check(["a.weight", "b.weight"])
    return [float(weights[name].read(())[0, 0]) for name in ("a.weight", "b.weight")]


FILES = {
    "above": "../secret.safetensors",
    "absolute": "{above}/secret.safetensors",
    "home": "~/secret.safetensors",
    "a folder": "sub/../model-00001-of-00002.safetensors",
    "this folder": ".",
    "nothing": "",
    "backslashes": "..\\secret.safetensors",
    "a zero": "model\0.safetensors",
    "a pickle": "pytorch_model.bin",
    "not there": "model-9.safetensors",
    "escapes": "\x1b[2J\u202e.safetensors",
    "very long": "x" * 10**5 + ".safetensors",
    "no text": 7,
}


@pytest.mark.parametrize("case", FILES)
def test_files_of_an_index_are_names_in_the_folder(case: str, folder: Path) -> None:
    name = FILES[case]
    name = name.format(above=folder.parent) if isinstance(name, str) else name
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a.weight": name, "b.weight": PARTS[1]}}))
    with pytest.raises(ModelError) as caught:
        read(folder)
    assert plain(str(caught.value)) and len(str(caught.value)) < 2000


@pytest.mark.parametrize("name", [*PARTS, INDEX, ONE])
@pytest.mark.parametrize("what", ["out", "far out", "loop", "pipe", "folder", "device"])
def test_files_of_a_folder_are_inside_it(what: str, name: str, folder: Path) -> None:
    path = folder / name
    if name == ONE:
        (folder / INDEX).unlink()
    path.unlink(missing_ok=True)
    targets = {"out": "../secret.safetensors", "loop": name, "device": "/dev/zero", "far out": "/etc/passwd"}
    if what in targets:
        path.symlink_to(targets[what])
    elif what == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(ModelError):
        read(folder)


def test_links_of_the_hub_s_own_cache_are_followed(folder: Path, tmp_path: Path) -> None:
    entry = tmp_path / "models--org--name"
    snapshot, blobs = entry / "snapshots" / "0123", entry / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in sorted(folder.iterdir()):
        shutil.copy(path, blobs / f"blob-of-{path.name}")
        (snapshot / path.name).symlink_to(f"../../blobs/blob-of-{path.name}")
    (blobs / "config").write_text(json.dumps(CONFIG))
    (snapshot / "config.json").symlink_to("../../blobs/config")
    assert read(snapshot) == [1.0, 1.0] and has_weights(snapshot)
    assert load_model(str(snapshot))[0].config.n_layer == 2
    (tmp_path / "shortcut").symlink_to(snapshot)
    assert read(tmp_path / "shortcut") == [1.0, 1.0]
    for target in (
        "../../../secret.safetensors",
        "../../../models--org--other/blobs/x",
        "../../refs",
        "../../blobs/..",
    ):
        (snapshot / PARTS[0]).unlink()
        (snapshot / PARTS[0]).symlink_to(target)
        with pytest.raises(ModelError):
            read(snapshot)


INDICES: dict[str, Callable[[], str]] = {
    "10^5 levels": lambda: '{"weight_map": ' + "[" * 10**5,
    "200 MB": lambda: " " * 200 * 10**6,
    "10^6 digits": lambda: '{"weight_map": {"a.weight": ' + "9" * 10**6 + "}}",
    "a list": lambda: "[]",
    "no map": lambda: "{}",
    "a list as map": lambda: '{"weight_map": []}',
    "tensors that the file has not": lambda: json.dumps(
        {"weight_map": dict.fromkeys(("a.weight", "b.weight"), PARTS[0])}
    ),
}


@pytest.mark.parametrize("case", INDICES)
def test_an_index_is_refused(case: str, folder: Path) -> None:
    (folder / INDEX).write_text(INDICES[case]())
    with pytest.raises(ModelError):
        read(folder)


HEADERS = {
    "nothing": b"",
    "a length without end": b"\xff" * 8,
    "a length of 90 MB": (90 * 10**6).to_bytes(8, "little") + b"{",
    "10^5 levels": (2 * 10**5).to_bytes(8, "little") + b"[" * 10**5 + b"]" * 10**5,
    "a tensor beyond the end": len(
        head := json.dumps(
            {"a.weight": {"dtype": "F32", "shape": [10**9, 10**9], "data_offsets": [0, 4 * 10**18]}}
        ).encode()
    ).to_bytes(8, "little")
    + head,
    "a shape that overflows": len(
        other := json.dumps({"a.weight": {"dtype": "F32", "shape": [2**63, 2], "data_offsets": [0, 16]}}).encode()
    ).to_bytes(8, "little")
    + other
    + bytes(16),
}


@pytest.mark.parametrize("case", HEADERS)
def test_corrupted_safetensors_are_refused(case: str, folder: Path) -> None:
    (folder / PARTS[0]).write_bytes(HEADERS[case])
    with pytest.raises(ModelError):
        read(folder)


class Mark:
    """Pickle that creates a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self._path), "w")


def test_pickles_are_never_read(folder: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    payload = pickle.dumps(Mark(mark))
    for name in (INDEX, *PARTS):
        (folder / name).unlink()
    (folder / "pytorch_model.bin").write_bytes(payload)
    (folder / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a.weight": "pytorch_model.bin"}}')
    (folder / "config.json").write_text(json.dumps(CONFIG))
    assert not has_weights(folder)
    with pytest.raises(ModelError, match="pickles, which may run code"):
        read(folder)
    (folder / ONE).write_bytes(payload)  # a pickle under another name
    with pytest.raises(ModelError):
        read(folder)
    with pytest.raises(ModelError):
        autoptd.parallelize(str(folder), world=1, cluster="dgx-h100", batch=2, precision="fp32")
    assert not mark.exists()
