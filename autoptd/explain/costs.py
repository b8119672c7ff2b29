"""Costs of training under a plan, in the units that people pay in: money, days and energy.

    device-hours of a step    ranks × step time / 3600
    cost of a step            sum over the types of device: device-hours × price of a device-hour
    cost per billion          cost of a step / units of a step × 10⁹
    a run of N units          ceil(N / units of a step) steps

Units are tokens, or samples of a model without a sequence (`PlanData.unit`). All follows from the predicted time of one
step: evaluation, checkpoints, restarts and idle reservations come on top. Energy counts `watts` at all times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from autoptd.cost_models.cluster import Cluster
from autoptd.errors import PlanError
from autoptd.plans.data import PlanData

_MOST = 1e30  # of a price or a number of tokens


@dataclass(frozen=True)
class TrainingCost:
    """Cost of a step, of a billion units, and of a run. None: no price, no watts, or no run was stated.

    `unit`: "tokens" or "samples". `currency`: of all costs, as it was stated; "" if it was not. Times in days (of 24
    hours) or device-hours, energy in megawatt-hours.
    """

    unit: str
    currency: str
    price_per_hour: float | None  # of one device; None also if types of device have different prices
    device_hours_per_step: float
    per_step: float | None
    per_billion: float | None
    units: float | None  # tokens, or samples, of the run
    steps: int | None
    days: float | None
    device_hours: float | None
    total: float | None
    energy_mwh: float | None

    def to_data(self) -> dict[str, Any]:
        """Return the fields as JSON data."""
        return asdict(self)


@dataclass(frozen=True)
class CostQuestion:
    """A price of a device-hour that replaces that of the cluster, and the length of a run in tokens or in samples.

    `currency`: of `price_per_hour`; None: that of the cluster. Raises PlanError for a value that is no positive number.
    """

    price_per_hour: float | None = None
    currency: str | None = None
    tokens: float | None = None
    samples: float | None = None

    def __post_init__(self) -> None:
        for name in ("price_per_hour", "tokens", "samples"):
            value, least = getattr(self, name), 0 if name == "price_per_hour" else 1
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (number and least <= value <= _MOST and value):
                raise PlanError(f"{name} is {value!r}", where=name, fix="pass a positive number, or leave it out")
        if self.tokens is not None and self.samples is not None:
            raise PlanError("tokens and samples are both given", where="tokens, samples", fix="pass one of them")

    @property
    def is_asked(self) -> bool:
        """True if a price or a run is given."""
        return self != AS_STATED

    def check(self, model: str, unit: str, cluster: Cluster) -> None:
        """Raise PlanError for tokens of a model that has none, and for one price of several types of device."""
        if self.tokens is not None and unit != "tokens":
            raise PlanError(
                f"{model} has samples without a length in tokens", where="tokens", fix="give samples instead"
            )
        if self.price_per_hour is not None and cluster.others:
            raise PlanError(
                f"one price is given for {len(cluster.pools)} types of device",
                where="price_per_hour",
                fix="state price_per_hour of every device in the cluster file",
            )

    def of(self, plan: PlanData, step_time_s: float | None = None) -> TrainingCost:
        """Return the cost under a plan; `step_time_s`: of a step, by default the predicted one.

        Raises what `check` raises.
        """
        self.check(plan.model, plan.unit, plan.cluster)
        step_s = plan.predicted.step_time_s if step_time_s is None else step_time_s
        ranks, prices = plan.cluster.pool_ranks(plan.world), self._prices(plan.cluster)
        watts = [pool.device.watts for pool in plan.cluster.pools]
        per_step = _times(ranks, prices, step_s / 3600)
        units = self._units(plan)
        steps = None if units is None else math.ceil(units / plan.units_per_step)
        run_s = None if steps is None else steps * step_s
        return TrainingCost(
            unit=plan.unit,
            currency=plan.cluster.device.currency if self.currency is None else self.currency,
            price_per_hour=prices[0] if len(set(prices)) == 1 else None,
            device_hours_per_step=plan.world * step_s / 3600,
            per_step=per_step,
            per_billion=None if per_step is None else per_step / plan.units_per_step * 1e9,
            units=units,
            steps=steps,
            days=None if run_s is None else run_s / 86400,
            device_hours=None if run_s is None else plan.world * run_s / 3600,
            total=None if run_s is None else _times(ranks, prices, run_s / 3600),
            energy_mwh=None if run_s is None else _times(ranks, watts, run_s / 3600 / 1e6),
        )

    def _prices(self, cluster: Cluster) -> list[float | None]:
        if self.price_per_hour is None:
            return [pool.device.price_per_hour for pool in cluster.pools]
        return [self.price_per_hour]

    def _units(self, plan: PlanData) -> float | None:
        return self.tokens if self.samples is None else self.samples * plan.units_per_step / plan.batch


AS_STATED = CostQuestion()  # of the cluster's prices, and of no run


def _times(ranks: Sequence[int], rates: Sequence[float | None], hours: float) -> float | None:
    """Return the sum over types of device of ranks × rate × hours; None unless all rates are stated."""
    known = [rate for rate in rates if rate is not None]
    return sum(n * rate * hours for n, rate in zip(ranks, known, strict=True)) if len(known) == len(rates) else None


def cost_lines(cost: TrainingCost) -> list[str]:
    """Return the cost as text: a line of prices, if there are any, and a line for the run, if one was asked for."""
    lines = []
    if cost.per_step is not None and cost.per_billion is not None:
        at = "" if cost.price_per_hour is None else f" ({money(cost.price_per_hour, cost.currency)} per device-hour)"
        costs = money(cost.per_step, cost.currency), money(cost.per_billion, cost.currency)
        lines.append(f"cost {costs[0]} per step, {costs[1]} per billion {cost.unit}{at}")
    if cost.units is not None and cost.device_hours is not None:
        parts = [
            f"{cost.steps:,} steps",
            f"{number(cost.days or 0.0)} days",
            f"{number(cost.device_hours)} device-hours",
        ]
        parts += [] if cost.total is None else [money(cost.total, cost.currency)]
        parts += [] if cost.energy_mwh is None else [f"{number(cost.energy_mwh)} MWh"]
        lines.append(f"{large(cost.units)} {cost.unit}: {', '.join(parts)}")
    return lines


def money(value: float, currency: str = "") -> str:
    """Return an amount with its currency, if there is one: `0.0123 USD`, `146,000`."""
    return f"{number(value)} {currency}".strip()


def number(value: float) -> str:
    """Return a number with three digits, or all before the point: `0.0123`, `1.63`, `1,462`. It keeps its sign."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def large(value: float) -> str:
    """Return a number of tokens in the syntax of `--tokens`: `1T`, `300B`, `1.5M`, `987`."""
    for unit, step in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= step:
            return f"{value / step:.4g}{unit}"
    return f"{value:.4g}"
