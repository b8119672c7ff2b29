"""`progress.pt`: everything of a checkpoint but the model's tensors, and the checks before it is used.

The file is an archive of `torch.save` whose zip comment is the SHA-256 of the archive without the comment.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from autoptd.checkpoint import folder, torch_files
from autoptd.checkpoint.files import LOAD_OLDER, opened
from autoptd.cost_models.complaints import brief
from autoptd.errors import CheckpointError
from autoptd.runtime.loss_scaling import LossScale
from autoptd.runtime.optimizers.several import defaults_by_group, described

_COMMENT = struct.Struct("<H")  # length of the comment, the last field of an archive
_END = b"PK\x05\x06"  # signature of an archive's last record: 22 bytes if there is no comment
_SHOWN = 8  # parameters named in an error
_DIGEST = 64  # hexadecimal digits


class _Random(BaseModel):
    model_config = ConfigDict(strict=True)
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)]
    step: Annotated[int, Field(ge=0, lt=2**63)]


class _Optimizer(BaseModel):
    name: Annotated[str, Field(alias="class")]
    groups: Annotated[list[dict[str, Any]], Field(max_length=100_000)]
    names: Annotated[list[list[str]] | None, Field(max_length=100_000)] = None  # of each group's parameters


class TrainingProgress(BaseModel):
    """The fields of `progress.pt`; `others` holds the states of schedulers and the like."""

    model_config = ConfigDict(strict=True)
    step: Annotated[int, Field(ge=0)]
    random: _Random
    optimizer: _Optimizer
    others: dict[str, Any]
    loss_scale: dict[str, Any] | None = None
    batch: Annotated[int, Field(ge=1)] | None = None  # samples of a step as planned, with which the step is a place


def to_bytes(progress: Mapping[str, Any]) -> bytes:
    """Return the file's bytes. Raises CheckpointError for values that `read_progress` would refuse."""
    blob = io.BytesIO()
    try:
        torch.save(dict(progress), blob)
        torch_files.check_readable(blob, blob.tell())
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"the state of the optimizer or of `others` cannot be saved in a checkpoint: {brief(str(error))}",
            where=", ".join(["optimizer", *progress.get("others", ())]),
            fix="make state_dict return only numbers, strings, lists, dicts and tensors",
        ) from error
    raw = blob.getvalue()
    assert raw[-22:-18] == _END and raw[-2:] == bytes(2)
    return raw[:-2] + _COMMENT.pack(_DIGEST) + hashlib.sha256(raw).hexdigest().encode()


