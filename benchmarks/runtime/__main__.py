"""Step time and memory of emitted programs against the same training written by hand with PyTorch's parts, on gloo.

Both alternate step by step in the same processes, so that other load on the machine slows both alike; the figure is the
median ratio of pairs of steps. Model, batch, optimizer (fused AdamW), clipping, precision (float32) and blocks per
stage are the same. Loss and gradient norm of the first step must agree, or the benchmark fails. Memory is the peak of
PyTorch's allocator on the fullest rank, measured with each program alone.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import autoptd
from autoptd.layout.mesh import Mesh
from autoptd.runtime.comm.threaded import run_lockstep
from autoptd.testing.process_pool import ProcessPool
from benchmarks.runtime.by_turns import Outcome, Task, by_turns, peak_bytes
from benchmarks.runtime.model import LAYERS, SEQ, TIMED, TINY, WIDTH, Sizes, Trained
from benchmarks.runtime.own_time import clocks, own_time, own_time_of_process, shown

PAIRS = 15
PEAKS = 5
SAMPLES = 4  # of a dp rank, per microbatch
THREADS, PROCESSES = "on threads", "on processes"  # where a rank's own time is measured


@dataclass(frozen=True)
class Case:
    """A mesh and ZeRO stage, and the PyTorch parts that the plan is compared with (see `by_hand.program`)."""

    mesh: Mesh
    zero: int
    against: str
    bar: float = 1.03
    schedule: str = "1f1b"

    def __str__(self) -> str:
        sizes = (
            f"{name} {n}" for name, n in (("dp", self.mesh.dp), ("tp", self.mesh.tp), ("pp", self.mesh.pp)) if n > 1
        )
        zero = f" ZeRO {self.zero}" if self.mesh.dp > 1 else ""
        schedule = f" {self.schedule}" if self.schedule != "1f1b" else ""
        way = self.against if self.against in (THREADS, PROCESSES) else f"against {self.against}"
        return f"{' '.join(sizes) or 'world 1'}{zero}{schedule} {way}"


CASES = (
    Case(Mesh(1, 1, 1), 0, "plain"),
    Case(Mesh(2, 1, 1), 0, "ddp"),
    Case(Mesh(2, 1, 1), 1, "ddp"),
    Case(Mesh(4, 1, 1), 0, "ddp"),
    Case(Mesh(4, 1, 1), 1, "ddp"),
    Case(Mesh(4, 1, 1), 1, "ddp+zero"),
    Case(Mesh(1, 4, 1), 0, "dtensor"),
    Case(Mesh(1, 1, 4), 0, "pipelining"),
    Case(Mesh(2, 2, 1), 1, "fsdp"),
    Case(Mesh(2, 2, 1), 2, "fsdp"),
    Case(Mesh(2, 1, 2), 1, "ddp+zero"),
    Case(Mesh(1, 2, 2), 0, "pipelining"),
    Case(Mesh(8, 1, 1), 0, "ddp"),
    Case(Mesh(8, 1, 1), 1, "ddp"),
    Case(Mesh(8, 1, 1), 1, "ddp+zero"),
    Case(Mesh(1, 8, 1), 0, "dtensor"),
    Case(Mesh(1, 1, 8), 0, "pipelining"),
    Case(Mesh(2, 2, 2), 1, "fsdp"),
    Case(Mesh(2, 2, 2), 2, "fsdp"),
)
OWN_TIME = (
    *(Case(Mesh(1, 1, 1), 0, THREADS, schedule=kind) for kind in ("1f1b",)),
    *(Case(Mesh(2, 1, 1), zero, THREADS) for zero in range(4)),
    *(Case(Mesh(1, 1, 4), 0, THREADS, schedule=kind) for kind in ("gpipe", "1f1b", "zero-bubble")),
    *(Case(Mesh(1, 1, 2, virtual=2), 0, THREADS, schedule=kind) for kind in ("interleaved", "zero-bubble-v")),
    Case(Mesh(1, 2, 1), 0, THREADS),
    Case(Mesh(2, 2, 2), 3, THREADS),
    *(Case(Mesh(2, 1, 1), zero, PROCESSES) for zero in range(4)),
    Case(Mesh(1, 1, 2), 0, PROCESSES),
    Case(Mesh(1, 2, 1), 0, PROCESSES),
)


def task_of(case: Case, sizes: Sizes = TIMED, samples: int = SAMPLES, m: int = 1) -> Task:
    """Plan a case; return its program and initial values for the workers. `m`: microbatches without a pipeline."""
    mesh = case.mesh
    if mesh.pp > 1:
        m = 2 * mesh.pp
    source = autoptd.trace(Trained(sizes), seq=sizes.seq, precision="fp32")
    fix = {
        "dp": mesh.dp, "tp": mesh.tp, "pp": mesh.pp, "zero": case.zero, "micro": samples, "recompute": "none",
        "sequence_parallel": False, "stages": "even",
    }  # fmt: skip
    if mesh.pp > 1:
        fix["schedule"] = case.schedule
        if case.schedule == "interleaved":
            fix["virtual"] = mesh.virtual
    made = autoptd.parallelize(source, world=mesh.world, batch=samples * m * mesh.dp, cluster="local", fix=fix)
    return Task(made.program, made.layout, made.initial_values(), case.against, samples * m, m, sizes)


def measure_own(case: Case, steps: int) -> list[dict[str, tuple[int, float]]]:
    """Measure a rank's own time by kind of action, for each rank, on a model whose ops take no time."""
    task = task_of(case, TINY, samples=1, m=8)
    mesh = task.layout.mesh
    if case.against == THREADS:
        with clocks():
            return run_lockstep(mesh, lambda c: own_time(c, task, steps), in_turn=True)
    with ProcessPool(mesh.world) as pool:
        return pool.run(mesh, own_time_of_process, task, steps)


