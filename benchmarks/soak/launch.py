"""Launcher of the four ranks of a job: starts them, waits until all have ended, and reads their notes."""

from __future__ import annotations

import multiprocessing
import socket
import time
from dataclasses import dataclass, field

from benchmarks.soak.worker import WORLD, Job, Run, main

BOUND_S = 20.0  # longest time from a fault to the end of the last rank
_LIMIT_S = 180.0  # longest time of a launch until its fault, or its end


@dataclass
class Outcome:
    """Output and notes of each rank. `seconds`: from the fault to the end of the last rank; None without a fault."""

    output: list[str]
    resumed: list[int]
    losses: list[dict[int, str]]
    durable: int
    digests: list[str]
    codes: list[int | None]
    seconds: float | None = None
    hung: list[int] = field(default_factory=list)


def launch(job: Job, run: Run, ends_with: int | None = None) -> Outcome:
    """Run a job to its end. `ends_with`: a rank whose end ends the others, as under a launcher."""
    context = multiprocessing.get_context("fork")
    run.notes.mkdir()
    ranks = [context.Process(target=main, args=(rank, job, run)) for rank in range(WORLD)]
    began = time.time()
    for each in ranks:
        each.start()
    fault: float | None = None
    while any(each.exitcode is None for each in ranks):
        time.sleep(0.05)
        fault = fault or _fault_of(run)
        if time.time() - (fault or began) > (BOUND_S if fault else _LIMIT_S):
            break
        if ends_with is not None and ranks[ends_with].exitcode is not None:
            fault = began
            break
    ended = time.time()
    hung = [r for r, each in enumerate(ranks) if each.exitcode is None]
    codes = [each.exitcode for each in ranks]
    for each in ranks:
        each.kill()
        each.join()
    outcome = _read(run, codes)
    outcome.hung = [] if ends_with is not None else hung
    outcome.seconds = None if (fault := fault or _fault_of(run)) is None else ended - fault
    return outcome


def _fault_of(run: Run) -> float | None:
    times = [float(line.split()[1]) for rank in range(WORLD) for line in _notes(run, rank) if line.startswith("fault")]
    return min(times, default=None)


def _notes(run: Run, rank: int) -> list[str]:
    path = run.notes / f"notes.{rank}"
    return [line for line in path.read_text().split("\n")[:-1] if line] if path.exists() else []


def _read(run: Run, codes: list[int | None]) -> Outcome:
    output, resumed, losses, digests, durable = [], list[int](), list[dict[int, str]](), list[str](), 0
    for rank in range(WORLD):
        path = run.notes / f"output.{rank}"
        output.append(path.read_text(errors="replace") if path.exists() else "")
        losses.append({})
        for line in _notes(run, rank):
            match line.split(" ", 1):
                case ["resumed", step]:
                    resumed.append(int(step))
                case ["loss", text]:
                    losses[-1][int(text.split()[0])] = text.split()[1]
                case ["durable", step]:
                    durable = max(durable, int(step))
                case ["ended", text]:
                    digests.append(text)
    return Outcome(output, resumed, losses, durable, digests, codes)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
