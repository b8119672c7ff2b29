"""The input of the search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sympy

from autoptd.cost_models.cluster import Cluster
from autoptd.passes.fold import Folded
from autoptd.search.constraints.options import Constraints

EFFORT = 200  # default number of cuts that are simulated beyond the first of each candidate


@dataclass(frozen=True)
class Task:
    """A planning problem: model, devices, batch and constraints.

    `effort`: cuts beyond the first of each candidate that may be simulated; None: as many as exactness takes.
    `time_limit_s`: the search ends after this time, provided that it has found a plan.
    """

    folded: Folded
    cluster: Cluster
    world: int
    batch: int
    sizes: Mapping[sympy.Symbol, int]  # value of every symbol except b
    precision: str
    optimizer: str
    constraints: Constraints
    effort: int | None = EFFORT
    time_limit_s: float = float("inf")
