"""Saved under any plan, loaded under any other: the same bits of parameters and optimizer state."""

from __future__ import annotations

from itertools import product

import pytest

from autoptd.testing.process_pool import ProcessPool
from tests.checkpoint.saved import PLANS, load_and_compare, made, whole_of, write
from tests.pairwise import pairwise

pytestmark = pytest.mark.ranks


class Roots(dict[str, str]):
    """Checkpoints of two steps by the plan that wrote them, each written when it is first asked for."""

    def __init__(self, pool: ProcessPool, folders: pytest.TempPathFactory) -> None:
        super().__init__()
        self._pool, self._folders = pool, folders

    def __missing__(self, name: str) -> str:
        root = str(self._folders.mktemp("checkpoints"))
        self._pool.run(made(name).layout.mesh, write, made(name), root, 2)
        self[name] = root
        return root


@pytest.fixture(scope="module")
def roots(pool: ProcessPool, tmp_path_factory: pytest.TempPathFactory) -> Roots:
    return Roots(pool, tmp_path_factory)


FIELDS = ("dp", "tp", "pp", "cp", "zero", "micro", "shards", "schedule")
# (writer, reader): every value of a field of the one occurs with every value of a field of the other
READ = pairwise(product(PLANS, PLANS), lambda pair: [PLANS[name].get(field) for name in pair for field in FIELDS])


@pytest.mark.parametrize("name", PLANS)
def test_what_any_plan_wrote_is_read_to_the_bit(name: str, pool: ProcessPool, roots: Roots) -> None:
    mine = {writer: roots[writer] for writer, reader in READ if reader == name}
    wrong = pool.run(made(name).layout.mesh, load_and_compare, made(name), mine)
    assert not any(wrong), wrong


def test_every_plan_wrote_the_same_tensors(roots: Roots) -> None:
    """Checkpoints do not depend on the plan: names, shapes and, up to rounding, values agree."""
    first, *others = (whole_of(roots[name]) for name in PLANS)
    assert {name.split(".")[0] for name in first} == {"model", "optimizer", "counts"}
    for other in others:
        assert sorted(other) == sorted(first)
        for name, x in first.items():
            assert (other[name] - x).norm() <= 1e-3 * x.norm(), name
