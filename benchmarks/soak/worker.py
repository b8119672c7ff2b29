"""One rank of the job that faults are planted in: it resumes, trains, saves, and notes losses and durable steps."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import autoptd
from autoptd.models.nanogpt import GPTSizes, NanoGPT
from autoptd.runtime.comm.processes import connect_processes
from autoptd.runtime.faults.heartbeat import Timeouts
from benchmarks.soak.faults import SAVE_EVERY, Fault, plant

SIZES = GPTSizes(vocab=32, max_seq=8, width=16, layers=2, heads=2, dropout=0.1)
WORLD, BATCH, SAMPLES = 4, 16, 80
PLANS: Mapping[str, Mapping[str, int]] = {
    "dp 2, pp 2, ZeRO 1": {"dp": 2, "tp": 1, "pp": 2, "zero": 1, "micro": 2},
    "dp 2, tp 2, ZeRO 3": {"dp": 2, "tp": 2, "pp": 1, "zero": 3, "micro": 4},
}


@dataclass(frozen=True)
class Job:
    """Program of a plan and its initial values; forked processes inherit both."""

    parallel: autoptd.Parallel
    values: Mapping[str, Tensor]


def make_jobs() -> list[Job]:
    """Return a job per plan, of the same model."""
    torch.manual_seed(0)
    source = autoptd.trace(NanoGPT(SIZES), seq=8, precision="fp32")
    made = [
        autoptd.parallelize(source, world=WORLD, batch=BATCH, cluster="dgx-h100", fix=dict(fix), clip_norm=1.0)
        for fix in PLANS.values()
    ]
    return [Job(each, each.initial_values()) for each in made]  # type: ignore[arg-type]


@dataclass(frozen=True)
class Run:
    """Options of one launch: resume from the newest checkpoint in `root`, train `steps` more or to step `until`."""

    root: Path
    notes: Path
    port: int
    limits: Timeouts
    steps: int = 6
    until: int | None = None
    saves: bool = True
    fault: Fault | None = None


def main(rank: int, job: Job, run: Run) -> None:
    """Run a rank like a script under a launcher: print exceptions, shut the interpreter down in the usual order."""
    out = os.open(run.notes / f"output.{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
    code = 0
    try:
        _train(rank, job, run)
    except BaseException:  # noqa: BLE001  like the interpreter
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    os._exit(code)


def _train(rank: int, job: Job, run: Run) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(run.port),
        "RANK": str(rank),
        "WORLD_SIZE": str(WORLD),
    }
    par = job.parallel
    par.start(connect_processes(par.layout.mesh, torch.device("cpu"), limits=run.limits), job.values)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(par.optimizer, 1000)
    first = par.resume(run.root, others={"rates": rates})
    _note(run, rank, f"resumed {first}")
    if run.fault is not None:
        plant(run.fault, rank, lambda: par.step - first, lambda: _note(run, rank, f"fault {time.time()}"))
    data = torch.randint(SIZES.vocab, (SAMPLES, 9), generator=torch.Generator().manual_seed(1))
    sampler = par.sampler(SAMPLES)
    sampler.start_at(par.step)
    last = first + run.steps if run.until is None else run.until
    while par.step < last:
        for rows in sampler:
            loss = par.train_step({"idx": data[rows, :-1], "targets": data[rows, 1:]})
            rates.step()
            _note(run, rank, f"loss {par.step} {float(loss).hex()}")
            if run.saves and par.step % SAVE_EVERY == 0:
                par.save(run.root, others={"rates": rates}, keep=4, wait=par.step % (2 * SAVE_EVERY) == 0)
                if par.step % (2 * SAVE_EVERY) == 0:
                    _note(run, rank, f"durable {par.step}")
            if par.step >= last:
                break
    par.finish_saving()
    _note(run, rank, f"ended {_digest(par)}")


def _digest(par: autoptd.Parallel) -> str:
    state = {name: x.double().sum() for name, x in par.state_dict().items()}
    bits = torch.stack([x.view(-1).view(torch.int32).long().sum() for x in par.state_dict().values()])
    return f"{float(sum(state.values())).hex()} {int(bits.sum())}"


def _note(run: Run, rank: int, line: str) -> None:
    """Append a line to the rank's notes at once, so that it survives a kill."""
    with (run.notes / f"notes.{rank}").open("a", buffering=1) as file:
        file.write(line + "\n")
