"""The report of a rank that ran out of memory: the category that exceeds its prediction, and a change that would fit.

Bytes are attributed in this order:

    parameters, gradients        as predicted, which is exact to the byte (`layout/state_bytes.py`)
    optimizer                    counted in the optimizer's state
    activations and temporary    everything else that was allocated at the peak
    overhead                     reserved by the allocator, but not allocated
    driver, communication, …     used on the device beyond that

A change fits if it frees the bytes that were missing: the difference of two predictions, in which the category that
exceeds its prediction is scaled by found / predicted.
"""

from __future__ import annotations

import re
import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from autoptd.compile.make_plan import make_plan
from autoptd.compile.traced import TracedModel
from autoptd.errors import AutoptdError, OutOfMemory
from autoptd.plans.model import Plan
from autoptd.progress import Silent
from autoptd.runtime.trainer import Trainer
from autoptd.search.constraints.options import read_constraints

Bytes = Mapping[str, int]
WORKING, OUTSIDE = "activations and temporary", "driver, communication and other processes"
_CPU_ERRORS = ("DefaultCPUAllocator: can't allocate memory", "not enough memory")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SEARCH_S = 5.0  # the other ranks wait for the report


@dataclass(frozen=True)
class Account:
    """Bytes on a rank by category."""

    predicted: Bytes
    found: Bytes

    @property
    def worst(self) -> str:
        """The category that exceeds its prediction most; empty if none does."""
        name = max(self.found, key=lambda n: self.found[n] - self.predicted.get(n, 0))
        return name if self.found[name] > self.predicted.get(name, 0) else ""

    def __str__(self) -> str:
        lines = [f"{n}: {_size(x)}, predicted {_size(self.predicted.get(n, 0))}" for n, x in self.found.items()]
        return "\n".join(lines)


@contextmanager
def explained(trainer: Trainer, plan: Plan, source: TracedModel, resident: int) -> Iterator[None]:
    """Turn an out-of-memory error within a step into OutOfMemory. `resident`: `resident_bytes()` before training."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        root = error.__cause__ if isinstance(error.__cause__, (RuntimeError, MemoryError)) else error
        if not is_out_of_memory(root):
            raise
        account = account_of(trainer, plan, resident)
        where = getattr(error, "where", "") or f"rank {trainer.communicators.rank}"
        what = f"{account.worst} {'is' if account.worst == 'optimizer' else 'are'} more than predicted"
        if account.worst == WORKING and plan.mesh.ep > 1:
            what += f", as on a rank whose experts get more rows than {plan.method.routing} routing gives them"
        raise OutOfMemory(
            f"out of memory: {what if account.worst else 'no category is more than predicted: the device has less'}",
            where=f"{where}\n{account}\n{str(root).splitlines()[0] if str(root) else 'MemoryError'}",
            fix=what_would_fit(plan, source, account, trainer.communicators.stage, _asked(str(root))),
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is torch's, Python's, or the RuntimeError of torch's CPU allocator."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(text in str(error) for text in _CPU_ERRORS)


def resident_bytes() -> int:
    """Return the peak bytes of this process in main memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def categories(memory: Bytes) -> dict[str, int]:
    """Merge the categories of `cost_models.memory.Memory` into those that a running process can distinguish."""
    return {
        "parameters": memory["parameters"],
        "gradients": memory["gradients"],
        "optimizer": memory["optimizer"],
        WORKING: memory["activations"] + memory["temporary"],
        "overhead": memory["overhead"],
        OUTSIDE: memory["communication"] + memory["context"],
    }


def account_of(trainer: Trainer, plan: Plan, resident: int) -> Account:
    """Attribute this rank's bytes at the peak. On a CPU, the growth of the process counts as activations."""
    predicted = categories(plan.predicted.memory[trainer.communicators.stage])
    state = trainer.optimizer.state.values()
    held = [x for each in state for x in each.values() if isinstance(x, torch.Tensor) and x.dim() > 0]
    found = {name: predicted[name] for name in ("parameters", "gradients")}
    found["optimizer"] = sum(x.numel() * x.element_size() for x in held)
    device = trainer.communicators.device
    if device.type != "cuda":
        return Account(predicted, found | {WORKING: max(0, resident_bytes() - resident)})
    allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    found[WORKING] = max(0, allocated - sum(found.values()))
    found["overhead"] = max(0, reserved - torch.cuda.memory_allocated(device))
    return Account(predicted, found | {OUTSIDE: max(0, total - free - reserved)})


