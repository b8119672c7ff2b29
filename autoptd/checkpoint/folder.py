"""A folder of checkpoints in which `latest` never names one that is not whole and durable.

    checkpoints/
      latest                 text: step-00000200
      step-00000100/         older ones, as many as are kept
      step-00000200/
        checkpoint.json      step, shapes, versions, and size and SHA-256 of every other file
        .metadata __0_0.distcp …    tensors, in torch.distributed.checkpoint's form
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

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from autoptd.cost_models.complaints import brief, describe_mistakes, read_text
from autoptd.errors import CheckpointError

FORMAT = 1
MANIFEST, PROGRESS, PLAN, LATEST = "checkpoint.json", "progress.pt", "plan.json", "latest"
_SHOWN = 8  # mistakes listed one by one
_NAME = re.compile(r"step-\d{8,}(\.\d+)?")


def name_of(step: int, turn: int = 0) -> str:
    """`turn`: where a run that went back to an older checkpoint comes by a step again, until the first is removed."""
    return f"step-{step:08d}" + (f".{turn}" if turn else "")


def part_of(root: Path, step: int) -> Path:
    """Where a checkpoint is written before it is one."""
    return root / f".{name_of(step)}.part"


def whole(root: Path) -> list[Path]:
    """The checkpoints in a folder, in the order in which they were written."""
    found = [path for path in root.iterdir() if _NAME.fullmatch(path.name)] if root.is_dir() else []
    found = [path for path in found if (path / MANIFEST).is_file()]
    return sorted(found, key=lambda path: ((path / MANIFEST).stat().st_mtime_ns, path.name))


def find(path: Path) -> Path:
    """A checkpoint: `path` itself, or the one that `latest` names in it. Raises CheckpointError."""
    if (path / MANIFEST).is_file():
        return path
    latest = path / LATEST
    if not latest.is_file():
        others = f"; it holds {', '.join(found.name for found in whole(path))}" if whole(path) else ""
        raise CheckpointError(
            f"no checkpoint here{others}",
            where=str(path),
            fix="give a folder that `save` wrote to, or one of its step-… folders",
        )
    named = path / latest.read_text(encoding="utf-8", errors="replace").strip()
    if not _NAME.fullmatch(named.name) or named.parent != path or not (named / MANIFEST).is_file():
        raise CheckpointError(f"names {named.name!r}, which is no checkpoint", where=str(latest))
    return named


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


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            found.update(block)
    return found.hexdigest()


def write_durably(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
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
    text = json.dumps({"format": FORMAT, "step": step, **manifest, "files": files}, indent=1)
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


class File(BaseModel):
    """What a file of a checkpoint was when it was written."""

    model_config = ConfigDict(extra="forbid", strict=True)
    bytes: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Manifest(BaseModel):
    """What `checkpoint.json` holds; tensors by the model's names, with their shapes."""

    model_config = ConfigDict(extra="forbid", strict=True)
    format: int
    step: Annotated[int, Field(ge=0, lt=2**63)]
    tensors: dict[str, list[Annotated[int, Field(ge=0)]]]
    aliases: dict[str, str]
    optimizer: str
    files: dict[Annotated[str, Field(pattern=r"^[\w.-]+$")], File]
    model: str = ""
    graph_hash: str = ""
    config: dict[str, Any] | None = None
    versions: dict[str, str] = {}


def newest_first(root: Path) -> list[Path]:
    """Where to go on from: the one that `latest` names, then those written before it, or all where it names none."""
    found = whole(root)[::-1]
    with suppress(CheckpointError, OSError):
        named = find(root)
        found = found[found.index(named) :] if named in found else found
    return found


def read_manifest(folder: Path) -> dict[str, Any]:
    """Raises CheckpointError."""
    path = folder / MANIFEST
    another = "load an older checkpoint: one of the other step-… folders"
    try:
        data = json.loads(read_text(path, "manifest", CheckpointError, another))
    except (ValueError, RecursionError) as error:
        said = brief(ascii(str(error))[1:-1])
        raise CheckpointError(f"the manifest is not JSON: {said}", where=str(path), fix=another) from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        version = brief(repr(data.get("format") if isinstance(data, dict) else None))
        raise CheckpointError(
            f"of format {version}; this autoptd reads format {FORMAT}", where=str(path), fix="use the version it names"
        )
    return checked(data, Manifest, path)


def checked(data: Any, kind: type[BaseModel], path: Path) -> dict[str, Any]:
    """The data, if it is what `kind` says. Raises CheckpointError naming the file and every wrong field."""
    try:
        kind.model_validate(data)
    except ValidationError as error:
        lines = describe_mistakes(error, kind).splitlines()
        raise CheckpointError(
            f"{path.name} is wrong in {len(lines)} place(s)",
            where="\n".join([str(path), *lines[:_SHOWN]]),
            fix="load an older checkpoint: one of the other step-… folders",
        ) from error
    found: dict[str, Any] = data
    return found


def damage(folder: Path, name: str, expected: Mapping[str, Any]) -> str:
    """What is wrong with one file, or nothing."""
    path = folder / name
    if not path.is_file():
        return f"{name} is missing"
    size = path.stat().st_size
    if not os.access(path, os.R_OK):
        return f"{name} may not be read"
    if size != expected.get("bytes"):
        return f"{name} has {size} bytes instead of {expected.get('bytes')}"
    return "" if digest(path) == expected.get("sha256") else f"{name} is damaged: its SHA-256 is another"
