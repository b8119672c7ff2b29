"""Write checkpoints beside training: a copy is taken at once, the rest happens in a thread of its own.

At most one copy exists at a time, of this rank's own elements: the next save waits for the one under way. The thread
talks through a gloo group that nobody else uses, so its collectives never stand between those of a step. What went
wrong in it is raised by the next save, or by `wait`, on every rank.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from autoptd.checkpoint import dcp, folder
from autoptd.checkpoint.entries import Entry, copied
from autoptd.checkpoint.files import digest
from autoptd.checkpoint.index import Index, merged, to_json
from autoptd.checkpoint.progress import to_bytes
from autoptd.checkpoint.torch_index import METADATA
from autoptd.errors import CheckpointError

T = TypeVar("T")


@dataclass(frozen=True)
class _Sealed:
    """What a rank has written: digests of its files, and where its tensors are in them."""

    digests: Mapping[str, str]
    index: Index


@dataclass(frozen=True)
class _Job:
    """A checkpoint to be written; of `files` and `manifest`, rank 0's count."""

    root: Path
    step: int
    entries: Sequence[Entry]  # copies
    files: Mapping[str, bytes]
    failed: CheckpointError | None  # in making them
    manifest: Mapping[str, Any]
    keep: int | None

    def prepare(self) -> None:
        if self.failed is not None:
            raise self.failed
        folder.prepare(self.root, self.step)

    def commit(self, sealed: Sequence[_Sealed]) -> Path:
        """`sealed`: by rank."""
        part = folder.part_of(self.root, self.step)
        text = to_json(merged(each.index for each in sealed))
        folder.write_durably(part / folder.INDEX, text.encode())
        digests = {name: found for each in sealed for name, found in each.digests.items()}
        digests[folder.INDEX] = digest(part / folder.INDEX)
        return folder.commit(self.root, self.step, self.manifest, digests, self.keep)


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
        files: dict[str, bytes] = {}
        failed: CheckpointError | None = None
        if self.rank == 0:
            files = {name: text.encode() for name, text in texts.items()}
            try:
                files[folder.PROGRESS] = to_bytes(progress)
            except CheckpointError as error:
                failed = error  # told on every rank, by the thread
        job = _Job(root, step, copied(entries), files, failed, manifest, keep)
        self._thread = threading.Thread(target=self._run, args=(job,), name=f"save of step {step}")
        self._thread.start()

    def wait(self) -> None:
        """Until the checkpoint under way is durable. Raises what went wrong."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _run(self, job: _Job) -> None:
        try:
            self._write(job)
        except BaseException as error:  # noqa: BLE001  raised by `wait`
            self._error = error

    def _write(self, job: _Job) -> None:
        part = folder.part_of(job.root, job.step)
        try:
            self.together("prepare", lambda: job.prepare() if self.rank == 0 else None)
            metadata = dcp.write(part, job.entries, self.group)
            sealed = self._gathered(self.together("seal", lambda: self._seal(part, job.files, metadata)))
            self.together("commit", lambda: job.commit(sealed) if self.rank == 0 else None)
        except CheckpointError:
            if self.rank == 0:
                shutil.rmtree(part, ignore_errors=True)
            raise

    def _seal(self, part: Path, files: Mapping[str, bytes], metadata: Metadata) -> _Sealed:
        """Write the small files; say what this rank wrote."""
        for name, data in files.items():
            folder.write_durably(part / name, data)
        mine = [path.name for path in part.glob(f"__{self.rank}_*")]
        mine += [*files, METADATA] if self.rank == 0 else []
        return _Sealed({name: digest(part / name) for name in mine}, dcp.written_by(self.rank, part, metadata))

    def _gathered(self, mine: T) -> list[T]:
        """What each rank has, by rank, on rank 0; nothing elsewhere."""
        if self.group is None:
            return [mine]
        each: list[Any] | None = [None] * dist.get_world_size(self.group) if self.rank == 0 else None
        dist.gather_object(mine, each, dst=0, group=self.group)
        return each or []

    def together(self, what: str, do: Callable[[], T]) -> T:
        """Do a part on each rank; fail on all of them where it fails on one."""
        told, found = "", None
        try:
            found = do()
        except (OSError, CheckpointError) as error:
            told = error.what if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        for rank, text in enumerate(self.everyone(told)):
            if text:
                raise CheckpointError(f"checkpoints cannot be written: {text}", where=f"{what}, rank {rank}")
        return cast(T, found)

    def everyone(self, mine: T) -> list[T]:
        """What each rank has, by rank."""
        if self.group is None:
            return [mine]
        each: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(each, mine, group=self.group)
        return each
