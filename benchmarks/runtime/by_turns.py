"""Work of one process: alternating steps of both programs, or the peak memory of one program alone."""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from autoptd.codegen.emit import Program, load_stage
from autoptd.layout.layout import Layout
from autoptd.ops.tp_axis import Axis
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.trainer import Trainer
from benchmarks.runtime.by_hand import Step, program
from benchmarks.runtime.model import TIMED, Sizes

OPTIONS: Mapping[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "fused": True}
WARM_UP = 3


@dataclass(frozen=True)
class Task:
    """Program and initial values of a case; picklable. `samples`: per dp rank and step; `against`: the baseline."""

    program: Program
    layout: Layout
    values: Mapping[str, Tensor]
    against: str
    samples: int
    microbatches: int
    sizes: Sizes = TIMED


@dataclass(frozen=True)
class Outcome:
    """Step seconds of the emitted program and of the baseline, in pairs; peak bytes of the fullest rank for each.

    `seconds`: of the wall clock; `cpu_s`: of the processor, over all ranks, in which other load on the machine is not.
    """

    seconds: list[tuple[float, float]]
    cpu_s: list[tuple[float, float]]
    ours_bytes: int
    theirs_bytes: int


def trainer_of(c: Communicators, task: Task) -> Trainer:
    """Return this rank's trainer with the initial values. A collective."""
    with torch.device("meta"):
        stages = [load_stage(task.program, stage)(Axis(c.tp)) for stage in c.mesh.stages_of(c.stage)]
    trainer = Trainer(stages, task.layout, c, "adamw", clip_norm=1.0, **OPTIONS)
    trainer.load_parameters(task.values)
    return trainer


def _ours(c: Communicators, task: Task) -> Step:
    trainer = trainer_of(c, task)

    def step(batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        loss = trainer.train_step(batch)
        assert trainer.grad_norm is not None
        return loss, trainer.grad_norm

    return step


def _theirs(c: Communicators, task: Task) -> Step:
    values = {name.removeprefix("decoder."): x for name, x in task.values.items()}
    return program(task.layout.mesh, task.against, OPTIONS, values, task.microbatches)


def batch_of(c: Communicators, task: Task, generator: torch.Generator) -> dict[str, Tensor]:
    """Return this rank's random tokens and targets; all ranks of one dp index get the same ones."""
    shape = (c.mesh.dp, task.samples, task.sizes.seq + 1)
    tokens = torch.randint(task.sizes.vocab, shape, generator=generator)[c.dp.rank]
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def by_turns(c: Communicators, task: Task, pairs: int) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Return step seconds of the emitted program and of the baseline, in pairs, and this rank's of the processor.

    Collective: all ranks call it.
    """
    both = _ours(c, task), _theirs(c, task)
    generator = torch.Generator().manual_seed(0)
    found, on_cpu = [], []
    for pair in range(WARM_UP + pairs):
        batch = batch_of(c, task, generator)
        seconds, cpu_s, reported = [0.0, 0.0], [0.0, 0.0], [torch.zeros(2), torch.zeros(2)]
        for which in (0, 1) if pair % 2 else (1, 0):
            dist.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            reported[which] = torch.stack([_whole(x) for x in both[which](batch)])
            cpu_s[which] = time.process_time() - cpu_start
            dist.barrier()
            seconds[which] = time.perf_counter() - start
        if pair == 0:
            _check_same(c, *reported)
        if pair >= WARM_UP:
            found.append((seconds[0], seconds[1]))
            on_cpu.append((cpu_s[0], cpu_s[1]))
    return found, on_cpu


def _whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().to(torch.float64)


def _check_same(c: Communicators, ours: Tensor, theirs: Tensor) -> None:
    """Check that both programs have the same loss, averaged over ranks of the last stage, and gradient norm."""
    total = torch.tensor([float(theirs[0]) if c.stage == c.mesh.pp - 1 else 0.0], dtype=torch.float64)
    dist.all_reduce(total)
    theirs[0] = total[0] / (c.mesh.dp * c.mesh.tp)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=0)


def peak_bytes(c: Communicators, task: Task, ours: bool) -> int:
    """Return the peak bytes of all tensors of this process, from building the program to the end of its third step."""
    make: Callable[[Communicators, Task], Step] = _ours if ours else _theirs
    generator = torch.Generator().manual_seed(0)
    gc.collect()  # else garbage of an earlier program would be freed while this one is measured
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step = make(c, task)
        for _ in range(3):
            step(batch_of(c, task, generator))
        dist.barrier()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    return most_alive(e["args"] for e in sorted(events, key=lambda e: float(e["ts"])))


def most_alive(events: Iterable[Mapping[str, int]]) -> int:
    """Return the peak of live bytes over allocations and releases (negative "Bytes") in order of time.

    The profiler does not see releases by threads that it does not watch, such as gloo's; an address that is allocated
    a second time counts as released before.
    """
    alive: dict[int, int] = {}
    most = now = 0
    for event in events:
        address, size = event["Addr"], event["Bytes"]
        now -= alive.pop(address, 0)
        if size > 0:
            alive[address] = size
            now += size
        most = max(most, now)
    return most
