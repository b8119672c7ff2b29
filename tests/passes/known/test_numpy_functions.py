"""The torch forms of NumPy functions draw what these draw, in distribution."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.models.wav2vec2 import modeling_wav2vec2

from autoptd.passes.known.numpy_functions import NUMPY, compute_mask_indices
from autoptd.passes.known.replace import replaced_functions
from tests.passes.interpret import names_of, normalised

ROWS = 4000
LENGTHS = (20, 13, 6, 2)
CASES = [
    (0.3, 4, True, 0),
    (0.3, 4, False, 0),
    (0.05, 3, True, 2),
    (0.9, 3, True, 0),
    (0.0, 3, True, 0),
    (0.2, 5, True, 1),
]


@pytest.mark.parametrize(("prob", "length", "masked", "least"), CASES)
def test_spans_are_masked_as_often_as_by_the_original(prob: float, length: int, masked: bool, least: int) -> None:
    np.random.seed(0)
    torch.manual_seed(0)
    mask = (torch.arange(20) < torch.tensor(LENGTHS)[:, None]).long() if masked else None
    given = (len(LENGTHS), 20), prob, length, mask, least
    theirs = torch.stack([torch.tensor(modeling_wav2vec2._compute_mask_indices(*given)) for _ in range(ROWS)]).double()
    mine = torch.stack([compute_mask_indices(*given) for _ in range(ROWS)]).double()
    for of in (lambda x: x, lambda x: x.sum(-1), lambda x: x.sum(-1) ** 2, lambda x: x[..., 1:] * x[..., :-1]):
        a, b = of(theirs), of(mine)
        spread = ((a.var(0) + b.var(0)) / ROWS).sqrt()
        assert ((a.mean(0) - b.mean(0)).abs() <= 5 * spread + 1e-12).all()


def test_a_length_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        compute_mask_indices((2, 3), 0.5, 4)


def _compute_mask_indices(
    shape: Any, mask_prob: float, mask_length: int, attention_mask: Any = None, min_masks: int = 0
) -> Any:
    return np.random.rand(*shape) < mask_prob


class Augmented(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8).double()

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.tensor(_compute_mask_indices(x.shape[:2], 0.5, 2), dtype=torch.bool)
        x = x.clone()
        x[mask] = 0.0
        return self.layer(x).square().mean()


def test_the_function_is_found_by_its_name_and_parameters() -> None:
    found = names_of(normalised(Augmented(), {"x": torch.zeros(2, 8, 8, dtype=torch.float64)}))
    assert found.count("uniform") == 2 and "where" in found
    before = _compute_mask_indices
    with replaced_functions(Augmented(), NUMPY):
        assert _compute_mask_indices is not before
    assert _compute_mask_indices is before
