"""Two small plans on four ranks each, ready to run, and ways to corrupt them."""

from __future__ import annotations

from functools import cache

import torch

import autoptd
from autoptd.cost_models.cluster import Cluster, Sustained
from autoptd.models.nanogpt import GPTSizes, NanoGPT
from autoptd.plans.model import Plan
from autoptd.verification.smaller.smaller import subject_of
from autoptd.verification.verdict import Trial, Verdict, judge, make_trial

COMMON = {"micro": 1, "recompute": "none", "sequence_parallel": False}
LINE = {"pp": 2, "zero": 1, "virtual": 1, "schedule": "1f1b", "micro": 1, "recompute": "none"}
FIXED = {
    "tensors": {"dp": 2, "tp": 2, "pp": 1, "zero": 1, **COMMON},
    "stages": LINE | COMMON | {"dp": 2, "tp": 1},
    "again": {"dp": 1, "tp": 2, "pp": 1, "zero": 1, "micro": 2, "recompute": "selective"},
    "parts": LINE | {"dp": 1, "tp": 2, "gathers": "again", "cuts": ["blocks.1.norm_2"]},
    "thirds": {"dp": 2, "tp": 1, "pp": 1, "zero": 3, **COMMON},
}


@cache
def model() -> NanoGPT:
    """Make a model with tied tables, biases and dropout."""
    torch.manual_seed(0)
    return NanoGPT(GPTSizes(vocab=40, max_seq=8, width=8, layers=3, heads=2, dropout=0.1, bias=True))


@cache
def cluster() -> Cluster:
    """Return a cluster whose constants no fit changes, and with them the splits of the plans."""
    found = Cluster.load("dgx-h100")
    rates = {"launch_s": 4.8e-6, "k_overhead": 28.5, "memory_sustained": Sustained(fraction=0.6)}
    return found.model_copy(update={"device": found.device.model_copy(update=rates)})


@cache
def plan(name: str) -> Plan:
    fix = FIXED[name]
    world = fix["dp"] * fix["tp"] * fix["pp"]  # type: ignore[operator]
    return autoptd.plan(model(), world=world, batch=8, seq=8, precision="fp32", fix=fix, cluster=cluster())


@cache
def trial(name: str) -> Trial:
    return make_trial(subject_of(plan(name), model()))


def verdict(name: str, made: Trial | None = None) -> Verdict:
    return judge(made or trial(name), plan(name))


def told(found: Verdict) -> str:
    """Return the faults as the user reads them."""
    return "\n".join(f"{where}: {what}" for where, what in found.faults)
