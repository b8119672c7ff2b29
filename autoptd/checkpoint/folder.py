"""A folder of checkpoints in which `latest` only ever names a complete and durable one.

    checkpoints/
      latest                 text: step-00000200
      step-00000100/         older ones, as many as `keep` allows
      step-00000200/
        checkpoint.json      step, shapes, versions, size and SHA-256 of every other file, and of its own content
        index.json           file and bytes of each tensor
        __0_0.distcp … .metadata    tensors, as torch.distributed.checkpoint writes them, and its index (for others)
        progress.pt          everything but the model's tensors: optimizer options, schedulers, position in the data
        plan.json            the plan that wrote it; any other plan can read it

A checkpoint is written under a name that begins with a dot and ends in `.part`, made durable (files and folders are
flushed to disk), and renamed. Then `latest` is replaced. Last, older checkpoints and others of the same step are
removed, each under such a name too. A writer that dies in between leaves `.part` folders, which the next writer
removes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Collection, Mapping
from contextlib import suppress
from itertools import count
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

from autoptd.checkpoint.files import LOAD_OLDER, digest, is_folder, is_plain, is_regular, read_json, read_small
from autoptd.cost_models.complaints import brief, describe_mistakes, one_line, path_text
from autoptd.errors import CheckpointError

FORMAT, OLDER = 2, 1  # OLDER: the manifest has no digest of its own, and the only index is torch's
MANIFEST, PROGRESS, PLAN, LATEST = "checkpoint.json", "progress.pt", "plan.json", "latest"
INDEX = "index.json"
_SHOWN = 8  # mistakes listed in an error
_NONE = "none"  # begins what `described` says where no checkpoint is
_SEEN: dict[Path, tuple[str, frozenset[str]]] = {}  # by folder: its latest when last used here, and other runs' names
_LONGEST, _DEEPEST = 1 << 24, 50  # bytes of a manifest, nesting levels of the configuration in it
_NAME = re.compile(r"step-(\d{8,20})(\.\d+)?", re.ASCII)


def name_of(step: int, repeat: int = 0) -> str:
    """Return `step-00000200`, or `step-00000200.1` if a run that resumed earlier saves this step a second time."""
    return f"step-{step:08d}" + (f".{repeat}" if repeat else "")


def part_of(root: Path, step: int) -> Path:
    """Return the folder that a checkpoint is written to before it is complete."""
    return root / f".{name_of(step)}.part"


def checkpoints(root: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, in the order in which they were written."""
    found = [path for path in root.iterdir() if _NAME.fullmatch(path.name)] if root.is_dir() else []
    found = [path for path in found if is_folder(path) and is_regular(path / MANIFEST)]
    return sorted(found, key=lambda path: (_saved_ns(path), path.name))


def _saved_ns(folder: Path) -> int:
    """Return when a checkpoint was saved: as its manifest says, since a copy of the file is younger; else its time."""
    path = folder / MANIFEST
    with suppress(ValueError, RecursionError, MemoryError, CheckpointError, OSError):
        data = read_json(path, _LONGEST)
        if isinstance(data, dict) and type(saved := data.get("saved_ns")) is int:
            return saved
    return path.stat().st_mtime_ns


def find(path: Path) -> Path:
    """Return a checkpoint: `path` itself, or the one that its file `latest` names. Raises CheckpointError."""
    if is_regular(path / MANIFEST):
        return path
    latest = path / LATEST
    if not is_regular(latest):
        others = f"; it holds {', '.join(found.name for found in checkpoints(path))}" if checkpoints(path) else ""
        raise CheckpointError(
            f"no checkpoint here{others}",
            where=str(path),
            fix="give a folder that `save` wrote to, or one of its step-… folders",
        )
    name = read_small(latest, 1000).decode("utf-8", errors="replace").strip()
    if not _NAME.fullmatch(name) or not is_folder(path / name) or not is_regular(path / name / MANIFEST):
        fix = "give one of the step-… folders"
        raise CheckpointError(f"names {brief(ascii(name))}, which is not a checkpoint", where=str(latest), fix=fix)
    return path / name


def described(path: Path) -> str:
    """Return the name and the digest of the checkpoint that `path` is or names, or why there is none."""
    try:
        found = find(path)
        manifest = found / MANIFEST
        nbytes = manifest.stat().st_size
        content = f"SHA-256 {digest(manifest)}" if nbytes <= _LONGEST else f"{nbytes} bytes"  # refused when read
        return f"{found.name}, whose {MANIFEST} has {content}"
    except (CheckpointError, OSError) as error:
        return f"{_NONE}: {getattr(error, 'what', error)}"


