"""Scripts on several ranks, as torchrun starts them, but forked from a server that has imported torch and autoptd once:
imports take each of torchrun's processes more than its training of a tiny model."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import runpy
import socket
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from autoptd.runtime.comm.listening import LOOPBACK, on_loopback
from autoptd.testing.process_pool import PRELOADED


def run_script(ranks: int, script: str | Path, *arguments: str, limit_s: float = 240) -> tuple[int, str]:
    """Run a script on `ranks` processes in the working folder; return 0 and what they print, in the order of the ranks;
    or 1 and the traceback of the first rank that fails."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with socket.socket() as held:  # a free port that is not bound may be taken
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((LOOPBACK, 0))
        sizes = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        where = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(held.getsockname()[1])}
        started = []
        for rank in range(ranks):
            mine, theirs = context.Pipe(duplex=False)
            env = {**os.environ, **sizes, **where, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            job = (theirs, env, str(Path.cwd()), str(script), arguments)
            process = context.Process(target=_run, args=job, daemon=True)
            process.start()
            theirs.close()
            started.append((process, mine))
        try:
            found = [_answer(pipe, limit_s) for _, pipe in started]
        finally:
            for process, _ in started:
                process.terminate()
                process.join()
    wrong = [said for code, said in found if code]
    return (1, wrong[0]) if wrong else (0, "".join(said for _, said in found))


def _answer(pipe: Connection, limit_s: float) -> tuple[int, str]:
    try:
        return pipe.recv() if pipe.poll(limit_s) else (1, f"no answer in {limit_s:g} s")
    except EOFError:
        return 1, "the process ended"


def _run(pipe: Connection, env: dict[str, str], folder: str, script: str, arguments: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    os.environ.update(env)
    os.chdir(folder)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        with contextlib.redirect_stdout(io.StringIO()) as said, on_loopback():
            runpy.run_path(script, run_name="__main__")
        pipe.send((0, said.getvalue()))
    except BaseException:  # noqa: BLE001  reported to the caller
        pipe.send((1, traceback.format_exc()))
    pipe.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
