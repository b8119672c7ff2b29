"""Can checkpoints be written here: what `autoptd.checkpoint.folder` does, tried out with a few bytes."""

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
_KEPT = 2  # checkpoints that lie there at once: the last one, and the one that is being written


def check_folder(folder: Path, plan: Plan | None) -> Iterator[Finding]:
    """Write, flush, rename, and count what is free. What it makes, it removes."""
    standing = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if not standing.is_dir():
        fix = "name a folder that exists, or that can be made"
        yield Finding("FAIL", "checkpoints", f"{standing} is a file", fix)
        return
    try:
        with tempfile.TemporaryDirectory(prefix=".autoptd-doctor-", dir=standing) as made:
            _try_out(Path(made))
    except OSError as error:
        fix = "name a folder on a file system where files can be made, flushed and renamed"
        yield Finding("FAIL", "checkpoints", f"{standing}: {error.strerror}", fix)
        return
    yield Finding("ok", "checkpoints", f"{standing} can be written, flushed and renamed in")
    yield _free(standing, plan)


def _try_out(made: Path) -> None:
    old, new = made / "old", made / "new"
    for path in (old, new):
        with path.open("wb") as file:
            file.write(b"doctor" + path.name.encode())
            file.flush()
            os.fsync(file.fileno())
    new.replace(old)  # over one that exists, as `latest` is
    descriptor = os.open(made, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if old.read_bytes() != b"doctornew":
        raise OSError(0, "what was written is not what is read")


def _free(standing: Path, plan: Plan | None) -> Finding:
    free = shutil.disk_usage(standing).free
    if plan is None:
        return Finding("ok", "free space", f"{free / GIB:.1f} GiB; with --plan FILE it is held against a checkpoint")
    needed = checkpoint_bytes(plan)
    seen = f"{free / GIB:.1f} GiB; a checkpoint takes up to {needed / GIB:.1f}"
    if free < needed:
        return Finding("FAIL", "free space", seen, "name a larger file system")
    if free < _KEPT * needed:
        return Finding("warn", "free space", f"{seen}, and the one before it is kept until it is whole", "make room")
    return Finding("ok", "free space", seen)


def checkpoint_bytes(plan: Plan) -> int:
    """Of parameters in full precision and the optimizer's moments: (k + 1) · main · elements.

    At most: what every tp rank holds whole is counted once for each here, and stands once in a file.
    """
    moments, main, compute = MOMENTS.get(plan.optimizer, 2), MAIN_BYTES[plan.precision], COMPUTE_BYTES[plan.precision]
    kept = moments + (main != compute and plan.zero < 3)  # copies of each element in the optimizer's part
    data = (plan.method.shards or plan.mesh.dp * plan.mesh.cp) if plan.zero else 1
    if kept:
        elements = sum(stage.get("optimizer", 0) for stage in plan.predicted.memory) * data / (kept * main)
    else:  # no moments: its parameters alone
        elements = sum(stage.get("parameters", 0) for stage in plan.predicted.memory) / compute
    return round(elements * plan.mesh.tp * (moments + 1) * main)
