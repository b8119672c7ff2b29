"""Tokens per second of an emitted program against the plain model on one GPU, both compiled, in alternating steps.

The emitted program runs in a world of one on NCCL, in bf16 with fp32 main parameters, its blocks compiled. The plain
model runs in fp32 under `torch.autocast(bf16)`, compiled as a whole. Both use fused AdamW and clipping, and copy the
loss to the host in each step.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import autoptd
from benchmarks.gpu.cases import Case, make_model, random_batch
from benchmarks.gpu.rows import Row
from benchmarks.gpu.steps import wait

OPTIONS: Mapping[str, Any] = {"lr": 1e-4, "weight_decay": 0.1, "fused": True}
BAR = 1.0  # lowest accepted ratio of tokens per second, ours ÷ theirs
WARM_UP, PAIRS = 3, 9
Step = Callable[[Mapping[str, Tensor]], float]


def ours(model: nn.Module, case: Case, device: str) -> autoptd.Parallel:
    """Plan the model and return the emitted program, running."""
    fix = {"micro": case.batch, "recompute": "none"}
    precision = "bf16" if device == "cuda" else "fp32"
    cluster = "dgx-h100" if device == "cuda" else "local"
    return autoptd.parallelize(
        model,
        world=1,
        batch=case.batch,
        seq=case.seq,
        precision=precision,
        cluster=cluster,
        fix=fix,
        clip_norm=1.0,
        optimizer_options=dict(OPTIONS),
        compile=True,
    )


def theirs(model: nn.Module, device: str) -> Step:
    """Compile the plain model; return a function that trains one step of it and returns the loss."""
    model = model.to(device).train()
    forward = torch.compile(model)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, **OPTIONS)

    def step(batch: Mapping[str, Tensor]) -> float:
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = forward(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return float(loss.detach())

    return step


def by_turns(case: Case, device: str, pairs: int = PAIRS) -> Row:
    """Return tokens per second of both, and the median ratio of pairs."""
    outline = make_model(case)
    parallel = ours(outline, case, device)
    model = copy.deepcopy(outline).to_empty(device=device)
    model.load_state_dict(parallel.state_dict())
    model.tie_weights()
    both: tuple[Step, Step] = (lambda batch: float(parallel.train_step(batch)), theirs(model, device))
    batch, found = random_batch(outline, case, device), []
    tokens = case.batch * (case.seq or 1)
    for pair in range(WARM_UP + pairs):
        seconds = [0.0, 0.0]
        for which in (0, 1) if pair % 2 else (1, 0):
            start = time.perf_counter()
            both[which](batch)
            wait(device)
            seconds[which] = time.perf_counter() - start
        if pair >= WARM_UP:
            found.append((tokens / seconds[0], tokens / seconds[1]))
    mine, other = (statistics.median(pair[i] for pair in found) for i in (0, 1))
    ratio = statistics.median(a / b for a, b in found)
    figures = {"autoptd": f"{mine:,.0f} tokens/s", "plain": f"{other:,.0f} tokens/s", "ratio": f"{ratio:.3f}"}
    return Row("tokens", case.name, figures, ratio >= BAR)