def prepare(root: Path, step: int) -> Path:
    """Return an empty folder to write to, after removing those of writers that died. Raises CheckpointError."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        for left in root.glob(".step-*.part"):
            _remove(left, f".{uuid.uuid4().hex[:8]}")
        part = part_of(root, step)
        part.mkdir()
    except OSError as error:
        raise CheckpointError(f"checkpoints cannot be written here: {error.strerror}", where=str(root)) from error
    return part


def goes_on_from(path: Path) -> None:
    """Note that this process goes on from the checkpoints of a folder: they are of its own run from now on."""
    root = path.parent if is_regular(path / MANIFEST) else path
    _SEEN[root.resolve()] = described(root), frozenset()


def of_other_runs(root: Path) -> frozenset[str]:
    """Return the names of the checkpoints in a folder that this run did not write, and does not go on from.

    Raises CheckpointError if another process has written there since this one last did, or loaded from there.
    """
    now, key = described(root), root.resolve()
    before, others = _SEEN.setdefault(key, (now, frozenset(path.name for path in checkpoints(root))))
    if now != before and not now.startswith(_NONE):
        what = (
            f"another process has saved {now.partition(',')[0]} into {root} since this one last saved or loaded there"
        )
        raise CheckpointError(f"{what}: give each job a folder of its own, or end this one and resume")
    return others


def check_model(root: Path, manifest: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the latest checkpoint has other parameters: new ones would take the places of these."""
    try:
        found = read_manifest(find(root))
    except (CheckpointError, OSError):
        return  # there is none, or it is damaged
    if found["format"] == FORMAT and _parameters(found) != _parameters(manifest):
        what = "the folder has checkpoints of another model, which new ones would replace: give each model its own"
        raise CheckpointError(what, where=str(root))


def _parameters(manifest: Mapping[str, Any]) -> dict[str, Any]:
    return {name: shape for name, shape in manifest["tensors"].items() if name not in manifest.get("buffers", ())}


def try_writing(root: Path, rank: int) -> None:
    """Raise OSError if a rank cannot write to a folder. Makes the folder if needed and leaves nothing in it."""
    root.mkdir(parents=True, exist_ok=True)
    trial = root / f".trial-of-rank-{rank}"
    write_durably(trial, bytes(4096))
    trial.unlink()


def write_durably(path: Path, data: bytes) -> None:
    """Write and flush a new file. Anything with that name, even a link or a FIFO, is removed, not written to."""
    path.unlink(missing_ok=True)
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _flush(folder: Path) -> None:
    """Make the entries of a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def commit(
    root: Path,
    step: int,
    manifest: Mapping[str, Any],
    digests: Mapping[str, str],
    keep: int | None,
    leave: Collection[str] = (),
) -> Path:
    """Turn the written folder into the latest checkpoint, then remove all but `keep` checkpoints (None: remove none).

    `digests`: SHA-256 of every file. `leave`: names of checkpoints that neither count nor are removed. Raises OSError,
    in which case `latest` is unchanged.
    """
    part = part_of(root, step)
    final = next(path for n in count() if not os.path.lexists(path := root / name_of(step, n)))
    files = {name: {"bytes": (part / name).stat().st_size, "sha256": digests[name]} for name in sorted(digests)}
    saved_ns = max([time.time_ns(), *(_saved_ns(path) + 1 for path in checkpoints(root)[-1:])])  # though clocks go back
    data = {"format": FORMAT, "step": step, "saved_ns": saved_ns, **manifest, "files": files}
    text = json.dumps({**data, "sha256": _own_digest(data)}, indent=1)
    if len(text) > _LONGEST:
        raise CheckpointError(
            f"the manifest would have {len(text)} bytes, more than the limit of {_LONGEST}", where=str(part)
        )
    write_durably(part / MANIFEST, text.encode())
    _flush(part)
    part.rename(final)
    _flush(root)
    pointer = root / f".{LATEST}.part"
    write_durably(pointer, final.name.encode())
    pointer.replace(root / LATEST)
    _SEEN[root.resolve()] = described(root), frozenset(leave)
    _flush(root)
    others = [path for path in checkpoints(root) if path != final and path.name not in leave]
    replaced = [path for path in others if path.name.partition(".")[0] == name_of(step)]
    old = [path for path in others if path not in replaced]
    for path in replaced + (old[: len(old) - keep + 1] if keep is not None and len(old) >= keep else []):
        _remove(path)
    return final


def _remove(path: Path, mark: str = "") -> None:
    """Remove a checkpoint, or what is left of one, unless another process does.

    It is renamed first: what is removed in part has no checkpoint's name, nor that under which a writer would go on.
    """
    with suppress(FileNotFoundError):
        name = path.name.removeprefix(".").removesuffix(".part")
        shutil.rmtree(path.rename(path.with_name(f".{name}{mark}.part")))


def _own_digest(data: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a manifest's other fields, regardless of whitespace."""
    rest = {key: value for key, value in data.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _each(kind: Any, key: Any = one_line) -> BeforeValidator:
    """Validate the entries of an object, stopping at the first wrong one: a hostile object may have millions."""
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
        raise ValueError(f"{brief(ascii(name))} is not the name of a file in the folder")


def _shallow(data: Any) -> Any:
    """Return `data`. Raises ValueError if it is nested deeper than any configuration is."""
    inside = [data]
    for _ in range(_DEEPEST):
        holders = [each for each in inside if isinstance(each, (dict, list))]
        inside = [x for each in holders for x in (each.values() if isinstance(each, dict) else each)]
        if not inside:
            return data
    raise ValueError(f"should have at most {_DEEPEST} levels of nesting")


_Line = Annotated[str, AfterValidator(one_line)]


class File(BaseModel):
    """A file's size and digest at the time it was written."""

    model_config = ConfigDict(extra="forbid", strict=True)
    bytes: Annotated[int, Field(ge=0, lt=2**63)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Manifest(BaseModel):
    """The fields of `checkpoint.json`; `tensors` maps the model's names to shapes."""

    model_config = ConfigDict(extra="forbid", strict=True)
    format: int
    step: Annotated[int, Field(ge=0, lt=2**63)]
    saved_ns: Annotated[int | None, Field(ge=0)] = None  # since 1970; checkpoints of a folder are in this order
    tensors: Annotated[dict[str, Any], _each(Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=32)])]
    buffers: Annotated[list[_Line], FailFast()] = []  # names in `tensors` that are not parameters
    aliases: Annotated[dict[str, Any], _each(_Line)]
    optimizer: _Line
    files: Annotated[dict[str, Any], _each(File, _file_name)]
    model: _Line = ""
    graph_hash: _Line = ""
    config: Annotated[dict[str, Any] | None, AfterValidator(_shallow)] = None
    versions: Annotated[dict[str, Any], _each(_Line)] = {}
    sha256: str | None = None