def what_would_fit(plan: Plan, source: TracedModel, account: Account, stage: int, missing: int) -> str:
    """Describe the cheapest change that frees `missing` bytes on the fullest rank, or say that there is none."""
    factor = max(1.0, account.found.get(account.worst, 0) / max(1, account.predicted.get(account.worst, 0)))
    now = _weighed(categories(plan.predicted.memory[stage]), account.worst, factor)
    until = time.monotonic() + _SEARCH_S
    for description, change in _changes(plan):
        if time.monotonic() > until:
            break
        try:
            other = make_plan(
                source,
                world=plan.world,
                cluster=plan.cluster,
                batch=plan.batch,
                precision=plan.precision,
                optimizer=plan.optimizer,
                constraints=read_constraints({**_chosen_by(plan), **change}),
                progress=Silent(),
                time_limit_s=1.0,
            )
        except AutoptdError:  # not possible for this model or world
            continue
        freed = now - max(_weighed(categories(each), account.worst, factor) for each in other.predicted.memory)
        if freed > 0 and freed >= missing and not other.not_runnable:
            return f"{description} would fit: fix={change} is predicted to free at least {_size(int(freed))} per rank"
    return "no single change is predicted to fit: use more devices, or a smaller model"


def _weighed(memory: Bytes, worst: str, factor: float) -> float:
    return sum(x * (factor if name == worst else 1) for name, x in memory.items())


def _chosen_by(plan: Plan) -> dict[str, Any]:
    mesh, how = plan.mesh, plan.schedule
    found: dict[str, Any] = {
        "dp": mesh.dp,
        "tp": mesh.tp,
        "pp": mesh.pp,
        "cp": mesh.cp,
        "zero": plan.zero,
        "micro": plan.sizes["b"],
    }
    if mesh.ep > 1:
        found |= {"ep": mesh.ep, "etp": mesh.etp or mesh.tp, "routing": plan.method.routing}
    return found | {"schedule": how.kind} | ({"virtual": how.virtual} if how.virtual > 1 else {})


def _changes(plan: Plan) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield changes of the plan, in words and as `fix=` takes them."""
    mesh, micro = plan.mesh, plan.sizes["b"]
    yield "recomputing attention", {"recompute": "selective"}
    yield "recomputing everything", {"recompute": "full"}
    if micro > 1:
        yield "a smaller microbatch", {"micro": micro // 2}
        yield "a smaller microbatch with recomputation", {"micro": micro // 2, "recompute": "full"}
    for zero in range(plan.zero + 1, 4) if mesh.dp * mesh.cp > 1 else ():
        yield f"ZeRO {zero}", {"zero": zero}
    if plan.zero < 3 and max(plan.method.offload, default=0.0) < 1:
        yield "the optimizer state in host memory", {"offload": 1.0}
    if mesh.dp % 2 == 0:
        yield "more stages", {"pp": mesh.pp * 2, "dp": mesh.dp // 2}
        yield "more tensor parallelism", {"tp": mesh.tp * 2, "dp": mesh.dp // 2}


def _asked(message: str) -> int:
    """Return the bytes that the failed allocation asked for; 1 if the error does not name them."""
    if found := re.search(r"[Tt]ried to allocate ([\d.]+) (bytes|[KMG]iB)", message):
        return int(float(found[1]) * _UNITS[found[2]])
    return 1


def _size(nbytes: int) -> str:
    for unit in ("GiB", "MiB", "KiB"):
        if nbytes >= _UNITS[unit]:
            return f"{nbytes / _UNITS[unit]:.2f} {unit}"
    return f"{nbytes} bytes"
