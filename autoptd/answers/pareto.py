"""The trade-off of step time against memory: the fastest plan for less and less device memory.

Plans are made for devices with less and less memory than the fastest plan needs, 8 % at a time, until nothing fits.
None is made where the plan before fits already. Points that another one beats in both time and memory are left out.
What a device must have includes the headroom that is left for the error of the prediction.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from autoptd.answers.in_processes import answered, cores
from autoptd.answers.query import PlanQuery
from autoptd.errors import DoesNotFit
from autoptd.explain.choices import changes, short
from autoptd.explain.tables import GIB, WIDTH, columns, gib, render, seconds, section
from autoptd.plans.model import Plan
from autoptd.progress import Progress, Silent

_STEP = 0.08  # of the memory before
_POINTS = 30  # plans made, at most


@dataclass(frozen=True)
class Frontier:
    """Non-dominated plans, from the fastest to the one with the least memory.

    device_bytes: memory that a device must have for each. refused_bytes: that with which nothing fits. complete: false
    if a limit of time or plans came first.
    """

    points: tuple[Plan, ...]
    device_bytes: tuple[int, ...]
    refused_bytes: int | None
    complete: bool

    def to_data(self) -> dict[str, Any]:
        """Return the points as JSON data, in seconds and bytes."""
        return {
            "points": [
                {
                    "plan": short(plan),
                    "step_time_s": plan.predicted.step_time_s,
                    "tokens_per_s": plan.predicted.tokens_per_s,
                    "device_bytes": nbytes,
                    "changes": changes(before, plan) if before else [],
                }
                for before, plan, nbytes in zip((None, *self.points), self.points, self.device_bytes, strict=False)
            ],
            "refused_bytes": self.refused_bytes,
            "complete": self.complete,
        }


def frontier(
    query: PlanQuery,
    *,
    time_limit_s: float = math.inf,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Frontier:
    """Return the fastest plan for each device memory. Raises DoesNotFit if nothing fits in all of the memory."""
    progress, started = progress or Silent(), clock()

    def most(plan: Plan) -> int:
        return max(query.device_bytes(plan))

    def plan_within(nbytes: int) -> Plan | DoesNotFit:
        try:
            return query.with_memory(nbytes).plan()
        except DoesNotFit as error:
            return error

    with progress.stage("plan with all memory"):
        found = [query.plan()]
    limits, made, refused = [most(found[0])], 1, None
    while limits[-1] > query.cluster.device.context_bytes:
        limits.append(math.floor(limits[-1] * (1 - _STEP)))
    limits.pop()
    while refused is None and made < _POINTS and clock() - started <= time_limit_s:
        limits = [nbytes for nbytes in limits if nbytes < most(found[-1])]
        if not limits:
            break
        some, limits = limits[: cores()], limits[cores() :]
        answers = answered(progress, f"plan with {gib(some[0])} and less", plan_within, some)
        made += len(some)
        for nbytes, plan in zip(some, answers, strict=True):
            if isinstance(plan, DoesNotFit):
                refused = nbytes
                break
            if nbytes < most(found[-1]):
                found.append(plan)
    complete = refused is not None or not limits
    kept = _undominated(found, most)
    return Frontier(kept, tuple(map(most, kept)), refused, complete)


def _undominated(plans: Sequence[Plan], device_bytes: Callable[[Plan], int]) -> tuple[Plan, ...]:
    """Return the plans sorted by step time, of which each needs less memory than every faster one."""
    kept: list[Plan] = []
    for plan in sorted(plans, key=lambda p: (p.predicted.step_time_s, device_bytes(p))):
        if not kept or device_bytes(plan) < device_bytes(kept[-1]):
            kept.append(plan)
    return tuple(kept)


def pareto_text(title: str, found: Frontier, width: int = WIDTH) -> str:
    """Return a table with a row per point and its changes from the row above."""
    table = columns("device, GiB>", "step>", "slower>", "changes", gap=1 if width < WIDTH else 2)
    fastest = found.points[0]
    for before, plan, nbytes in zip((None, *found.points), found.points, found.device_bytes, strict=False):
        slower = plan.predicted.step_time_s / fastest.predicted.step_time_s - 1
        what = short(plan) if before is None else ", ".join(changes(before, plan))
        cells = [f"{nbytes / GIB:.1f}", seconds(plan.predicted.step_time_s)]
        table.add_row(*cells, f"{slower:+.1%}" if before else "", what)
    ends = [] if found.refused_bytes is None else [f"nothing fits in {gib(found.refused_bytes)}"]
    ends += [] if found.complete else ["less memory was not tried: the limit of time or of plans was reached"]
    return render([title, *section("Fastest plan for each device memory", table), *ends], width)
