"""Predicted and measured training steps on one GPU: time, and peak memory, eager and compiled.

Each case is planned and run by `autoptd.parallelize(model, world=1)` in its own process, in bf16 with fp32 main
parameters and AdamW, on random tokens or pixels. Step time is the median of several steps after a warm-up. Memory is
the peak of all tensors, and beside it what torch's allocator reserved. On a CPU: gloo, fp32, and no memory figures.
"""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

from benchmarks.gpu.cases import Case, make_model, random_batch
from benchmarks.gpu.rows import Row

MODES = ("eager", "compiled")
WARM_UP, STEPS = 3, 10
GIB = 2**30


def measure(case: Case, mode: str, cluster: str, device: str, steps: int = STEPS) -> Row:
    """Plan and run one case. Raises whatever planning or training raises, ArithmeticError for a loss not finite."""
    import torch

    import autoptd
    from autoptd.cost_models.memory import Memory

    model = make_model(case)
    constraints: dict[str, Any] = {"world": 1, "cluster": cluster, "batch": case.batch, "seq": case.seq}
    constraints["precision"] = "bf16" if device == "cuda" else "fp32"
    fix = {"micro": case.batch, "recompute": "none", "kernels": mode}
    parallel = autoptd.parallelize(model, **constraints, fix=fix)
    predicted = parallel.plan.predicted
    batch = random_batch(model, case, device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses, taken = [], []
    for _ in range(WARM_UP + steps):
        start = time.perf_counter()
        losses.append(float(parallel.train_step(batch)))  # waits for the device
        wait(device)
        taken.append(time.perf_counter() - start)
    if not math.isfinite(losses[-1]):
        raise ArithmeticError(f"the loss is {losses[-1]} after {len(losses)} steps")
    taken = taken[WARM_UP:]
    seconds = statistics.median(taken)
    figures = {
        "predicted": f"{predicted.step_time_s * 1e3:.1f} ms",
        "measured": f"{seconds * 1e3:.1f} ms",
        "off": f"{predicted.step_time_s / seconds - 1:+.1%}",
        "loss": f"{losses[-1]:.3f}",
    }
    if device == "cuda":
        tensors = Memory(**predicted.memory[0]).allocated
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        figures |= {
            "tensors, predicted": f"{tensors / GIB:.2f} GiB",
            "measured ": f"{allocated / GIB:.2f} GiB",
            "off ": f"{tensors / allocated - 1:+.1%}",
            "reserved": f"{reserved / GIB:.2f} GiB",
        }
    return Row("steps", f"{case.name}, {mode}", figures)


def wait(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
