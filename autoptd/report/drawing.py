"""The simulated step of a plan as small integers, which the script of the page draws.

Times are in parts of `UNITS` of the step. A pass has several colours, one after the other, as shares of its length:
a forward pass compute and exposed tp communication; a backward pass recomputation, compute, and the same.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from autoptd.cost_models.timeline import RankRecord
from autoptd.explain.timeline import is_too_long, simulate_plan, stage_times
from autoptd.plans.data import PlanData

UNITS = 1_000_000
_EVENTS = 24_000  # most that are drawn; of longer steps the first and the last
KINDS = ("F", "B", "W", "REDUCE", "STEP", "GATHER", "SF", "SB")


def drawing(plan: PlanData, limit: int = _EVENTS) -> dict[str, Any] | None:
    """Return at most `limit` events of the pipeline ranks: of each kind, chunk, microbatch, start and length.

    `shares`: of a pass on each chunk of each rank; `hidden`: where events were left out, if any were. None for a plan
    without times, or with too many passes to simulate in seconds."""
    if not plan.predicted.times or is_too_long(plan):
        return None
    _, timeline = simulate_plan(plan)
    times, _ = stage_times(plan)
    whole_s = timeline.makespan_s
    most = max(2, limit // len(timeline.records) // 2)
    rows, hidden, left_out = [], [UNITS, 0], False
    for record in timeline.records:
        events = list(_events(record, whole_s))
        if len(events) > 2 * most:
            left_out = True
            before, after = events[most - 1], events[-most]
            hidden = [min(hidden[0], before[3] + before[4]), max(hidden[1], after[3])]
            events = [*events[:most], *events[-most:]]
        rows.append(list(chain.from_iterable(events)))
    if left_out:  # cut all ranks at the same times
        rows = [_without(row, hidden[0], hidden[1]) for row in rows]
    shares = [
        [
            _shares(chunk.forward_s, chunk.forward_tp_s, chunk.backward_s, chunk.backward_tp_s, chunk.recompute_s)
            for chunk in rank.chunks
        ]
        for rank in times
    ]
    return {
        "kinds": KINDS,
        "seconds": whole_s,
        "ranks": rows,
        "shares": shares,
        "hidden": hidden if left_out else None,
    }


def _events(record: RankRecord, whole_s: float) -> Any:
    scale = UNITS / whole_s if whole_s else 0.0
    for action, start_s, end_s in zip(record.actions, record.starts_s, record.ends_s, strict=True):
        if action.kind in KINDS and end_s > start_s:
            at, end = round(start_s * scale), round(end_s * scale)
            microbatch = -1 if action.microbatch is None else action.microbatch
            yield KINDS.index(action.kind), action.chunk, microbatch, at, max(1, end - at)


def _without(row: list[int], start: int, end: int) -> list[int]:
    events = [row[i : i + 5] for i in range(0, len(row), 5)]
    return list(chain.from_iterable(e for e in events if e[3] + e[4] <= start or e[3] >= end))


def _shares(forward_s: float, forward_tp_s: float, backward_s: float, backward_tp_s: float, again_s: float) -> Any:
    """Return the share of tp communication in a forward pass; of recomputation and of tp in a backward pass."""
    ahead, back = forward_s + forward_tp_s, backward_s + backward_tp_s
    return [
        round(forward_tp_s / ahead, 4) if ahead else 0,
        round(again_s / back, 4) if back else 0,
        round(backward_tp_s / back, 4) if back else 0,
    ]
