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
flushed to disk), then renamed; only then is `latest` replaced, and only then are older ones removed. A writer that dies
in between leaves a `.part` folder, which the next one removes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autoptd.errors import CheckpointError

FORMAT = 1
MANIFEST, PROGRESS, PLAN, LATEST = "checkpoint.json", "progress.pt", "plan.json", "latest"
_NAME = re.compile(r"step-(\d{8,})")


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def part_of(root: Path, step: int) -> Path:
    """Where a checkpoint is written before it is one."""
    return root / f".{name_of(step)}.part"


def steps(root: Path) -> list[int]:
    """Of the whole checkpoints in a folder, ascending."""
    found = (_NAME.fullmatch(path.name) for path in root.iterdir()) if root.is_dir() else ()
    return sorted(int(match[1]) for match in found if match and (root / match[0] / MANIFEST).is_file())


def find(path: Path) -> Path:
    """A checkpoint: `path` itself, or the one that `latest` names in it. Raises CheckpointError."""
    if (path / MANIFEST).is_file():
        return path
    latest = path / LATEST
    if not latest.is_file():
        others = f"; it holds {', '.join(map(name_of, steps(path)))}" if steps(path) else ""
        raise CheckpointError(
            f"no checkpoint here{others}",
            where=str(path),
            fix="give a folder that `save` wrote to, or one of its step-… folders",
        )
    named = path / latest.read_text(encoding="utf-8", errors="replace").strip()
    if named.parent != path or not (named / MANIFEST).is_file():
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
    part, final = part_of(root, step), root / name_of(step)
    files = {name: {"bytes": (part / name).stat().st_size, "sha256": digests[name]} for name in sorted(digests)}
    text = json.dumps({"format": FORMAT, "step": step, **manifest, "files": files}, indent=1)
    write_durably(part / MANIFEST, text.encode())
    _flush(part)
    if final.exists():  # of an earlier run, which went on from an older checkpoint
        old = root / f".{final.name}.old.part"
        final.rename(old)
        part.rename(final)
        shutil.rmtree(old)
    else:
        part.rename(final)
    _flush(root)
    pointer = root / f".{LATEST}.part"
    write_durably(pointer, final.name.encode())
    pointer.replace(root / LATEST)
    _flush(root)
    if keep is not None:
        for old_step in [s for s in steps(root) if s != step][: -(keep - 1) or None]:
            shutil.rmtree(root / name_of(old_step))
    return final


def read_manifest(folder: Path) -> dict[str, Any]:
    """Raises CheckpointError."""
    path = folder / MANIFEST
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"not readable: {error}", where=str(path)) from error
    wanted = {"step": int, "files": dict, "tensors": dict, "aliases": dict, "optimizer": str}
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        version = data.get("format") if isinstance(data, dict) else None
        raise CheckpointError(
            f"of format {version!r}; this autoptd reads format {FORMAT}",
            where=str(path),
            fix="use the version it names",
        )
    for key, kind in wanted.items():
        if not isinstance(data.get(key), kind):
            raise CheckpointError(f"{key!r} is missing or no {kind.__name__}", where=str(path), fix="use another one")
    return data


def damage(folder: Path, name: str, expected: Mapping[str, Any]) -> str:
    """What is wrong with one file, or nothing."""
    path = folder / name
    if not path.is_file():
        return f"{name} is missing"
    size = path.stat().st_size
    if size != expected.get("bytes"):
        return f"{name} has {size} bytes instead of {expected.get('bytes')}"
    return "" if digest(path) == expected.get("sha256") else f"{name} is damaged: its SHA-256 is another"
