"""Loading of models by name (`llama3-70b`), folder (`./folder`), Hub id (`org/name`) or callable (`train:build`), on
the meta device.

Nothing is downloaded: configurations are local files, and models are built from them without weights. torch and
transformers are imported when a model is built, so that listing names is fast.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoptd.cost_models.complaints import quoted, read_json, read_text
from autoptd.errors import ModelError, nearest
from autoptd.models.downloaded import check_config, contained, file_of
from autoptd.models.hub import cached_folder, hub_name, is_hub_id
from autoptd.models.own_code import USER_ERRORS, first_line, place_of, remedy_of

if TYPE_CHECKING:
    from torch import nn

_SHIPPED = Path(__file__).parent
_OURS = ("source", "note", "seq")  # fields of a shipped configuration that transformers does not know
_NANOGPT = "nanogpt"
_ACCEPTED = "pass a shipped name, a Hugging Face config.json or its folder, a cached org/name, or module:callable"


def model_names() -> list[str]:
    """Return the names of shipped models, sorted."""
    return sorted([_NANOGPT, *(path.stem for path in _SHIPPED.glob("*.json"))])


def describe_models() -> dict[str, str]:
    """Return the source of each shipped model's shapes, by name."""
    found = {_NANOGPT: "a plain nn.Module of GPT-2's sizes: autoptd/models/nanogpt.py"}
    found |= {path.stem: json.loads(path.read_text("utf-8"))["source"] for path in _SHIPPED.glob("*.json")}
    return dict(sorted(found.items()))


@dataclass(frozen=True)
class Configuration:
    """All that says what a model is, besides the code of libraries: the text of its configuration."""

    text: str
    called: str  # the model's own name, which its configuration does not hold
    name: str  # the short name that `load_model` returns


def configuration_of(name: str) -> Configuration | None:
    """Return the configuration that `load_model` builds a model from; None for a callable, and for what is no model.

    Raises ModelError for a file that cannot be read.
    """
    if name == _NANOGPT:
        return Configuration("", name, name)
    found = _config_file(name)
    if found is None or not found[0].is_file():
        return None
    file, short = found
    called = short if is_hub_id(name) else _short_name(file)
    return Configuration(read_text(file, "configuration", ModelError, _ACCEPTED), called, short)


def _config_file(name: str) -> tuple[Path, str] | None:
    """Return the configuration file of a shipped model, a folder or a file, and a short name. Raises ModelError."""
    path = Path(name)
    if (_SHIPPED / f"{name}.json").is_file() and path.name == name:
        return _SHIPPED / f"{name}.json", name
    if name and (path.is_dir() or path.suffix == ".json"):
        return (file_of(path, "config.json"), path.resolve().name) if path.is_dir() else (path, _short_name(path))
    if is_hub_id(name):
        return file_of(cached_folder(name), "config.json"), hub_name(name)
    return None


def load_model(name: str, device: str = "meta") -> tuple[nn.Module, str]:
    """Return a module with parameters on `device`, and a short name for it. Raises ModelError.

    Modules from a configuration are in training mode; a callable's are returned as they are.
    """
    path = Path(name)
    if name == _NANOGPT:
        import torch

        from autoptd.models.nanogpt import NanoGPT

        with torch.device(device):
            return NanoGPT().train(), name
    if (found := _config_file(name)) is not None:
        return from_config(found[0], device, found[1] if is_hub_id(name) else ""), found[1]
    if ":" in name:
        return _from_callable(name, device), name.partition(":")[2]
    if path.suffix == ".py":
        raise ModelError(f"{name} is a file of code, not a model", fix=f"name what returns the model: {name}:make")
    fix = f"{nearest(name, model_names())}; or {_ACCEPTED.removeprefix('pass a shipped name, ')}"
    raise ModelError(f"there is no model {name!r}", fix=fix)


def from_config(path: Path, device: str = "meta", called: str = "") -> nn.Module:
    """Build the model of a Hugging Face configuration file, without weights. Raises ModelError.

    called: the model's own name. Default: that of the folder or file.
    """
    data = _read_config(path)
    check_config(data, str(path))
    try:
        import torch
        import transformers
    except ImportError as error:
        fix = "install it: pip install 'autoptd[hf]'"
        raise ModelError(f"{path} needs the package transformers", where=str(path), fix=fix) from error
    kind = _config_field(data, "model_type", path)
    architecture = _config_field(data, "architectures", path)
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    if kind not in known:
        raise ModelError(f"transformers has no model_type {quoted(kind)}", where=str(path), fix=_close(kind, known))
    fields = {key: value for key, value in data.items() if key not in (*_OURS, "model_type")}
    strict = getattr(importlib.import_module("huggingface_hub.errors"), "StrictDataclassError", ValueError)
    try:
        model_class = getattr(transformers, architecture, None)
        if not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)):
            fix = "correct `architectures`"
            raise ModelError(f"transformers has no model class {quoted(architecture)}", where=str(path), fix=fix)
        with torch.device(device), contained(str(path)):
            config = transformers.AutoConfig.for_model(kind, **fields)
            config.name_or_path = called or _short_name(path)
            model = model_class(config).train()
        if isinstance(data.get("seq"), int):
            model.default_seq = data["seq"]
        if getattr(model, "loss_type", "") is None:
            model.loss_type = "ForCausalLM"  # transformers' own default, which it takes with a warning
        return model
    except ModelError:
        raise
    except (*USER_ERRORS, strict) as error:
        what = f"transformers cannot build a {architecture} from {path.name}: {first_line(error)}"
        raise ModelError(what, where=str(path), fix="correct the configuration") from error


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ModelError(f"there is no file {path}", where=str(path), fix=_ACCEPTED)
    data = read_json(path, "configuration", ModelError, _ACCEPTED)
    if not isinstance(data, dict):
        raise ModelError(f"{path} is not a configuration: it holds a JSON {type(data).__name__}", where=str(path))
    return data


