"""A folder of checkpoints in which `latest` never names one that is not whole and durable.

    checkpoints/
      latest                 text: step-00000200
      step-00000100/         older ones, as many as are kept
      step-00000200/
        checkpoint.json      step, shapes, versions, size and SHA-256 of every other file, and of its own content
        index.json           where each tensor lies in the files that follow
        __0_0.distcp … .metadata    tensors, as torch.distributed.checkpoint writes them, and its own index, for others
        progress.pt          what is not a tensor: optimizer options, schedulers, position in the data
        plan.json            the plan that wrote it; any other can read it

A checkpoint is written under a name that begins with a dot and ends in `.part`, made durable (files and folders are
flushed to disk), then renamed; only then is `latest` replaced, and only then are older ones removed, and others of the
same step. A writer that dies in between leaves a `.part` folder, which the next one removes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    TypeAdapter,
    ValidationError,
)

from autoptd.checkpoint.files import ANOTHER, digest, is_folder, is_plain, is_regular, read_json, read_small
from autoptd.cost_models.complaints import brief, describe_mistakes, one_line, path_text
from autoptd.errors import CheckpointError

FORMAT, OLDER = 2, 1  # the older one: the manifest has no digest of its own, and torch's index is the only one
MANIFEST, PROGRESS, PLAN, LATEST = "checkpoint.json", "progress.pt", "plan.json", "latest"
INDEX = "index.json"
_SHOWN = 8  # mistakes listed one by one
_LONGEST, _DEEPEST = 1 << 24, 50  # bytes of a manifest, levels of the configuration in it
_NAME = re.compile(r"step-(\d{8,20})(\.\d+)?", re.ASCII)


def name_of(step: int, turn: int = 0) -> str:
    """`turn`: where a run that went back to an older checkpoint comes by a step again, until the first is removed."""
    return f"step-{step:08d}" + (f".{turn}" if turn else "")


def part_of(root: Path, step: int) -> Path:
    """Where a checkpoint is written before it is one."""
    return root / f".{name_of(step)}.part"


def whole(root: Path) -> list[Path]:
    """The checkpoints in a folder, in the order in which they were written."""
    found = [path for path in root.iterdir() if _NAME.fullmatch(path.name)] if root.is_dir() else []
    found = [path for path in found if is_folder(path) and is_regular(path / MANIFEST)]
    return sorted(found, key=lambda path: ((path / MANIFEST).stat().st_mtime_ns, path.name))


def find(path: Path) -> Path:
    """A checkpoint: `path` itself, or the one that `latest` names in it. Raises CheckpointError."""
    if is_regular(path / MANIFEST):
        return path
    latest = path / LATEST
    if not is_regular(latest):
        others = f"; it holds {', '.join(found.name for found in whole(path))}" if whole(path) else ""
        raise CheckpointError(
            f"no checkpoint here{others}",
            where=str(path),
            fix="give a folder that `save` wrote to, or one of its step-… folders",
        )
    name = read_small(latest, 1000).decode("utf-8", errors="replace").strip()
    if not _NAME.fullmatch(name) or not is_folder(path / name) or not is_regular(path / name / MANIFEST):
        fix = "give one of the step-… folders"
        raise CheckpointError(f"names {brief(ascii(name))}, which is no checkpoint", where=str(latest), fix=fix)
    return path / name


def prepare(root: Path, step: int) -> Path:
    """An empty folder to write to. What dead writers left is removed. Raises CheckpointError."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        for left in root.glob(".step-*.part"):
            shutil.rmtree(left)
        part = part_of(root, step)
        part.mkdir()
    except OSError as error:
        raise CheckpointError(f"checkpoints cannot be written here: {error.strerror}", where=str(root)) from error
    return part


