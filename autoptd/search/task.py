"""What the search is asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sympy

from autoptd.cost_models.cluster import Cluster
from autoptd.passes.fold import Folded
from autoptd.search.constraints.options import Constraints

EFFORT = 200  # cuts beyond the first of each candidate that are simulated, unless more is asked for


@dataclass(frozen=True)
class Task:
    """What is to be planned.

    `effort`: cuts beyond the first of each candidate that may be simulated; None is as many as it takes to be exact.
    `time_limit_s`: of the search, once it has found a plan.
    """

    folded: Folded
    cluster: Cluster
    world: int
    batch: int
    sizes: Mapping[sympy.Symbol, int]  # of every symbol but b
    precision: str
    optimizer: str
    constraints: Constraints
    effort: int | None = EFFORT
    time_limit_s: float = float("inf")
