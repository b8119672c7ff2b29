"""How long a checkpoint that is written beside training keeps training waiting.

One process trains; by turns some steps with a save begun before them, and as many without. What the save costs is the
call itself and what it slows the steps by, less a copy of what it saves; it is given as a share of one step. A core
must be free for the thread that writes, as cores are where GPUs compute.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import autoptd
from autoptd.checkpoint.entries import Entry, copied, model_entries, optimizer_entries
from benchmarks.runtime.model import SEQ, VOCAB, Trained

PAIRS = 41
STEPS = 1  # of a turn, in which the save is over
SAMPLES = 16
BAR = 0.05  # of a step, beyond the copy


def entries_of(parallel: autoptd.Parallel) -> list[Entry]:
    return [*model_entries(parallel._running, frozenset()), *optimizer_entries(parallel._running)]


def measure(pairs: int, root: Path) -> list[tuple[float, float, float, float, float]]:
    """Of each pair: seconds of a copy, of the call of `save`, of the steps after it, of as many without, and of waiting
    for the save after the steps."""
    source = autoptd.trace(Trained(), seq=SEQ, precision="fp32")
    parallel = autoptd.parallelize(source, world=1, batch=SAMPLES, cluster="local", fix={"recompute": "none"})
    words = torch.randint(VOCAB, (SAMPLES, SEQ + 1))
    batch = {"tokens": words[:, :-1], "targets": words[:, 1:]}

    def steps() -> float:
        begin = time.perf_counter()
        for _ in range(STEPS):
            parallel.train_step(batch)
        return time.perf_counter() - begin

    def copy() -> float:
        begin = time.perf_counter()
        kept = copied(entries_of(parallel))
        end = time.perf_counter()
        del kept
        return end - begin

    def save() -> tuple[float, float, float]:
        begin = time.perf_counter()
        parallel.save(root, keep=1, wait=False)
        called = time.perf_counter() - begin
        after = steps()
        begin = time.perf_counter()
        parallel.finish_saving()
        return called, after, time.perf_counter() - begin

    steps(), save(), copy()  # warm-up
    found = []
    for pair in range(pairs):
        if pair % 2:
            without = steps()
            called, after, waited = save()
        else:
            called, after, waited = save()
            without = steps()
        found.append((copy(), called, after, without, waited))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.saving", description=__doc__)
    parser.add_argument("--pairs", type=int, default=PAIRS, help=f"of turns (default {PAIRS})")
    pairs = parser.parse_args(argv).pairs
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="autoptd-saving-") as folder:
        found = measure(pairs, Path(folder))
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    step = statistics.median(without for *_, without, _ in found) / STEPS
    shares = sorted((called - copy + after - without) / step for copy, called, after, without, _ in found)
    low, stall, high = statistics.quantiles(shares, n=4) if len(shares) > 1 else shares * 3
    copies, calls = (statistics.median(each) for each in zip(*((c, called) for c, called, *_ in found), strict=True))
    print(f"a step takes {step:.3f} s, a checkpoint has {size / 2**20:.0f} MiB, a copy of what it holds {copies:.3f} s")
    waited = max(seconds for *_, seconds in found)
    print(f"the call of save takes {calls:.3f} s; after {STEPS} steps it is waited for {waited:.3f} s at most")
    verdict = "pass" if stall <= BAR else "MISS"
    print(f"beyond the copy a save costs {stall:+.3f} of a step ({low:+.3f} to {high:+.3f}); bar {BAR}: {verdict}")


if __name__ == "__main__":
    main()
