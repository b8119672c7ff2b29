"""`python -m benchmarks.published.calibrate FILE.jsonl`: fit the constants on runs, or check how they generalise.

    calibrate FILE.jsonl                   fit all constants, print them beside those that the clusters have
    calibrate FILE.jsonl --leave-out       for each group: fit without it, and compare its error with the full fit's

The loss is the mean over groups of the mean absolute logarithm of predicted by measured step time, each held to 0.5 so
that outliers do not decide. Constants are changed one at a time, up or down by a factor that shrinks from round to
round, from where they stand (coordinate descent): they are few, and the loss has kinks where a maximum changes sides.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autoptd.cost_models.cluster import Cluster
from autoptd.errors import AutoptdError
from autoptd.outputs import write_whole
from autoptd.search.pipeline.evaluate import Staged, bounded
from benchmarks.published.bars import TIMED
from benchmarks.published.compare import line_name
from benchmarks.published.constants import CONSTANTS, present, with_values
from benchmarks.published.predict import staged
from benchmarks.published.rows import Row, Unsupported, read_rows

_HELD = 0.5
_STEPS = (0.12, 0.06, 0.03)
_AT_MOST = 24  # runs of a group that are looked at: evenly chosen


@dataclass
class Case:
    """A measured run and its plan, to be timed again under other constants.

    `beside`: simulated by bounded seconds under the present constants, taken to stay: fits ask for bounds alone.
    """

    row: Row
    plan: Staged
    cluster: Cluster
    beside: float

    def ratio(self, values: Mapping[str, float], made: dict[Cluster, Cluster]) -> float:
        """Predicted by measured seconds."""
        if self.cluster not in made:
            made[self.cluster] = with_values(self.cluster, values)
        assert self.row.measured_time_s
        return self.beside * bounded(self.plan, made[self.cluster]).seconds / self.row.measured_time_s


def cases(rows: Sequence[Row]) -> dict[str, list[Case]]:
    """By group, of the runs whose time is fit to check."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.measured_time_s is not None:
            groups[line_name(row)].append(row)
    found: dict[str, list[Case]] = {}
    for name, members in groups.items():
        step = -(-len(members) // _AT_MOST)
        for row in members[::step]:
            try:
                plan, cluster = staged(row)
            except Unsupported:
                continue
            beside = plan.seconds / bounded(plan, cluster).seconds
            found.setdefault(name, []).append(Case(row, plan, cluster, beside))
        print(f"  {name}: {len(found.get(name, []))} of {len(members)} runs", file=sys.stderr, flush=True)
    return found


def loss(groups: Mapping[str, Sequence[Case]], values: Mapping[str, float]) -> float:
    """Mean over groups of the mean held absolute logarithm of predicted by measured."""
    made: dict[Cluster, Cluster] = {}
    means = []
    for members in groups.values():
        logs = [min(_HELD, abs(math.log(case.ratio(values, made)))) for case in members]
        means.append(statistics.fmean(logs))
    return statistics.fmean(means)


def fit(
    groups: Mapping[str, Sequence[Case]], start: Mapping[str, float], steps: Sequence[float] = _STEPS
) -> dict[str, float]:
    """Coordinate descent from `start`."""
    values, best = dict(start), loss(groups, start)
    for step in steps:
        for constant in CONSTANTS:
            for factor in (1 + step, 1 / (1 + step)):
                moved = False
                while (tried := values[constant.name] * factor) <= constant.most:
                    if (now := loss(groups, {**values, constant.name: tried})) >= best - 1e-6:
                        break
                    values[constant.name], best, moved = tried, now, True
                if moved:
                    break
        print(f"  steps of {step:.0%}: loss {best:.4f}", file=sys.stderr, flush=True)
    return values


def median_error(members: Sequence[Case], values: Mapping[str, float]) -> float:
    """Median absolute error of the step time."""
    made: dict[Cluster, Cluster] = {}
    return statistics.median(abs(case.ratio(values, made) - 1) for case in members)


def leave_out(
    groups: Mapping[str, Sequence[Case]], names: Sequence[str], values: Mapping[str, float]
) -> dict[str, tuple[float, float]]:
    """Group -> its median error under `values`, and under constants fitted without it, from the priors.

    A constant that only the group left out tells anything of stays at its prior.
    """
    found = {}
    for name in names:
        others = {other: members for other, members in groups.items() if other != name}
        without = fit(others, {c.name: c.prior for c in CONSTANTS})
        found[name] = median_error(groups[name], values), median_error(groups[name], without)
        print(f"{name:28s} {found[name][0]:6.1%} {found[name][1]:6.1%}", flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published.calibrate", description=__doc__)
    parser.add_argument("file", type=Path, metavar="FILE.jsonl")
    parser.add_argument("--leave-out", action="store_true", help="fit once without each group, and judge that group")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the values or errors there")
    given = parser.parse_args(arguments)
    try:
        rows = read_rows(given.file)
    except AutoptdError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    groups, start = cases(rows), present()
    result: dict[str, object]
    if given.leave_out:
        print(f"{'group':28s} {'all':>6s} {'without':>6s}")
        result = dict(leave_out(groups, [name for name in groups if name in TIMED], start))
    else:
        values = fit(groups, start)
        for constant in CONSTANTS:
            print(
                f"{constant.name:50s} {start[constant.name]:10.4g} {values[constant.name]:10.4g}  {constant.fitted_on}"
            )
        result = dict(values)
    if given.json:
        write_whole(given.json, json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
