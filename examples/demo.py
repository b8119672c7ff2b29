"""Plan a model of 175 billion parameters for 64 GPUs; then train a small one on 8 processes and check the result.

    python examples/demo.py

The second part trains the same GPT twice on the source files of Python's standard library, in float64: in one plain
process, and in 2 data-parallel × 2 tensor-parallel × 2 pipeline-parallel processes under torchrun. The losses of every
step, and the parameters at the end, must agree.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

import autoptd
from autoptd.models.nanogpt import GPTSizes, NanoGPT
from autoptd.progress import progress_on

WIDTH = 80  # columns
SIZES = GPTSizes(vocab=256, max_seq=128, width=128, layers=4, heads=4)  # bytes of text as tokens
BATCH, SEQ, STEPS = 16, 128, 60
MESH = {"dp": 2, "tp": 2, "pp": 2, "micro": 2}
WORLD = 8
ADAMW = {"lr": 1e-3, "weight_decay": 0.1}
CLIP = 1.0
TEXT_BYTES = 4_000_000
TOLERANCE = 1e-8  # relative, of losses and final parameters: AdamW amplifies the rounding of gradients over the steps


def main() -> int:
    started = time.monotonic()
    if not os.environ.get("SKIP"):
        show_a_large_plan()
    text = read_text()
    with tempfile.TemporaryDirectory(prefix="autoptd-demo-") as folder:
        agree = train_twice(text, Path(folder))
    print(f"{time.monotonic() - started:.0f} s in all")
    if agree is None:
        return 1
    print(agree)
    return 0


def show_a_large_plan() -> None:
    """Print the plan of a large model, made without a GPU and without weights."""
    from autoptd.explain.plan import explain
    from autoptd.models.load import load_model

    heading("1. gpt3-175b on 64 H100 GPUs")
    started = time.monotonic()
    progress = progress_on(sys.stderr)
    with progress.stage("make the model, without weights"):
        model, _ = load_model("gpt3-175b")
    plan = autoptd.plan(model, world=64, cluster="dgx-h100", batch=512, seq=2048, progress=progress)
    answer, time_of_a_step, memory = explain(plan, WIDTH).split("\n\n")[:3]
    print("\n\n".join((answer, time_of_a_step, memory)))
    print(f"\nplanned in {time.monotonic() - started:.0f} s, tracing included")


def train_twice(text: Tensor, folder: Path) -> str | None:
    """Train in one process and in 8, printing both losses per step; return the verdict, None if they disagree."""
    heading("2. A small GPT on the standard library's source, 1 process and 8")
    progress = progress_on(sys.stderr)
    model = make_model()
    parallel = autoptd.parallelize(
        model,
        world=WORLD,
        cluster="local",
        batch=BATCH,
        seq=SEQ,
        precision="fp64",
        fix={**MESH, "zero": 1},
        progress=progress,
    )
    parallel.plan.save(folder / "plan.json")
    torch.save(text, folder / "text.pt")
    mesh = parallel.plan.mesh
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(text):,} bytes of text, {STEPS} steps")
    print(
        f"8 processes: {mesh}, ZeRO-{parallel.plan.zero}, 1F1B with {parallel.plan.schedule.microbatches} microbatches"
    )
    with progress.stage("train in one process"):
        alone, alone_s = train_alone(model, text)
    print(f"\n{'step':>4}  {'1 process':>18}  {'8 processes':>18}  {'difference':>10}")
    losses: list[float] = []
    rank_s = 0.0
    rows = run_ranks(folder)
    with progress.stage("start 8 processes, each of which traces the model and imports its stage"):
        first = next(rows, {"seconds": 0.0})
    for row in chain([first], rows):
        if "seconds" in row:
            rank_s = row["seconds"]
            continue
        step, loss = len(losses), row["loss"]
        losses.append(loss)
        off = abs(loss - alone[step]) / alone[step]
        print(f"{step:4}  {alone[step]:18.14f}  {loss:18.14f}  {off:10.1e}", flush=True)
    if len(losses) < STEPS:
        print(f"FAILED: the processes ended after {len(losses)} of {STEPS} steps")
        return None
    state = torch.load(folder / "state.pt")
    return judge(alone, losses, model.state_dict(), state, alone_s, rank_s)


def judge(
    alone: list[float],
    losses: list[float],
    state: dict[str, Tensor],
    found: dict[str, Tensor],
    alone_s: float,
    rank_s: float,
) -> str | None:
    """Compare losses and final parameters; return the verdict, None after printing why they disagree."""
    assert state.keys() == found.keys()
    apart = {name: float((found[name] - x).norm() / x.norm()) for name, x in state.items()}
    worst = max(apart, key=lambda name: apart[name])
    loss_apart = max(abs(x - y) / x for x, y in zip(alone, losses, strict=True))
    tokens = BATCH * SEQ * (STEPS - 1)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    print(f"\nlargest relative parameter difference after {STEPS} steps: {apart[worst]:.1e}, in {worst}")
    print(f"tokens/s on {cores} cores: {tokens / alone_s:,.0f} in 1 process, {tokens / rank_s:,.0f} in 8 processes")
    if not (apart[worst] <= TOLERANCE and loss_apart <= TOLERANCE):
        print(f"FAILED: more than {TOLERANCE:.0e} apart")
        return None
    if not losses[-1] < 0.75 * losses[0]:
        print(f"FAILED: the loss did not go down: {losses[0]:.3f} to {losses[-1]:.3f}")
        return None
    fell = f"loss {losses[0]:.3f} to {losses[-1]:.3f}"
    return f"OK parity of 8 processes with 1: parameters within {apart[worst]:.1e}; {fell}"


def make_model() -> NanoGPT:
    """Return the model with the same initial values in every process."""
    torch.manual_seed(0)
    model = NanoGPT(SIZES).double()
    for table in (model.tokens, model.positions):  # the tokens' table is tied to the head: logits start near zero
        torch.nn.init.normal_(table.weight, std=0.02)
    return model


def batch_of(text: Tensor, step: int) -> dict[str, Tensor]:
    """Return BATCH windows of the text at random offsets, seeded by the step."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(text) - SEQ - 1, (BATCH,), generator=generator)
    windows = torch.stack([text[i : i + SEQ + 1] for i in starts.tolist()]).long()
    return {"idx": windows[:, :-1].contiguous(), "targets": windows[:, 1:].contiguous()}


