"""Masks are equal if they were computed alike from the same tensors, none of which was written to."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from autoptd.passes.known.equal_masks import EqualMasks

X, Y = torch.arange(6), torch.arange(6) % 3
MANY = np.arange(2000)


def are_equal(*computed: Callable[[], tuple[Callable[..., Tensor], tuple[object, ...]]]) -> bool:
    """Return whether two calls give one mask."""
    masks, made = EqualMasks(), []
    for each in computed:
        func, args = each()
        made.append(func(*args))
        masks.note(made[-1], func, args, {})
    found = [masks.selecting(Tensor.__getitem__, (mask, mask), {})[1][1] for mask in made]
    return found[0] is found[1]


@pytest.mark.parametrize(
    ("one", "two", "equal"),
    [
        ((torch.eq, (X, 2)), (torch.eq, (X, 2)), True),
        ((torch.eq, (X, 2)), (torch.eq, (X, 3)), False),
        ((torch.eq, (X, 2)), (torch.eq, (Y, 2)), False),
        ((torch.eq, (X, 2)), (torch.eq, (X, 2.0)), False),
        ((torch.eq, (X, True)), (torch.eq, (X, 1)), False),
        ((torch.lt, (X, 2)), (torch.gt, (X, 2)), False),
        ((Tensor.bool, (X,)), (Tensor.bool, (X,)), True),
        ((torch.bernoulli, (X / 6,)), (torch.bernoulli, (X / 6,)), False),
    ],
)
def test_calls(one: tuple[object, ...], two: tuple[object, ...], equal: bool) -> None:
    assert are_equal(lambda: one, lambda: two) is equal  # type: ignore[arg-type, return-value]


def test_arrays_are_not_compared_by_their_text() -> None:
    """A long array is shortened in its text, and one array may change."""
    mask = torch.arange(2000) % 2 > 0
    other = np.where(MANY == 1000, 0, MANY)
    assert str(MANY) == str(other)
    assert not are_equal(lambda: (Tensor.__getitem__, (mask, MANY)), lambda: (Tensor.__getitem__, (mask, other)))


def test_what_is_written_to_is_another() -> None:
    given = X.clone()

    def written() -> tuple[Callable[..., Tensor], tuple[object, ...]]:
        given[0] = 9
        return torch.gt, (given, 4)

    assert not are_equal(lambda: (torch.gt, (given, 4)), written)
