"""The report of `autoptd simulate`: the step of a plan, simulated from the action lists of its schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from autoptd.cost_models.simulate import simulate
from autoptd.cost_models.step_times import PRICED, ChunkTimes, Overlap, StageTimes, times_from_data
from autoptd.cost_models.timeline import Timeline
from autoptd.errors import PlanError
from autoptd.explain.costs import AS_STATED, CostQuestion, TrainingCost, cost_lines
from autoptd.explain.tables import columns, render, seconds, stage_axes
from autoptd.plans.data import PlanData
from autoptd.schedule import Schedule, StageMap, chunks_of, in_flight, route_of, row_of, step_lists, text
from autoptd.text import wrapped

_TRACED = 50_000  # most forward passes in a trace, 100 MB
LEAST_COLUMNS = 3  # of the shortest forward pass, for a readable picture


def chunk_times(
    plan: PlanData, kind: str | None = None, virtual: int | None = None
) -> tuple[Schedule, tuple[StageTimes, ...], Overlap]:
    """Return the action lists of a plan, the times of its ranks, and its overlap.

    kind, virtual: another schedule on the same ranks; each rank's work, summed over its chunks, is then cut into
    `virtual` equal chunks. Raises PlanError for a plan without times, and for an impossible schedule.
    """
    kind = kind or plan.schedule.kind
    virtual = virtual or row_of(kind).chunks or plan.schedule.virtual
    times, overlap = stage_times(plan, kind, virtual)
    return step_lists(kind, plan.mesh.pp, plan.schedule.microbatches, virtual, overlap.early), times, overlap


def stage_times(
    plan: PlanData, kind: str | None = None, virtual: int | None = None
) -> tuple[tuple[StageTimes, ...], Overlap]:
    """Return the times of a plan's ranks, cut again for another schedule, and its overlap. Raises PlanError."""
    if not plan.predicted.times:
        raise PlanError(
            "the plan has no times of its stages",
            where="predicted.times",
            fix="plan again with this version of autoptd",
        )
    kind, virtual = kind or plan.schedule.kind, virtual or plan.schedule.virtual
    times = times_from_data(plan.predicted.times, plan.mesh.pp, plan.route.shape)
    if (virtual, row_of(kind).shape) != (len(times[0].chunks), plan.route.shape):
        times = _cut_again(times, plan.route, route_of(kind, plan.mesh.pp, virtual))
    # the tp seconds of a plan are the exposed ones, op by op: overlapping them again would count the overlap twice
    return times, Overlap.of(set(plan.method.overlap) - PRICED, plan.cluster.device.collective_share)


def _cut_again(times: Sequence[StageTimes], old: StageMap, new: StageMap) -> tuple[StageTimes, ...]:
    """Return each rank's work cut into as many equal chunks as another route has.

    A message between two ranks takes as long as in the plan; if the plan has none there, as long as its longest.
    """
    known: dict[frozenset[int], float] = {}
    for stage in range(old.stages - 1):
        rank, chunk = old.place(stage)
        ends = frozenset((rank, old.holder(stage + 1)))
        known[ends] = max(known.get(ends, 0.0), times[rank].chunks[chunk].send_forward_s)
    longest = max(known.values(), default=0.0)

    def send_s(stage: int) -> float:
        if not 0 <= stage < new.stages - 1:
            return 0.0
        return known.get(frozenset((new.holder(stage), new.holder(stage + 1))), longest)

    def chunk_of(stage: int) -> ChunkTimes:
        whole = times[new.holder(stage)].chunks
        parts = ("forward_s", "backward_s", "weight_s", "recompute_s", "forward_tp_s", "backward_tp_s")
        each = {name: sum(getattr(chunk, name) for chunk in whole) / new.virtual for name in parts}
        return ChunkTimes(**each, send_forward_s=send_s(stage), send_backward_s=send_s(stage - 1))

    chunks = [chunk_of(stage) for stage in range(new.stages)]
    return tuple(replace(own, chunks=new.of(chunks, rank)) for rank, own in enumerate(times))


def is_too_long(plan: PlanData) -> bool:
    """Return whether a step has so many passes that its events would be too many to read."""
    return len(plan.stages) * plan.schedule.microbatches > _TRACED


def refuse_untraceable(plan: PlanData) -> None:
    """Raise PlanError for a step with so many microbatches that its trace would be too large to open."""
    if is_too_long(plan):
        passes = len(plan.stages) * plan.schedule.microbatches
        raise PlanError(
            f"a trace of {passes:,} forward passes would be too large to open; the limit is {_TRACED:,}",
            where="schedule.microbatches",
            fix="leave out --trace, or plan with a smaller batch: the steady state repeats",
        )


def simulate_plan(plan: PlanData, kind: str | None = None, virtual: int | None = None) -> tuple[Schedule, Timeline]:
    """Simulate one step of a plan. Raises what `chunk_times` raises."""
    schedule, times, overlap = chunk_times(plan, kind, virtual)
    kind = kind or plan.schedule.kind
    return schedule, simulate(schedule, times, overlap, route_of(kind, len(schedule), chunks_of(schedule)))