def train_alone(model: NanoGPT, text: Tensor) -> tuple[list[float], float]:
    """Train `model` in plain PyTorch; return the losses, and the seconds of all steps but the first."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    losses: list[float] = []
    started = 0.0
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(**batch_of(text, step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(loss.item())
        if step == 0:
            started = time.monotonic()
    return losses, time.monotonic() - started


def run_ranks(folder: Path) -> Iterator[dict[str, float]]:
    """Start the processes and yield the reports of rank 0."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}"]
    # CPU only: 8 processes cannot share a GPU
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    command += [str(Path(__file__).resolve()), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)


def train_rank(folder: Path) -> None:
    """Train as one of the 8 processes, like a user's training script; rank 0 prints losses and saves parameters."""
    text = torch.load(folder / "text.pt")
    parallel = autoptd.parallelize(make_model(), plan=folder / "plan.json", optimizer_options=ADAMW, clip_norm=CLIP)
    share = BATCH // parallel.dp_size
    mine = slice(parallel.dp_rank * share, (parallel.dp_rank + 1) * share)
    reports, started = os.environ["RANK"] == "0", 0.0
    for step in range(STEPS):
        loss = parallel.train_step({name: x[mine] for name, x in batch_of(text, step).items()})
        if reports:
            print(json.dumps({"loss": loss.item()}), flush=True)
        if step == 0:
            started = time.monotonic()
    seconds = time.monotonic() - started
    state = parallel.state_dict()
    if reports:
        torch.save(state, folder / "state.pt")
        print(json.dumps({"seconds": seconds}), flush=True)


def read_text() -> Tensor:
    """Return the source of the standard library's top-level modules in alphabetical order, as bytes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    data = b"".join(path.read_bytes() for path in files)[:TEXT_BYTES]
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def heading(text: str) -> None:
    print(f"\n{text}\n{'─' * min(WIDTH, len(text))}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train_rank(Path(sys.argv[1]))
    else:
        sys.exit(main())
