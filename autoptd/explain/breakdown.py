"""The breakdown of a step into terms: seconds of the slowest pipeline rank, bytes of the fullest, for one plan or two.

    step = forward + backward + recompute + copies + tp + sends + bubble + dp reduce + dp gather + optimizer - hidden

The terms are those of the pipeline rank with most work, over all microbatches. `pipeline_sends` is the gain in a
simulation where messages between stages take no time; `pipeline_bubble` is the rest of the rank's waiting time.
`hidden_behind_compute` is negative: work that overlaps with other work, and is counted in its own term too. Where dp
hides less than it slows the passes beside it, the difference is `slowed_by_dp`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from autoptd.cost_models.steady import makespan_s
from autoptd.cost_models.step_times import ChunkTimes, StageTimes
from autoptd.explain.timeline import stage_times
from autoptd.plans.data import PlanData
from autoptd.schedule import period_of, step_lists

_ROUNDING = 1e-9  # of a step: a smaller remainder is rounding


@dataclass(frozen=True)
class CostTerm:
    """One term in two plans, in seconds or bytes."""

    name: str
    a: float
    b: float

    @property
    def difference(self) -> float:
        """The excess of `b` over `a`."""
        return self.b - self.a

    def to_data(self) -> dict[str, float | str]:
        """Return `{"term": …, "a": …, "b": …, "difference": …}`."""
        return {"term": self.name, "a": self.a, "b": self.b, "difference": self.difference}


def compared(a: Mapping[str, float], b: Mapping[str, float]) -> list[CostTerm]:
    """Return the terms that differ, the largest difference first."""
    names = [*a, *(name for name in b if name not in a)]
    terms = [CostTerm(name, a.get(name, 0.0), b.get(name, 0.0)) for name in names]
    return sorted((t for t in terms if t.a != t.b), key=lambda t: -abs(t.difference))


def time_terms(a: PlanData, b: PlanData) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds of a step of each plan, in the finest terms that both have; they add up to the step."""
    fine = all(map(_separates_passes, (a, b)))
    return step_terms(a, passes=fine), step_terms(b, passes=fine)


def step_terms(plan: PlanData, passes: bool = True) -> dict[str, float]:
    """Return the seconds of a step by term. `passes`: split compute into forward and backward where possible."""
    terms, by_dp = dict(plan.predicted.time_s), False
    if plan.predicted.times:
        times, overlap = stage_times(plan)
        slowest, by_dp = max(times, key=_work_s), overlap.dp
        if passes and _separates_passes(plan):
            compute = terms.pop("compute", 0.0)
            forward = min(compute, plan.schedule.microbatches * sum(c.forward_s for c in slowest.chunks))
            terms = {"forward_compute": forward, "backward_compute": compute - forward, **terms}
        together = terms.pop("dp_communication", 0.0)
        ends = {"dp_reduce": slowest.reduce_s, "dp_gather": slowest.gather_s}
        terms |= ends | {"dp_per_microbatch": _rest(plan, together - _exposed_end_s(plan))}
        waited = terms.pop("pipeline_bubble", 0.0)
        if plan.mesh.pp > 1 and waited > 0:
            sends = min(waited, max(0.0, _gain_s(plan, _without_sends)))
            terms |= {"pipeline_sends": sends, "pipeline_bubble": waited - sends}
    hidden = _rest(plan, plan.predicted.step_time_s - sum(terms.values()))
    terms["hidden_behind_compute" if hidden < 0 else "slowed_by_dp" if by_dp else "other"] = hidden
    return {name: value for name, value in terms.items() if value}


def memory_terms(plan: PlanData) -> dict[str, float]:
    """Return the bytes of the fullest rank by category."""
    row = max(plan.predicted.memory, key=lambda memory: sum(memory.values()))
    return {name: float(size) for name, size in row.items() if size}


def _separates_passes(plan: PlanData) -> bool:
    """Return whether forward and backward are known separately: not if both contain data-parallel communication, or
    copies of activations."""
    predicted = plan.predicted
    if not predicted.times or "activation_copies" in predicted.time_s:
        return False
    return _rest(plan, predicted.time_s.get("dp_communication", 0.0) - _exposed_end_s(plan)) <= 0


def _exposed_end_s(plan: PlanData) -> float:
    """Return the seconds of a step for sums and gathers at its end, as `search.pipeline.evaluate.exposed_end_s`."""
    times, overlap = stage_times(plan)
    slowest = max(times, key=_work_s)
    return max(0.0, _gain_s(plan, _without_ends)) if overlap.dp else slowest.reduce_s + slowest.gather_s


def _gain_s(plan: PlanData, changed: Callable[[StageTimes], StageTimes]) -> float:
    """Return the seconds by which a simulated step is shorter if each rank's times are changed."""
    times, overlap = stage_times(plan)
    schedule, pp = plan.schedule, plan.mesh.pp

    def step_s(times: Sequence[StageTimes]) -> float:
        return makespan_s(
            lambda microbatches: step_lists(schedule.kind, pp, microbatches, schedule.virtual, overlap.early),
            schedule.microbatches,
            times,
            overlap,
            period_of(schedule.kind, pp),
            plan.route,
        )

    return step_s(times) - step_s(tuple(map(changed, times)))


def _rest(plan: PlanData, value: float) -> float:
    return value if abs(value) > _ROUNDING * plan.predicted.step_time_s else 0.0


def _work_s(rank: StageTimes) -> float:
    return sum(c.forward_s + c.backward_s + c.forward_tp_s + c.backward_tp_s for c in rank.chunks)


def _without_ends(rank: StageTimes) -> StageTimes:
    return replace(rank, reduce_s=0.0, gather_s=0.0)


def _without_sends(rank: StageTimes) -> StageTimes:
    return replace(rank, chunks=tuple(map(_chunk_without_sends, rank.chunks)))


def _chunk_without_sends(chunk: ChunkTimes) -> ChunkTimes:
    return replace(chunk, send_forward_s=0.0, send_backward_s=0.0)
