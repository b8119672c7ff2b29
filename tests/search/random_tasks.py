"""Small models of several shapes, traced once, and random planning tasks for them."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autoptd
from autoptd.cost_models.cluster import Cluster, HostMemory
from autoptd.cost_models.memory import communicator_bytes
from autoptd.errors import AutoptdError, PlanError
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


class Mixture(nn.Module):
    """Two blocks of four experts each, of which every token takes two, and a head."""

    def __init__(self, width: int = 64, experts: int = 4, classes: int = 512) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(width, experts) for _ in range(2))
        self.up = nn.ParameterList(torch.empty(experts, width, 4 * width) for _ in range(2))
        self.down = nn.ParameterList(torch.empty(experts, 4 * width, width) for _ in range(2))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for gate, up, down in zip(self.gates, self.up, self.down, strict=True):
            scores = gate(x).softmax(-1)
            best, chosen = scores.topk(2, -1)
            weights = torch.zeros_like(scores).scatter(-1, chosen, best)
            hidden = F.gelu(torch.einsum("bsh,ehf->ebsf", x, up))
            x = x + torch.einsum("ebsf,efh,bse->bsh", hidden, down, weights)
        return F.cross_entropy(self.head(x).flatten(0, 1), y.flatten())


@cache
def traced(name: str) -> autoptd.TracedModel:
    with torch.device("meta"):
        if name.startswith("gpt"):
            layers, width, vocab = map(int, name.split("-")[1:])
            model = NanoGPT(NanoSizes(vocab=vocab, max_seq=SEQ, layers=layers, heads=8, width=width))
            return autoptd.trace(model, seq=SEQ)
        inputs = {"x": torch.empty(2, SEQ, 64, dtype=torch.bfloat16), "y": torch.empty(2, SEQ, dtype=torch.long)}
        return autoptd.trace(Mixture() if name == "mixture" else Uneven(), inputs=inputs)


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
    constraints = read_constraints({"headroom": 0, **exactly_searched(dimensions)}).searching(*dimensions)
    task = Task(model.folded, cluster, world, batch, model.sizes, "bf16", "adamw", constraints, effort=None)
    return model, _with_memory(task, rng.choice([_any_bytes, _tight_bytes])(rng, model, task))


def exactly_searched(dimensions: Collection[str]) -> dict[str, Any]:
    """Return what is fixed: where sums over dp begin while chunks run, the search does not choose which one recomputes,
    and its gap says so."""
    return {"overlap": ["p2p"]} if {"virtual", "zero-bubble-v"}.intersection(dimensions) else {}


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
    stages = free.costs.stages(best.candidate._replace(recompute="full"))
    most, least = (max(m.needed for m in s.memory) for s in (best, stages.finish(best.solution.boundaries)))
    return least + rng.uniform(-0.1, 1.1) * (most - least) + _PADDING


# ---- tasks with every dimension ----

POLICIES = ("selective", "ops", "full", "offload")
DENSE = ("gpt-1-256-512", "gpt-2-64-512", "uneven")


def wide_task(seed: int) -> tuple[autoptd.TracedModel, Task]:
    """Make a task of one or more dimensions at a time, for which each is worth something to some task.

    Memory is tight, and hosts are quick or slow, with any memory. What remains is few plans: one or two policies of
    recomputation, at most two chunks per rank, and one size of pipeline.
    """
    rng = random.Random(seed)
    aim = (*DIMENSIONS, "ep")[seed % (len(DIMENSIONS) + 1)]
    names = {*rng.sample(DIMENSIONS, rng.choice([1, 2, 3])), aim} - {"ep"}
    name = {"ep": "mixture", "cp": "gpt-2-64-512"}.get(aim) or rng.choice((*DENSE, *DENSE, "mixture"))
    model, world = traced(name), rng.choice([2, 4] if aim in ("ep", "cp") else [1, 2, 2, 4])
    world = 4 if aim == "shards" else world
    cluster = random_cluster(random.Random(rng.randrange(4)))
    pp = 1 if aim in ("shards", "ep", "cp") else rng.choice([d for d in (1, 2, 4) if world % d == 0])
    fix = {"headroom": 0, "pp": pp, **({"bucket_bytes": 2**17} if rng.random() < 0.5 else {})}
    fix |= exactly_searched(names)
    constraints = read_constraints(fix).searching(*names)
    policies = tuple(rng.sample(POLICIES, 1 if "virtual" in names else 2)) if "recompute" in names else ("full",)
    method = replace(constraints.method, policies=policies)
    constraints = replace(constraints, method=method, among={"virtual": (1, 2)})
    batch = rng.choice([1, 2]) if aim == "cp" else rng.randint(world, 4 * world)
    task = Task(model.folded, cluster, world, batch, model.sizes, "bf16", "adamw", constraints, effort=None)
    task = replace(task, cluster=_with_host(rng, model, task))
    return model, _with_memory(task, _tightest_bytes(rng, model, task))


def _with_host(rng: random.Random, model: autoptd.TracedModel, task: Task) -> Cluster:
    """Return the cluster with a host of any speed, and with any memory or an unknown one."""
    state = 20 * sum(p.numel() for p in model.model.parameters())
    known = int(state * 10 ** rng.uniform(-1.5, 1)) if rng.random() < 0.6 else None
    speed = 10 ** rng.uniform(-1, 4)
    rates = {"to_bytes_per_s": 5e9 * speed, "from_bytes_per_s": 5e9 * speed, "step_bytes_per_s": 2e10 * speed}
    host = HostMemory(memory_bytes=known, **rates)
    return task.cluster.model_copy(update={"device": task.cluster.device.model_copy(update={"host": host})})


def _tightest_bytes(rng: random.Random, model: autoptd.TracedModel, task: Task) -> float:
    """Return between what a plan takes that saves all memory, and what the best takes if memory has no limit."""
    free = Planner(_with_memory(replace(task, effort=0), 2**50), Silent(), model.known)
    try:
        most = max(m.needed for m in free.answer().staged.memory)
    except PlanError:
        return 2.0**30
    saving = [
        c._replace(recompute="full", offload=float("offload" in task.constraints.searched and c.zero < 3))
        for c in free.candidates()
        if c.micro == 1 and c.virtual == 1 and c.tp == min(2, task.world // c.pp)
    ]
    least = most
    for c in rng.sample(saving, min(4, len(saving))):
        try:
            least = min(least, max(m.needed for m in free.predict(c).memory))
        except AutoptdError:
            continue
    return least + rng.uniform(-0.1, 1.0) * (most - least) + _PADDING
