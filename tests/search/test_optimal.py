"""The search against all plans there are, on random small tasks."""

from __future__ import annotations

import math

import pytest
from every_plan import least_seconds
from random_tasks import random_task

from autoptd.errors import DoesNotFit, PlanError
from autoptd.progress import Silent
from autoptd.search.planner import Planner

PLANS = 30_000  # tasks with more are left to the offline run


def found_seconds(planner: Planner) -> tuple[float, float]:
    try:
        answer = planner.answer()
    except DoesNotFit:
        return math.inf, 0.0
    return answer.staged.seconds, answer.gap


@pytest.mark.parametrize("start", range(0, 40, 10))
def test_the_search_finds_the_best_of_all_plans(start: int) -> None:
    for seed in range(start, start + 10):
        model, task = random_task(seed)
        try:
            best, _ = least_seconds(Planner(task, Silent(), model.known))
        except PlanError:
            continue
        seconds, gap = found_seconds(Planner(task, Silent(), model.known))
        assert seconds == pytest.approx(best, rel=1e-9), seed
        assert gap <= 1e-9, seed
