"""The cheapest set of blocks to recompute, against every subset."""

from __future__ import annotations

import itertools
import random

import pytest

from autoptd.search.recompute import Block, choose, peak_bytes


def random_blocks(rng: random.Random) -> list[Block]:
    kinds = [(rng.uniform(0.1, 2), rng.randint(5, 40)) for _ in range(rng.randint(1, 3))]
    return [
        Block((i,), seconds, nbytes, rng.randint(1, 4))
        for i in range(rng.randint(1, 9))
        for seconds, nbytes in [rng.choice(kinds)]
    ]


@pytest.mark.parametrize("seed", range(150))
def test_the_choice_is_the_cheapest_subset(seed: int) -> None:
    rng = random.Random(seed)
    blocks = random_blocks(rng)
    static, workspace, alive = rng.randint(0, 50), rng.randint(0, 20), rng.randint(1, 4)
    most = peak_bytes(blocks, set(), static, workspace, alive)
    budget = rng.uniform(0.3, 1.1) * most
    subsets = (set(c) for n in range(len(blocks) + 1) for c in itertools.combinations(range(len(blocks)), n))
    fitting = [s for s in subsets if peak_bytes(blocks, s, static, workspace, alive) <= budget]
    chosen = choose(blocks, static, workspace, alive, budget)
    if not fitting:
        assert chosen is None
        return
    assert chosen is not None and peak_bytes(blocks, chosen, static, workspace, alive) <= budget
    best = min(sum(blocks[i].forward_s for i in s) for s in fitting)
    assert sum(blocks[i].forward_s for i in chosen) == pytest.approx(best)


def test_a_recomputed_block_has_its_activations_back_during_its_own_backward() -> None:
    blocks = [Block((0,), 1.0, 100, 10), Block((1,), 1.0, 100, 10)]
    # two microbatches in flight keep both inputs twice; one block's other 90 bytes come back
    assert peak_bytes(blocks, {0, 1}, static=5, workspace=3, in_flight=2) == 5 + 2 * 20 + 3 + 90
    assert peak_bytes(blocks, set(), static=5, workspace=3, in_flight=2) == 5 + 2 * 200 + 3


def test_many_kinds_still_give_a_set_that_fits() -> None:
    blocks = [Block((i,), 1.0 + i, 100 + 7 * i, 5) for i in range(40)]
    budget = peak_bytes(blocks, set(), 0, 0, 2) * 0.5
    chosen = choose(blocks, 0, 0, 2, budget)
    assert chosen is not None and peak_bytes(blocks, chosen, 0, 0, 2) <= budget
