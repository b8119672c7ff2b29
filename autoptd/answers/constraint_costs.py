"""The cost of each constraint (pin): the plan without it, all others kept, and the plan without any constraint.

    cost of a pin = step time as asked - step time without the pin

If the search covers what a pin fixes, its cost is never negative, as far as the search is exact. Pins such as `kernels`
are execution options that are never searched: without the pin the default applies, and the cost compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoptd.answers.in_processes import answered
from autoptd.answers.query import PlanQuery
from autoptd.answers.sweep import reason, shown
from autoptd.errors import AutoptdError, DoesNotFit, PlanError
from autoptd.explain.choices import changes, short
from autoptd.explain.tables import WIDTH, columns, render, seconds, section, signed
from autoptd.plans.model import Plan
from autoptd.progress import Progress, Silent

_SEARCHED = {  # options that are searched if not fixed
    *("context", "cp", "cuts", "dp", "ep", "etp", "headroom", "max_tp", "micro", "offload", "pp", "recompute"),
    *("schedule", "sequence_parallel", "shards", "splits", "stages", "tp", "virtual", "whole", "zero"),
}
_SAME = 5e-4  # of a step: a smaller difference is reported as none


@dataclass(frozen=True)
class Pin:
    """One constraint as written: `tp=8`, `split *.q_proj.weight=S0`. `key`: its pattern, if a name can have several."""

    name: str
    text: str
    key: str | None = None

    def dropped(self, query: PlanQuery) -> PlanQuery:
        """Return the query without this pin."""
        if self.key is None:
            return query.with_changes(**{self.name: None})
        value = query.fix[self.name]
        if isinstance(value, Mapping):
            rest: Any = {key: v for key, v in value.items() if key != self.key}
        else:
            rest = tuple(v for v in _as_tuple(value) if v != self.key)
        return query.with_changes(**{self.name: rest or None})


def pins_of(fix: Mapping[str, Any]) -> Iterator[Pin]:
    """Yield each constraint by itself: one per pattern of `splits` and `whole`, one for all cuts."""
    for name, value in fix.items():
        if name == "splits" and isinstance(value, Mapping):
            yield from (Pin(name, f"split {pattern}={placement}", pattern) for pattern, placement in value.items())
        elif name == "whole":
            yield from (Pin(name, f"whole {pattern}", pattern) for pattern in dict.fromkeys(_as_tuple(value)))
        elif name == "cuts":
            yield Pin(name, f"cut {', '.join(_as_tuple(value))}")
        else:
            yield Pin(name, f"{name}={shown(tuple(value) if isinstance(value, list) else value)}")


def pin_texts(fix: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (name, text) of each constraint."""
    return [(pin.name, pin.text) for pin in pins_of(fix)]


