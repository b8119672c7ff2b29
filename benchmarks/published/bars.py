"""Bars that the figures of a report must meet. A figure equal to its bar meets it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from benchmarks.published.compare import Fitting, Line, PlanSet
from benchmarks.published.statistics import Errors

TIMED = (
    "bloom_prequel (64 heads)",
    "dgxc_llmb (dense)",
    "korthikanti_table5",
    "mpt_llm_foundry",
    "nanotron_ultrascale_best",
    "sc21_table1",
    "torchtitan",
    "vtrain_multi",
)
TIME, TIME_ALL, TIME_ALL_P90 = 0.08, 0.06, 0.18
MEMORY = 0.06
# of mixtures of experts, all groups together: line -> bars of the step time's median and 90th percentile
MIXTURES = {"mixtures in bf16": (0.08, 0.2), "mixtures in fp8": (0.12, None)}
MEMORY_MIXTURES = 0.08
SKIPPED_MIXTURES = 0.15
REGRET, RANK = 0.04, 0.9
SAID_NOT_TO_FIT = 0.02  # share of the runs that ran


@dataclass(frozen=True)
class Verdict:
    """A bar and whether it is met, printed as `≤ 8 % pass`."""

    text: str
    met: bool

    def __str__(self) -> str:
        return f"{self.text} {'pass' if self.met else 'MISS'}"


def at_most(value: float, bar: float) -> Verdict:
    return Verdict(f"≤ {bar * 100:g} %", value <= bar)


def time_verdicts(name: str, time: Errors | None) -> list[Verdict]:
    """Judge the median time error of a line, for all rows also the 90th percentile; a line without times misses."""
    if name == "all rows":
        median, p90 = (time.median, time.p90) if time else (inf, inf)
        return [at_most(median, TIME_ALL), at_most(p90, TIME_ALL_P90)]
    if name in MIXTURES:
        found = zip(MIXTURES[name], (time.median, time.p90) if time else (inf, inf), strict=True)
        return [at_most(value, bar) for bar, value in found if bar is not None]
    return [at_most(time.median if time else inf, TIME)] if name in TIMED else []


def memory_verdicts(line: Line) -> list[Verdict]:
    """Judge the median memory error of a group of dense models, or of all mixtures; the rest has no bar."""
    if line.memory is None or line.name in ("all rows", "all mixtures") or line.name.endswith("(moe)"):
        return []
    return [at_most(line.memory.median, MEMORY_MIXTURES if line.name in MIXTURES else MEMORY)]


def skip_verdict(lines: Sequence[Line]) -> Verdict | None:
    """Judge the share of mixtures that were skipped; None without mixtures."""
    rows = sum(line.rows for line in lines)
    return at_most(sum(line.rows - line.used for line in lines) / rows, SKIPPED_MIXTURES) if rows else None


def set_verdicts(plans: PlanSet) -> list[Verdict]:
    """Judge rank correlation (vtrain), then regret (vtrain and BLOOM)."""
    vtrain, bloom = plans.line.startswith("vtrain"), plans.line.startswith("bloom_prequel")
    rank = [Verdict(f"≥ {RANK:g}", plans.spearman >= RANK)] if vtrain else []
    return rank + ([at_most(plans.regret, REGRET)] if vtrain or bloom else [])


def fitting_verdicts(fitting: Fitting) -> list[Verdict]:
    """Judge memory verdicts: no out-of-memory run predicted to fit; at most 2 % of those that ran predicted not to."""
    wrong = len(fitting.said_not_to_fit) / fitting.ran if fitting.ran else 0.0
    return [Verdict("= 0", not fitting.said_to_fit), at_most(wrong, SAID_NOT_TO_FIT)]
