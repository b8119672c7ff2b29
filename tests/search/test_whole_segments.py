"""Bounds from whole segments per rank: by hand, and never above a plan of a random task."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from autoptd.errors import AutoptdError
from autoptd.progress import Silent
from autoptd.schedule import route_of
from autoptd.search import whole_segments
from autoptd.search.critical_paths import PathWeights
from autoptd.search.pipeline.lp_bound import BlockOptions
from autoptd.search.planner import Planner
from autoptd.search.whole_segments import Chains, RankCosts, WholeSegments, contents, most_of
from tests.search.every_plan import _all_seconds
from tests.search.random_tasks import random_task

ROUNDS, SEEDS = 100, range(5)
SHORT, LONG = 0, 1
LINE = (SHORT, LONG) * 10  # 20 segments, of 1 and 2 seconds


def part(seconds: float, *options: tuple[float, float, float], state: float = 0.0) -> BlockOptions:
    return BlockOptions(seconds / 2, seconds / 2, 0.0, 0.0, state, options or ((0.0, 0.0, 0.0),))


def too_few(
    limit_s: float, chunks: int = 2, budgets: tuple[float, ...] = (np.inf,) * 4, chains: Chains | None = None
) -> bool:
    """Return whether four ranks cannot hold LINE within a time per microbatch. A segment keeps a byte, or is computed
    again in its own time."""
    kinds = [part(1.0, (0.0, 0.0, 1.0), (0.0, 1.0, 0.0)), part(2.0, (0.0, 0.0, 1.0), (0.0, 2.0, 0.0))]
    most = most_of(LINE, np.array([1.0, 2.0]), limit_s)
    held = contents(LINE, most, frozenset(), chunks, False)
    assert held is not None
    ranks = [RankCosts(kinds, 1.0, budget_bytes, (0.0, 0.0)) for budget_bytes in budgets]
    found = WholeSegments(held, ranks, [10, 10], ROUNDS, ROUNDS * limit_s, len(budgets) - 1)
    return found.are_too_few(chains)


def test_some_rank_has_more_than_an_even_share() -> None:
    """Even shares of 30 seconds are 7.5; five segments are 7 or 8 seconds, or 6 and 9 in two runs of odd length."""
    assert too_few(7.5) and too_few(7.99)
    assert not too_few(8.01)
    assert too_few(7.99, chunks=1) and not too_few(8.01, chunks=1)


def test_no_rank_holds_more_than_its_memory_takes() -> None:
    """A rank of five segments with four bytes recomputes one of them, in a second at least."""
    assert not too_few(9.01, budgets=(4.0,) * 4)
    assert too_few(8.49, budgets=(4.0,) * 4)
    assert not too_few(8.01, budgets=(5.0,) * 4)


def test_chains_are_counted_with_the_segments() -> None:
    """An average of chains that takes a tenth more than even shares: 8.25 seconds."""
    chains = Chains(np.full((3, 4), 1.1 * ROUNDS / 4), 0.0, False)
    assert too_few(8.2, chains=chains) and not too_few(8.3, chains=chains)


def test_chains_that_stay_with_the_last_segment() -> None:
    """Chains that pass the last stage three times and others once: its segment counts twice more."""
    passes = np.ones((3, 4))
    passes[:, -1] = 3.0
    found = Chains.of(PathWeights(passes, np.ones(4)), route_of("interleaved", 2, 2), part(5.0), (0.5,) * 3, False)
    assert (found.passes == 1.0).all() and found.known_s == pytest.approx(3 * 0.5 + 2 * 5.0)


def test_contents_are_those_of_all_runs() -> None:
    """Against all pairs of runs, with two segments that begin none."""
    kinds, uncut = (0, 1, 2, 1, 2, 3), frozenset({2, 5})
    most, edges = (1, 2, 2, 1), [i for i in range(7) if i not in uncut]
    runs = [(i, j) for i, j in itertools.combinations(edges, 2)]
    expected = set()
    for one, other in itertools.product(runs, repeat=2):
        if {0} >= {one[0] == 0, other[0] == 0} and {0} >= {one[1] == 6, other[1] == 6}:
            both = kinds[slice(*one)] + kinds[slice(*other)]
            expected.add(tuple(both.count(k) for k in range(4)))
    held = contents(kinds, most, uncut, 2, False)
    assert held is not None
    inner = ~held.first & ~held.last
    assert {tuple(row) for row in held.counts[inner].tolist()} == {
        e for e in expected if all(n <= m for n, m in zip(e, most, strict=True))
    }


def excluded(seeds: range) -> Iterator[tuple[bool, bool]]:
    """Yield, for candidates of random tasks, whether their best plan is excluded, and whether one twice as fast is."""
    for seed in seeds:
        model, task = random_task(seed)
        search, rng = Planner(replace(task, effort=None), Silent(), model.known), random.Random(seed)
        try:
            space = [c for c in search.space() if c.pp > 1]
        except AutoptdError:
            continue
        for c in rng.sample(space, min(4, len(space))):
            if isinstance(search.costs.solved(c), AutoptdError) or (stages := search.costs.stages(c)).fixed:
                continue
            plans = _all_seconds(search, c, False, lambda cuts, rng=rng: rng.random() < 0.5)
            if (best_s := min(itertools.islice(plans, 30), default=None)) is not None:
                end_s = search.costs.bounds.with_end_s(c, 0.0)
                yield stages.excludes(best_s * (1 + 1e-6) - end_s), stages.excludes(best_s / 2 - end_s)


def test_no_plan_is_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random tasks: none is, though most would be if they had to be twice as fast. Some are where runs of more than
    one segment are missed."""
    found = list(excluded(SEEDS))
    assert len(found) > 5
    assert not any(best for best, _ in found)
    assert sum(halved for _, halved in found) > len(found) / 2
    runs = whole_segments._runs
    monkeypatch.setattr(whole_segments, "_runs", lambda *args: [some[some.sum(axis=1) == 1] for some in runs(*args)])
    whole_segments.contents.cache_clear()
    assert any(best for best, _ in excluded(SEEDS))
