"""Delay of training by a checkpoint that is written in the background.

One process trains in rounds of three steps: a plain one, one with a save begun before it, and a plain one. The cost of
a save is the time of its call, less a copy of what it saves, plus the excess of its step over the mean of the plain
steps around it. It is reported as a share of a step. The writing thread needs a core of its own.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import autoptd
from autoptd.checkpoint.entries import copied, model_entries, optimizer_entries
from benchmarks.runtime.model import SEQ, VOCAB, Trained

ROUNDS = 41
SAMPLES = 16
BAR = 0.05  # share of a step, beyond the copy


def copy_s(parallel: autoptd.Parallel) -> float:
    """Return the median seconds of copying a checkpoint's tensors."""
    found = []
    for _ in range(5):
        begin = time.perf_counter()
        copies = copied([*model_entries(parallel._running, frozenset()), *optimizer_entries(parallel._running)])
        found.append(time.perf_counter() - begin)
        del copies
    return statistics.median(found)


def measure(rounds: int, root: Path) -> tuple[float, list[tuple[float, float, float, float, float]]]:
    """Return the seconds of a copy and, per round, of: step before, call of save, step during it, wait, step after."""
    source = autoptd.trace(Trained(), seq=SEQ, precision="fp32")
    parallel = autoptd.parallelize(source, world=1, batch=SAMPLES, cluster="local", fix={"recompute": "none"})
    words = torch.randint(VOCAB, (SAMPLES, SEQ + 1))
    batch = {"tokens": words[:, :-1], "targets": words[:, 1:]}

    def timed(do: Callable[[], object]) -> float:
        begin = time.perf_counter()
        do()
        return time.perf_counter() - begin

    def step() -> float:
        return timed(lambda: parallel.train_step(batch))

    def save() -> tuple[float, float, float]:
        return timed(lambda: parallel.save(root, keep=1, wait=False)), step(), timed(parallel.finish_saving)

    step(), save(), step()  # warm-up
    copy = copy_s(parallel)
    step()
    return copy, [(step(), *save(), step()) for _ in range(rounds)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.saving", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of three steps (default %(default)s)")
    rounds = parser.parse_args(argv).rounds
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="autoptd-saving-") as folder:
        copy, found = measure(rounds, Path(folder))
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    step = statistics.median((before + after) / 2 for before, *_, after in found)
    shares = [(call - copy + beside - (before + after) / 2) / step for before, call, beside, _, after in found]
    low, stall, high = statistics.quantiles(shares, n=4) if len(shares) > 1 else shares * 3
    call, waited = statistics.median(row[1] for row in found), max(row[3] for row in found)
    print(f"a step takes {step:.3f} s, a checkpoint has {size / 2**20:.0f} MiB, copying its tensors takes {copy:.3f} s")
    print(f"the call of save takes {call:.3f} s; waiting for it after the step takes at most {waited:.3f} s")
    verdict = "pass" if stall <= BAR else "MISS"
    print(f"beyond the copy, a save costs {stall:+.3f} of a step ({low:+.3f} to {high:+.3f}); bar {BAR}: {verdict}")


if __name__ == "__main__":
    main()
