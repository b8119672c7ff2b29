"""Python's random fractions, drawn by torch while a model is traced and while it is run as the reference.

`random.random()` and `random.uniform(a, b)` in forward are one number a pass, as `torch.rand(())` is: a layer is
skipped by it (LayerDrop), or all samples are scaled by it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from autoptd.passes.known.replace import files_of


def _random() -> Tensor:
    return torch.rand(())


def _uniform(a: float, b: float) -> Tensor:
    return _random() if (a, b) == (0, 1) else a + (b - a) * _random()


_DRAWN = {"random": _random, "uniform": _uniform}


class _Module:
    """Python's random module with these functions in place of its own."""

    def __getattr__(self, name: str) -> Any:
        return _DRAWN.get(name) or getattr(random, name)


@contextmanager
def fractions_drawn_by_torch(model: nn.Module) -> Iterator[None]:
    """Replace the random module and its functions in the Python modules of the model's classes."""
    with ExitStack() as replaced:
        for file in files_of(model):
            names = vars(file)
            found: dict[str, Any] = {name: _Module() for name, value in names.items() if value is random}
            for function, made in _DRAWN.items():
                own = getattr(random, function)
                found |= {name: made for name, value in names.items() if type(value) is type(own) and value == own}
            for name, made in found.items():  # no patch.dict, which would undo what forward does to other globals
                replaced.enter_context(patch.object(file, name, made))
        yield