def _as_tuple(value: str | Iterable[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


@dataclass(frozen=True)
class DroppedPins:
    """The plan without `pins`. `searched`: whether the search decides in their place; if not, defaults apply."""

    pins: tuple[Pin, ...]
    what: str
    searched: bool
    chosen: Plan  # as asked
    found: Plan | AutoptdError

    @property
    def step_time_s(self) -> float | None:
        """Step time of the plan without the pins."""
        return self.found.predicted.step_time_s if isinstance(self.found, Plan) else None

    @property
    def cost_s(self) -> float | None:
        """Seconds per step that the pins cost; negative if they gain."""
        return None if self.step_time_s is None else self.chosen.predicted.step_time_s - self.step_time_s

    @property
    def cost(self) -> float | None:
        """The cost as a share of the step without the pins."""
        return None if self.cost_s is None or self.step_time_s is None else self.cost_s / self.step_time_s

    @property
    def changed(self) -> list[str]:
        """Changes from the plan as asked to the plan without the pins."""
        return changes(self.chosen, self.found) if isinstance(self.found, Plan) else []

    def to_data(self) -> dict[str, Any]:
        """Return the row as JSON data, in seconds."""
        return {
            "dropped": [pin.text for pin in self.pins],
            "searched": self.searched,
            "plan": short(self.found) if isinstance(self.found, Plan) else None,
            "step_time_s": self.step_time_s,
            "cost_s": self.cost_s,
            "cost": self.cost,
            "changes": self.changed,
            "refused": reason(self.found) if isinstance(self.found, AutoptdError) else None,
        }


def pin_costs(query: PlanQuery, chosen: Plan, progress: Progress | None = None) -> list[DroppedPins]:
    """Plan without each pin, without all searched ones, and without any; each set of pins once.

    chosen: the plan of `query`. Raises what planning raises, except DoesNotFit and PlanError, which are answers.
    """
    pins = tuple(pins_of(query.fix))
    choices = tuple(pin for pin in pins if pin.name in _SEARCHED)
    groups: dict[tuple[Pin, ...], str] = {(pin,): pin.text for pin in pins}
    for several, what in ((choices, "all that are searched"), (pins, "all constraints")):
        groups.setdefault(several, what)
    dropped = [group for group in groups if group]
    name = f"plan without {len(pins)} constraints"
    answers = answered(progress or Silent(), name, lambda group: _answer(query, group), dropped)
    return [
        DroppedPins(group, groups[group], all(pin.name in _SEARCHED for pin in group), chosen, found)
        for group, found in zip(dropped, answers, strict=True)
    ]


def _answer(query: PlanQuery, dropped: Sequence[Pin]) -> Plan | AutoptdError:
    for pin in dropped:
        query = pin.dropped(query)
    try:
        return query.plan()
    except (DoesNotFit, PlanError) as error:
        return error


def pins_text(title: str, rows: Sequence[DroppedPins], width: int = WIDTH) -> str:
    """Return a table with a row per dropped set of pins: step time, cost, and the changes of the plan."""
    chosen = rows[0].chosen
    table = columns("dropped", "step>", "cost>", "", "plan without it", gap=1 if width < WIDTH else 2)
    for row in rows:
        table.add_row(_dropped(row), *_cells(row), _instead(row))
    head = f"as asked: {short(chosen)}, {seconds(chosen.predicted.step_time_s)} a step"
    parts = [title, head, *section("Cost of each constraint", table)]
    return render([*parts, *_remarks(rows)], width)


def pin_rows(rows: Sequence[DroppedPins]) -> list[tuple[str, str, str, str]]:
    """Return (dropped, step, cost, plan without it) of each row in words, for the page of a plan."""
    found = []
    for row in rows:
        step, cost, share = _cells(row)
        found.append((_dropped(row), step, f"{cost} {share}".strip(), _instead(row)))
    return found


def _dropped(row: DroppedPins) -> str:
    alone = len(row.pins) == 1
    return row.what if alone or row.what == "all constraints" else f"{row.what}: {', '.join(p.name for p in row.pins)}"


def _cells(row: DroppedPins) -> tuple[str, str, str]:
    if row.step_time_s is None or row.cost_s is None or row.cost is None:
        return "–", "–", ""
    if abs(row.cost) < _SAME:
        return seconds(row.step_time_s), "none", ""
    return seconds(row.step_time_s), signed(row.cost_s, seconds(row.cost_s)), f"{row.cost:+.1%}"


def _instead(row: DroppedPins) -> str:
    if isinstance(row.found, AutoptdError):
        return reason(row.found)
    instead = ", ".join(row.changed) or "unchanged"
    return instead if row.searched or len(row.pins) > 1 else f"{instead} (the default, not searched)"


def _remarks(rows: Sequence[DroppedPins]) -> list[str]:
    gains = [row.pins[0].text for row in rows if len(row.pins) == 1 and row.searched and (row.cost or 0.0) < -_SAME]
    if not gains:
        return []
    return ["", f"{', '.join(gains)}: faster than without, since the search excludes or did not reach it (--exact)"]
