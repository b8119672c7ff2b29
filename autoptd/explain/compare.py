"""Comparison of two plans: which is faster, which terms make the difference, and which choices differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autoptd.explain.breakdown import CostTerm, compared, memory_terms, time_terms
from autoptd.explain.costs import AS_STATED, CostQuestion, TrainingCost, cost_lines, large, money, number
from autoptd.explain.plan import MOST_TERMS, SIGNIFICANT, choice_lines, headline
from autoptd.explain.tables import WIDTH, columns, gib, part_name, render, seconds, section, signed, words
from autoptd.plans.data import PlanData
from autoptd.text import fold_names


def compare(
    a: PlanData,
    b: PlanData,
    names: tuple[str, str] = ("A", "B"),
    width: int = WIDTH,
    costs: CostQuestion = AS_STATED,
) -> str:
    """Return two plans side by side: which is faster, the terms that make it so, all choices and splits that differ."""
    if a == b:
        return "\n".join([f"{names[0]} and {names[1]} are the same plan: {headline(a)}", *cost_lines(costs.of(a)), ""])
    parts: list[RenderableType] = [Text(verdict(a, b, names))]
    if made := makes(a, b, names):
        parts.append(Text(made))
    parts += [Text(f"{names[0]}  {headline(a)}"), Text(f"{names[1]}  {headline(b)}")]
    for title, rows in comparison_tables(a, b, costs):
        parts += section(title, _sides(names, rows))
    return render(parts, width)


def comparison_tables(
    a: PlanData, b: PlanData, costs: CostQuestion = AS_STATED
) -> list[tuple[str, list[tuple[str, str, str, str]]]]:
    """Return the tables of a comparison that have rows: title and rows of name, `a`, `b` and their difference."""
    chosen = [(*x, y[1], "") for x, y in zip(choice_lines(a), choice_lines(b), strict=True) if x != y]
    step = CostTerm("step", a.predicted.step_time_s, b.predicted.step_time_s)
    time = [(part_name(term.name, a, b), term) for term in [*compared(*time_terms(a, b)), step]]
    full_a, full_b = memory_terms(a), memory_terms(b)
    total = CostTerm("total", sum(full_a.values()), sum(full_b.values()))
    memory = [(words(term.name), term) for term in [*compared(full_a, full_b), total]]
    found = [
        ("Choices that differ", chosen),
        ("Time of one step, largest difference first", _term_rows(time, seconds)),
        ("Cost", _cost_rows(costs.of(a), costs.of(b))),
        ("Memory of the fullest rank, largest difference first", _term_rows(memory, gib)),
        ("Parameters split differently", _split_differences(a, b)),
    ]
    return [(title, rows) for title, rows in found if rows]


def comparison_data(a: PlanData, b: PlanData, costs: CostQuestion = AS_STATED) -> dict[str, object]:
    """Return the comparison as JSON data: seconds and bytes by term, and every field of the plans that differs."""
    return {
        "same": a == b,
        "verdict": verdict(a, b),
        "time_s": [term.to_data() for term in compared(*time_terms(a, b))],
        "memory_bytes": [term.to_data() for term in compared(memory_terms(a), memory_terms(b))],
        "cost": [costs.of(plan).to_data() for plan in (a, b)],
        "differences": differences(a, b),
    }


def makes(a: PlanData, b: PlanData, names: tuple[str, str] = ("A", "B")) -> str:
    """Return the few terms that make the difference: `B takes 50 ms more: bubble +50 ms`. Empty if there is none."""
    terms = compared(*time_terms(a, b))
    whole = b.predicted.step_time_s - a.predicted.step_time_s
    largest = max([abs(whole), *(abs(t.difference) for t in terms)])
    named = [t for t in terms if abs(t.difference) >= SIGNIFICANT * largest][:MOST_TERMS]
    if not named or not whole:
        return ""
    listed = ", ".join(f"{part_name(t.name, a, b)} {signed(t.difference, seconds(t.difference))}" for t in named)
    step = "" if a.units_per_step == b.units_per_step else "a step of "
    return f"{step}{names[1]} takes {seconds(abs(whole))} {'more' if whole > 0 else 'less'}: {listed}"


def verdict(a: PlanData, b: PlanData, names: tuple[str, str] = ("A", "B")) -> str:
    """Return in one line which plan is faster, and by how much: in throughput, if their steps are of other sizes."""
    other = ", of different models" if a.model != b.model else ", of different graphs"
    models = other if a.graph_hash != b.graph_hash else ""
    if (a.unit, a.units_per_step) == (b.unit, b.units_per_step):
        return _faster([plan.predicted.step_time_s for plan in (a, b)], names) + models
    sizes = " and ".join(f"{plan.units_per_step:,} {plan.unit}" for plan in (a, b))
    if a.unit != b.unit:
        return f"{names[0]} and {names[1]} have no common measure: their steps are of {sizes}{models}"
    (less, slow), (more, quick) = sorted(zip([plan.predicted.tokens_per_s for plan in (a, b)], names, strict=True))
    rates = f"{more:,.0f} {a.unit}/s against {less:,.0f}; their steps are of {sizes}{models}"
    if less == more:
        return f"{names[0]} and {names[1]} are predicted equally fast: {rates}"
    return f"{quick} is {more / less - 1:.1%} faster than {slow}: {rates}"


def _faster(times_s: Sequence[float], names: tuple[str, str]) -> str:
    if times_s[0] == times_s[1]:
        return f"{names[0]} and {names[1]} are predicted equally fast: {seconds(times_s[0])} a step"
    (fast, quick), (slow, long) = sorted(zip(times_s, names, strict=True))
    ratio = f"{slow / fast - 1:.1%} faster than {long}" if fast else f"faster than {long}"
    return f"{quick} is {ratio}: {seconds(fast)} a step against {seconds(slow)}"


def differences(a: PlanData, b: PlanData) -> dict[str, list[object]]:
    """Return field path -> the values of both plans, for the fields that differ; None if one lacks the field."""
    left, right = (dict(_leaves(plan.model_dump(mode="json"), "")) for plan in (a, b))
    paths = [path for path in sorted({*left, *right}) if left.get(path) != right.get(path)]
    return {path: [left.get(path), right.get(path)] for path in paths}


def _term_rows(terms: Sequence[tuple[str, CostTerm]], text: Callable[[float], str]) -> list[tuple[str, str, str, str]]:
    rows = []
    for name, term in terms:
        change = f" ({term.difference / term.a:+.1%})" if term.a and term.difference else ""
        difference = signed(term.difference, text(term.difference)) if term.difference else "same"
        sides = [text(value) if value else "–" for value in (term.a, term.b)]
        rows.append((name, sides[0], sides[1], f"{difference}{change}"))
    return rows


def _cost_rows(a: TrainingCost, b: TrainingCost) -> list[tuple[str, str, str, str]]:
    """Return the figures that both plans have; those in different currencies have no difference."""
    run = "" if a.units is None else f" of {large(a.units)} {a.unit}"
    figures = [
        ("cost per step", a.per_step, b.per_step, True),
        (f"cost per billion {a.unit}", a.per_billion if a.unit == b.unit else None, b.per_billion, True),
        (f"days{run}", a.days, b.days, False),
        (f"device-hours{run}", a.device_hours, b.device_hours, False),
        (f"cost{run}", a.total, b.total, True),
        (f"MWh{run}", a.energy_mwh, b.energy_mwh, False),
    ]
    rows = []
    for name, x, y, paid in figures:
        if x is None or y is None:
            continue
        sides = [money(v, c.currency) if paid else number(v) for v, c in ((x, a), (y, b))]
        change = f" ({(y - x) / x:+.1%})" if x and y != x else ""
        difference = "" if paid and a.currency != b.currency else f"{signed(y - x, number(y - x))}{change}"
        rows.append((name, sides[0], sides[1], "same" if x == y and difference else difference))
    return rows


def _split_differences(a: PlanData, b: PlanData) -> list[tuple[str, str, str, str]]:
    left, right = a.splits.parameters, b.splits.parameters
    groups: dict[tuple[str, str], list[str]] = {}
    for name in [*left, *(name for name in right if name not in left)]:
        pair = (left.get(name, "-"), right.get(name, "-"))
        if pair[0] != pair[1]:
            groups.setdefault(pair, []).append(name)
    return [(line, *pair, "") for pair, names in groups.items() for line in fold_names(names)]


def _sides(names: tuple[str, str], rows: list[tuple[str, str, str, str]]) -> Table:
    last = ["difference>"] if any(row[3] for row in rows) else []
    table = columns("", f"{names[0]}>", f"{names[1]}>", *last)
    for row in rows:
        table.add_row(*row[: 3 + len(last)])
    return table


def _leaves(data: object, path: str) -> Iterator[tuple[str, object]]:
    match data:
        case dict() if data:
            for key, value in data.items():
                yield from _leaves(value, f"{path}.{key}" if path else key)
        case list() if data:
            for i, value in enumerate(data):
                yield from _leaves(value, f"{path}[{i}]")
        case _:
            yield path, data
