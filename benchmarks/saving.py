"""How long a checkpoint that is written beside training keeps training waiting.

One process trains; again and again a step, a step with a save begun before it, and a step. What the save costs is its
call, less a copy of what it saves, and what its step takes longer than the mean of the two around it; it is given as a
share of a step. A core must be free for the thread that writes, as cores are where GPUs compute.
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
BAR = 0.05  # of a step, beyond the copy


def copy_s(parallel: autoptd.Parallel) -> float:
    """Median seconds of copying what a checkpoint holds."""
    found = []
    for _ in range(5):
        begin = time.perf_counter()
        kept = copied([*model_entries(parallel._running, frozenset()), *optimizer_entries(parallel._running)])
        found.append(time.perf_counter() - begin)
        del kept
    return statistics.median(found)


def measure(rounds: int, root: Path) -> tuple[float, list[tuple[float, float, float, float, float]]]:
    """Seconds of a copy; of each round those of the step before, the call, the step beside, of waiting for the save
    after it, and of the step after."""
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
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"(default {ROUNDS})")
    rounds = parser.parse_args(argv).rounds
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="autoptd-saving-") as folder:
        copy, found = measure(rounds, Path(folder))
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    step = statistics.median((before + after) / 2 for before, *_, after in found)
    shares = [(call - copy + beside - (before + after) / 2) / step for before, call, beside, _, after in found]
    low, stall, high = statistics.quantiles(shares, n=4) if len(shares) > 1 else shares * 3
    call, waited = statistics.median(row[1] for row in found), max(row[3] for row in found)
    print(f"a step takes {step:.3f} s, a checkpoint has {size / 2**20:.0f} MiB, a copy of what it holds {copy:.3f} s")
    print(f"the call of save takes {call:.3f} s; after the step the save is waited for {waited:.3f} s at most")
    verdict = "pass" if stall <= BAR else "MISS"
    print(f"beyond the copy a save costs {stall:+.3f} of a step ({low:+.3f} to {high:+.3f}); bar {BAR}: {verdict}")


if __name__ == "__main__":
    main()
