"""The host's time to launch an op in training: from steps of a model so small that the device waits for the host.

The time of a step, divided by the launches that the cost models count in it. A loop over one op would miss most of it:
on an H200 that takes 6.5 us, where a launch within a training step took 37 to 56 us, with its share of the emitted
program, of autograd in both passes and of the optimizer.
"""

from __future__ import annotations

import statistics
import time

import torch

from autoptd.api import plan, trace
from autoptd.compile.program import make_program, read_sharding
from autoptd.cost_models.cluster import Cluster
from autoptd.models.nanogpt import GPTSizes, NanoGPT
from autoptd.parallel import Parallel
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import run_lockstep

SIZES = GPTSizes(vocab=256, max_seq=64, width=64, layers=8, heads=4)
_SAMPLES, _WARM_UP, _STEPS = 2, 5, 15


def dispatch_s(device: torch.device) -> tuple[float, int]:
    """Return the host's seconds per launch, and the number of steps timed."""
    with torch.device("meta"):
        model = NanoGPT(SIZES)
    traced = trace(model, seq=SIZES.max_seq, precision="bf16" if device.type == "cuda" else "fp32")
    fix = {"micro": _SAMPLES, "recompute": "none", "kernels": "eager"}
    counted = plan(traced, world=1, cluster=_counting(), batch=_SAMPLES, fix=fix)
    program = make_program(traced, counted, read_sharding(traced, counted))
    parallel = Parallel(counted, traced, program, "adamw", {}, None, seed=0)
    ids = torch.randint(SIZES.vocab, (_SAMPLES, SIZES.max_seq), device=device)
    batch = dict.fromkeys(parallel.layout.inputs, ids)

    def body(communicators: Communicators) -> float:
        parallel.start(communicators)
        taken = []
        for _ in range(_WARM_UP + _STEPS):
            start = time.perf_counter()
            float(parallel.train_step(batch))  # waits for the device
            taken.append(time.perf_counter() - start)
        return statistics.median(taken[_WARM_UP:])

    (seconds,) = run_lockstep(parallel.layout.mesh, body, device=device)
    return seconds / counted.predicted.step_time_s, _STEPS


def _counting() -> Cluster:
    """Return a cluster where every launch takes the host a second, and nothing else takes long."""
    cluster = Cluster.load("dgx-h100")
    return cluster.model_copy(update={"device": cluster.device.model_copy(update={"dispatch_s": 1.0})})
