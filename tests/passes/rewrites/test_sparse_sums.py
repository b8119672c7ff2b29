"""Sparse tensors added to dense ones: sums by index, with the gradient of the values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.passes.interpret import assert_unchanged, names_of
from tests.passes.normalise.test_normalise import WIDTH, batch, model_of

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


def change(self: nn.Module) -> Tensor:
    """Return a sparse matrix that has two numbers at one place."""
    places = torch.tensor([[0, 1, 2, 0, 4, 5, 6, 7], [1, 1, 3, 1, 1, 0, 0, 2]])
    return torch.sparse_coo_tensor(places, self.second.bias * 0.5, (WIDTH, WIDTH))


def in_place(self: nn.Module, h: Tensor) -> Tensor:
    weight = self.second.weight.clone()
    weight += change(self)
    return F.linear(h, weight)


def out_of_place(self: nn.Module, h: Tensor) -> Tensor:
    return F.linear(h, self.second.weight + change(self))


@pytest.mark.parametrize("body", [in_place, out_of_place])
def test_sparse_changes_are_sums_by_index(body: Callable[[nn.Module, Tensor], Tensor]) -> None:
    assert "index_put" in names_of(assert_unchanged(model_of(body), batch()))
