"""Checks that checkpoints can be written: the file operations of `autoptd.checkpoint.folder` with a few bytes."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from autoptd.cost_models.memory import COMPUTE_BYTES, MAIN_BYTES, MOMENTS
from autoptd.doctor.facts import Finding
from autoptd.plans.model import Plan

GIB = 2**30
_AT_ONCE = 2  # checkpoints on disk during a save: the last one, and the one being written


def check_folder(folder: Path, plan: Plan | None) -> Iterator[Finding]:
    """Write, flush and rename files, and measure the free space. Removes all that it makes."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        fix = "give a folder that exists, or that can be made"
        yield Finding("FAIL", "checkpoints", f"{existing} is a file", fix)
        return
    try:
        with tempfile.TemporaryDirectory(prefix=".autoptd-doctor-", dir=existing) as trial:
            _try_operations(Path(trial))
    except OSError as error:
        fix = "give a folder on a file system where files can be made, flushed and renamed"
        yield Finding("FAIL", "checkpoints", f"{existing}: {error.strerror}", fix)
        return
    yield Finding("ok", "checkpoints", f"files can be written, flushed and renamed in {existing}")
    yield _free(existing, plan)


def _try_operations(trial: Path) -> None:
    old, new = trial / "old", trial / "new"
    for path in (old, new):
        with path.open("wb") as file:
            file.write(b"doctor" + path.name.encode())
            file.flush()
            os.fsync(file.fileno())
    new.replace(old)  # replaces an existing file, as is done with `latest`
    descriptor = os.open(trial, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if old.read_bytes() != b"doctornew":
        raise OSError(0, "a file does not hold what was written to it")


def _free(folder: Path, plan: Plan | None) -> Finding:
    free = shutil.disk_usage(folder).free
    if plan is None:
        return Finding("ok", "free space", f"{free / GIB:.1f} GiB; --plan FILE compares it with a checkpoint's size")
    needed = checkpoint_bytes(plan)
    seen = f"{free / GIB:.1f} GiB; a checkpoint takes up to {needed / GIB:.1f} GiB"
    if free < needed:
        return Finding("FAIL", "free space", seen, "give a folder on a larger file system")
    if free < _AT_ONCE * needed:
        seen += ", and the previous one is removed only after the next is complete"
        return Finding("warn", "free space", seen, "free some space")
    return Finding("ok", "free space", seen)


def checkpoint_bytes(plan: Plan) -> int:
    """Return an upper bound on the bytes of a checkpoint: (moments + 1) · main bytes · elements.

    It counts tensors that are replicated over tp once per tp rank; a checkpoint holds them once.
    """
    moments, main, compute = MOMENTS.get(plan.optimizer, 2), MAIN_BYTES[plan.precision], COMPUTE_BYTES[plan.precision]
    copies = moments + (main != compute and plan.zero < 3)  # values per element that the plan counts as optimizer state
    data = (plan.method.shards or plan.mesh.dp * plan.mesh.cp) if plan.zero else 1
    if copies:
        elements = sum(stage.get("optimizer", 0) for stage in plan.predicted.memory) * data / (copies * main)
    else:  # no optimizer state: count parameters
        elements = sum(stage.get("parameters", 0) for stage in plan.predicted.memory) / compute
    return round(elements * plan.mesh.tp * (moments + 1) * main)
