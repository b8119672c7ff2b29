"""Inputs whose samples are not single rows of dim 0: patches of pictures in one list, positions [3, samples, tokens].

Others have no samples, such as a weight of the loss that the training loop changes: every microbatch gets them whole.

user's tensor            rows    the program's tensor
[b, …]                   1       the same
[b · n, …]               n       [b, n, …]: n consecutive rows are one sample's
[3, b, …], dim 1         1       [b, 3, …]
[], [n, …]               0       the same
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from autoptd.errors import InputsError


@dataclass(frozen=True)
class SampleRows:
    """The place of samples in the user's tensor: `rows` consecutive ones of `dim` belong to each; 0: it has none."""

    dim: int = 0
    rows: int = 1

    def apart(self, x: Tensor) -> Tensor:
        """Return the tensor with a row of dim 0 for each sample, if it has some. Its `dim` is a multiple of `rows`."""
        x = x.movedim(self.dim, 0) if self.dim else x
        return x.unflatten(0, (-1, self.rows)) if self.rows > 1 else x

    def joined(self, x: Tensor) -> Tensor:
        """Return the user's tensor of one with a row of dim 0 for each sample."""
        x = x.flatten(0, 1) if self.rows > 1 else x
        return x.movedim(0, self.dim) if self.dim else x

    def part(self, x: Tensor, index: int, parts: int) -> Tensor:
        """Return the user's tensor of one of `parts` shares of the samples."""
        if not self.rows:
            return x
        return self.joined(self.apart(x).tensor_split(parts)[index])

    def __str__(self) -> str:
        if not self.rows:
            return "no dim of samples: all samples of a step share it"
        rows = f"{self.rows} rows of dim {self.dim}" if self.rows > 1 else f"a row of dim {self.dim}"
        return f"{rows} for each sample"


_MOST = 3  # sizes that are tried as the number of samples
_MARK = "_autoptd_shared"  # attribute of example inputs

PLAIN = SampleRows()
SHARED = SampleRows(rows=0)


Rows = Mapping[str, SampleRows]  # of every input


def shared(example: Tensor, by_all: bool = True) -> Tensor:
    """Return an example input that all samples share, whatever its sizes: each rank gives it whole in every step.

    by_all: False for one that has rows for each sample, where it may as well be shared. Unmarked inputs are shared if
    they have no dim as long as the number of samples. Raises InputsError for what is no tensor.
    """
    if not isinstance(example, Tensor):
        raise InputsError(f"shared is given {type(example).__name__}, not a tensor", fix="mark each tensor: shared(x)")
    marked = example.detach()
    setattr(marked, _MARK, by_all)
    return marked


def is_declared(example: Tensor) -> bool:
    """Return whether the user said what an example input is."""
    return hasattr(example, _MARK)


def samples_first(names: Iterable[str], rows: Rows) -> list[str]:
    """Return the names of inputs, those that all samples share last."""
    return sorted(names, key=lambda name: rows.get(name) == SHARED)


def readings(inputs: Mapping[str, Tensor]) -> Iterator[Rows]:
    """Yield what the dims of example inputs may be, most likely first: only a trace tells which it is."""
    given: list[Rows] = []
    declared = {name: SHARED for name, x in inputs.items() if getattr(x, _MARK, False)}
    others = {name: x for name, x in inputs.items() if name not in declared}
    for samples in _counts(others) or [0]:
        for several in (True, False):
            found = declared | find_rows(others, samples, several=several)
            if (rows := {name: found.get(name, PLAIN) for name in inputs}) not in given:
                given.append(rows)
                yield rows


def samples_in(inputs: Mapping[str, Tensor], rows: Rows) -> int:
    """Return the number of samples of inputs that are read so. Raises InputsError if none has samples."""
    found = next((rows[name].apart(x).shape[0] for name, x in inputs.items() if rows[name] != SHARED), None)
    if found is None:
        raise InputsError("all inputs are shared by all samples", fix="give an input with a leading batch dim")
    return found


def _counts(inputs: Mapping[str, Tensor]) -> list[int]:
    """Return the sizes of dim 0, those that most inputs have first, then those of earlier inputs."""
    sizes = Counter(x.shape[0] for x in inputs.values() if x.ndim)
    return [size for size, _ in sizes.most_common(_MOST)]


def find_rows(inputs: Mapping[str, Tensor], samples: int, *, several: bool = True) -> dict[str, SampleRows]:
    """Return the place of samples in each input that has them elsewhere than in single rows of dim 0.

    A dim of the size `samples` is looked for, then the largest that is a multiple of it. For floating-point numbers,
    such as pixels, which have more dims that are no samples, dim 0 is looked at first. All samples share what has none;
    without `several`, all that has no row of dim 0 for each.
    """
    found = {}
    for name, x in inputs.items():
        if x.ndim and x.shape[0] == samples:
            continue
        if not several:
            found[name] = SHARED
            continue
        equal = [SampleRows(dim) for dim, size in enumerate(x.shape) if size == samples and samples > 1]
        many = [SampleRows(dim, n // samples) for dim, n in enumerate(x.shape) if n > samples and n % samples == 0]
        first, many = [row for row in many if not row.dim], sorted(many, key=lambda row: -row.rows)
        likely = [*first, *equal, *many] if x.is_floating_point() else [*equal, *many]
        found[name] = likely[0] if likely else SHARED
    return found


def with_samples(inputs: Mapping[str, Tensor], rows: Rows, samples: int) -> dict[str, Tensor]:
    """Return inputs of so many samples, those of `inputs` over and over; of pixels the first one, in no memory."""
    parts = {name: row.apart(inputs[name]) for name, row in rows.items() if row != SHARED}
    return dict(inputs) | {name: rows[name].joined(_of_samples(x, samples)) for name, x in parts.items()}


def _of_samples(x: Tensor, samples: int) -> Tensor:
    if x.is_floating_point():
        return x[:1].expand(samples, *x.shape[1:])
    return x[torch.arange(samples, device=x.device) % x.shape[0]]
