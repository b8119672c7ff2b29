"""Writes of one sample each, `y[i] = …` in a loop over i, held back until the loop is over.

If the loop writes every sample the same way, the writes become one, `y[:] = …` of the joined values; else they are
done as they were written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Index = tuple[Any, ...]
Join = Callable[[list[Tensor], Sequence[Any]], Tensor | None]


def sample_index(index: Any, of_samples: Sequence[bool], slices: bool = False) -> tuple[int, int, Index] | None:
    """Return the dim that a single number indexes, the number, and the index with it left open.

    None unless that is a dim of samples, and all dims before it are whole. `of_samples`: for each dim of the tensor.
    With `slices`, `i : i + 1` is taken for the number i, and leaves a slice of this length.
    """
    parts = list(index) if isinstance(index, tuple) else [index]
    for dim, part in enumerate(parts):
        counts = dim < len(of_samples) and of_samples[dim]
        if counts and isinstance(part, int) and not isinstance(part, bool):
            return dim, part, (*parts[:dim], slice(None), *parts[dim + 1 :])
        if not isinstance(part, slice):
            return None
        if counts and slices and part.step is None and isinstance(part.start, int) and isinstance(part.stop, int):
            return dim, part.start, (*parts[:dim], slice(part.stop - part.start), *parts[dim + 1 :])
        if part != slice(None):
            return None
    return None


@dataclass
class RowWrites:
    """The writes to one tensor that are held back, in their order."""

    target: Tensor
    writes: list[tuple[Index, Index, int, int, Any]] = field(
        default_factory=list
    )  # index, its open form, dim, i, value

    def _shape(self, index: Index) -> Sequence[Any]:
        return torch.empty_like(self.target)[index].shape

    def done(self, join: Join) -> None:
        """Write. `join` gives the values of all samples, of one shape, in one tensor; None if they are not alike."""
        self.writes = [write for write in self.writes if 0 not in self._shape(write[0])]
        slots: dict[str, list[tuple[int, Any]]] = {}
        for _, opened, dim, i, value in self.writes:
            slots.setdefault(f"{dim} {opened}", []).append((i, value))
        made = {key: self._whole(found, join) for key, found in slots.items()}
        if any(value is None for value in made.values()):
            for index, _, _, _, value in self.writes:
                self.target[index] = value
            return
        for _, opened, dim, i, _ in self.writes:
            if i == 0:
                value = made[f"{dim} {opened}"]
                self.target[opened] = value.movedim(0, dim) if isinstance(value, Tensor) and value.ndim > dim else value

    def _whole(self, found: list[tuple[int, Any]], join: Join) -> Any:
        if [i for i, _ in found] != list(range(len(found))):
            return None
        values = [value for _, value in found]
        if all(isinstance(value, Tensor) for value in values):
            index = next(x for x, _, _, i, v in self.writes if i == 0 and v is values[0])
            return join(values, self._shape(index))
        return values[0] if all(value == values[0] for value in values[1:]) else None
