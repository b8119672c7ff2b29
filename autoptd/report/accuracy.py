"""Errors of predictions for published runs: the figures of docs/accuracy.md, which reports quote."""

from __future__ import annotations

from typing import NamedTuple


class MeasuredErrors(NamedTuple):
    """Relative errors over a number of runs: the median, and the least that 90 % of them are within."""

    runs: int
    median: float
    most: float


STEP_TIME = MeasuredErrors(451, 0.054, 0.179)
MEMORY = MeasuredErrors(62, 0.037, 0.121)
