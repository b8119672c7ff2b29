"""Kernels that permute rows of experts: numbers by hand, and the ops of a graph that add up by index."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from autoptd.cost_models.op_time import OpWork
from autoptd.search.permutation import adds_up, gradient_adds, is_adding, of_own_rows, permuting

aten = torch.ops.aten
LOOKUP = (OpWork("memory", 0.0, 30.0, "bf16"),)


def totals(permutation: str, place: str, backward: bool = False) -> tuple[float, float]:
    """Return bytes beside the lookup's and additions, of rows of 20 bytes and 10 elements."""
    works = list(permuting(LOOKUP, permutation, place, 20.0, 10.0, backward))
    assert works[0].nbytes == 30.0
    return sum(w.nbytes for w in works[1:]), sum(w.added for w in works)


@pytest.mark.parametrize(
    ("permutation", "ahead", "ahead_back", "behind", "behind_back"),
    [
        ("added", (0, 0), (0, 10), (0, 10), (0, 0)),
        # the product with weights reads and writes the rows: 2 × 20 bytes; its gradients take 6 × 20
        ("weighted", (0, 0), (0, 10), (40, 10), (120, 0)),
        # a gather more each way (40), a kernel that adds up more (40, 10 additions), zeros (20), a copy (40)
        ("twice", (40, 0), (20 + 40, 20), (40 + 40 + 20 + 40, 20), (120 + 40, 0)),
    ],
)
def test_passes_by_hand(permutation: str, ahead: tuple, ahead_back: tuple, behind: tuple, behind_back: tuple) -> None:
    assert totals(permutation, "ahead") == ahead and totals(permutation, "ahead", True) == ahead_back
    assert totals(permutation, "behind") == behind and totals(permutation, "behind", True) == behind_back
    assert adds_up(permutation) and of_own_rows(permutation) == (permutation != "twice")


def test_ops_that_add_up_by_index() -> None:
    def call(target: object, accumulate: bool = False) -> SimpleNamespace:
        return SimpleNamespace(target=target, arg=lambda index, name, default=None: accumulate)

    assert is_adding(call(aten.index_add.default)) and is_adding(call(aten.scatter_add_.default))
    assert is_adding(call(aten.index_put.default, True)) and not is_adding(call(aten.index_put.default))
    assert not is_adding(call(aten.add.Tensor))
    assert gradient_adds(call(aten.index.Tensor)) and not gradient_adds(call(aten.embedding.default))
    assert not adds_up("fused") and not adds_up("")
