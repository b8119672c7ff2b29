"""Write checkpoints beside training: a copy is taken at once, the rest happens in a thread of its own.

At most one copy exists at a time, of this rank's own elements: the next save waits for the one under way. The thread
talks through a gloo group that nobody else uses, so its collectives never stand between those of a step. What went
wrong in it is raised by the next save, or by `wait`, on every rank.
"""

from __future__ import annotations

import io
import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autoptd.checkpoint import dcp, folder
from autoptd.checkpoint.entries import Entry, copied
from autoptd.errors import CheckpointError


class Saver:
    """One per process. Made by all ranks of the world together."""

    def __init__(self) -> None:
        several = dist.is_initialized() and dist.get_world_size() > 1
        self.group: dist.ProcessGroup | None = dist.new_group(backend="gloo") if several else None
        self.rank = dist.get_rank() if several else 0
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(
        self,
        root: Path,
        step: int,
        entries: Sequence[Entry],
        progress: Mapping[str, Any],
        texts: Mapping[str, str],
        manifest: Mapping[str, Any],
        keep: int | None,
    ) -> None:
        """Copy this rank's entries and write them later. `texts` are files by name, `progress` goes to one of torch's.

        A collective, of which `progress`, `texts` and `manifest` are rank 0's.
        """
        self.wait()
        blob = io.BytesIO()
        torch.save(dict(progress), blob)
        files = {folder.PROGRESS: blob.getvalue(), **{name: text.encode() for name, text in texts.items()}}
        job = (root, step, copied(entries), files if self.rank == 0 else {}, manifest, keep)
        self._thread = threading.Thread(target=self._run, args=job, name=f"save of step {step}")
        self._thread.start()

    def wait(self) -> None:
        """Until the checkpoint under way is durable. Raises what went wrong."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _run(
        self,
        root: Path,
        step: int,
        entries: Sequence[Entry],
        files: Mapping[str, bytes],
        manifest: Mapping[str, Any],
        keep: int | None,
    ) -> None:
        try:
            self._write(root, step, entries, files, manifest, keep)
        except BaseException as error:  # noqa: BLE001  raised by `wait`
            self._error = error

    def _write(
        self,
        root: Path,
        step: int,
        entries: Sequence[Entry],
        files: Mapping[str, bytes],
        manifest: Mapping[str, Any],
        keep: int | None,
    ) -> None:
        part = folder.part_of(root, step)
        try:
            self._together("prepare", lambda: folder.prepare(root, step) if self.rank == 0 else None)
            dcp.write(part, entries, self.group)
            digests = self._gathered(self._together("seal", lambda: self._seal(part, files)))
            self._together(
                "commit", lambda: folder.commit(root, step, manifest, digests, keep) if self.rank == 0 else None
            )
        except CheckpointError:
            if self.rank == 0:
                shutil.rmtree(part, ignore_errors=True)
            raise

    def _seal(self, part: Path, files: Mapping[str, bytes]) -> dict[str, str]:
        """Write the small files; digests of what this rank wrote."""
        for name, data in files.items():
            folder.write_durably(part / name, data)
        mine = [path.name for path in part.glob(f"__{self.rank}_*")]
        mine += [*files, dcp.INDEX] if self.rank == 0 else []
        return {name: folder.digest(part / name) for name in mine}

    def _together(self, what: str, do: Any) -> Any:
        """Do a part on each rank; fail on all of them where it fails on one."""
        told, found = "", None
        try:
            found = do()
        except (OSError, CheckpointError) as error:
            told = error.what if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        if self.group is not None:
            each: list[str] = [""] * dist.get_world_size(self.group)
            dist.all_gather_object(each, told, group=self.group)
        else:
            each = [told]
        for rank, text in enumerate(each):
            if text:
                raise CheckpointError(f"the checkpoint cannot be written: {text}", where=f"{what}, rank {rank}")
        return found

    def _gathered(self, mine: dict[str, str]) -> dict[str, str]:
        if self.group is None:
            return mine
        each: list[dict[str, str]] = [{} for _ in range(dist.get_world_size(self.group))]
        dist.all_gather_object(each, mine, group=self.group)
        return {name: text for found in each for name, text in found.items()}
