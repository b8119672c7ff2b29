"""`progress.pt`: what a checkpoint holds besides tensors of the model, and what of it must be so before it is used.

A file of `torch.save`, whose archive's comment is the SHA-256 of all bytes before it.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from autoptd.checkpoint import folder, torch_files
from autoptd.checkpoint.files import ANOTHER, opened
from autoptd.cost_models.complaints import brief
from autoptd.errors import CheckpointError
from autoptd.runtime.loss_scaling import LossScale

_COMMENT = struct.Struct("<H")  # its length, the last field of an archive
_END = b"PK\x05\x06"  # of an archive: 22 bytes, where there is no comment
_DIGEST = 64


class _Random(BaseModel):
    model_config = ConfigDict(strict=True)
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)]
    step: Annotated[int, Field(ge=0, lt=2**63)]


class _Optimizer(BaseModel):
    name: Annotated[str, Field(alias="class")]
    groups: Annotated[list[dict[str, Any]], Field(max_length=100_000)]


class TrainingProgress(BaseModel):
    """What `progress.pt` holds: all that is no tensor of the model."""

    model_config = ConfigDict(strict=True)
    step: Annotated[int, Field(ge=0)]
    random: _Random
    optimizer: _Optimizer
    others: dict[str, Any]
    loss_scale: dict[str, Any] | None = None


def to_bytes(progress: Mapping[str, Any]) -> bytes:
    """The file. Raises CheckpointError for values that could not be read again."""
    blob = io.BytesIO()
    try:
        torch.save(dict(progress), blob)
        torch_files.check_readable(blob, blob.tell())
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"the state of the optimizer or of `others` cannot be kept in a checkpoint: {brief(str(error))}",
            where=", ".join(["optimizer", *progress.get("others", ())]),
            fix="let state_dict return numbers, texts, lists, dicts and tensors",
        ) from error
    raw = blob.getvalue()
    assert raw[-22:-18] == _END and raw[-2:] == bytes(2)
    return raw[:-2] + _COMMENT.pack(_DIGEST) + hashlib.sha256(raw).hexdigest().encode()


def read_progress(where: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Raises CheckpointError, for one that is of another step too."""
    path = where / folder.PROGRESS
    try:
        with opened(path) as file:
            length = os.fstat(file.fileno()).st_size
            if manifest["format"] != folder.OLDER:
                _check_digest(file, length)
            found = torch_files.load(file, length)
    except (OSError, ValueError, MemoryError) as error:
        said = brief(ascii(str(error) or type(error).__name__)[1:-1])
        raise CheckpointError(f"not readable: {said}", where=str(path), fix=ANOTHER) from error
    if not isinstance(found, dict):
        raise CheckpointError(f"holds a {type(found).__name__} instead of fields", where=str(path), fix=ANOTHER)
    folder.checked(found, TrainingProgress, path)
    if found["step"] != manifest["step"]:
        told = f"is of step {found['step']}, the manifest of step {manifest['step']}"
        raise CheckpointError(told, where=str(path), fix=ANOTHER)
    for number, group in enumerate(found["optimizer"]["groups"]):
        if wrong := not_finite(group):
            told = f"group {number} of the optimizer has {wrong}"
            raise CheckpointError(told, where=str(path), fix=ANOTHER)
    _check_scale(path, found.get("loss_scale"))
    return found


def _check_scale(path: Path, saved: Mapping[str, Any] | None) -> None:
    """Raise CheckpointError unless it has what a loss scale has, of its types, finite."""
    if saved is None:
        return
    for name, default in asdict(LossScale()).items():
        value: Any = saved.get(name)
        kind = type(value) is int or (type(value) is float and isinstance(default, float))
        if not (kind and _finite(value) and value >= 0):
            told = f"the loss scale has {name} = {brief(ascii(value))}"
            raise CheckpointError(told, where=str(path), fix=ANOTHER)


def _check_digest(file: Any, length: int) -> None:
    """Raises ValueError unless the comment is the digest of the rest."""
    found, left = hashlib.sha256(), length - _DIGEST - _COMMENT.size
    if left < 0:
        raise ValueError("it ends early")
    while left and (block := file.read(min(left, 1 << 22))):
        found.update(block)
        left -= len(block)
    found.update(bytes(2))
    said = file.read(_COMMENT.size + _DIGEST)
    if said != _COMMENT.pack(_DIGEST) + found.hexdigest().encode():
        raise ValueError("it is damaged: the SHA-256 that it ends with is another")


def _numbers(value: Any) -> list[float]:
    if isinstance(value, (tuple, list)):
        return [x for each in value[:100] for x in _numbers(each)]
    if isinstance(value, Tensor):
        return [float(value)] if value.numel() == 1 and not value.is_complex() else []
    return [value] if isinstance(value, (int, float)) else []


def not_finite(options: Mapping[Any, Any]) -> str:
    """`lr = nan`, or nothing."""
    wrong = (f"{key} = {brief(str(value))}" for key, value in options.items() if not all(map(_finite, _numbers(value))))
    return next(wrong, "")


def _finite(value: float) -> bool:
    return abs(value) < 2**63 if isinstance(value, int) else math.isfinite(value)


def check_optimizer(where: Path, progress: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Raise CheckpointError unless the options that were saved are all that an optimizer has."""
    saved, mine = progress["optimizer"], type(optimizer).__name__
    skip = "load it with optimizer=False to take the parameters alone"
    if saved["class"] != mine:
        told = f"the checkpoint was trained by {brief(ascii(saved['class'])[1:-1])}, not {mine}"
        raise CheckpointError(told, where=str(where), fix=skip)
    if len(saved["groups"]) != len(optimizer.param_groups):
        told = f"the checkpoint has {len(saved['groups'])} parameter groups, not {len(optimizer.param_groups)}"
        raise CheckpointError(told, where=str(where), fix="give the same parameter_groups, or " + skip)
    for number, group in enumerate(saved["groups"]):
        for name, value in optimizer.defaults.items():
            if name not in group:
                told = f"group {number} of the checkpoint's optimizer lacks {name}"
                raise CheckpointError(told, where=str(where), fix=skip)
            if not _alike(group[name], value):
                told = f"group {number} of the checkpoint's optimizer has {name} = {brief(ascii(group[name]))}"
                raise CheckpointError(told, where=str(where), fix=skip)


def _alike(saved: Any, default: Any) -> bool:
    """Whether a value may stand where an optimizer has this default: a number for a number, a pair for a pair."""
    if isinstance(default, bool) or default is None:
        return saved is None or isinstance(saved, (bool, int, float, str))
    if isinstance(default, (int, float, Tensor)):
        return isinstance(saved, (int, float)) or (isinstance(saved, Tensor) and saved.numel() == 1)
    if isinstance(default, (tuple, list)):
        same = isinstance(saved, (tuple, list)) and len(saved) == len(default)
        return same and all(map(_alike, saved, default))
    return isinstance(saved, type(default))