def newest_first(root: Path) -> list[Path]:
    """Return the checkpoints to try in turn: that of `latest`, then older ones; all of them if it names none."""
    found = checkpoints(root)[::-1]
    with suppress(CheckpointError, OSError):
        named = find(root)
        found = found[found.index(named) :] if named in found else found
    return found


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the fields of `checkpoint.json`. Raises CheckpointError, also if its digest or its step is wrong."""
    path = folder / MANIFEST
    try:
        data = read_json(path, _LONGEST)
        own = _own_digest(data) if isinstance(data, dict) else ""
    except (ValueError, RecursionError, MemoryError) as error:
        reason = brief(ascii(str(error))[1:-1])
        raise CheckpointError(f"the manifest is not JSON: {reason}", where=str(path), fix=LOAD_OLDER) from error
    if not isinstance(data, dict) or data.get("format") not in (FORMAT, OLDER):
        version = brief(ascii(data.get("format") if isinstance(data, dict) else None))
        what = f"the checkpoint has format {version}; this autoptd reads formats {OLDER} and {FORMAT}"
        raise CheckpointError(what, where=str(path), fix="use the autoptd version that the file names")
    checked(data, Manifest, path)
    if data["format"] == FORMAT and data.get("sha256") != own:
        what = "the manifest is damaged: the SHA-256 of its content differs"
        raise CheckpointError(what, where=str(path), fix=LOAD_OLDER)
    if data["format"] == OLDER and ("sha256" in data or INDEX in data["files"]):
        what = f"the manifest says format {OLDER}, but has fields of format {FORMAT}"
        raise CheckpointError(what, where=str(path), fix=LOAD_OLDER)
    if (name := _NAME.fullmatch(folder.name)) and int(name[1]) != data["step"]:
        raise CheckpointError(f"{folder.name} holds step {data['step']}", where=str(path), fix=LOAD_OLDER)
    return data


def checked(data: Any, kind: type[BaseModel], path: Path) -> dict[str, Any]:
    """Return `data` if it is a valid `kind`. Raises CheckpointError naming the file and every wrong field."""
    if len(data) > 100:
        raise CheckpointError(f"{path.name} has {len(data)} fields", where=str(path), fix=LOAD_OLDER)
    try:
        kind.model_validate(data)
    except ValidationError as error:
        lines = describe_mistakes(error, kind).splitlines()
        raise CheckpointError(
            f"{path.name} is wrong in {len(lines)} place(s)",
            where="\n".join([str(path), *lines[:_SHOWN]]),
            fix=LOAD_OLDER,
        ) from error
    found: dict[str, Any] = data
    return found


def size_fault(folder: Path, name: str, expected: Mapping[str, Any]) -> str:
    """Return a sentence if a file is missing, unreadable or of the wrong size, else ""; the file is not read."""
    path = folder / name
    if not path.exists() and not path.is_symlink():
        return f"{name} is missing"
    if not is_regular(path):
        return f"{name} is not a regular file"
    size = path.stat().st_size
    if not os.access(path, os.R_OK):
        return f"{name} is not readable: permission denied"
    return "" if size == expected["bytes"] else f"{name} has {size} bytes instead of {expected['bytes']}"


def damage(folder: Path, name: str, expected: Mapping[str, Any]) -> str:
    """Return a sentence if a file is missing or its size or digest is wrong, else ""; all of the file is read."""
    if wrong := size_fault(folder, name, expected):
        return wrong
    try:
        return "" if digest(folder / name) == expected["sha256"] else f"{name} is damaged: its SHA-256 differs"
    except (OSError, CheckpointError) as error:
        return f"{name} cannot be read: {getattr(error, 'what', error)}"
