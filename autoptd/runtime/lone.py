"""Gradients that no other rank has a part of: autograd adds them up, and they stay where it did."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from autoptd.runtime.storage import Piece


class Lone:
    """Parameters of `lone` buffers, and what the optimizer updates of them: all of each, or its part of a bucket."""

    def __init__(self) -> None:
        self.parameters: dict[str, nn.Parameter] = {}
        self.used: set[str] = set()
        self._pieces: list[Piece] = []

    def adopt(self, pieces: Iterable[Piece]) -> None:
        self._pieces = list(pieces)

    def start_step(self) -> None:
        """Forget the last step's gradients, whoever looks at them: the next ones are made anew."""
        self.used = set()
        for parameter in self.parameters.values():
            parameter.grad = None
        for piece in self._pieces:
            piece.param.grad, piece.grad = None, piece.grad.new_empty(0)

    def finish(self) -> None:
        """All gradients have come: hand them to the pieces. One that did not come is zero, as for who has a part."""
        seen: set[int] = set()
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                self.used.add(name)
            if parameter.grad.data_ptr() in seen:  # views of one tensor, which clipping would scale twice
                parameter.grad = parameter.grad.clone()
            seen.add(parameter.grad.data_ptr())
        for piece in self._pieces:
            gradient = self.parameters[piece.name].grad
            assert gradient is not None
            piece.grad = gradient.view(-1)[piece.start : piece.start + piece.param.numel()]

    def scale(self, factor: Tensor) -> None:
        if gradients := list(self.gradients().values()):
            torch._foreach_mul_(gradients, factor)

    def gradients(self) -> dict[str, Tensor]:
        """Of the last step, each in its parameter's shape."""
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
