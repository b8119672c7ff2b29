"""What a checkpoint holds, what is wrong with it, and what of it nobody has verified."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autoptd.checkpoint import dcp, folder
from autoptd.checkpoint.files import ANOTHER
from autoptd.checkpoint.index import Index, read_index
from autoptd.checkpoint.progress import read_progress
from autoptd.checkpoint.torch_index import METADATA, read_torch_index
from autoptd.errors import CheckpointError

UNVERIFIED = (
    "written before checkpoints had an index of their own. Not verified: the manifest itself, and that progress.pt"
    " was written with it. The index is torch's pickle, read as data"
)


def index_of(where: Path, manifest: Mapping[str, Any]) -> Index:
    """Where its tensors lie: in files that the manifest lists, and no more than these hold. Raises CheckpointError.

    The index is compared with its digest, the other files with their sizes.
    """
    older = manifest["format"] == folder.OLDER
    name = METADATA if older else folder.INDEX
    check_listed(where, manifest, name)
    files = sorted(manifest["files"].items())
    wrong = [text for each, expected in files if (text := folder.misfit(where, each, expected))]
    if wrong or (wrong := [folder.damage(where, name, manifest["files"][name])]) != [""]:
        raise CheckpointError(wrong[0], where=str(where), fix=ANOTHER)
    sizes = {each: expected["bytes"] for each, expected in files}
    return read_torch_index(where, sizes) if older else read_index(where, sizes)


def unverified(manifest: Mapping[str, Any]) -> str:
    """What a checkpoint cannot prove, or nothing."""
    return UNVERIFIED if manifest["format"] == folder.OLDER else ""


def check_listed(where: Path, manifest: Mapping[str, Any], *names: str) -> None:
    """Raise CheckpointError for files that the manifest omits."""
    if lost := sorted(set(names) - manifest["files"].keys()):
        path = str(where / folder.MANIFEST)
        raise CheckpointError(f"files lacks {', '.join(lost)}", where=path, fix=ANOTHER)


def damaged_files(where: Path, manifest: Mapping[str, Any]) -> list[str]:
    """What is wrong with each file that is not what it was."""
    files = sorted(manifest["files"].items())
    return [text for name, expected in files if (text := folder.damage(where, name, expected))]


def read_whole(where: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, in this process alone; digests of files are not compared. Raises CheckpointError."""
    index = index_of(where, folder.read_manifest(where))
    return dcp.read_whole(where, index, index)


@dataclass(frozen=True)
class Findings:
    """What looking through a whole checkpoint found."""

    files: int
    damage: tuple[str, ...]  # file by file
    not_finite: tuple[str, ...]  # parameters, and what the optimizer keeps for them
    unverified: str


def examine(where: Path) -> Findings:
    """Prove every file of a checkpoint, then read all of it. Raises CheckpointError for what digests do not find."""
    manifest = folder.read_manifest(where)
    damage = damaged_files(where, manifest)
    wrong: tuple[str, ...] = ()
    if not damage:
        check_listed(where, manifest, folder.PROGRESS, folder.PLAN)
        index = index_of(where, manifest)
        read_progress(where, manifest)
        tensors = ((key, dcp.read_whole(where, index, [key])[key]) for key in index)  # one at a time
        wrong = tuple(text for key, x in tensors if (text := not_finite(key, x, manifest)))
    return Findings(len(manifest["files"]), tuple(damage), wrong, unverified(manifest))


def not_finite(key: str, x: Tensor, manifest: Mapping[str, Any]) -> str:
    """`model.head.weight: 3 of 64 elements are not finite`, or nothing. Buffers may well be infinite, as masks are."""
    if key.partition(".")[2] in manifest.get("buffers", ()):
        return ""
    if not (x.is_floating_point() or x.is_complex()) or x.numel() == 0:
        return ""
    x = (torch.view_as_real(x) if x.is_complex() else x).detach()
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if all(map(math.isfinite, map(float, torch.aminmax(x)))):  # a third of the time that counting takes
        return ""
    return f"{key}: {int(x.numel() - torch.isfinite(x).sum())} of {x.numel()} elements are not finite"
