"""Random code while it is traced: comparisons of a drawn number with a rate of 0, and checks of distributions' values.

Layers are skipped at random (LayerDrop) by a Python branch on a drawn number, which no trace can hold. With a rate of
0, the default of many models, none is skipped: no fraction is below 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.overrides import TorchFunctionMode

from autoptd.errors import UnsupportedOp

_FRACTIONS = frozenset({torch.rand, torch.rand_like})
_BELOW = frozenset({torch.Tensor.__lt__, torch.Tensor.lt, torch.lt})
_ABOVE = frozenset({torch.Tensor.__gt__, torch.Tensor.__ge__, torch.gt, torch.ge})
_COMPARES = _BELOW | _ABOVE | {torch.Tensor.__le__, torch.le}


@contextmanager
def random_code() -> Iterator[None]:
    """Trace draws within: comparisons that are known, no checks of arguments' values."""
    checked = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        with _Comparisons():
            yield
    finally:
        Distribution.set_default_validate_args(checked)


class _Comparisons(TorchFunctionMode):
    """The mode that knows which single numbers were drawn, and what was found by comparing them."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[Tensor] = []
        self.found: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _COMPARES and _among(args[0], self.drawn):
            if func in _BELOW and isinstance(args[1], (int, float)) and args[1] <= 0:
                return False
            self.found.append(func(*args, **kwargs or {}))
            return self.found[-1]
        if func is torch.Tensor.__bool__ and _among(args[0], self.found):
            raise UnsupportedOp(
                "a branch depends on a drawn number, as where layers are skipped at random (LayerDrop): the program "
                "would repeat the branch of the trace",
                fix="set this rate (layerdrop) to 0, or multiply what the branch adds by a drawn mask, as stochastic "
                "depth does",
            )
        made = func(*args, **kwargs or {})
        if func in _FRACTIONS and isinstance(made, Tensor) and not made.ndim:
            self.drawn.append(made)
        return made


def _among(x: object, tensors: Sequence[Tensor]) -> bool:
    return any(x is tensor for tensor in tensors)
