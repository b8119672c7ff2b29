"""`python -m benchmarks [RUNS.jsonl]`: how long planning takes, how fast programs train; with runs, how long predicting
them takes."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks import planning, prediction
from benchmarks.runtime import __main__ as runtime


def main() -> None:
    planning.main([])
    print()
    runtime.main([])
    for path in map(Path, sys.argv[1:]):
        print(f"\nprediction of the runs of vtrain_multi in {path.name}, every choice fixed, after the trace")
        print(prediction.summary(prediction.measure(path, "vtrain_multi")))


if __name__ == "__main__":
    main()
