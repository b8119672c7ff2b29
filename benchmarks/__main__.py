"""`python -m benchmarks [RUNS.jsonl]`: planning time, speed of emitted programs and, with runs, prediction time."""

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
        print(f"\ntime to predict a vtrain_multi run of {path.name} on a traced model, every choice fixed")
        print(prediction.summary(prediction.measure(path, "vtrain_multi")))


if __name__ == "__main__":
    main()
