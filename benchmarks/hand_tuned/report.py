"""The printed report: each run, the distribution of gains per group, and every loss."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from benchmarks.hand_tuned.search import Comparison, SearchResult

QUARTILES = (0, 25, 50, 75, 100)


def lines_of(c: Comparison) -> list[str]:
    """Return the lines of a run: its own plan, that of the free search, and that of the search of used dimensions."""
    if c.own_s is None:
        return [f"{c.id}  not compared: {c.own}"]
    over = f", own plan needs {c.needed_bytes / 2**30:.1f} GiB" if c.needed_bytes > c.memory_bytes else ""
    found = [f"{c.id}  {c.model} on {c.devices}{over}", f"  own   {c.own_s:9.4g} s           {c.own}"]
    for name, free, gain in (("free", c.free, c.gain), ("used", c.used, c.used_gain)):
        if free is not None:
            found.append(f"  {name}  {_seconds(free)} {'' if gain is None else f'{gain:+7.1%}':8}  {free.plan}")
            found += [f"  LOSS  {free.loss}"] if free.loss else []
    return found


def _seconds(free: SearchResult) -> str:
    return "  no plan  " if free.seconds is None else f"{free.seconds:9.4g} s"


def quartiles(gains: Sequence[float]) -> tuple[float, ...]:
    """Return the minimum, lower quartile, median, upper quartile and maximum (linear interpolation)."""
    return tuple(float(value) for value in np.percentile(np.asarray(gains, dtype=float), QUARTILES))


def table(comparisons: Iterable[Comparison]) -> list[str]:
    """Return a Markdown table of runs, losses and the distribution of gains of both searches, per group and overall."""
    groups: dict[str, list[Comparison]] = {}
    for c in comparisons:
        groups.setdefault(c.group, []).append(c)
    rows = [*sorted(groups.items()), ("all", [c for group in groups.values() for c in group])]
    head = "| group | runs | losses | least | quartile | median | quartile | most | used: least | median | most |"
    return [head, "|---|" + "---:|" * (head.count("|") - 2), *(_row(name, group) for name, group in rows)]


def _row(name: str, group: Sequence[Comparison]) -> str:
    compared = [c for c in group if c.own_s is not None]
    losses = sum(bool(c.losses) for c in compared)
    free = [c.gain for c in compared if c.gain is not None]
    used = [c.used_gain for c in compared if c.used_gain is not None]
    shown = [f"{g:.1%}" for g in quartiles(free)] if free else ["–"] * 5
    alone = [f"{g:.1%}" for g in quartiles(used)[::2]] if used else ["–"] * 3
    return f"| {' | '.join([name, str(len(compared)), str(losses), *shown, *alone])} |"


def text(comparisons: Sequence[Comparison]) -> str:
    """Return the whole report."""
    blocks = [line for c in comparisons for line in lines_of(c)]
    lost = [f"{c.id}: {loss}" for c in comparisons for loss in c.losses]
    verdict = [f"losses: {len(lost)}", *lost] if lost else ["no loss"]
    return "\n".join([*blocks, "", *table(comparisons), "", *verdict])
