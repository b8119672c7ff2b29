"""A torch dispatch mode in which the plain model draws the random numbers of the emitted program.

The k-th random call of a forward pass gets the numbers of the draw that was traced from it, made into the op's
distribution by the functions that write the graph (`distributions.py`), here on tensors. Ops within torch's own Python
or C++ code are met too: those of `F.gumbel_softmax`, `F.dropout2d`, `torch.distributions`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autoptd.ops import library as ops
from autoptd.ops.dropout import DropoutKey, SamplePosition
from autoptd.passes.normalise.functionalize import functional_form
from autoptd.passes.opcall import is_random
from autoptd.passes.random.distributions import DISTRIBUTIONS, Shape
from autoptd.passes.random.draws import given_of

aten = torch.ops.aten
_FRACTIONS = (aten.rand.default, aten.rand_like.default, aten.uniform.default)


@dataclass(frozen=True)
class Draw:
    """A node that draws: its key, the number of its call in a forward pass, where samples are placed in its elements,
    and the probability to drop of a mask.

    layer: number of calls in the layer that is skipped where a single mask is 0.
    rows: whether it draws for all rows of which the model computes some.
    """

    key: str
    call: int
    samples: SamplePosition
    dropped: float | None = None
    layer: int = 0
    rows: bool = False


class DrawsOfProgram(TorchDispatchMode):
    """The mode. `next_draw`: takes the next draw; where it is None, numbers are their mean. `leave_out`: passes over
    the calls of a layer that the model skips."""

    def __init__(
        self,
        next_draw: Callable[[], Draw | None],
        leave_out: Callable[[Draw], None],
        rng: DropoutKey,
    ) -> None:
        super().__init__()
        self.next_draw, self.leave_out, self.rng = next_draw, leave_out, rng

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        form = func if func in DISTRIBUTIONS else functional_form(func) if is_random(func) else None
        if func is aten.rrelu_with_noise.default:
            return self._rrelu(*args[:4])
        if form not in DISTRIBUTIONS:
            return func(*args, **kwargs)
        draw, made = self.next_draw(), func(*args, **kwargs)  # for its shape and type, and to advance torch's generator
        found = TensorWriter(draw, self.rng).made(form, given_of(form, args, kwargs), made)
        if draw and draw.layer and not found.any():
            self.leave_out(draw)
        return made.copy_(found)

    def _rrelu(self, x: Tensor, noise: Tensor, low: float, high: float) -> Tensor:
        slope = TensorWriter(self.next_draw(), self.rng).draw(ops.uniform, tuple(x.shape), dtype=x.dtype)
        noise.copy_(torch.where(x > 0, 1.0, slope * (high - low) + low))
        return x * noise


@dataclass(frozen=True)
class TensorWriter:
    """The `Writer` that runs ops, with one draw of the program; all floating-point numbers are of float64."""

    drawn: Draw | None
    rng: DropoutKey

    def made(self, form: Any, given: Mapping[str, Any], like: Tensor) -> Any:
        """Return what an op draws. `like`: a result of it, for shape and type."""
        if self.drawn is not None and self.drawn.dropped is not None:
            return self._from_mask(form, self.drawn, like)
        return DISTRIBUTIONS[form](self, given, tuple(like.shape), like.dtype)

    def draw(self, target: Callable[..., Any], shape: Shape, *options: Any, dtype: torch.dtype) -> Tensor:
        dtype = torch.float64 if dtype.is_floating_point else dtype
        key = {} if self.drawn is None else {"key": self.drawn.key, "rng": self.rng, "samples": self.drawn.samples}
        return target(shape, *options, dtype, **key)  # type: ignore[no-any-return]

    def _from_mask(self, form: Any, drawn: Draw, like: Tensor) -> Tensor:
        """Return what a model draws whose graph has a mask instead: 1 with a probability, or a number that floor takes
        to 1 if that probability is added."""
        assert drawn.dropped is not None
        mask = self.draw(ops.dropout_mask, tuple(like.shape), drawn.dropped, dtype=like.dtype)
        kept = (mask != 0).to(like.dtype)
        return kept * (1 - 2.0**-32) if form in _FRACTIONS else kept

    def op(self, target: Any, args: Sequence[Any], shape: Shape, dtype: torch.dtype) -> Any:
        return target(*args)

    def shape(self, x: Any) -> Shape | None:
        return tuple(x.shape) if isinstance(x, Tensor) else None

    def dtype(self, x: Tensor) -> torch.dtype:
        return x.dtype

    def fixed(self, x: Any) -> Any:
        return x
