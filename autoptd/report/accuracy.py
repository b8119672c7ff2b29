"""Errors of predictions for published runs: the figures of docs/accuracy.md, which reports quote."""

from __future__ import annotations

from typing import NamedTuple


class MeasuredErrors(NamedTuple):
    """Relative errors over a number of runs: the median, and the least that 90 % of them are within."""

    runs: int
    median: float
    most: float


# by the name of their row in the tables
STEP_TIME = {
    "all rows": MeasuredErrors(451, 0.058, 0.191),  # dense models
    "mixtures in bf16": MeasuredErrors(118, 0.056, 0.186),
    "mixtures in fp8": MeasuredErrors(67, 0.089, 0.386),
}
MEMORY = MeasuredErrors(62, 0.037, 0.121)  # of dense models
