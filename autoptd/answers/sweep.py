"""A plan per point of a sweep: step time, memory and cost by number of devices, batch, cluster or fixed option.

    device-seconds       step time × devices
    scaling efficiency   tokens/s per device ÷ that of the first point which fits
    added                tokens/s per device added since the previous point ÷ tokens/s per device of the first point;
                         below one half, adding devices no longer pays

If several names are swept, the first is the outermost; numbers of devices are compared among otherwise equal points.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from autoptd.answers.in_processes import answered
from autoptd.answers.query import PlanQuery
from autoptd.errors import AutoptdError, ClusterError, DoesNotFit, InputsError, PlanError
from autoptd.explain.choices import short
from autoptd.explain.costs import AS_STATED, CostQuestion, TrainingCost
from autoptd.plans.model import Plan
from autoptd.progress import Progress, Silent

PAYS = 0.5  # of the throughput per device at the first point: below it, adding devices no longer pays


@dataclass(frozen=True)
class SweepPoint:
    """One point of a sweep: its plan, or why there is none. `first`, `before`: plans that it is compared with."""

    values: Mapping[str, object]  # swept name -> value
    found: Plan | AutoptdError
    costs: CostQuestion = AS_STATED
    first: Plan | None = None
    before: Plan | None = None

    @property
    def plan(self) -> Plan | None:
        return self.found if isinstance(self.found, Plan) else None

    @property
    def fits(self) -> bool:
        return isinstance(self.found, Plan)

    @property
    def device_seconds(self) -> float | None:
        """Device-seconds of one step."""
        return None if self.plan is None else self.plan.predicted.step_time_s * self.plan.world

    @property
    def cost(self) -> TrainingCost | None:
        """Cost of training under the plan."""
        return None if self.plan is None else self.costs.of(self.plan)

    @property
    def efficiency(self) -> float | None:
        """Tokens/s per device, relative to the first point."""
        if self.plan is None or self.first is None:
            return None
        return _per_device(self.plan) / _per_device(self.first)

    @property
    def added(self) -> float | None:
        """Tokens/s per device added since the previous point, relative to tokens/s per device of the first point."""
        if self.plan is None or self.first is None or self.before is None or self.plan.world <= self.before.world:
            return None
        more = self.plan.predicted.tokens_per_s - self.before.predicted.tokens_per_s
        return more / (self.plan.world - self.before.world) / _per_device(self.first)

    @property
    def pays(self) -> bool:
        """True if adding the devices of this point pays, or if none were added."""
        return self.added is None or self.added >= PAYS

    def to_data(self) -> dict[str, Any]:
        """Return the row as JSON data: seconds, bytes, and costs in the currency of the price."""
        data: dict[str, Any] = {"values": dict(self.values), "fits": self.fits}
        if self.plan is None:
            assert isinstance(self.found, AutoptdError)
            return data | {"reason": reason(self.found), "error": type(self.found).__name__}
        predicted, cost = self.plan.predicted, self.cost
        assert cost is not None
        return data | {
            "plan": short(self.plan),
            "world": self.plan.world,
            "batch": self.plan.batch,
            "step_time_s": predicted.step_time_s,
            "tokens_per_s": predicted.tokens_per_s,
            "mfu": predicted.mfu,
            "memory_bytes": predicted.memory_bytes,
            "device_seconds": self.device_seconds,
            "unit": cost.unit,
            "cost": cost.to_data(),
            "scaling_efficiency": self.efficiency,
            "added_efficiency": self.added,
            "predicted_only": list(self.plan.not_runnable),
        }


def sweep(
    query: PlanQuery,
    over: Mapping[str, Sequence[Any]],
    *,
    costs: CostQuestion = AS_STATED,
    progress: Progress | None = None,
) -> list[SweepPoint]:
    """Plan for every combination of values; one that does not fit or is invalid is a point as well.

    over: swept name (see `PlanQuery.with_changes`) -> values. Raises InputsError for a length of no sequence, and
    ClusterError for a cluster that cannot be read, before anything is planned.
    """
    combinations = [dict(zip(over, values, strict=True)) for values in product(*over.values())]
    queries = [query.with_changes(**values) for values in combinations]
    points: list[SweepPoint] = []
    answers = answered(progress or Silent(), f"sweep {len(queries)} points", _answer, queries)
    for values, found in zip(combinations, answers, strict=True):
        alike = [p for p in points if p.plan is not None and _others(p.values) == _others(values)]
        plans = [p.plan for p in alike]
        first = plans[0] if plans else found if isinstance(found, Plan) else None
        points.append(SweepPoint(values, found, costs, first, plans[-1] if plans else None))
    return points


def _answer(point_query: PlanQuery) -> Plan | AutoptdError:
    try:
        return point_query.plan()
    except (DoesNotFit, PlanError, InputsError, ClusterError) as error:
        return error


def _others(values: Mapping[str, object]) -> dict[str, object]:
    """Return the swept values that compared points must share: all but the number of devices."""
    return {name: value for name, value in values.items() if name != "world"} if "world" in values else {}


def _per_device(plan: Plan) -> float:
    return plan.predicted.tokens_per_s / plan.world


def reason(error: AutoptdError) -> str:
    """Return in one line why there is no plan: the shortfall of memory, or the invalid option."""
    if isinstance(error, DoesNotFit):
        lacks = error.where.splitlines()[-1] if error.where else error.what
        return f"does not fit: {lacks.strip()}"
    return f"not possible: {error.what.splitlines()[0]}"


def shown(value: object) -> str:
    """Return a value in the syntax of `--sweep`."""
    if isinstance(value, tuple):
        return "+".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
