"""A checkpoint's tensors, its damaged files, and the parts of it that cannot be verified."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autoptd.checkpoint import dcp, folder
from autoptd.checkpoint.files import LOAD_OLDER
from autoptd.checkpoint.index import Index, read_index
from autoptd.checkpoint.progress import read_progress
from autoptd.checkpoint.torch_index import METADATA, read_torch_index
from autoptd.errors import CheckpointError

UNVERIFIED = (
    "written in format 1, which has no index.json. Not verified: the manifest itself, and that progress.pt"
    " was written with it. The index is torch's pickle, read as data"
)


def index_of(where: Path, manifest: Mapping[str, Any]) -> Index:
    """Return the index of a checkpoint's tensors, all of which are in files that the manifest lists.

    The index is compared with its digest, the other files with their sizes. Raises CheckpointError.
    """
    older = manifest["format"] == folder.OLDER
    name = METADATA if older else folder.INDEX
    check_listed(where, manifest, name)
    files = sorted(manifest["files"].items())
    wrong = [text for each, expected in files if (text := folder.size_fault(where, each, expected))]
    if wrong or (wrong := [folder.damage(where, name, manifest["files"][name])]) != [""]:
        raise CheckpointError(wrong[0], where=str(where), fix=LOAD_OLDER)
    sizes = {each: expected["bytes"] for each, expected in files}
    return read_torch_index(where, sizes) if older else read_index(where, sizes)


def unverified(manifest: Mapping[str, Any]) -> str:
    """Return a sentence on what cannot be verified; "" for the current format."""
    return UNVERIFIED if manifest["format"] == folder.OLDER else ""


def check_listed(where: Path, manifest: Mapping[str, Any], *names: str) -> None:
    """Raise CheckpointError for files that the manifest omits."""
    if lost := sorted(set(names) - manifest["files"].keys()):
        path = str(where / folder.MANIFEST)
        raise CheckpointError(f"files lacks {', '.join(lost)}", where=path, fix=LOAD_OLDER)


def damaged_files(where: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each file whose size or digest differs from the manifest; reads all files."""
    files = sorted(manifest["files"].items())
    return [text for name, expected in files if (text := folder.damage(where, name, expected))]


def read_whole(where: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint, in this process alone, without comparing digests. Raises CheckpointError."""
    index = index_of(where, folder.read_manifest(where))
    return dcp.read_whole(where, index, index)


@dataclass(frozen=True)
class Findings:
    """The result of `examine`."""

    files: int
    damage: tuple[str, ...]  # a sentence per damaged file
    not_finite: tuple[str, ...]  # a sentence per parameter or optimizer tensor
    unverified: str


def examine(where: Path) -> Findings:
    """Verify every file's digest, then read all tensors. Raises CheckpointError for faults that digests do not find."""
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
    """Return `model.head.weight: 3 of 64 elements are not finite`, or "". Buffers may be infinite, as masks are."""
    if key.partition(".")[2] in manifest.get("buffers", ()):
        return ""
    if not (x.is_floating_point() or x.is_complex()) or x.numel() == 0:
        return ""
    x = (torch.view_as_real(x) if x.is_complex() else x).detach()
    x = x if x.dtype == torch.float64 else x.float()
    if all(map(math.isfinite, map(float, torch.aminmax(x)))):  # takes a third of the time of counting
        return ""
    return f"{key}: {int(x.numel() - torch.isfinite(x).sum())} of {x.numel()} elements are not finite"