def measure(case: Case, pairs: int = PAIRS) -> Outcome:
    """Measure a case: step times on rank 0, and peak bytes of the fullest rank for each program."""
    task = task_of(case)
    mesh = task.layout.mesh
    with ProcessPool(mesh.world, timeout_s=300 + 15 * pairs) as pool:
        by_rank = pool.run(mesh, by_turns, task, pairs)
        full = [fullest([pool.run(mesh, peak_bytes, task, ours) for _ in range(PEAKS)]) for ours in (True, False)]
    times, cpu_s = by_rank[0][0], [cpu for _, cpu in by_rank]
    summed = [(sum(a for a, _ in pair), sum(b for _, b in pair)) for pair in zip(*cpu_s, strict=True)]
    return Outcome(times, summed, full[0], full[1])


def fullest(runs: Sequence[Sequence[int]]) -> int:
    """Return the peak bytes of the fullest rank, each rank's peak being its minimum over the runs.

    Memory that one of gloo's threads frees last counts as alive until its address is reused, which can inflate a run.
    """
    return max(map(min, zip(*runs, strict=True)))


def line(case: Case, found: Outcome) -> str:
    """Return `dp 2 ZeRO 1 against ddp   0.105  0.110   0.96  (0.93 to 0.99)  0.97  ≤ 1.03  pass   80  95   0.84`."""
    ratios = sorted(ours / theirs for ours, theirs in found.seconds)
    ratio, quarter = statistics.median(ratios), len(ratios) // 4
    cpu = statistics.median(ours / theirs for ours, theirs in found.cpu_s)
    ours, theirs = (statistics.median(pair[i] for pair in found.seconds) for i in (0, 1))
    spread = f"({ratios[quarter]:.3f} to {ratios[-1 - quarter]:.3f})"
    verdict = "pass" if ratio <= case.bar else "MISS"
    mine, other = found.ours_bytes / 2**20, found.theirs_bytes / 2**20
    memory = f"{mine:8.1f} {other:8.1f}  {mine / other:.2f}"
    times = f"{ours:8.4f} {theirs:8.4f}   {ratio:.3f} {spread:18} {cpu:.3f}"
    return f"{case!s:34} {times}  ≤ {case.bar:<5g} {verdict} {memory}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.runtime", description="Emitted programs against training by hand."
    )
    parser.add_argument("--pairs", type=int, default=PAIRS, metavar="N", help="timed steps of each (%(default)s)")
    parser.add_argument("--only", metavar="TEXT", default="", help="only cases whose name contains TEXT")
    chosen = parser.parse_args(argv)
    print(f"model: {LAYERS} blocks of width {WIDTH}, microbatches of {SAMPLES} × {SEQ} tokens, float32, gloo")
    ratios = f"ratio (quartiles) {'':6} CPU s {'':14}"
    print(f"{'':34} {'ours s':>8} {'theirs s':>8}   {ratios} {'MiB ours':>9} {'theirs':>8}  ratio")
    for case in CASES:
        if chosen.only in str(case):
            print(line(case, measure(case, chosen.pairs)), flush=True)
    print("\nµs of the processor per action between ops: mean, then the slowest rank's by kind")
    for case in OWN_TIME:
        if chosen.only in str(case):
            print(f"{case!s:46} {shown(measure_own(case, chosen.pairs))}", flush=True)


if __name__ == "__main__":
    main()
