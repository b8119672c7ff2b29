"""`python -m benchmarks.coverage.mutated 17`: what was drawn for a seed, the model, and the outcome of its check."""

from __future__ import annotations

import argparse
import textwrap
import warnings
from collections.abc import Sequence

from benchmarks.coverage.check import check
from benchmarks.coverage.mutated.case import Mutated


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.coverage.mutated", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--model", action="store_true", help="print the model's modules")
    chosen = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    case = Mutated(chosen.seed)
    print(textwrap.fill(f"{case.name}: {'; '.join(case.drawn.notes)}", 120))
    if chosen.model:
        print(case.drawn.model)
    for name, value in check(case).data().items():
        print(f"{name:10}  {value}" if value not in ("", 0.0) else "", end="\n" if value not in ("", 0.0) else "")


if __name__ == "__main__":
    main()
