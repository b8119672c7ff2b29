"""Very different plans of one model on eight ranks, and the code by which a worker saves and loads them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import autoptd
from autoptd.checkpoint import contents
from autoptd.checkpoint.entries import Entry, model_entries, optimizer_entries
from autoptd.checkpoint.session import Session
from autoptd.codegen.emit import Program, load_stage
from autoptd.compile.traced import TracedModel
from autoptd.layout.layout import Layout
from autoptd.models.nanogpt import GPTSizes, NanoGPT
from autoptd.ops.stage import stage_axes
from autoptd.ops.tp_axis import Axis
from autoptd.plans.model import Plan
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.trainer import Trainer

SIZES = GPTSizes(vocab=66, max_seq=8, width=24, layers=3, heads=4)  # 66 words: divisible by neither 4 nor 8 ranks
WORLD, BATCH = 8, 16
PLANS: Mapping[str, Mapping[str, Any]] = {
    "dp 8": {"dp": 8, "tp": 1, "pp": 1, "zero": 1, "micro": 2},
    "tp 4": {"dp": 2, "tp": 4, "pp": 1, "zero": 1, "micro": 8},
    "pp 2, uneven, ZeRO 0": {"dp": 4, "tp": 1, "pp": 2, "zero": 0, "micro": 2},
    "pp 4, ZeRO 2": {"dp": 2, "tp": 1, "pp": 4, "zero": 2, "micro": 2, "offload": 0.5},
    "all three": {"dp": 2, "tp": 2, "pp": 2, "zero": 1, "micro": 4},
    "all three, ZeRO 3, V": {
        "dp": 2,
        "tp": 2,
        "pp": 2,
        "zero": 3,
        "micro": 4,
        "schedule": "zero-bubble-v",
        "virtual": 2,
    },
    "dp 8, ZeRO 2 in fours": {"dp": 8, "tp": 1, "pp": 1, "zero": 2, "shards": 4, "micro": 1},
    "cut sequences": {"dp": 2, "tp": 2, "pp": 1, "cp": 2, "zero": 1, "micro": 4},
}
OTHERS: Mapping[str, Mapping[str, Any]] = {"dp 2": {"dp": 2, "tp": 1, "pp": 1, "zero": 1, "micro": 4}}  # fewer ranks
OPTIONS = {"lr": 1e-2, "weight_decay": 0.1}


@dataclass(frozen=True)
class Made:
    """Everything that a worker needs to run a plan; picklable."""

    plan: Plan
    layout: Layout
    program: Program
    values: Mapping[str, Tensor]


@cache
def source(precision: str = "fp32") -> TracedModel:
    """Trace the model, whose second layer is frozen."""
    torch.manual_seed(0)
    model = NanoGPT(SIZES)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".1." not in name)
    return autoptd.trace(model, seq=8, precision=precision)


@cache
def made(name: str, precision: str = "fp32") -> Made:
    fix = dict({**PLANS, **OTHERS}[name])
    world = fix["dp"] * fix["tp"] * fix["pp"] * fix.get("cp", 1)
    parallel = autoptd.parallelize(source(precision), world=world, batch=BATCH, cluster="dgx-h100", fix=fix)
    layout = replace(parallel.layout, bucket_elements=1000)  # so that a rank has shards of many parameters
    return Made(parallel.plan, layout, parallel.program, parallel.initial_values())


def trainer_of(c: Communicators, job: Made, optimizer: Any = "adamw", options: Mapping[str, Any] = OPTIONS) -> Trainer:
    with torch.device("meta"):
        cut = stage_axes(job.layout, c.cp, c.ep, c.dp)
        stages = [load_stage(job.program, k)(Axis(c.tp), **cut) for k in c.mesh.stages_of(c.stage)]
    trainer = Trainer(stages, job.layout, c, optimizer, **options)
    trainer.load_parameters(job.values)
    return trainer


def session_of(trainer: Trainer, plan: Plan) -> Session:
    tensors = {name: list(spec.shape) for name, spec in trainer.layout.parameters.items()}
    return Session(trainer, plan, still(trainer), {"tensors": tensors, "aliases": {}})


def still(trainer: Trainer) -> frozenset[str]:
    """Return the names of the frozen parameters."""
    return frozenset(name for name, spec in trainer.layout.parameters.items() if not spec.trainable)


def batch(step: int, c: Communicators) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(SIZES.vocab, (BATCH, 9), generator=generator).tensor_split(c.mesh.dp)[c.dp.rank]
    return {"idx": tokens[:, :-1], "targets": tokens[:, 1:]}


def write(c: Communicators, job: Made, root: str, steps: int) -> None:
    """Train a little, then save."""
    trainer = trainer_of(c, job)
    for step in range(steps):
        trainer.train_step(batch(step, c))
    session = session_of(trainer, job.plan)
    session.save(Path(root), steps, {}, None)
    session.wait()


def load_and_compare(c: Communicators, job: Made, roots: Mapping[str, str]) -> list[str]:
    """Load each checkpoint and return this rank's tensors that differ from the whole tensors in it."""
    trainer = trainer_of(c, job)
    session, wrong = session_of(trainer, job.plan), []
    for name, root in roots.items():
        trainer.load_parameters({n: torch.zeros_like(x) for n, x in job.values.items()})
        session.load(Path(root), {}, optimizer=True)
        whole = whole_of(root)
        entries = [*model_entries(trainer, still(trainer)), *optimizer_entries(trainer)]
        wrong += [f"{name}: {key}" for key in differing(entries, whole)]
        used = {f"model.{n}": x for n, x in trainer.state_dict().items()}
        wrong += [f"{name}: {key} as the model has it" for key, x in used.items() if not torch.equal(x, whole[key])]
    return wrong


@cache
def whole_of(root: str) -> dict[str, Tensor]:
    """Return every tensor of the checkpoint of step 2; read once per process."""
    return contents.read_whole(Path(root) / "step-00000002")


def differing(entries: list[Entry], whole: Mapping[str, Tensor]) -> Iterator[str]:
    for entry in entries:
        for region in entry.regions:
            place = tuple(slice(o, o + n) for o, n in zip(region.offsets, region.sizes, strict=True))
            if not torch.equal(whole[entry.key][place], region.of(entry.flat)):
                yield entry.key
        if sum(math.prod(r.sizes) for r in entry.regions) != entry.flat.numel():
            yield f"{entry.key}: not all of it"
