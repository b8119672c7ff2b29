"""Random code while it is traced: branches on a drawn number, and checks of distributions' values.

Layers are skipped at random (LayerDrop) by a Python branch on a drawn number. `Skips` says which way a trace takes.
With a rate of 0, the default of many models, no layer is skipped: no fraction is below 0, and it is 0 itself with the
probability of its last digit alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.overrides import TorchFunctionMode

from autoptd.passes.random.skipped_layers import Skips, refusal

_FRACTIONS = frozenset({torch.rand, torch.rand_like})
_BELOW = frozenset({torch.Tensor.__lt__, torch.Tensor.lt, torch.lt, torch.Tensor.__le__, torch.Tensor.le, torch.le})
_ABOVE = frozenset({torch.Tensor.__gt__, torch.Tensor.gt, torch.gt, torch.Tensor.__ge__, torch.Tensor.ge, torch.ge})


@contextmanager
def random_code(skips: Skips) -> Iterator[None]:
    """Trace draws within: branches as `skips` says, whose rates are filled in; no checks of arguments' values."""
    checked = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        with _Comparisons(skips):
            yield
    finally:
        Distribution.set_default_validate_args(checked)


@dataclass(frozen=True)
class _Comparison:
    """The result of comparing a drawn number with a rate, `below` or above it. draw: which call of `torch.rand(())` it
    is of; None if it is of another."""

    result: Tensor
    draw: int | None
    below: bool
    rate: object


class _Comparisons(TorchFunctionMode):
    """The mode that knows which single numbers were drawn, and what was found by comparing them."""

    def __init__(self, skips: Skips) -> None:
        super().__init__()
        self.skips = skips
        self.drawn: list[Tensor] = []
        self.found: list[_Comparison] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _BELOW | _ABOVE and (number := _index(args[0], self.drawn)) is not None:
            made = func(*args, **kwargs or {})
            draw = None if args[0].ndim else sum(not x.ndim for x in self.drawn[:number])
            self.found.append(_Comparison(made, draw, func in _BELOW, args[1]))
            return made
        if func is torch.Tensor.__bool__:
            compared = _index(args[0], [c.result for c in self.found])
            if compared is not None:
                return self._branch(self.found[compared])
        made = func(*args, **kwargs or {})
        if func in _FRACTIONS and isinstance(made, Tensor) and all(isinstance(n, int) and n == 1 for n in made.shape):
            self.drawn.append(made)
        return made

    def _branch(self, compared: _Comparison) -> bool:
        rate = compared.rate
        if isinstance(rate, (int, float)) and rate <= 0:
            return not compared.below
        if not isinstance(rate, float) or rate >= 1 or compared.draw is None:
            raise refusal()
        self.skips.rates[compared.draw] = rate
        return (compared.draw in self.skips.without) == compared.below


def _index(x: object, tensors: Sequence[Tensor]) -> int | None:
    return next((i for i, tensor in enumerate(tensors) if x is tensor), None)
