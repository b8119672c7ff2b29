"""Times of the host: of copies there and back and of the optimizer there, and to launch an op in training.

Offload copies gradients to pinned memory, updates them there by the optimizer that the runtime makes, rounds main
parameters to the compute type, and copies these back.

The time of a launch is that of steps of a model so small that the device waits for the host, divided by the launches
that the cost models count in them. A loop over one op would miss most of it:
on an H200 that takes 6.5 us, where a launch within a training step took 37 to 56 us, with its share of the emitted
program, of autograd in both passes and of the optimizer.
"""

from __future__ import annotations

import os
import statistics
import time

import torch
from torch import nn

from autoptd.api import plan, trace
from autoptd.compile.program import make_program, read_sharding
from autoptd.cost_models.cluster import Cluster
from autoptd.models.nanogpt import GPTSizes, NanoGPT
from autoptd.parallel import Parallel
from autoptd.profile.record import Case
from autoptd.profile.timing import Run
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import run_lockstep
from autoptd.runtime.optimizers.named import construct

SIZES = GPTSizes(vocab=256, max_seq=64, width=64, layers=8, heads=4)
_SAMPLES, _WARM_UP, _STEPS = 2, 5, 15


def host_run(case: Case, device: torch.device) -> Run:
    """Allocate a case of the family `host` and return the function that runs it once."""
    pinned = device.type == "cuda"
    on_host = torch.randn(case.n).pin_memory() if pinned else torch.randn(case.n)
    if case.op == "step":
        parameter, rounded = nn.Parameter(on_host), torch.empty(case.n, dtype=torch.bfloat16, pin_memory=pinned)
        parameter.grad = torch.randn(case.n)
        optimizer = construct("adamw", [parameter], {})

        said = os.environ.get("OMP_NUM_THREADS", "")
        threads = int(said) if said.isdigit() and int(said) else torch.get_num_threads()

        def step() -> None:
            before = torch.get_num_threads()
            torch.set_num_threads(threads)
            optimizer.step()
            rounded.copy_(parameter.detach())
            torch.set_num_threads(before)

        return step
    on_device = torch.randn(case.n, device=device)
    there, back = (on_host, on_device), (on_device, on_host)
    target, source = there if case.op == "to_host" else back
    return lambda: target.copy_(source, non_blocking=True)


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
