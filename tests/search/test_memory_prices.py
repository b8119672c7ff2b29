"""Bounds from the prices of another program: never above a program's own optimum, which its own prices reach."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from autoptd.search import memory_prices
from autoptd.search.memory_prices import MemoryPrices
from autoptd.search.pipeline.lp_bound import BlockOptions, Blocks, Pipeline, relaxed_bound

SLACK = 1 + 1e-9
Program = tuple[list[list[Blocks]], Pipeline]


def part(rng: random.Random, slower: float, pool: int) -> BlockOptions:
    """Return random costs. `pool`: type of device; other options may be of use on each."""
    forward_s, kept, state = rng.uniform(0.5, 2), rng.uniform(1, 10), rng.uniform(0, 5)
    options = (0.0, 0.0, kept), (0.0, forward_s, rng.uniform(0, kept / 2)), (rng.uniform(0, 3), 1.0, 0.0)
    costs = [(there * slower, again * slower, n) for there, again, n in options]
    few = 1 + (rng.randint(0, 2) + pool) % 3
    return BlockOptions(forward_s * slower, 2 * forward_s * slower, 0.0, 0.0, state, tuple(costs[:few]))


def program(seed: int, shape: int) -> Program:
    """Return a random program; those of one `shape` have the same ranks and blocks, but other costs and memory."""
    of_shape, rng = random.Random(shape), random.Random(seed * 1000 + shape)
    ranks, counts = of_shape.choice([2, 3, 4, 20]), [of_shape.randint(1, 9) for _ in range(of_shape.randint(1, 3))]
    pieces = [of_shape.choice([0, 2, 3]) for _ in counts]
    only: list[int | None] = [None] * len(counts)
    if of_shape.random() < 0.5:  # the ends of a model
        counts, pieces, only = [1, *counts, 1], [0, *pieces, 0], [0, *only, -1]
    pools = tuple(int(k >= ranks // 2) for k in range(ranks)) if of_shape.random() < 0.3 else (0,) * ranks
    costs, state = rng.random(), rng.getstate()
    by_pool = []
    for pool in range(max(pools) + 1):
        rng.setstate(state)
        slower = 1.0 + pool * costs
        blocks = [
            Blocks(n, part(rng, slower, pool), tuple(part(rng, slower, pool) for _ in range(m)), at)
            for n, m, at in zip(counts, pieces, only, strict=True)
        ]
        by_pool.append(blocks)
    held = tuple(((float(ranks - k),),) for k in range(ranks))
    whole = [(n, same.whole) for n, same in zip(counts, by_pool[0], strict=True)]
    least = sum(n * (w.state + min(kept for *_, kept in w.options) * ranks / 2) for n, w in whole) / ranks
    budgets = (least * rng.uniform(0.8, 2.0),) * ranks
    return by_pool, Pipeline(
        None, rng.randint(1, 30), of_shape.choice([1, 2]), held, pools, budgets, (), (of_shape.choice([0, ranks - 1]),)
    )


def bound_by(prices: Sequence[Program], of: Program) -> float:
    """Return the bound of a program from the prices of others."""
    known = MemoryPrices()
    for other in prices:
        known.bound(*other, math.inf)
    return known.bound(*of, 0.0).seconds


def too_high() -> list[int]:
    found = list[int]()
    for shape in range(30):
        one, *others = (program(seed, shape) for seed in range(4))
        least = relaxed_bound(*one).seconds
        found += [shape for other in (*others, one) if bound_by([other], one) > least * SLACK]
    return found


def test_prices_of_others_prove_no_more_than_is_true() -> None:
    assert too_high() == []


def test_own_prices_prove_all_of_it() -> None:
    least = []
    for shape in range(30):
        one = program(0, shape)
        least.append(relaxed_bound(*one).seconds)
        assert bound_by([one], one) == pytest.approx(least[-1], rel=1e-9), shape
    assert 3 < sum(map(math.isinf, least)) < 27, "some fit, others do not"


def test_a_program_is_solved_where_prices_do_not_reach_the_limit() -> None:
    one, other = program(0, 1), program(1, 1)
    known = MemoryPrices()
    known.bound(*other, math.inf)
    assert known.bound(*one, math.inf).seconds == relaxed_bound(*one).seconds


def test_memory_without_a_limit_has_no_price() -> None:
    by_pool, pipeline = program(0, 1)
    free = replace(pipeline, budgets=(math.inf,) * len(pipeline.budgets))
    assert relaxed_bound(by_pool, free).prices is None
    assert MemoryPrices().bound(by_pool, free, 0.0).seconds == relaxed_bound(by_pool, free).seconds


# ---- planted bugs ----


def test_planted_bugs_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:  # the most in flight on a rank of a group, not the least
        patch.setattr(memory_prices, "min", max, raising=False)
        assert too_high()
    with monkeypatch.context() as patch:  # a proof that nothing fits from any price
        patch.setattr(memory_prices, "_PROOF", -1e9)
        assert too_high()
    honest_ends, wrong = memory_prices._may_hold, Pipeline(None, 1, 1, (), (), (), (), (1,))
    with monkeypatch.context() as patch:  # the ends of a model on the wrong ranks
        patch.setattr(memory_prices, "_may_hold", lambda blocks, _, group: honest_ends(blocks, wrong, group))
        assert too_high()
    honest = memory_prices._columns
    for i in range(3):  # seconds, state and kept bytes that are 1 % too high
        with monkeypatch.context() as patch:
            more = np.array([1.0, 1.0, 1.0])
            more[i] = 1.01
            patch.setattr(
                memory_prices, "_columns", lambda blocks, more=more: [*np.transpose(honest(blocks) * more[:, None]).T]
            )
            assert too_high()
