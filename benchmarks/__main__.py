"""`python -m benchmarks [RUNS.jsonl]`: the tables, one after the other; with runs, how long predicting them takes."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks import prediction
from benchmarks.planning import CASES, line, measure


def main() -> None:
    print("planning, cold start with trace")
    print(f"{'model':12} {'world':>6} {'time':>10} {'memory':>9}   plan")
    for case in CASES:
        print(line(case, measure(case)), flush=True)
    for path in map(Path, sys.argv[1:]):
        print(f"\nprediction of the runs of vtrain_multi in {path.name}, every choice fixed, after the trace")
        print(prediction.summary(prediction.measure(path, "vtrain_multi")))


if __name__ == "__main__":
    main()
