"""Asynchronous saving: this rank's elements are copied at once, and a thread writes them while training continues.

At most one copy exists at a time: the next save waits for the one in progress. The thread has a gloo group of its own,
so its collectives cannot interleave with those of a training step. An error in it is raised on all ranks by the next
save or by `wait`; one that no call has raised by the end of the process is printed, and the process ends with status 1.
"""

from __future__ import annotations

import atexit
import logging
import shutil
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
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
from autoptd.outputs import exit_now, to_stderr
from autoptd.runtime.comm.along_tree import Reasons, of_all, to_root
from autoptd.runtime.comm.members import group_of_members

T = TypeVar("T")
_unseen: list[BaseException] = []  # errors of saves that no call has raised by the end of the process


@atexit.register  # runs after all that is registered later
def _exit_with_status_1() -> None:
    """End the process with status 1, which no handler at exit can return, if a save failed that no call waited for."""
    if _unseen:
        logging.shutdown()
        exit_now(1)


@dataclass(frozen=True)
class _RankFiles:
    """The files that a rank wrote: their digests, and the index of its tensors in them, ours and torch's."""

    digests: Mapping[str, str]
    index: Index
    metadata: Metadata


@dataclass(frozen=True)
class _Job:
    """A checkpoint to write. `files` and `manifest` are used on rank 0 alone."""

    root: Path
    step: int
    entries: Sequence[Entry]  # copies
    files: Mapping[str, bytes]
    failed: CheckpointError | None  # the error in making `files`
    manifest: Mapping[str, Any]
    keep: int | None
    leave: Collection[str]  # names of checkpoints of other runs

    def prepare(self) -> None:
        if self.failed is not None:
            raise self.failed
        folder.prepare(self.root, self.step)

    def commit(self, by_rank: Sequence[_RankFiles]) -> Path:
        part = folder.part_of(self.root, self.step)
        text = to_json(merged(each.index for each in by_rank))
        folder.write_durably(part / folder.INDEX, text.encode())
        digests = {name: found for each in by_rank for name, found in each.digests.items()}
        dcp.write_index(part, (each.metadata for each in by_rank))
        digests |= {name: digest(part / name) for name in (folder.INDEX, METADATA)}
        return folder.commit(self.root, self.step, self.manifest, digests, self.keep, self.leave)


