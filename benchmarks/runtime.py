"""How fast an emitted program trains, against the same training written with PyTorch's own parts, on gloo.

Both run in the same processes, a step each by turns, so that what else the machine does slows both alike; the figure is
the median ratio of pairs. Model, batch, optimizer (fused AdamW), clipping and precision (float32) are the same.

    world 1      against the plain model in eager PyTorch
    dp N         against DistributedDataParallel; ZeRO 1 against it with ZeroRedundancyOptimizer as well
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autoptd
from autoptd.codegen.emit import Program, load_stage
from autoptd.models.nanogpt import NanoGPT, Sizes
from autoptd.runtime.axis import Axis
from autoptd.runtime.comm import Communicators
from autoptd.runtime.layout import Layout
from autoptd.runtime.pool import Pool
from autoptd.runtime.trainer import Trainer

SIZES = Sizes(vocab=2048, max_seq=128, width=256, layers=4, heads=8)
SAMPLES, SEQ = 4, 128  # of a rank
OPTIONS: Mapping[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "fused": True}
PAIRS, WARM_UP = 15, 3


@dataclass(frozen=True)
class Case:
    """A plan for `dp` ranks, and what it is compared with: "plain", "ddp" or "ddp+zero"."""

    dp: int
    zero: int
    against: str
    bar: float

    def __str__(self) -> str:
        plan = f"dp {self.dp}, ZeRO {self.zero}" if self.dp > 1 else "world 1"
        return f"{plan} against {self.against}"


CASES = (
    Case(1, 0, "plain", 1.02),
    Case(2, 0, "ddp", 1.0),
    Case(2, 1, "ddp", 1.0),
    Case(2, 1, "ddp+zero", 1.0),
    Case(4, 1, "ddp", 1.0),
)


def _ours(c: Communicators, program: Program, layout: Layout, values: Mapping[str, Tensor]) -> Callable[[Any], object]:
    with torch.device("meta"):
        stage = load_stage(program, 0)(Axis(c.tp))
    trainer = Trainer(stage, layout, c, "adamw", clip_norm=1.0, **OPTIONS)
    trainer.load_parameters(values)
    return trainer.train_step


def _theirs(against: str, values: Mapping[str, Tensor]) -> Callable[[Any], object]:
    model: nn.Module = NanoGPT(SIZES)
    model.load_state_dict(dict(values), strict=False)
    if against != "plain":
        model = nn.parallel.DistributedDataParallel(model)
    parameters = list(model.parameters())
    if against == "ddp+zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, **OPTIONS)
    else:
        optimizer = torch.optim.AdamW(parameters, **OPTIONS)

    def step(batch: Mapping[str, Tensor]) -> object:
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return loss.detach()

    return step


def by_turns(
    c: Communicators, program: Program, layout: Layout, values: Mapping[str, Tensor], against: str, pairs: int
) -> list[tuple[float, float]]:
    """Seconds of a step of ours and of theirs, pair by pair, in a worker."""
    both = _ours(c, program, layout, values), _theirs(against, values)
    generator = torch.Generator().manual_seed(c.rank)
    found = []
    for pair in range(WARM_UP + pairs):
        tokens = torch.randint(SIZES.vocab, (SAMPLES, SEQ + 1), generator=generator)
        batch = {"idx": tokens[:, :-1], "targets": tokens[:, 1:]}
        seconds = [0.0, 0.0]
        for which in (0, 1) if pair % 2 else (1, 0):
            dist.barrier()
            start = time.perf_counter()
            both[which](batch)
            dist.barrier()
            seconds[which] = time.perf_counter() - start
        if pair >= WARM_UP:
            found.append((seconds[0], seconds[1]))
    return found


def measure(case: Case, pairs: int = PAIRS) -> list[tuple[float, float]]:
    """Of rank 0."""
    model = NanoGPT(SIZES)
    source = autoptd.trace(model, seq=SEQ, precision="fp32")
    fix = {"dp": case.dp, "tp": 1, "pp": 1, "zero": case.zero, "micro": SAMPLES, "recompute": "none"}
    made = autoptd.parallelize(source, world=case.dp, batch=SAMPLES * case.dp, cluster="local", fix=fix)
    with Pool(case.dp) as pool:
        job = made.program, made.layout, made.initial_values(), case.against, pairs
        return pool.run(made.layout.mesh, by_turns, *job)[0]


def line(case: Case, found: Sequence[tuple[float, float]]) -> str:
    """`dp 2, ZeRO 1 against ddp   0.105 s  0.110 s   0.96  (0.93 to 0.99)  ≤ 1  pass`."""
    ratios = sorted(ours / theirs for ours, theirs in found)
    ratio, quarter = statistics.median(ratios), len(ratios) // 4
    ours, theirs = (statistics.median(pair[i] for pair in found) for i in (0, 1))
    spread = f"({ratios[quarter]:.3f} to {ratios[-1 - quarter]:.3f})"
    verdict = "pass" if ratio <= case.bar else "MISS"
    return f"{case!s:32} {ours:8.4f} {theirs:8.4f}   {ratio:.3f} {spread:18} ≤ {case.bar:g}  {verdict}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.runtime", description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=PAIRS, metavar="N", help="steps of each (%(default)s)")
    chosen = parser.parse_args(argv)
    print(f"a step of {SIZES.layers} blocks of width {SIZES.width}, {SAMPLES} × {SEQ} tokens a rank, float32, gloo")
    print(f"{'':32} {'ours s':>8} {'theirs s':>8}   ratio (quartiles)")
    for case in CASES:
        print(line(case, measure(case, chosen.pairs)), flush=True)


if __name__ == "__main__":
    main()
