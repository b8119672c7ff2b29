"""Functions of torch that are written as ops on sizes have its numbers, and keep samples apart."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoptd.passes.known.of_sizes import affine_grid, diag, diagonal, take_along_dim
from autoptd.passes.trace.trace import trace


@pytest.mark.filterwarnings("ignore:Since version 1.3.0, affine_grid")
@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("shape", [(4, 5), (1, 6), (3, 1, 5)])
def test_numbers_are_those_of_torch(shape: tuple[int, ...], align_corners: bool) -> None:
    theta = torch.randn(2, len(shape), len(shape) + 1, dtype=torch.float64)
    expected = F.affine_grid(theta, [2, 3, *shape], align_corners=align_corners)
    assert torch.allclose(affine_grid(theta, (2, 3, *shape), align_corners), expected, rtol=0, atol=1e-14)


class Transformer(nn.Module):
    """A spatial transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        theta = self.place(x.flatten(1)).view(-1, 2, 3)
        return F.grid_sample(x, F.affine_grid(theta, x.size(), align_corners=False), align_corners=False).mean()


def test_a_spatial_transformer_is_traced_for_any_number_of_samples() -> None:
    traced = trace(Transformer(), {"x": torch.randn(2, 1, 4, 4)})
    assert [str(s) for s in traced.sizes] == ["b"]
    assert not [n for n in traced.graph.graph.nodes if "affine_grid" in str(n.target)]


class Pairs(nn.Module):
    """Every sample against all others, in a matrix whose diagonal is written."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        scores = (y @ y.T).fill_diagonal_(-torch.inf)
        return F.cross_entropy(scores, torch.arange(x.size(0)).roll(1))


def test_the_number_of_samples_of_a_written_diagonal_stays_a_size() -> None:
    assert [str(s) for s in trace(Pairs(), {"x": torch.randn(4, 4)}).sizes] == ["b"]


class Diagonals(Pairs):
    """Every sample against all others, of which those half a batch away are taken."""

    def forward(self, x: Tensor) -> Tensor:
        y, n = self.layer(x), x.size(0)
        scores = y @ torch.cat([y, y]).T
        return torch.cat([scores.diag(n), torch.diag(scores.T, -n), scores.T.diagonal(offset=n)]).sum()


def test_the_place_of_a_diagonal_stays_a_size() -> None:
    assert [str(s) for s in trace(Diagonals(), {"x": torch.randn(4, 4)}).sizes] == ["b"]


@pytest.mark.parametrize("place", [-3, -1, 0, 2, 4])
def test_diagonals_are_those_of_torch(place: int) -> None:
    x = torch.randn(4, 6)
    assert torch.equal(diag(x, place), x.diag(place)) and torch.equal(diagonal(x, place), x.diagonal(place))


class Sorted(Pairs):
    """Tokens in the order of their norms, taken by indices that have no place for features."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        norms, at = y.norm(dim=-1).sort(dim=1)
        taken = y.take_along_dim(at[..., None], 1) * torch.take_along_dim(norms, at, dim=-1)[..., None]
        return (taken * torch.arange(4)[:, None]).sum()


def test_the_number_of_samples_of_indices_that_are_broadcast_stays_a_size() -> None:
    assert [str(s) for s in trace(Sorted(), {"x": torch.randn(2, 4, 4)}).sizes] == ["b"]


@pytest.mark.parametrize(
    ("shape", "indices", "dim"),
    [
        ((3, 4, 5), (3, 4, 1), 1),
        ((3, 4, 5), (1, 6, 5), -2),
        ((3, 1, 5), (3, 4, 2), 2),
        ((4,), (7,), 0),
        ((2, 3), (8,), None),
    ],
)
def test_elements_are_those_that_torch_takes(shape: tuple[int, ...], indices: tuple[int, ...], dim: int | None) -> None:
    x, at = torch.randn(shape), torch.randint(0, 1 if dim is None else shape[dim], indices)
    assert torch.equal(take_along_dim(x, at, dim), torch.take_along_dim(x, at, dim))