def _config_field(data: dict[str, Any], field: str, path: Path) -> str:
    """Return a field's text, or the first text of its list. Raises ModelError if there is none."""
    value = data.get(field)
    first = value[0] if isinstance(value, list) and value else value
    if not isinstance(first, str):
        what = f"{path} is not a Hugging Face configuration of a model: {field!r} is {quoted(value)}"
        raise ModelError(what, where=str(path), fix="use the config.json that came with the model")
    return first


def load_callable(name: str) -> Callable[..., Any]:
    """Return the object that `module:callable` names, imported as for a model. Raises ModelError."""
    if ":" not in name:
        raise ModelError(f"{name!r} is not module:callable", where=name, fix="name a function of a Python file")
    with _importing_from(name):
        return _find_callable(name)


def load_inputs(name: str) -> dict[str, Any]:
    """Return the example inputs that a `module:callable` makes. Raises ModelError."""
    build = load_callable(name)
    try:
        made = build()
    except USER_ERRORS as error:
        what = f"{name} failed: {first_line(error)}"
        raise ModelError(what, where=place_of(error), fix=remedy_of(error)) from error
    if not isinstance(made, dict):
        fix = "return {'name': tensor, …} as forward takes them"
        raise ModelError(f"{name} returned {type(made).__name__}, not a mapping of tensors", where=name, fix=fix)
    return made


def _from_callable(name: str, device: str) -> nn.Module:
    """Build the model of a `module:callable`, imported as `_module_of` says."""
    with _importing_from(name):
        build = _find_callable(name)
        import torch

        try:
            with torch.device(device):
                model = build()
        except USER_ERRORS as error:
            what = f"{name} failed: {first_line(error)}"
            raise ModelError(what, where=place_of(error), fix=remedy_of(error)) from error
    if not isinstance(model, torch.nn.Module):
        fix = "return the nn.Module to be planned"
        raise ModelError(f"{name} returned {type(model).__name__}, not an nn.Module", where=name, fix=fix)
    return model


def _find_callable(name: str) -> Callable[..., Any]:
    module_name, _, attribute = name.partition(":")
    if not module_name:
        raise ModelError(
            f"cannot import '': {name!r} names no module", where=name, fix="name a function of a Python file"
        )
    file, imported = Path(module_name), _module_of(name)[1]
    try:
        module = importlib.import_module(imported)
    except USER_ERRORS as error:
        what = f"cannot import {module_name!r}: {first_line(error)}"
        missing = isinstance(error, ModuleNotFoundError) and error.name in (imported, imported.partition(".")[0])
        if not missing:
            raise ModelError(what, where=place_of(error), fix=remedy_of(error)) from error
        fix = f"run in the folder of {module_name}, or " + ("name the whole path" if file.suffix else "install it")
        raise ModelError(what, where=name, fix=fix) from error
    taken = getattr(module, "__file__", None) or "Python itself"
    if file.suffix == ".py" and file.is_file() and not (Path(taken).is_file() and file.samefile(taken)):
        what = f"{module_name!r} has the name of another module, of {taken}"
        raise ModelError(what, where=str(file.absolute()), fix="give the file another name")
    found = getattr(module, attribute, None)
    if hasattr(found, "named_parameters") and not isinstance(found, type):
        raise ModelError(
            f"{name} is a module, not a function that returns one",
            where=name,
            fix=f"name a function or class: def make(): return {attribute}",
        )
    if not callable(found):
        callables = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        fix = nearest(attribute, callables) if callables else "define a function there that returns the model"
        raise ModelError(f"{module_name} has no callable {attribute!r}", where=name, fix=fix)
    return found


def _module_of(name: str) -> tuple[Path, str]:
    """Return the folder from which the module of a `module:callable` is imported, and its name there.

    The folder is the current one, or that of a file outside of it. Installed packages are found from both.
    """
    module_name = name.partition(":")[0]
    file = Path(module_name)
    if file.suffix == ".py" and (file.is_absolute() or ".." in file.parts):
        return file.parent.absolute(), file.stem
    return Path.cwd(), ".".join(file.parts).removesuffix(".py")


@contextmanager
def _importing_from(name: str) -> Iterator[None]:
    """Import from the folder of a `module:callable`."""
    folder = str(_module_of(name)[0])
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def _short_name(path: Path) -> str:
    """Return the folder's name for a `config.json`, otherwise the name of the file without its suffix."""
    path = path.resolve()
    return path.parent.name if path.name == "config.json" else path.stem


def _close(name: str, known: Any) -> str:
    """Return the guess of `nearest` without its list of several hundred names."""
    guess, _, _ = nearest(name, known).partition("known:")
    return guess.strip() or "use the transformers release that the model needs"
