"""`elastic_training.py FOLDER STEPS`: train until a number of steps, from the newest checkpoint of the folder.

Each rank appends a line for each step to a file of its own: the step, its loss, this rank's samples, and its round.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autoptd

BATCH, SAMPLES, SAVE_EVERY = 12, 60, 3


class Net(nn.Module):
    """A stack with dropout, so that its random state must be restored."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1)) for _ in range(4))
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


def made(world: int) -> autoptd.Parallel:
    torch.manual_seed(0)
    example = torch.zeros(2, 16, dtype=torch.float64)
    asked = {"inputs": {"x": example}, "targets": example[:, :4], "loss": nn.functional.mse_loss, "precision": "fp64"}
    return autoptd.parallelize(
        Net().double(), world=world, cluster="local", batch=BATCH, optimizer_options={"lr": 0.05}, **asked
    )


def data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x, x[:, :4].sin()


def train(folder: Path, steps: int, pause_s: float = 0.0) -> None:
    par = made(int(os.environ.get("WORLD_SIZE", "1")))
    stop = par.stop_request()
    start = par.resume(folder)
    x, y = data()
    sampler = par.sampler(SAMPLES, seed=3)
    sampler.start_at(par.step)
    begun = torch.tensor([time.time()], dtype=torch.float64)
    par._running.communicators.world.broadcast(begun, 0)
    ours = {"round": float(begun), "start": start, "world": par.plan.world, "mesh": str(par.plan.mesh)}
    ours |= {"pid": os.getpid(), "agent": os.getppid()}
    log = folder.parent / f"{folder.name}-log" / f"{time.time_ns()}-{par.rank}.jsonl"
    log.parent.mkdir(exist_ok=True)
    while par.step < steps:
        for rows in sampler:
            loss = float(par.train_step({"x": x[rows], "targets": y[rows]}))
            with log.open("a") as file:
                file.write(json.dumps({"step": par.step, "loss": loss, "rows": rows, **ours}) + "\n")
            time.sleep(pause_s)
            asked = stop.asked()
            if par.step % SAVE_EVERY == 0 or asked or par.step == steps:
                par.save(folder, keep=2)
            if asked:
                sys.exit(stop.exit_code)
            if par.step == steps:
                break


def alone(steps: int) -> list[dict[str, Any]]:
    """Return what one process logs that nothing interrupts."""
    par, (x, y), lines = made(1), data(), list[dict[str, Any]]()
    sampler = par.sampler(SAMPLES, seed=3)
    while par.step < steps:
        for rows in sampler:
            loss = float(par.train_step({"x": x[rows], "targets": y[rows]}))
            lines.append({"step": par.step, "loss": loss, "rows": rows})
    return lines[:steps]


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
