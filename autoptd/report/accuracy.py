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
    "all rows": MeasuredErrors(451, 0.055, 0.193),  # dense models
    "mixtures in bf16": MeasuredErrors(118, 0.061, 0.186),
    "mixtures in fp8": MeasuredErrors(67, 0.091, 0.37),
}
MEMORY = MeasuredErrors(62, 0.037, 0.121)  # of dense models