class Saver:
    """The process's writer of checkpoints. Construction is a collective of all ranks of the world."""

    def __init__(self) -> None:
        world = dist.get_world_size() if dist.is_initialized() else 1
        self.group: dist.ProcessGroup | None = None
        if world > 1:  # only rank 0 has messages for all others, so that a rank needs few connections
            self.group = group_of_members("checkpoints", range(world), "gloo", lazy=True)
        self.rank = dist.get_rank() if world > 1 else 0
        self._written: threading.Event | None = None  # of the save in progress
        self._error: BaseException | None = None
        self._saving = ""
        atexit.register(self._say_what_failed)  # runs once the thread has ended

    def start(
        self,
        root: Path,
        step: int,
        entries: Sequence[Entry],
        progress: Mapping[str, Any],
        texts: Mapping[str, str],
        manifest: Mapping[str, Any],
        keep: int | None,
        leave: Collection[str] = (),
    ) -> None:
        """Copy this rank's entries and start writing them. A collective.

        progress: the fields of `progress.pt`. texts: further files, by name. leave: checkpoints that are not removed.
        Of all these, and of `manifest`, only rank 0's are used.
        """
        self.wait()
        files: dict[str, bytes] = {}
        failed: CheckpointError | None = None
        if self.rank == 0:
            files = {name: text.encode() for name, text in texts.items()}
            try:
                files[folder.PROGRESS] = to_bytes(progress)
            except CheckpointError as error:
                failed = error  # the thread raises it on all ranks
        job = _Job(root, step, copied(entries), files, failed, manifest, keep, leave)
        self._saving = f"step {step} into {root}"
        written = threading.Event()
        thread = threading.Thread(target=self._run, args=(job, written), name=f"save of step {step}")
        self._written = written
        try:
            thread.start()
        except RuntimeError:  # there can be no further thread
            self._written = None
            raise

    def wait(self) -> None:
        """Wait until the checkpoint in progress is durable. Raises the error of its thread.

        An interrupt of `Thread.join` would take a thread that runs for one that has ended (seen in Python 3.11).
        """
        if self._written is not None:
            self._written.wait()
            self._written = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _say_what_failed(self) -> None:
        """Print an error that no call has raised. Ranks share a CheckpointError, which the first one prints."""
        _unseen.extend([self._error] if self._error is not None else [])
        if self._error is not None and (self.rank == 0 or not isinstance(self._error, CheckpointError)):
            fix = "end the script with finish_saving(), which raises this error"
            text = f"saving {self._saving} failed: {self._error}\n  fix    {fix}"
            to_stderr(text)

    def _run(self, job: _Job, written: threading.Event) -> None:
        try:
            self._write(job)
        except BaseException as error:  # noqa: BLE001  raised by `wait`
            self._error = error
        finally:
            written.set()

    def _write(self, job: _Job) -> None:
        part = folder.part_of(job.root, job.step)
        try:
            self.on_all_ranks("prepare", lambda: job.prepare() if self.rank == 0 else None)
            metadata = self.on_all_ranks("tensors", lambda: dcp.write(part, job.entries, self.rank))
            mine = self.on_all_ranks("finish", lambda: self._finish(part, job.files, metadata))
            by_rank = self._gather(mine)
            self.on_all_ranks("commit", lambda: job.commit(by_rank) if self.rank == 0 else None)
        except CheckpointError:
            if self.rank == 0:
                shutil.rmtree(part, ignore_errors=True)
            raise

    def _finish(self, part: Path, files: Mapping[str, bytes], metadata: Metadata) -> _RankFiles:
        """Write the small files; return digests and index of all files that this rank wrote."""
        for name, data in files.items():
            folder.write_durably(part / name, data)
        mine = [path.name for path in part.glob(f"__{self.rank}_*")]
        mine += files
        index = dcp.written_by(self.rank, part, metadata)
        return _RankFiles({name: digest(part / name) for name in mine}, index, metadata)

    def _gather(self, mine: T) -> list[T]:
        """Return the values of all ranks, by rank, on rank 0. A collective."""
        found = to_root({self.rank: mine}, lambda a, b: a | b, self.group)
        return [found[rank] for rank in sorted(found)]

    def on_all_ranks(self, step: str, do: Callable[[], T]) -> T:
        """Run a step of saving on each rank. Raises CheckpointError on all ranks if it fails on one. A collective."""
        failure, found = "", None
        try:
            found = do()
        except (OSError, CheckpointError) as error:
            failure = error.what if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        failed = self.reasons(failure)
        if failed.count:
            (rank, text), *others = failed.first
            where = [f"{step}, rank {rank}", *(f"rank {other}: {theirs}" for other, theirs in others), *failed.more()]
            raise CheckpointError(f"checkpoints cannot be written: {text}", where="\n".join(where))
        return cast(T, found)

    def reasons(self, mine: str) -> Reasons:
        """Return what ranks found wrong, the same on all; "" for nothing. A collective."""
        return of_all(Reasons.of(self.rank, mine), Reasons.merged, self.group)

    def agree(self, what: str, mine: str, fix: str) -> None:
        """Raise CheckpointError `what` on all ranks unless all have the same text. A collective."""
        found = of_all({self.rank: mine}, _first_that_differ, self.group)
        if len(found) > 1:
            where = "\n".join(f"rank {rank}: {text}" for rank, text in found.items())
            raise CheckpointError(what, where=where, fix=fix)


def _first_that_differ(a: Mapping[int, str], b: Mapping[int, str]) -> dict[int, str]:
    """Return the text of the lowest rank, and of the lowest rank with another one, by rank."""
    found: dict[int, str] = {}
    for rank, value in sorted({**a, **b}.items()):
        if len(found) < 2 and value not in found.values():
            found[rank] = value
    return found
