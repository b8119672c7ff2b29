"""Cases made by a function: the model with its batch, from a fixed seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

SAMPLES = 8
Built = tuple[nn.Module, Mapping[str, Any]]


@dataclass(frozen=True)
class Made:
    """A model and its batch by the function that makes them, and its loss if `forward` returns none.

    Models are cast to float64 and put in training mode.
    """

    name: str
    family: str
    make: Callable[[], Built]
    loss: Callable[..., Tensor] | None = None

    def build(self) -> tuple[nn.Module, dict[str, Any]]:
        torch.manual_seed(0)
        model, batch = self.make()
        return model.double().train(), dict(batch)


def normal(*shape: int, seed: int = 1) -> Tensor:
    """Random numbers with a row per sample."""
    return torch.randn(SAMPLES, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def whole(below: int, *shape: int, seed: int = 2) -> Tensor:
    """Random whole numbers from 0 to `below` - 1 with a row per sample."""
    return torch.randint(below, (SAMPLES, *shape), generator=torch.Generator().manual_seed(seed))
