"""Hugging Face folders: weights read slice by slice, and checkpoints exported for `from_pretrained`.

config.json  model.safetensors                                    or, for large models,
config.json  model-00001-of-00003.safetensors …  model.safetensors.index.json
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from autoptd.checkpoint import contents, dcp, folder
from autoptd.checkpoint.files import LOAD_OLDER
from autoptd.cost_models.complaints import MIB, quoted, read_json
from autoptd.errors import CheckpointError, ModelError
from autoptd.models.downloaded import file_of
from autoptd.runtime.comm.interfaces import Communicators, all_gather_text
from autoptd.runtime.lazy_tensor import Stored

ONE, INDEX, LOSS = "model.safetensors", "model.safetensors.index.json", "loss.safetensors"
_TEXT = 2000  # bytes of an error that other ranks receive
_ENDING, _INDEX_BYTES = ".safetensors", 32 * MIB
_CONVERT = f"give a folder with {ONE} or {INDEX}; .bin files are pickles, which may run code, and are never read"
_VALUES = {"F64", "F32", "F16", "BF16"}  # types whose numbers are the weights themselves
_UNSCALED = "integers and 8-bit types are codes of quantised weights, to be multiplied by scales: write bfloat16 ones"
SHARD_BYTES = 5 * 10**9  # the default of transformers (max_shard_size, quoted from memory)


# ---- reading ----


def has_weights(path: Path) -> bool:
    """Return whether a folder holds safetensors. A link out of it counts, but reading it is refused."""
    return any(os.path.lexists(path / name) for name in (ONE, INDEX))


class Weights(Mapping[str, Stored]):
    """The tensors of a folder, by the names of a model's parameters and buffers.

    Names in the files may lack the model's prefix (`wte.weight` for `transformer.wte.weight`), or have one that the
    model lacks. Tied tensors are found under any of their names. Raises ModelError.
    """

    def __init__(self, path: Path, model: nn.Module) -> None:
        self._path = path
        self._file_of = _files(path)
        self._open: dict[str, Any] = {}
        prefix = getattr(model, "base_model_prefix", "")
        tied: dict[int, list[str]] = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            tied.setdefault(id(p), []).append(name)
        aliases = {name: names for names in tied.values() for name in names}
        self._found: dict[str, str] = {}
        self._left = {*self._file_of}  # keys that the model has no name for
        buffers = dict(model.named_buffers(remove_duplicate=False))
        tensors = {**buffers, **dict(model.named_parameters(remove_duplicate=False))}
        self._floating = {name for name, x in tensors.items() if x.is_floating_point()}
        for name in (*buffers, *aliases):
            for candidate in (name, *aliases.get(name, ())):
                for key in _keys(candidate, prefix):
                    if key in self._file_of:
                        self._found.setdefault(name, key)
                        self._left.discard(key)
        for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ():  # of transformers
            self._left = {key for key in self._left if not re.search(pattern, key)}

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, name: str) -> Stored:
        key = self._found[name]
        file = self._file_of[key]
        if file not in self._open:
            self._open[file] = _opened(self._path, file)
        try:
            stored = self._open[file].get_slice(key)
        except SafetensorError as error:
            fix = "download the folder again: its index and its files are of two versions"
            raise ModelError(f"holds no tensor {quoted(key)}", where=str(self._path / file), fix=fix) from error
        if name in self._floating and stored.get_dtype() not in _VALUES:
            what = f"{quoted(key)} is of type {stored.get_dtype()}, not a floating-point type of 16 bits or more"
            raise ModelError(what, where=str(self._path / file), fix=_UNSCALED)
        return Stored(
            tuple(stored.get_shape()), lambda slices: stored[slices] if slices else self._open[file].get_tensor(key)
        )

    def check(self, names: Iterable[str]) -> None:
        """Raise ModelError if any of these parameters is missing. Rank 0 warns of tensors that the model lacks."""
        if missing := [name for name in names if name not in self]:
            more = [f"and {len(missing) - 8} more"] if len(missing) > 8 else []
            held = ", ".join(sorted(self._file_of)[:3])
            raise ModelError(
                f"{len(missing)} parameters of the model are not among the weights",
                where="\n".join([str(self._path), *missing[:8], *more]),
                fix=f"give the weights of this model; the folder holds {held}, …",
            )
        if self._left and not (dist.is_initialized() and dist.get_rank()):
            shown = ", ".join(map(quoted, sorted(self._left)[:8])) + ", …" * (len(self._left) > 8)
            warnings.warn(f"{self._path}: {len(self._left)} tensors are not in the model: {shown}", stacklevel=5)


def _keys(name: str, prefix: str) -> tuple[str, ...]:
    """Return the names under which files may hold a tensor."""
    bare = name.removeprefix(f"{prefix}.")
    return (name, bare, f"{prefix}.{name}") if prefix else (name,)


def _files(path: Path) -> dict[str, str]:
    """Return the file of each tensor."""
    if os.path.lexists(path / INDEX):
        fix = "download the folder again"
        index = read_json(file_of(path, INDEX), "index of weights", ModelError, fix, _INDEX_BYTES)
        files = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
            raise ModelError("is not an index of weights: no `weight_map`", where=str(path / INDEX), fix=fix)
        for file in sorted(set(files.values())):
            if not file.endswith(_ENDING):
                raise ModelError(f"names {quoted(file)}, which is not {_ENDING}", where=str(path / INDEX), fix=_CONVERT)
            file_of(path, file)
        return files
    if not os.path.lexists(path / ONE):
        raise ModelError("holds no safetensors files", where=str(path), fix=_CONVERT)
    return dict.fromkeys(_opened(path, ONE).keys(), ONE)


def _opened(folder: Path, name: str) -> Any:
    try:
        return safe_open(file_of(folder, name), framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot be read: {error}", where=str(folder / name), fix="download the file again") from error


# ---- writing ----


def export(source: Path, target: Path, dtype: torch.dtype | None, shard_bytes: int = SHARD_BYTES) -> dict[str, Any]:
    """Write a checkpoint as a folder that `from_pretrained` loads, holding one file's tensors in memory at a time.

    dtype: of floating-point tensors; None for the plan's precision. Returns step, files, dtype and number of tensors.
    Raises CheckpointError.
    """
    where = folder.find(source)
    manifest = folder.read_manifest(where)
    if not isinstance(manifest.get("config"), dict):
        raise CheckpointError(
            "the model is not from transformers: it has no configuration to export",
            where=str(where),
            fix="read the tensors with `autoptd.Parallel.load`, or with torch.distributed.checkpoint",
        )
    _check_empty(target)
    if damage := contents.damaged_files(where, manifest):
        raise CheckpointError(f"the checkpoint is damaged: {damage[0]}", where=str(where), fix=LOAD_OLDER)
    contents.check_listed(where, manifest, folder.PLAN)
    index = contents.index_of(where, manifest)
    known = {key.removeprefix("model."): saved for key, saved in index.items() if key.startswith("model.")}
    dtype = dtype or _trained_in(where)
    types = {name: dtype if saved.dtype.is_floating_point else saved.dtype for name, saved in known.items()}
    groups = _grouped({name: _bytes(saved.shape, types[name]) for name, saved in known.items()}, shard_bytes)

    def read(names: Sequence[str]) -> dict[str, Tensor]:
        found = dcp.read_whole(where, index, [f"model.{name}" for name in names])
        return {key.removeprefix("model."): x.to(types[key.removeprefix("model.")]) for key, x in found.items()}

    with _new_folder(target) as part:
        files = _write_files(part, groups, read)
        _write_json(part / "config.json", {**manifest["config"], "dtype": str(dtype).removeprefix("torch.")})
    return {"step": manifest["step"], "tensors": len(known), "files": sorted(set(files.values())), "dtype": str(dtype)}


def _trained_in(where: Path) -> torch.dtype:
    from autoptd.layout.layout import PRECISIONS
    from autoptd.plans.model import Plan

    return PRECISIONS[Plan.load(where / folder.PLAN).precision]


def _bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _check_empty(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError("the folder is not empty", where=str(target), fix="give an empty or a new folder")


@contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """Give a folder to write into, which becomes `target` if nothing fails. Raises CheckpointError."""
    part = target.with_name(f".{target.name}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        yield part
        if target.exists():
            target.rmdir()
        part.replace(target)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot be written: {error}", where=str(target)) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _write_json(path: Path, data: object) -> None:
    path.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _grouped(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Return the names of each file's tensors: at most `limit` bytes, or a single larger tensor."""
    groups: list[list[str]] = []
    free = 0
    for name in sorted(sizes):
        if not groups or sizes[name] > free:
            groups.append([])
            free = limit
        groups[-1].append(name)
        free -= sizes[name]
    return groups


