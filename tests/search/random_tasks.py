"""Small models of several shapes, traced once, and random planning tasks for them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autoptd
from autoptd.cost_models.cluster import Cluster
from autoptd.cost_models.memory import communicator_bytes
from autoptd.errors import PlanError
from autoptd.models.nanogpt import GPTSizes as NanoSizes
from autoptd.models.nanogpt import NanoGPT
from autoptd.progress import Silent
from autoptd.search.constraints.options import DIMENSIONS, read_constraints
from autoptd.search.planner import Planner, Task

SEQ = 256


class Uneven(nn.Module):
    """Blocks of growing width, and a wide head: nothing repeats."""

    def __init__(self, widths: tuple[int, ...] = (64, 128, 128, 256), classes: int = 512) -> None:
        super().__init__()
        pairs = zip(widths, (*widths[1:], widths[-1]), strict=True)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(a, 4 * a), nn.GELU(), nn.Linear(4 * a, b)) for a, b in pairs
        )
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), y.flatten())


@cache
def traced(name: str) -> autoptd.TracedModel:
    with torch.device("meta"):
        if name.startswith("gpt"):
            layers, width, vocab = map(int, name.split("-")[1:])
            model = NanoGPT(NanoSizes(vocab=vocab, max_seq=SEQ, layers=layers, heads=8, width=width))
            return autoptd.trace(model, seq=SEQ)
        inputs = {"x": torch.empty(2, SEQ, 64, dtype=torch.bfloat16), "y": torch.empty(2, SEQ, dtype=torch.long)}
        return autoptd.trace(Uneven(), inputs=inputs)


MODELS = ("gpt-1-256-512", "gpt-2-64-512", "gpt-2-128-4096", "gpt-3-512-512", "uneven")
_PADDING = 2**16  # more than stages are estimated to need beyond their true need, while they are being cut
WORLDS = (1, 2, 4, 4, 6, 8)
DEVICES = ("A100-SXM4-80GB", "H100-SXM5-80GB")


def random_cluster(rng: random.Random) -> Cluster:
    """Make links and devices of all speeds."""
    base = Cluster.of(
        rng.choice(DEVICES), rng.choice([1, 2, 4, 8]), 10 ** rng.uniform(9, 11.7), 10 ** rng.uniform(8, 11)
    )
    slow = 10 ** rng.uniform(-3, 0)  # on a real device small models are all latency
    host = {"launch_s": base.device.launch_s * slow, "dispatch_s": base.device.dispatch_s * slow}
    return base.model_copy(update={"device": base.device.model_copy(update=host)})


def random_task(
    seed: int, models: Sequence[str] = MODELS, worlds: Sequence[int] = WORLDS, clusters: int | None = None
) -> tuple[autoptd.TracedModel, Task]:
    """Make a task: up to 8 ranks, far too little to plenty of memory, any options; one of `clusters` clusters, or
    any."""
    rng = random.Random(seed)
    model = traced(rng.choice(models))
    world = rng.choice(worlds)
    cluster = random_cluster(rng if clusters is None else random.Random(rng.randrange(clusters)))
    dimensions = rng.sample(DIMENSIONS, rng.choice([0, 1, 1, 2]))
    batch = world * rng.choice([1, 2, 3, 4])
    constraints = read_constraints({"headroom": 0}).searching(*dimensions)
    task = Task(model.folded, cluster, world, batch, model.sizes, "bf16", "adamw", constraints, effort=None)
    return model, _with_memory(task, rng.choice([_any_bytes, _tight_bytes])(rng, model, task))


def _with_memory(task: Task, nbytes: float) -> Task:
    device = task.cluster.device
    memory = max(int(nbytes), device.context_bytes + 1)
    return replace(
        task, cluster=task.cluster.model_copy(update={"device": device.model_copy(update={"memory_bytes": memory})})
    )


def _any_bytes(rng: random.Random, model: autoptd.TracedModel, task: Task) -> float:
    """Return a memory size by the parameters: from too little for their state to plenty."""
    communication = communicator_bytes((task.world,) * 5) if task.world > 1 else 0
    needed = 30 * sum(p.numel() for p in model.model.parameters()) * 10 ** rng.uniform(-0.7, 1)
    return task.cluster.device.context_bytes + communication + needed


def _tight_bytes(rng: random.Random, model: autoptd.TracedModel, task: Task) -> float:
    """Return about the memory of the best unconstrained plan, so that some of its blocks recompute, or none."""
    free = Planner(_with_memory(replace(task, effort=0), 2**50), Silent(), model.known)
    try:
        best = free.answer().staged
    except PlanError:
        return 2.0**30
    stages = free._stages(best.candidate._replace(recompute="full"))
    most, least = (max(m.needed for m in s.memory) for s in (best, stages.finish(best.solution.boundaries)))
    return least + rng.uniform(-0.1, 1.1) * (most - least) + _PADDING
