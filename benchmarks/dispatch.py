"""`python -m benchmarks.dispatch [FILE.json]`: predicted against measured dispatch and combine of experts' rows.

The file holds a list of curves: `gpu`, `dispatcher`, `op`, the tokens of a rank and their width, and `points` of `ep`
and `time_us`. The default file is in benchmarks/data. NCCL's all-to-all sends each row by itself, the others merge
those of a token.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean, median
from typing import Any

from autoptd.cost_models.cluster import Cluster
from autoptd.cost_models.dispatch import dispatch_s
from benchmarks.collectives import cluster_of

DATA = Path(__file__).parent / "data" / "dispatch.json"
BAR = 0.25
_BF16 = 2


def errors(curve: dict[str, Any]) -> dict[int, float]:
    """Return ep -> relative error of the time."""
    cluster = cluster_of({"name": "", **curve})
    return {p["ep"]: predicted_s(curve, p["ep"], cluster) / (p["time_us"] * 1e-6) - 1 for p in curve["points"]}


def predicted_s(curve: dict[str, Any], ep: int, cluster: Cluster) -> float:
    how = "rows" if "nccl" in curve["dispatcher"] else "merged"
    sizes = curve["tokens_per_rank"], curve["hidden"] * _BF16, curve["experts"], curve["top_k"]
    return dispatch_s(how, *sizes, cluster, ep)


def main(arguments: list[str]) -> int:
    """Print the table; return 1 if the median error of any curve exceeds BAR."""
    curves = json.loads((Path(arguments[0]) if arguments else DATA).read_text("utf-8"))
    medians = []
    print(f"{'GPU':16}{'dispatcher':16}{'op':10}{'median':>8}{'mean':>8}   error by ep")
    for curve in curves:
        found = errors(curve)
        medians.append(median(map(abs, found.values())))
        each = ", ".join(f"{ep}: {e:+.0%}" for ep, e in found.items())
        head = f"{curve['gpu']:16}{curve['dispatcher']:16}{curve['op']:10}"
        print(f"{head}{medians[-1]:8.1%}{fmean(found.values()):+8.1%}   {each}")
    print(f"\n{len(medians)} curves: median of medians {median(medians):.1%}, largest {max(medians):.1%}")
    return int(max(medians) > BAR)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
