"""Tokens per second of an emitted program against the plain model on one GPU, both compiled, in alternating steps.

    python -m benchmarks.runtime.gpu [--only gpt2-124m,…] [--ranks 2] [--device cpu]

The emitted program runs in a world of one on NCCL, in bf16 with fp32 main parameters, its blocks compiled. The plain
model runs in fp32 under `torch.autocast(bf16)`, compiled as a whole. Both use fused AdamW and clipping, and copy the
loss to the host in each step. `--ranks N` instead trains on N processes that share the GPU and communicate over gloo,
and compares losses with one process: it checks correctness, not speed. `--device cpu` tries the command out on tiny
shapes. The first line of output has the date and the device, so that the figures can be quoted.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autoptd
from benchmarks.single_gpu import CASES, Case, make_model, random_batch

OPTIONS: Mapping[str, Any] = {"lr": 1e-4, "weight_decay": 0.1, "fused": True}
BAR = 1.0  # lowest accepted ratio of tokens per second, ours ÷ theirs
WARM_UP, STEPS = 3, 9
Step = Callable[[Mapping[str, Tensor]], float]


def ours(model: nn.Module, case: Case, device: str, world: int = 1, compiled: bool = True) -> autoptd.Parallel:
    """Plan the model and return this process's part of the emitted program."""
    fix = {"dp": world, "tp": 1, "pp": 1, "micro": case.batch, "recompute": "none"}
    precision = "bf16" if device == "cuda" else "fp32"
    cluster = "dgx-h100" if device == "cuda" else "local"
    return autoptd.parallelize(
        model,
        world=world,
        batch=case.batch * world,
        seq=case.seq,
        precision=precision,
        cluster=cluster,
        fix=fix,
        clip_norm=1.0,
        optimizer_options=dict(OPTIONS),
        compile=compiled,
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


def by_turns(case: Case, device: str, pairs: int) -> tuple[float, float, float]:
    """Return (tokens per second of ours, of theirs, median ratio of pairs)."""
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
            seconds[which] = time.perf_counter() - start
        if pair >= WARM_UP:
            found.append((tokens / seconds[0], tokens / seconds[1]))
    mine, other = (statistics.median(pair[i] for pair in found) for i in (0, 1))
    return mine, other, statistics.median(a / b for a, b in found)


def one_rank(case: Case, device: str) -> None:
    """Train three steps as one rank under torchrun; rank 0 prints the last loss."""
    dist.init_process_group("gloo")
    outline = make_model(case)
    parallel = ours(outline, case, device, dist.get_world_size(), compiled=False)
    for step in range(3):
        loss = parallel.train_step(share(outline, case, device, step, dist.get_world_size(), parallel.dp_rank))
    if dist.get_rank() == 0:
        print(f"loss {float(loss):.6f}")
    dist.destroy_process_group()


def share(model: nn.Module, case: Case, device: str, step: int, ranks: int, rank: int) -> dict[str, Tensor]:
    """Return a dp rank's samples of the global batch of a step."""
    every = random_batch(model, Case(case.name, case.model, case.config, case.batch * ranks, case.seq), device)
    return {name: x.roll(step, 0).tensor_split(ranks)[rank] for name, x in every.items()}


def shared(case: Case, device: str, ranks: int) -> tuple[float, float]:
    """Return the loss after three steps: of ranks that share the device, and of one process."""
    words = ["-m", "benchmarks.runtime.gpu", "--one", case.name, "--device", device]
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", *words]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("loss ")]
    if done.returncode or not lines:
        raise RuntimeError(f"the ranks failed:\n{done.stderr[-2000:]}")
    outline = make_model(case)
    whole = Case(case.name, case.model, case.config, case.batch * ranks, case.seq)
    parallel = ours(outline, whole, device, compiled=False)
    for step in range(3):
        loss = parallel.train_step(share(outline, whole, device, step, 1, 0))
    return float(lines[-1].split()[1]), float(loss)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.runtime.gpu", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", default="", metavar="NAME,…", help="cases (default: the first, and the first Llama)")
    parser.add_argument("--pairs", type=int, default=STEPS, metavar="N", help="timed steps of each (%(default)s)")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="processes that share the device")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--one", metavar="NAME", help=argparse.SUPPRESS)
    chosen = parser.parse_args(argv)
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device found: nothing was measured (--device cpu tries the command out)")
        return 0
    cases = {case.name: case for case in CASES[chosen.device]}
    if chosen.one:
        one_rank(cases[chosen.one], chosen.device)
        return 0
    names = chosen.only.split(",") if chosen.only else list(cases)[:1] + [n for n in cases if n.startswith("llama")][:1]
    device = torch.cuda.get_device_name() if chosen.device == "cuda" else "CPU"
    print(f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}, {device}, torch {torch.__version__}")
    for name in names:
        if chosen.ranks > 1:
            several, one = shared(cases[name], chosen.device, chosen.ranks)
            print(f"{name:12} {chosen.ranks} ranks: loss {several:.6f}, one process: {one:.6f}", flush=True)
        else:
            mine, other, ratio = by_turns(cases[name], chosen.device, chosen.pairs)
            verdict = "pass" if ratio >= BAR else "MISS"
            print(f"{name:12} {mine:10,.0f} {other:10,.0f} tokens/s   {ratio:.3f} ≥ {BAR:g} {verdict}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
