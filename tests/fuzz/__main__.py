"""Corrupt files and load each as a user does.

    python -m tests.fuzz --files 10000 --seed 0

    a plan       autoptd.parallelize(model, plan=path) up to the emitted program, its layout, and its text
    a cluster    Cluster.load(path), then a plan of a tiny model on it
    a checkpoint (--checkpoints N)  inspected, checked, exported, and loaded

Each must load and then be consistent, or be refused by an autoptd error that names a field or a line. Anything else is
printed with the number of the file, and `--only N` reproduces that one. No process group may start.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.fuzz.checkpoints import load_checkpoint, pristine, spoilt_checkpoint
from tests.fuzz.files import CLUSTERS, spoilt
from tests.fuzz.loading import Outcome, guarded, load


def run(files: int, seed: int, only: int | None = None) -> tuple[Counter[str], list[tuple[int, Outcome]]]:
    """Return counts by outcome, and the files with a wrong outcome."""
    ends: Counter[str] = Counter()
    wrong = []
    with tempfile.TemporaryDirectory() as folder, guarded():
        for number in range(files) if only is None else [only]:
            kind, path = spoilt(Path(folder), seed, number)
            outcome = load(kind, path)
            ends[f"{'cluster' if kind in CLUSTERS else 'plan'} {outcome.end}"] += 1
            if outcome.wrong:
                wrong.append((number, outcome))
                print(f"--only {number}: {outcome.text}\n", file=sys.stderr)
            if number % 1000 == 999:
                print(f"{number + 1} files, {len(wrong)} ended wrongly", file=sys.stderr)
    return ends, wrong


def run_checkpoints(count: int, seed: int, only: int | None = None) -> tuple[Counter[str], list[tuple[int, Outcome]]]:
    """Like `run`, for checkpoints with one corrupted file each."""
    ends: Counter[str] = Counter()
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        good = pristine(Path(folder) / "good")
        for number in range(count) if only is None else [only]:
            name = spoilt_checkpoint(good, Path(folder) / "spoilt", seed, number)
            outcome = load_checkpoint(Path(folder) / "spoilt")
            ends[f"{name} {outcome.end}"] += 1
            if outcome.wrong:
                wrong.append((number, outcome))
                print(f"--only {number}: {outcome.text}\n", file=sys.stderr)
    return ends, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoints", type=int, default=0, help="as many spoilt checkpoints instead")
    parser.add_argument("--only", type=int, help="the file of this number alone")
    arguments = parser.parse_args()
    start = time.monotonic()
    if arguments.checkpoints:
        ends, wrong = run_checkpoints(arguments.checkpoints, arguments.seed, arguments.only)
    else:
        ends, wrong = run(arguments.files, arguments.seed, arguments.only)
    for end, count in sorted(ends.items()):
        print(f"{count:6} {end}")
    print(f"{sum(ends.values())} files in {time.monotonic() - start:.0f} s, {len(wrong)} ended wrongly")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
