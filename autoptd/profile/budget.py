"""Division of a limited time among many cases: each gets an equal share of the time left, which it need not use up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autoptd.profile.record import Case, Measurement, Skipped
from autoptd.profile.timing import LEAST

Measure = Callable[[Case, float], "Measurement | Skipped"]
Report = Callable[["Measurement | Skipped"], None]


def spend(
    series: Sequence[Sequence[Case]], limit_s: float, elapsed_s: Callable[[], float], measure: Measure, report: Report
) -> list[Measurement | Skipped]:
    """Measure the first case of each series, and later ones unless the one before shows that they take too long.

    `measure(case, share_s)` times a case. `elapsed_s()` is the time since the start; ranks that measure a collective
    must all get the same value.
    """
    found: list[Measurement | Skipped] = []
    left = sum(map(len, series))
    for cases in series:
        last: Measurement | None = None
        for index, case in enumerate(cases):
            left_s = max(0.0, limit_s - elapsed_s())
            share_s = left_s / left
            left -= 1
            why = _why_not(last, case, left_s, share_s * (len(cases) - index)) if index else None
            result = Skipped(case=case, why=why) if why else measure(case, share_s)
            if isinstance(result, Measurement):
                last = result
            found.append(result)
            report(result)
    return found


def _why_not(last: Measurement | None, case: Case, left_s: float, share_s: float) -> str | None:
    """Return why a case is skipped: its time, extrapolated from the last one, exceeds its series' share."""
    if not left_s:
        return "no time was left"
    if last is None:
        return None
    amount, before = (case.flops, last.case.flops) if case.flops else (case.nbytes, last.case.nbytes)
    expected_s = last.seconds * amount / max(before, 1) * (LEAST + 4)  # warm-up, memory taken
    return f"would take {expected_s:.2g} s of the {share_s:.2g} s left for it" if expected_s > share_s else None


def first_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
