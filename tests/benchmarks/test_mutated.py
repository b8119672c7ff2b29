"""Models mutated at random: a few quick seeds through the check; `python -m benchmarks.coverage mutated` has more."""

from __future__ import annotations

import pytest

from benchmarks.coverage.check import check
from benchmarks.coverage.mutated.case import Mutated

QUICK = (0, 13, 17, 34, 54, 68)


@pytest.mark.parametrize("seed", QUICK)
def test_a_mutated_model_trains_as_on_one_process_or_is_refused(seed: int) -> None:
    found = check(Mutated(seed), free=False)
    assert found.result in ("trained", "refused"), found
    assert found.difference < 1e-9
    if found.result == "refused":
        assert found.what and found.where and found.fix


def test_a_seed_draws_the_same_model() -> None:
    first, second = Mutated(17).drawn, Mutated(17).drawn
    assert first.notes == second.notes
    assert str(first.model) == str(second.model)


def test_kinds_of_models_take_turns() -> None:
    assert len({Mutated(seed).base for seed in range(60)}) == 20
