"""Data-parallel ranks share each global batch; batches are the same under every plan, from any step on."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from autoptd.errors import InputsError
from autoptd.runtime.sampler import ShareSampler


def batches(ranks: int, *, samples: int = 50, batch: int = 8, epochs: int = 2, step: int = 0) -> list[list[int]]:
    """Return the global batches that the ranks make up together."""
    each = [ShareSampler(samples, batch, rank, ranks, seed=3, step=step) for rank in range(ranks)]
    shares = [[share for _ in range(epochs) for share in sampler] for sampler in each]
    return [[i for share in shares_of_step for i in share] for shares_of_step in zip(*shares, strict=True)]


def test_batches_are_the_same_under_every_plan() -> None:
    alone = batches(1)
    assert all(batches(ranks) == alone for ranks in (2, 3, 4, 5, 8))
    assert len(alone) == 2 * (50 // 8) and all(len(set(batch)) == 8 for batch in alone)
    first, second = (sorted(i for batch in alone[k : k + 6] for i in batch) for k in (0, 6))
    assert len(set(first)) == 48, "no sample twice in an epoch"
    assert alone[:6] != alone[6:] and first != second, "another order, and others left out"


@pytest.mark.parametrize("step", [0, 1, 5, 6, 9])
def test_training_goes_on_where_it_stopped(step: int) -> None:
    assert batches(4, step=step) == batches(2, epochs=3)[step : step + 12 - step % 6]


def test_an_iterator_that_was_left_is_gone_on_with() -> None:
    sampler = ShareSampler(50, 8, 0, 2)
    whole = list(ShareSampler(50, 8, 0, 2))
    begun = iter(sampler)
    assert [next(begun), next(begun)] == whole[:2]
    assert list(sampler) == whole[2:]


def test_in_order() -> None:
    assert list(ShareSampler(10, 4, 1, 2, shuffle=False)) == [[2, 3], [6, 7]]


def test_a_data_loader_takes_it() -> None:
    data = TensorDataset(torch.arange(50))
    sampler = ShareSampler(50, 8, 1, 2)
    found = [batch.tolist() for (batch,) in DataLoader(data, batch_sampler=sampler)]
    assert found == list(ShareSampler(50, 8, 1, 2)) and len(sampler) == len(found) == 6


@pytest.mark.parametrize(
    ("samples", "batch", "ranks", "step", "message"),
    [(50, 2, 3, 0, "cannot be shared"), (7, 8, 2, 0, "less than one batch"), (50, 8, 2, -1, "no step -1")],
)
def test_what_cannot_be(samples: int, batch: int, ranks: int, step: int, message: str) -> None:
    with pytest.raises(InputsError, match=message):
        ShareSampler(samples, batch, 0, ranks, step=step)
