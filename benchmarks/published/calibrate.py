"""`python -m benchmarks.published.calibrate FILE.jsonl`: fit the constants on runs, or check how they generalise.

    calibrate FILE.jsonl                   fit all constants, print them beside the present values
    calibrate FILE.jsonl --leave-out       for each group: its error under present values, and in a fit without it

The loss is the mean over groups of the mean of |log(predicted ÷ measured step time)|, each clipped to 0.5 against
outliers. Coordinate descent starts at the present values and changes one constant at a time, up or down by a factor
that shrinks from round to round: constants are few, and the loss has kinks where a maximum switches arguments.
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

_CLIP = 0.5
_STEPS = (0.12, 0.06, 0.03)
_AT_MOST = 24  # runs used of each group, evenly spaced in it


@dataclass
class Case:
    """A measured run and its plan, to be timed under other constants.

    `simulated_ratio`: simulated ÷ lower-bound seconds under the present constants. A fit assumes that it stays
    the same and computes bounds only.
    """

    row: Row
    plan: Staged
    cluster: Cluster
    simulated_ratio: float

    def ratio(self, values: Mapping[str, float], made: dict[Cluster, Cluster]) -> float:
        """Return predicted ÷ measured seconds."""
        if self.cluster not in made:
            made[self.cluster] = with_values(self.cluster, values)
        assert self.row.measured_time_s
        return self.simulated_ratio * bounded(self.plan, made[self.cluster]).seconds / self.row.measured_time_s


def cases(rows: Sequence[Row]) -> dict[str, list[Case]]:
    """Return, per group, the cases of runs whose step time is complete enough to check."""
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
            simulated_ratio = plan.seconds / bounded(plan, cluster).seconds
            found.setdefault(name, []).append(Case(row, plan, cluster, simulated_ratio))
        print(f"  {name}: {len(found.get(name, []))} of {len(members)} runs", file=sys.stderr, flush=True)
    return found


def loss(groups: Mapping[str, Sequence[Case]], values: Mapping[str, float]) -> float:
    """Return the mean over groups of the mean clipped |log(predicted ÷ measured)|."""
    made: dict[Cluster, Cluster] = {}
    means = []
    for members in groups.values():
        logs = [min(_CLIP, abs(math.log(case.ratio(values, made)))) for case in members]
        means.append(statistics.fmean(logs))
    return statistics.fmean(means)


def fit(
    groups: Mapping[str, Sequence[Case]], start: Mapping[str, float], steps: Sequence[float] = _STEPS
) -> dict[str, float]:
    """Return the constants that coordinate descent from `start` finds."""
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
    """Return the median absolute relative error of the step time."""
    made: dict[Cluster, Cluster] = {}
    return statistics.median(abs(case.ratio(values, made) - 1) for case in members)


def leave_out(
    groups: Mapping[str, Sequence[Case]], names: Sequence[str], values: Mapping[str, float]
) -> dict[str, tuple[float, float]]:
    """Return group -> (median error under `values`, median error under constants fitted from the priors without it).

    A constant that only the omitted group determines stays at its prior.
    """
    found = {}
    for name in names:
        others = {other: members for other, members in groups.items() if other != name}
        without = fit(others, {c.name: c.prior for c in CONSTANTS})
        found[name] = median_error(groups[name], values), median_error(groups[name], without)
        print(f"{name:28s} {found[name][0]:6.1%} {found[name][1]:7.1%}", flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published.calibrate", description=__doc__)
    parser.add_argument("file", type=Path, metavar="FILE.jsonl", help="published runs, see benchmarks/README.md")
    parser.add_argument("--leave-out", action="store_true", help="report each group's error in a fit without it")
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
        print(f"{'group':28s} {'now':>6s} {'without':>7s}")
        result = dict(leave_out(groups, [name for name in groups if name in TIMED or name.endswith("(moe)")], start))
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