def _write_files(
    part: Path, groups: Sequence[Sequence[str]], read: Callable[[Sequence[str]], dict[str, Tensor]]
) -> dict[str, str]:
    """Write the files, and the index if there are several. `read`: gives the tensors of one. Returns that of each."""
    files: dict[str, str] = {}
    total = 0
    for number, names in enumerate(groups, 1):
        file = ONE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        tensors = read(names)
        total += sum(x.numel() * x.itemsize for x in tensors.values())
        save_file(tensors, part / file, metadata={"format": "pt"})
        files |= dict.fromkeys(names, file)
    if len(groups) > 1:
        _write_json(part / INDEX, {"metadata": {"total_size": total}, "weight_map": files})
    return files


class RunningWeights:
    """The weights of a running model, written by rank 0 into a folder, while all ranks gather one tensor at a time.

    whole: returns a tensor by its name, on every rank. A collective.
    """

    def __init__(self, communicators: Communicators, whole: Callable[[str], Tensor]) -> None:
        self._comm, self._whole = communicators, whole

    def write(
        self,
        target: Path,
        sizes: Mapping[str, int],
        loss: Mapping[str, str],
        configurations: Mapping[str, object],
    ) -> None:
        """Write the tensors of `sizes`, names and bytes; and those of `loss` in a file of its own, by names there.

        configurations: further files, as JSON. A collective. Raises CheckpointError on all ranks.
        """
        groups = _grouped(sizes, SHARD_BYTES)
        self._agree(partial(_check_empty, target))
        if self._comm.rank != 0:
            for name in (*(name for names in groups for name in names), *loss):
                self._whole(name)
            self._agree(lambda: None)
            return
        gathered = 0

        def read(names: Sequence[str]) -> dict[str, Tensor]:
            nonlocal gathered
            found = {}
            for name in names:
                whole = self._whole(name)
                gathered += 1
                found[name] = whole.detach().cpu().contiguous().clone()
            return found

        def write() -> None:
            try:
                with _new_folder(target) as part:
                    _write_files(part, groups, read)
                    if loss:
                        found = {loss[name]: x for name, x in read([*loss]).items()}
                        save_file(found, part / LOSS, metadata={"format": "pt"})
                    for name, data in configurations.items():
                        _write_json(part / name, data)
            finally:  # the other ranks gather all of them
                for name in [*(name for names in groups for name in names), *loss][gathered:]:
                    self._whole(name)

        self._agree(write)

    def _agree(self, do: Callable[[], None]) -> None:
        """Run a function on rank 0; raise its CheckpointError on all ranks. A collective."""
        text = ""
        if self._comm.rank == 0:
            try:
                do()
            except CheckpointError as error:
                text = "\x1f".join((error.what, error.where, error.fix))
        first = all_gather_text(text, self._comm.world, self._comm.device, _TEXT)[0]
        if first:
            what, where, fix = [*first.split("\x1f"), "", ""][:3]
            raise CheckpointError(what, where=where, fix=fix)