def try_writing(root: Path, rank: int) -> None:
    """Raise OSError if a rank cannot write to a folder, which is made if there is none; nothing is left in it."""
    root.mkdir(parents=True, exist_ok=True)
    trial = root / f".trial-of-rank-{rank}"
    write_durably(trial, bytes(4096))
    trial.unlink()


def write_durably(path: Path, data: bytes) -> None:
    """Write a file anew: what is at its place, a link or a FIFO too, is removed and not written to."""
    path.unlink(missing_ok=True)
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _flush(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def commit(root: Path, step: int, manifest: Mapping[str, Any], digests: Mapping[str, str], keep: int | None) -> Path:
    """Turn what was written into the latest checkpoint; `keep`: how many there are then, None for all.

    `digests`: of every file. Raises OSError; then `latest` is what it was.
    """
    part = part_of(root, step)
    final = next(path for turn in range(len(whole(root)) + 1) if not (path := root / name_of(step, turn)).exists())
    files = {name: {"bytes": (part / name).stat().st_size, "sha256": digests[name]} for name in sorted(digests)}
    data = {"format": FORMAT, "step": step, **manifest, "files": files}
    text = json.dumps({**data, "sha256": _own_digest(data)}, indent=1)
    if len(text) > _LONGEST:
        raise CheckpointError(f"the manifest would have {len(text)} bytes, more than {_LONGEST}", where=str(part))
    write_durably(part / MANIFEST, text.encode())
    _flush(part)
    part.rename(final)
    _flush(root)
    pointer = root / f".{LATEST}.part"
    write_durably(pointer, final.name.encode())
    pointer.replace(root / LATEST)
    _flush(root)
    others = [path for path in whole(root) if path != final]
    again = [path for path in others if path.name.partition(".")[0] == name_of(step)]
    old = [path for path in others if path not in again]
    for path in again + (old[: len(old) - keep + 1] if keep is not None and len(old) >= keep else []):
        shutil.rmtree(path)
    return final


def _own_digest(data: Mapping[str, Any]) -> str:
    """SHA-256 of what a manifest says besides, however it is spaced."""
    said = {key: value for key, value in data.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(said, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _each(kind: Any, key: Any = one_line) -> BeforeValidator:
    """Checks the entries of an object up to the first that is wrong: a hostile one may have millions."""
    adapter = TypeAdapter(kind)

    def check(data: Any) -> Any:
        if not isinstance(data, dict):
            raise ValueError("should be an object")
        for name, value in data.items():
            key(name)
            try:
                adapter.validate_python(value, strict=True)
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                raise ValueError(f"{path_text((name, *first['loc']))}: {first['msg'].lower()}") from None
        return data

    return BeforeValidator(check)


def _file_name(name: str) -> None:
    if not is_plain(name):
        raise ValueError(f"{brief(ascii(name))} is no name of a file in the folder")


def _level(data: Any) -> Any:
    """The same. Raises ValueError where it is nested deeper than any configuration is."""
    inside = [data]
    for _ in range(_DEEPEST):
        holders = [each for each in inside if isinstance(each, (dict, list))]
        inside = [x for each in holders for x in (each.values() if isinstance(each, dict) else each)]
        if not inside:
            return data
    raise ValueError(f"should have at most {_DEEPEST} levels")


_Line = Annotated[str, AfterValidator(one_line)]


class File(BaseModel):
    """What a file of a checkpoint was when it was written."""

    model_config = ConfigDict(extra="forbid", strict=True)
    bytes: Annotated[int, Field(ge=0, lt=2**63)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Manifest(BaseModel):
    """What `checkpoint.json` holds; tensors by the model's names, with their shapes."""

    model_config = ConfigDict(extra="forbid", strict=True)
    format: int
    step: Annotated[int, Field(ge=0, lt=2**63)]
    tensors: Annotated[dict[str, Any], _each(Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=32)])]
    buffers: Annotated[list[_Line], FailFast()] = []  # those of `tensors` that are no parameters
    aliases: Annotated[dict[str, Any], _each(_Line)]
    optimizer: _Line
    files: Annotated[dict[str, Any], _each(File, _file_name)]
    model: _Line = ""
    graph_hash: _Line = ""
    config: Annotated[dict[str, Any] | None, AfterValidator(_level)] = None
    versions: Annotated[dict[str, Any], _each(_Line)] = {}
    sha256: str | None = None


def newest_first(root: Path) -> list[Path]:
    """Where to go on from: the one that `latest` names, then those written before it, or all where it names none."""
    found = whole(root)[::-1]
    with suppress(CheckpointError, OSError):
        named = find(root)
        found = found[found.index(named) :] if named in found else found
    return found


def read_manifest(folder: Path) -> dict[str, Any]:
    """Raises CheckpointError, for one that is not what was written too."""
    path = folder / MANIFEST
    try:
        data = read_json(path, _LONGEST)
        own = _own_digest(data) if isinstance(data, dict) else ""
    except (ValueError, RecursionError, MemoryError) as error:
        said = brief(ascii(str(error))[1:-1])
        raise CheckpointError(f"the manifest is not JSON: {said}", where=str(path), fix=ANOTHER) from error
    if not isinstance(data, dict) or data.get("format") not in (FORMAT, OLDER):
        version = brief(ascii(data.get("format") if isinstance(data, dict) else None))
        told = f"of format {version}; this autoptd reads formats {OLDER} and {FORMAT}"
        raise CheckpointError(told, where=str(path), fix="use the version it names")
    checked(data, Manifest, path)
    if data["format"] == FORMAT and data.get("sha256") != own:
        told = "the manifest is damaged: the SHA-256 of its content is another"
        raise CheckpointError(told, where=str(path), fix=ANOTHER)
    if data["format"] == OLDER and ("sha256" in data or INDEX in data["files"]):
        told = f"the manifest says format {OLDER}, but has what came with format {FORMAT}"
        raise CheckpointError(told, where=str(path), fix=ANOTHER)
    if (name := _NAME.fullmatch(folder.name)) and int(name[1]) != data["step"]:
        raise CheckpointError(f"{folder.name} holds step {data['step']}", where=str(path), fix=ANOTHER)
    return data


def checked(data: Any, kind: type[BaseModel], path: Path) -> dict[str, Any]:
    """The data, if it is what `kind` says. Raises CheckpointError naming the file and every wrong field."""
    if len(data) > 100:
        raise CheckpointError(f"{path.name} has {len(data)} fields", where=str(path), fix=ANOTHER)
    try:
        kind.model_validate(data)
    except ValidationError as error:
        lines = describe_mistakes(error, kind).splitlines()
        raise CheckpointError(
            f"{path.name} is wrong in {len(lines)} place(s)",
            where="\n".join([str(path), *lines[:_SHOWN]]),
            fix=ANOTHER,
        ) from error
    found: dict[str, Any] = data
    return found


def misfit(folder: Path, name: str, expected: Mapping[str, Any]) -> str:
    """What is wrong with one file as far as can be seen without reading it, or nothing."""
    path = folder / name
    if not path.exists() and not path.is_symlink():
        return f"{name} is missing"
    if not is_regular(path):
        return f"{name} is not a regular file"
    size = path.stat().st_size
    if not os.access(path, os.R_OK):
        return f"{name} may not be read"
    return "" if size == expected["bytes"] else f"{name} has {size} bytes instead of {expected['bytes']}"


def damage(folder: Path, name: str, expected: Mapping[str, Any]) -> str:
    """What is wrong with one file, all of which is read, or nothing."""
    if wrong := misfit(folder, name, expected):
        return wrong
    try:
        return "" if digest(folder / name) == expected["sha256"] else f"{name} is damaged: its SHA-256 is another"
    except (OSError, CheckpointError) as error:
        return f"{name} cannot be read: {getattr(error, 'what', error)}"
