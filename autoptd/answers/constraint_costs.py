"""What each choice made by hand costs: the plan without it, the others kept, and the plan with nothing fixed.

    cost of a pin = step time as asked - step time without the pin

Where the search chooses in its place when it is dropped, a pin costs nothing or more, as far as the search is exact. It
may gain where it allows what is otherwise not searched (ZeRO-3, say, unless it is included). Some pins are no choices,
but say how a plan is carried out (`kernels`, say): dropped, the default holds, and their cost compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoptd.answers.query import PlanQuery
from autoptd.answers.sweep import reason, shown
from autoptd.errors import AutoptdError, DoesNotFit, PlanError
from autoptd.explain.choices import changes, short
from autoptd.explain.tables import WIDTH, columns, render, seconds, section, signed
from autoptd.plans.model import Plan
from autoptd.progress import Progress, Silent

# What is searched when it is not fixed: always, or where one of these is included.
_ALWAYS = {
    *("cuts", "dp", "headroom", "max_tp", "micro", "pp", "recompute"),
    *("sequence_parallel", "splits"),
    "stages",
}
_ALWAYS |= {"tp", "whole", "zero"}
_INCLUDED = {
    "cp": {"cp"},
    "schedule": {"virtual", "zero-bubble", "zero-bubble-v"},
    "shards": {"shards"},
    "virtual": {"virtual"},
}
_SAME = 5e-4  # of a step: what is less is told as nothing


@dataclass(frozen=True)
class Pin:
    """One choice made by hand, as it is written: `tp=8`, `split *.q_proj.weight=S0`. `key`: of several under a name."""

    name: str
    text: str
    key: str | None = None

    def dropped(self, asked: PlanQuery) -> PlanQuery:
        """The question without it."""
        if self.key is None:
            return asked.but(**{self.name: None})
        value = asked.fix[self.name]
        if isinstance(value, Mapping):
            rest: Any = {key: v for key, v in value.items() if key != self.key}
        else:
            rest = tuple(v for v in _several(value) if v != self.key)
        return asked.but(**{self.name: rest or None})


def pins_of(fix: Mapping[str, Any]) -> Iterator[Pin]:
    """Each choice by itself: of `splits` and `whole` every pattern; cuts belong together."""
    for name, value in fix.items():
        if name == "splits":
            yield from (Pin(name, f"split {pattern}={placement}", pattern) for pattern, placement in value.items())
        elif name == "whole":
            yield from (Pin(name, f"whole {pattern}", pattern) for pattern in dict.fromkeys(_several(value)))
        elif name == "cuts":
            yield Pin(name, f"cut {', '.join(_several(value))}")
        else:
            yield Pin(name, f"{name}={shown(tuple(value) if isinstance(value, list) else value)}")


def written(fix: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name, text) of each choice made by hand."""
    return [(pin.name, pin.text) for pin in pins_of(fix)]


def _several(value: str | Iterable[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


@dataclass(frozen=True)
class Without:
    """What was asked, less `pins`. `searched`: whether the search chooses in their place, or defaults hold."""

    pins: tuple[Pin, ...]
    what: str
    searched: bool
    chosen: Plan  # as asked
    found: Plan | AutoptdError

    @property
    def step_time_s(self) -> float | None:
        """Of the plan without the pins."""
        return self.found.predicted.step_time_s if isinstance(self.found, Plan) else None

    @property
    def cost_s(self) -> float | None:
        """Seconds of each step that the pins cost; negative where they gain."""
        return None if self.step_time_s is None else self.chosen.predicted.step_time_s - self.step_time_s

    @property
    def cost(self) -> float | None:
        """The same as a share of the step without them."""
        return None if self.cost_s is None or self.step_time_s is None else self.cost_s / self.step_time_s

    @property
    def changed(self) -> list[str]:
        """What would be otherwise."""
        return changes(self.chosen, self.found) if isinstance(self.found, Plan) else []

    def to_data(self) -> dict[str, Any]:
        """For machines: seconds."""
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


def pin_costs(asked: PlanQuery, chosen: Plan, progress: Progress | None = None) -> list[Without]:
    """A row for each pin dropped by itself, one for all that are searched, one for all; each question asked once.

    chosen: the plan of `asked`. Raises what planning raises but DoesNotFit and PlanError, which are answers.
    """
    progress, pins = progress or Silent(), tuple(pins_of(asked.fix))
    choices = tuple(pin for pin in pins if _is_searched(pin.name, asked))
    groups: list[tuple[tuple[Pin, ...], str]] = [((pin,), pin.text) for pin in pins]
    groups += [(choices, "all that is searched"), (pins, "nothing fixed")]
    rows: list[Without] = []
    for group, what in groups:
        if not group or group in [row.pins for row in rows]:
            continue
        with progress.stage(f"plan without {what}" if len(group) == 1 else f"plan with {what} free"):
            found = _answer(asked, group)
        rows.append(Without(group, what, all(_is_searched(pin.name, asked) for pin in group), chosen, found))
    return rows


def _is_searched(name: str, asked: PlanQuery) -> bool:
    include = asked.options.get("include", ())
    included = {include} if isinstance(include, str) else set(include)
    return name in _ALWAYS or (name in _INCLUDED and ("all" in included or bool(_INCLUDED[name] & included)))


def _answer(asked: PlanQuery, dropped: Sequence[Pin]) -> Plan | AutoptdError:
    for pin in dropped:
        asked = pin.dropped(asked)
    try:
        return asked.plan()
    except (DoesNotFit, PlanError) as error:
        return error


def pins_text(title: str, rows: Sequence[Without], width: int = WIDTH) -> str:
    """A row for what is dropped: the step without it, what the pin costs, and which plan it would be."""
    chosen = rows[0].chosen
    table = columns("dropped", "step>", "it costs>", "", "the plan without it", gap=1 if width < WIDTH else 2)
    for row in rows:
        table.add_row(_dropped(row), *_cells(row), _instead(row))
    head = f"as asked: {short(chosen)}, {seconds(chosen.predicted.step_time_s)} a step"
    parts = [title, head, *section("What choices made by hand cost", table)]
    return render([*parts, *_remarks(rows)], width)


def _dropped(row: Without) -> str:
    alone = len(row.pins) == 1
    return row.what if alone or row.what == "nothing fixed" else f"{row.what}: {', '.join(p.name for p in row.pins)}"


def _cells(row: Without) -> tuple[str, str, str]:
    if row.step_time_s is None or row.cost_s is None or row.cost is None:
        return "–", "–", ""
    if abs(row.cost) < _SAME:
        return seconds(row.step_time_s), "nothing", ""
    return seconds(row.step_time_s), signed(row.cost_s, seconds(row.cost_s)), f"{row.cost:+.1%}"


def _instead(row: Without) -> str:
    if isinstance(row.found, AutoptdError):
        return reason(row.found)
    instead = ", ".join(row.changed) or "the same"
    return instead if row.searched or len(row.pins) > 1 else f"{instead} (not searched: the default)"


def _remarks(rows: Sequence[Without]) -> list[str]:
    gains = [row.pins[0].text for row in rows if len(row.pins) == 1 and row.searched and (row.cost or 0.0) < -_SAME]
    if not gains:
        return []
    return ["", f"{', '.join(gains)}: better than free, being what the search leaves out, or did not get to (--exact)"]
