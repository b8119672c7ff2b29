"""A pool of gloo processes on this machine, reused between jobs: the multi-process counterpart of `run_lockstep`.

Workers are forked from a server that has imported torch once. They run any number of jobs, on any mesh of their size.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, TypeVar

import torch

from autoptd.errors import RuntimeFault
from autoptd.layout.mesh import Mesh
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.listening import LOOPBACK, on_loopback
from autoptd.runtime.comm.processes import connect_processes

T = TypeVar("T")
# Imported once, by the fork server, of which a process has one; others append what they need before it starts. An
# optimizer imports the last one on its first call.
PRELOADED = [
    "torch",
    "torch.distributed",
    "autoptd.runtime.trainer",
    "autoptd.api",
    "autoptd.compile.make_plan",
    "autoptd.checkpoint.session",
    "torch._dynamo",
]


class ProcessPool:
    """A context manager: `with ProcessPool(8) as pool: pool.run(mesh, fn, *args)`. A failed job ends the workers."""

    def __init__(self, world: int, timeout_s: float = 120.0) -> None:
        self.world, self.timeout_s = world, timeout_s
        self._workers: list[Any] = []
        self._pipes: list[Connection] = []
        self._port: socket.socket | None = None

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, mesh: Mesh, fn: Callable[..., T], *args: object) -> list[T]:
        """Call `fn(communicators, *args)` on every rank; return the results by rank. All of these are pickled.

        Raises RuntimeFault with the first failed rank's traceback, or naming the ranks that did not answer in time.
        """
        assert mesh.world == self.world, (mesh, self.world)
        if not self._workers:
            self._start()
        for pipe in self._pipes:
            pipe.send((mesh, fn, args))
        results: dict[int, Any] = {}
        while len(results) < self.world:
            waiting = {self._pipes[rank]: rank for rank in range(self.world) if rank not in results}
            ready = wait(list(waiting), self.timeout_s)
            if not ready:
                self.close()
                raise RuntimeFault(
                    f"ranks {sorted(waiting.values())} did not answer in {self.timeout_s:g} s", where=str(mesh)
                )
            for pipe, rank in waiting.items():
                if pipe in ready:
                    results[rank] = self._read(pipe, rank, mesh)
        return [results[rank] for rank in range(self.world)]

    def _read(self, pipe: Connection, rank: int, mesh: Mesh) -> Any:
        try:
            good, result = pipe.recv()
        except EOFError:
            good, result = False, "the process ended"
        if not good:
            self.close()
            raise RuntimeFault(f"rank {rank} failed\n{result}", where=str(mesh))
        return result

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._port = socket.socket()  # held while the workers live: a free port that is not bound may be taken
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind((LOOPBACK, 0))
        port = self._port.getsockname()[1]
        for rank in range(self.world):
            mine, theirs = context.Pipe()
            worker = context.Process(target=_work, args=(theirs, rank, self.world, port, self.timeout_s), daemon=True)
            worker.start()
            theirs.close()
            self._workers.append(worker)
            self._pipes.append(mine)

    def close(self) -> None:
        """End the workers."""
        for pipe in self._pipes:
            pipe.close()
        for worker in self._workers:
            worker.terminate()
            worker.join()
        self._workers, self._pipes = [], []
        if self._port is not None:
            self._port.close()
            self._port = None


def _work(pipe: Connection, rank: int, world: int, port: int, timeout_s: float) -> None:
    """Run jobs until the pipe closes. The communicators of a mesh are made once."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(world)}
    made: dict[Mesh, Communicators] = {}
    while True:
        try:
            mesh, fn, args = pipe.recv()
        except EOFError:
            return
        try:
            if mesh not in made:
                with on_loopback():
                    made[mesh] = connect_processes(mesh, torch.device("cpu"), timeout_s)
            pipe.send((True, fn(made[mesh], *args)))
        except BaseException:  # noqa: BLE001  reported to the caller, who ends this process
            pipe.send((False, traceback.format_exc()))
