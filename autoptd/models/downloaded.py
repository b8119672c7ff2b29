"""Safe reading of a downloaded Hugging Face folder: which files are read, and what its configuration may contain.

A downloaded folder is untrusted data. Its configuration describes a model class of transformers; nothing in it may
fetch or run code, or exhaust the machine. Its files are in the folder, or in the blobs of the hub's cache:

    models--org--name/snapshots/<revision>/model.safetensors  ->  ../../blobs/<digest>

A link must lead to a file of the folder itself, or to one of the blobs of the same repository.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from autoptd.cost_models.complaints import brief, path_text, quoted
from autoptd.errors import ModelError
from autoptd.text import printable

MOST_MODULES = 150_000
_MOST_LAYERS, _MOST_OF_A_KIND, _LARGEST = 1_000, 10_000, 2**53
_OWN = ("eager", "sdpa")  # implementations of attention and experts that are part of transformers and torch
_OWN_EXPERTS = (*_OWN, "grouped_mm", "batched_mm")
_IMPLEMENTATION = re.compile(r"_?(attn|experts)_implementation(_internal)?")
_CODE = {  # field -> what transformers would do with it
    "auto_map": "names Python files of the folder, which would be run",
    "custom_pipelines": "names Python files of the folder, which would be run",
    "trust_remote_code": "asks for code of the folder to be run",
    "quantization_config": "asks for weights and kernels that autoptd does not train with",
    "compression_config": "asks for weights and kernels that autoptd does not train with",
    "use_kernels": "asks for kernels to be fetched and run",
    "kernel_config": "asks for kernels to be fetched and run",
    "use_pretrained_backbone": "asks for weights to be fetched",
}
_LAYERS = re.compile(r"(^|_)(layers?|depths?|blocks|stages)$|^n_layer")
_COUNT = re.compile(r"(^|_)(n|num)_\w*(layer|block|stage|expert|head|group|branch|codebook|quantizer|module)")
_NOT_COUNTED = re.compile(r"_(id|ids|size|dim|freq|interval|step|offset|index|eps|dropout|drop)$")


def file_of(folder: Path, name: str) -> Path:
    """Return the path of a file in a folder. Raises ModelError unless it is a regular file there or in its blobs."""
    fix = "download the complete folder again; its files must be in it, or in the blobs of its own cache entry"
    where = str(folder / brief(name))
    if not name or name != Path(name).name or name in (".", "..") or "\0" in name or "\\" in name:
        raise ModelError(f"{quoted(name)} is not the name of a file in the folder", where=str(folder), fix=fix)
    path = folder / name
    try:
        real, home = path.resolve(strict=True), folder.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # a link to itself is a RuntimeError before Python 3.13
        raise ModelError(f"there is no file {brief(name)}", where=where, fix=fix) from error
    if real.parent != home and real.parent not in _blobs(home):
        raise ModelError(f"{brief(name)} is a link out of the folder, to {real}", where=where, fix=fix)
    if not real.is_file():
        raise ModelError(f"{brief(name)} is not a regular file", where=where, fix=fix)
    return path


def _blobs(folder: Path) -> list[Path]:
    """Return the folder of the hub's cache that holds the files a snapshot links to, if the folder is a snapshot."""
    return [above.parent / "blobs" for above in folder.parents if above.name == "snapshots"][:1]


def check_config(data: dict[str, Any], where: str) -> None:
    """Raise ModelError for a field that makes transformers fetch or run code, and for an impossible size."""
    todo: list[tuple[tuple[str | int, ...], Any]] = [((), data)]
    while todo:
        path, value = todo.pop()
        inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        todo += [((*path, key), inner) for key, inner in inside]
        name = next((part for part in reversed(path) if isinstance(part, str)), "")
        if path and (wrong := _wrong(name, value)):
            what, fix = wrong
            raise ModelError(f"the configuration {what}", where=f"{where}\n{path_text(path)}", fix=fix)


def _wrong(name: str, value: Any) -> tuple[str, str] | None:
    """Return what is wrong with a field or a value inside it, and the fix; None if it is fine."""
    if name in _CODE and value not in (None, False):
        return f"{_CODE[name]}: {name}", f"remove {name}, if transformers itself has the model"
    if found := _IMPLEMENTATION.fullmatch(name):
        own = _OWN_EXPERTS if found[1] == "experts" else _OWN
        if any(leaf is not None and leaf not in own for leaf in _leaves(value)):
            return f"asks for {name} {quoted(value)}, which may be fetched and run", f"use {', '.join(own)} or none"
    if name == "backbone" and isinstance(value, str) and re.search(r"[/:]", value):
        return f"asks for the backbone {quoted(value)} to be fetched", "describe it in backbone_config"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if isinstance(value, int) and abs(value) > _LARGEST:
        return f"has the number {quoted(value)}", f"use a whole number of at most {_LARGEST:,}"
    layers = _LAYERS.search(name) is not None
    if (layers or _COUNT.search(name)) and not _NOT_COUNTED.search(name):
        most = _MOST_LAYERS if layers or "layer" in name else _MOST_OF_A_KIND
        if not 0 <= value <= most:
            return f"has {name} {quoted(value)}", f"use a number from 0 to {most:,}"
    return None


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the values of a field: one for each part of the model, or one for all of it."""
    for inner in value.values() if isinstance(value, dict) else ():
        yield from _leaves(inner)
    if not isinstance(value, dict):
        yield value


@contextmanager
def contained(where: str) -> Iterator[None]:
    """Restrict transformers while it builds a model: no downloads, a `printable` log, at most MOST_MODULES modules.

    Raises ModelError beyond that number.
    """
    from huggingface_hub import constants
    from torch.nn.modules.module import register_module_module_registration_hook

    made = 0

    def count(*_: object) -> None:
        nonlocal made
        made += 1
        if made > MOST_MODULES:
            what = f"the configuration describes a model of more than {MOST_MODULES:,} modules"
            raise ModelError(what, where=where, fix="correct the numbers of layers, experts and the like")

    offline = constants.HF_HUB_OFFLINE
    handlers = logging.getLogger("transformers").handlers
    with ExitStack() as stack:
        constants.HF_HUB_OFFLINE = True
        stack.callback(setattr, constants, "HF_HUB_OFFLINE", offline)
        stack.callback(register_module_module_registration_hook(count).remove)
        for handler in handlers:
            handler.addFilter(_printable_record)
            stack.callback(handler.removeFilter, _printable_record)
        yield


def _printable_record(record: logging.LogRecord) -> bool:
    record.msg, record.args = printable(record.getMessage()), ()
    return True