def read_progress(where: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Read and check `progress.pt`. Raises CheckpointError, also if its step is not the manifest's."""
    path = where / folder.PROGRESS
    try:
        with opened(path) as file:
            length = os.fstat(file.fileno()).st_size
            if manifest["format"] != folder.OLDER:
                _check_digest(file, length)
            found = torch_files.load(file, length)
    except (OSError, ValueError, MemoryError) as error:
        reason = brief(ascii(str(error) or type(error).__name__)[1:-1])
        raise CheckpointError(f"not readable: {reason}", where=str(path), fix=LOAD_OLDER) from error
    if not isinstance(found, dict):
        raise CheckpointError(f"holds a {type(found).__name__}, not a dict", where=str(path), fix=LOAD_OLDER)
    folder.checked(found, TrainingProgress, path)
    if found["step"] != manifest["step"]:
        what = f"is of step {found['step']}, the manifest of step {manifest['step']}"
        raise CheckpointError(what, where=str(path), fix=LOAD_OLDER)
    for number, group in enumerate(found["optimizer"]["groups"]):
        if wrong := not_finite(group):
            what = f"group {number} of the optimizer has {wrong}"
            raise CheckpointError(what, where=str(path), fix=LOAD_OLDER)
    _check_scale(path, found.get("loss_scale"))
    return found


def _check_scale(path: Path, saved: Mapping[str, Any] | None) -> None:
    """Raise CheckpointError unless `saved` has every field of a loss scale, with the right type and finite."""
    if saved is None:
        return
    for name, default in asdict(LossScale()).items():
        value: Any = saved.get(name)
        kind = type(value) is int or (type(value) is float and isinstance(default, float))
        if not (kind and _finite(value) and value >= 0):
            what = f"the loss scale has {name} = {brief(ascii(value))}"
            raise CheckpointError(what, where=str(path), fix=LOAD_OLDER)


def _check_digest(file: Any, length: int) -> None:
    """Raise ValueError unless the comment is the digest of the rest."""
    found, left = hashlib.sha256(), length - _DIGEST - _COMMENT.size
    if left < 0:
        raise ValueError("the file is truncated")
    while left and (block := file.read(min(left, 1 << 22))):
        found.update(block)
        left -= len(block)
    found.update(bytes(2))
    comment = file.read(_COMMENT.size + _DIGEST)
    if comment != _COMMENT.pack(_DIGEST) + found.hexdigest().encode():
        raise ValueError("the file is damaged: its SHA-256 is not the one at its end")


def _numbers(value: Any) -> list[float]:
    if isinstance(value, (tuple, list)):
        return [x for each in value[:100] for x in _numbers(each)]
    if isinstance(value, Tensor):
        return [float(value)] if value.numel() == 1 and not value.is_complex() else []
    return [value] if isinstance(value, (int, float)) else []


def not_finite(options: Mapping[Any, Any]) -> str:
    """Return the first option with a number that is not finite, as `lr = nan`, or ""."""
    wrong = (f"{key} = {brief(str(value))}" for key, value in options.items() if not all(map(_finite, _numbers(value))))
    return next(wrong, "")


def _finite(value: float) -> bool:
    return abs(value) < 2**63 if isinstance(value, int) else math.isfinite(value)


def check_optimizer(where: Path, progress: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Raise CheckpointError unless class, number of groups and options are those of this optimizer."""
    saved, mine = progress["optimizer"], described(optimizer)
    skip = "load it with optimizer=False to restore the parameters alone"
    if saved["class"] != mine:
        what = f"the checkpoint was trained by {brief(ascii(saved['class'])[1:-1])}, not {mine}"
        raise CheckpointError(what, where=str(where), fix=skip)
    if len(saved["groups"]) != len(optimizer.param_groups):
        what = f"the checkpoint has {len(saved['groups'])} parameter groups, not {len(optimizer.param_groups)}"
        raise CheckpointError(what, where=str(where), fix="give the same parameter_groups, or " + skip)
    for number, (group, defaults) in enumerate(zip(saved["groups"], defaults_by_group(optimizer), strict=True)):
        for name, value in defaults.items():
            if name not in group:
                what = f"group {number} of the checkpoint's optimizer lacks {name}"
                raise CheckpointError(what, where=str(where), fix=skip)
            if not _is_like(group[name], value):
                what = f"group {number} of the checkpoint's optimizer has {name} = {brief(ascii(group[name]))}"
                raise CheckpointError(what, where=str(where), fix=skip)


def check_groups(where: Path, progress: Mapping[str, Any], groups: Sequence[Sequence[str]]) -> None:
    """Raise CheckpointError for a parameter in another group than before: it would get that group's options."""
    before = {name: i for i, names in enumerate(progress["optimizer"].get("names") or ()) for name in names}
    moved = [(name, i) for i, names in enumerate(groups) for name in names if before.get(name, i) != i]
    if moved:
        lines = [f"{name}: in group {before[name]} of the checkpoint, {i} of the optimizer" for name, i in moved]
        raise CheckpointError(
            "the checkpoint has other parameters in the groups of the optimizer, whose options it would bring",
            where="\n".join([str(where), *lines[:_SHOWN]]),
            fix="give the same parameter_groups, or load it with optimizer=False to restore the parameters alone",
        )


def _is_like(saved: Any, default: Any) -> bool:
    """Return whether a value has the form of an option's default: a number for a number, a pair for a pair."""
    if isinstance(default, bool) or default is None:
        return saved is None or isinstance(saved, (bool, int, float, str))
    if isinstance(default, (int, float, Tensor)):
        return isinstance(saved, (int, float)) or (isinstance(saved, Tensor) and saved.numel() == 1)
    if isinstance(default, (tuple, list)):
        same = isinstance(saved, (tuple, list)) and len(saved) == len(default)
        return same and all(map(_is_like, saved, default))
    return isinstance(saved, type(default))