def simulated_cost(plan: PlanData, timeline: Timeline, costs: CostQuestion) -> TrainingCost:
    """Return the cost of steps as simulated, with what an extra pass for the sums in a loss adds to each."""
    return costs.of(plan, timeline.makespan_s + plan.predicted.time_s.get("loss_sums", 0.0))


def summary(plan: PlanData, schedule: Schedule, timeline: Timeline, costs: CostQuestion = AS_STATED) -> dict[str, Any]:
    """Return the report as JSON data."""
    return {
        "makespan_s": timeline.makespan_s,
        "bubble": timeline.bubble,
        "critical_stage": timeline.critical,
        "exposed_s": timeline.exposed_s,
        "cost": simulated_cost(plan, timeline, costs).to_data(),
        "stages": [
            {
                "name": name,
                "busy_s": timeline.busy_s[rank],
                "in_flight": list(in_flight(schedule[rank])),
                **{f"{part}_s": value for part, value in timeline.breakdown_s(rank).items()},
            }
            for rank, name in enumerate(rank_names(plan))
        ],
    }


def rank_names(plan: PlanData) -> list[str]:
    """Return the modules of each pipeline rank."""
    held = [plan.route.of(plan.stages, rank) for rank in range(plan.mesh.pp)]
    return ["; ".join(stage.modules for stage in stages) for stages in held]


def report(
    plan: PlanData,
    schedule: Schedule,
    timeline: Timeline,
    kind: str,
    width: int,
    costs: CostQuestion = AS_STATED,
) -> str:
    """Return the report as text: a headline, the cost of such steps, a row per pipeline rank, and a picture if `width`
    suffices."""
    virtual = chunks_of(schedule)
    chunks = f" of {virtual} chunks each" if virtual > 1 else ""
    streams = {"tp": stage_axes(plan)}
    exposed = ", ".join(f"{streams.get(name, name)} {_time(value)}" for name, value in timeline.exposed_s.items())
    headline = [
        f"{plan.model}: {kind}, {_count(plan.mesh.pp, 'stage')}{chunks} × "
        f"{_count(plan.schedule.microbatches, 'microbatch')}",
        f"step {_time(timeline.makespan_s)}, mean bubble {timeline.bubble:.1%}; "
        f"exposed on the busiest stage, {timeline.critical}: {exposed}",
    ]
    costed = cost_lines(simulated_cost(plan, timeline, costs))
    lines = [*(wrapped(line, width) for line in (*headline, *costed)), "", *_table(schedule, timeline, streams, width)]
    if drawn := picture(timeline, width):
        lines += ["", *drawn]
    return "\n".join(lines) + "\n"


def action_lines(schedule: Schedule, width: int) -> list[str]:
    """Return the actions of each pipeline rank in lines of at most `width` columns, as docs/schedules.md names them."""
    margin = len(f"{len(schedule) - 1}  ")
    lines = ["Actions of each rank"]
    for rank, actions in enumerate(text(schedule)):
        first, *others = wrapped(actions, width - margin).split("\n")
        lines += [f"{rank:{margin - 2}}  {first}", *(" " * margin + line for line in others)]
    return lines


def _table(schedule: Schedule, timeline: Timeline, streams: Mapping[str, str], width: int) -> list[str]:
    parts = [timeline.breakdown_s(rank) for rank in range(len(schedule))]
    names = "stage", "busy", *(streams.get(name, name) for name in parts[0]), "in flight"
    table = columns(*(f"{name}>" for name in names))
    for rank, part in enumerate(parts):
        table.add_row(
            str(rank),
            f"{timeline.busy_s[rank] / timeline.makespan_s:.1%}" if timeline.makespan_s else "-",
            *(_time(value) for value in part.values()),
            "+".join(map(str, in_flight(schedule[rank]))),
        )
    return render([table], width).splitlines()


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "es" if noun.endswith("h") else "s")


def _time(value: float) -> str:
    return seconds(value) if value > 1e-9 else "0"


def picture(timeline: Timeline, width: int) -> list[str]:
    """Return a row of at most `width` characters per rank, to scale: `F0---B0------..`; a dot means idle.

    Empty if the shortest forward pass would get fewer than three columns.
    """
    work = [event for event in timeline.events if event.action.kind not in ("RF", "RB")]
    forwards = [event.end_s - event.start_s for event in work if event.action.kind == "F"]
    margin = len(f"{len(timeline.busy_s) - 1}  ")
    if (
        not forwards
        or not timeline.makespan_s
        or min(forwards) * (width - margin) < LEAST_COLUMNS * timeline.makespan_s
    ):
        return []
    per_s = (width - margin) / timeline.makespan_s
    rows = [["."] * (width - margin) for _ in timeline.busy_s]
    for event in work:
        start, end = round(event.start_s * per_s), round(event.end_s * per_s)
        rows[event.stage][start:end] = str(event.action)[: end - start].ljust(end - start, "-")
    return [f"{rank:{margin - 2}}  {''.join(row)}" for rank, row in enumerate(rows)]
