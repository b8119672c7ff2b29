"""Time against memory: what a step costs when devices have less memory, point by point.

The plan is made again on devices that have just less than the last plan needs, until nothing fits. What another point
beats in both time and memory is left out. Needed is what decides whether a plan fits: with the least that the
allocator holds free, not with what it usually does, which `explain` shows as overhead. Each point needs at least 8 %
less than the one before, so that a hundred layers do not make a hundred points.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from autoptd.answers.query import PlanQuery
from autoptd.cost_models.memory import Memory
from autoptd.errors import DoesNotFit
from autoptd.explain.choices import changes, short
from autoptd.explain.tables import GIB, WIDTH, columns, gib, render, seconds, section
from autoptd.plans.model import Plan
from autoptd.progress import Progress, Silent

_STEP = 0.08  # of the memory that the last point needs
_POINTS = 30  # plans made, at most


@dataclass(frozen=True)
class Frontier:
    """Points from the fastest to the leanest, none beaten by another; `refused_bytes`: with that nothing fits.

    `complete` is false where the time or the number of plans ended before.
    """

    points: tuple[Plan, ...]
    refused_bytes: int | None
    complete: bool

    def to_data(self) -> dict[str, Any]:
        """For machines: seconds and bytes."""
        return {
            "points": [
                {
                    "plan": short(plan),
                    "step_time_s": plan.predicted.step_time_s,
                    "tokens_per_s": plan.predicted.tokens_per_s,
                    "needed_bytes": needed_bytes(plan),
                    "changes": changes(before, plan) if before else [],
                }
                for before, plan in zip((None, *self.points), self.points, strict=False)
            ],
            "refused_bytes": self.refused_bytes,
            "complete": self.complete,
        }


def needed_by_stage(plan: Plan) -> list[int]:
    """Bytes that a device of each pipeline rank must have, by what decides whether a plan fits."""
    return [Memory(**row).needed for row in plan.predicted.memory]


def needed_bytes(plan: Plan) -> int:
    """Bytes that every device must have: those of the fullest rank."""
    return max(needed_by_stage(plan))


def frontier(
    asked: PlanQuery,
    *,
    time_limit_s: float = math.inf,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Frontier:
    """The fastest plan for each memory. Raises DoesNotFit where not even the devices' own memory suffices."""
    progress, started = progress or Silent(), clock()
    with progress.stage("plan with all memory"):
        found = [asked.plan()]
    refused, complete = None, False
    while len(found) < _POINTS and clock() - started <= time_limit_s:
        limit = math.floor(needed_bytes(found[-1]) * (1 - _STEP))
        if limit <= asked.cluster.device.context_bytes:
            complete = True
            break
        with progress.stage(f"plan with {gib(limit)}"):
            try:
                found.append(asked.with_memory(limit).plan())
            except DoesNotFit:
                refused, complete = limit, True
                break
    return Frontier(_undominated(found), refused, complete)


def _undominated(plans: Sequence[Plan]) -> tuple[Plan, ...]:
    """From the fastest to the leanest: each must need less than all that are at least as fast."""
    kept: list[Plan] = []
    for plan in sorted(plans, key=lambda p: (p.predicted.step_time_s, needed_bytes(p))):
        if not kept or needed_bytes(plan) < needed_bytes(kept[-1]):
            kept.append(plan)
    return tuple(kept)


def pareto_text(title: str, found: Frontier, width: int = WIDTH) -> str:
    """A row per point, with what changes from the one above."""
    table = columns("needs, GiB>", "step>", "slower>", "what changes", gap=1 if width < WIDTH else 2)
    fastest = found.points[0]
    for before, plan in zip((None, *found.points), found.points, strict=False):
        slower = plan.predicted.step_time_s / fastest.predicted.step_time_s - 1
        what = short(plan) if before is None else ", ".join(changes(before, plan))
        cells = [f"{needed_bytes(plan) / GIB:.1f}", seconds(plan.predicted.step_time_s)]
        table.add_row(*cells, f"{slower:+.1%}" if before else "", what)
    ends = [] if found.refused_bytes is None else [f"nothing fits in {gib(found.refused_bytes)}"]
    ends += [] if found.complete else ["leaner points were not looked for: the time or the number of plans was spent"]
    return render([title, *section("The fastest plan for each memory of a device", table), *ends], width)
