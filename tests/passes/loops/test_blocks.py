"""Constants with a block for each sample: written for any number of samples, or refused."""

from __future__ import annotations

import pytest
import torch

from autoptd.passes.loops.blocks import blocks_of

FIRST = torch.tensor([[0, 1], [2, 3]])


@pytest.mark.parametrize("step", [0, 4, torch.tensor([[1, 2], [3, 4]])], ids=["same", "rows", "tensor"])
@pytest.mark.parametrize("dim", [0, 1])
def test_blocks_of_more_samples_go_on(step: int | torch.Tensor, dim: int) -> None:
    def blocks(count: int) -> list[torch.Tensor]:
        return [FIRST + i * step for i in range(count)]

    found = blocks_of(blocks(3), dim)
    assert found is not None
    assert torch.equal(found.write(5), torch.cat(blocks(5), dim))


def test_blocks_without_a_rule_are_refused() -> None:
    assert blocks_of([FIRST, FIRST + 1, FIRST + 3], 0) is None
    assert blocks_of([FIRST, FIRST[:1]], 0) is None
    assert blocks_of([FIRST / 2, FIRST / 2 + 1, FIRST / 2 + 2], 0) is None  # no rounded multiples
