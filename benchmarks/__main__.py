"""`python -m benchmarks`: the tables, one after the other."""

from __future__ import annotations

from benchmarks.planning import CASES, line, measure


def main() -> None:
    print("planning, cold start with trace")
    print(f"{'model':12} {'world':>6} {'time':>10} {'memory':>9}   plan")
    for case in CASES:
        print(line(case, measure(case)), flush=True)


if __name__ == "__main__":
    main()
