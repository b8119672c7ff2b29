"""Messages that take another time backward than forward, in a search against every plan there is."""

from __future__ import annotations

import random
from functools import cache

import pytest

import autoptd
from autoptd.cost_models.cluster import Cluster
from autoptd.progress import Silent
from autoptd.search.constraints.options import read_constraints
from autoptd.search.planner import Planner, Task
from tests.parity.test_volumes import BATCH, RATE, PostNorm, free, gpt
from tests.search.every_plan import least_seconds

SCHEDULES = ("1f1b", "gpipe", "zero-bubble", "interleaved")


@cache
def traced(frozen: bool) -> autoptd.TracedModel:
    return autoptd.trace(PostNorm(frozen), inputs=gpt()[1], precision="fp32")


def nodes_of_two(inside: float, flops_per_s: float) -> Cluster:
    """Return nodes whose links are `inside` times as fast as those between them."""
    level = free().levels[0]
    levels = (level.model_copy(update={"name": "inside", "ranks": 2, "bytes_per_s": inside * RATE}), level)
    rates = free().device.matmul_flops_per_s.model_copy(update={"fp32": flops_per_s})
    device = free().device.model_copy(update={"matmul_flops_per_s": rates})
    return free().model_copy(update={"levels": levels, "device": device})


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_best_cut_counts_each_way_for_itself(schedule: str, frozen: bool) -> None:
    model, rng, unequal = traced(frozen), random.Random(schedule), 0
    for _ in range(4):
        cluster = nodes_of_two(rng.choice([2, 10, 1000]), rng.choice([1e11, 1e12, 1e13]))
        fix = {"tp": 2, "pp": 2, "micro": rng.choice([1, 2]), "schedule": schedule, "recompute": "none", "headroom": 0}
        fix |= {"sequence_parallel": False, "sends": "slices", "virtual": 2 if schedule == "interleaved" else 1}
        task = Task(model.folded, cluster, 4, BATCH, model.sizes, "fp32", "adamw", read_constraints(fix), effort=None)
        answer = Planner(task, Silent(), model.known).answer()
        best, _ = least_seconds(Planner(task, Silent(), model.known))
        assert answer.staged.seconds == pytest.approx(best, rel=1e-9)
        assert answer.gap < 1e-9
        unequal += any(forward != backward for forward, backward in answer.staged.sends_s)
    assert unequal or not frozen
