"""Inputs whose samples are not single rows of dim 0: patches of pictures in one list, positions [3, samples, tokens].

user's tensor            rows    the program's tensor
[b, …]                   1       the same
[b · n, …]               n       [b, n, …]: n consecutive rows are one sample's
[3, b, …], dim 1         1       [b, 3, …]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class SampleRows:
    """The place of samples in the user's tensor: `rows` consecutive ones of `dim` belong to each."""

    dim: int = 0
    rows: int = 1

    def apart(self, x: Tensor) -> Tensor:
        """Return the tensor with a row of dim 0 for each sample. Its size in `dim` must be a multiple of `rows`."""
        x = x.movedim(self.dim, 0) if self.dim else x
        return x.unflatten(0, (-1, self.rows)) if self.rows > 1 else x

    def joined(self, x: Tensor) -> Tensor:
        """Return the user's tensor of one with a row of dim 0 for each sample."""
        x = x.flatten(0, 1) if self.rows > 1 else x
        return x.movedim(0, self.dim) if self.dim else x

    def part(self, x: Tensor, index: int, parts: int) -> Tensor:
        """Return the user's tensor of one of `parts` shares of the samples."""
        return self.joined(self.apart(x).tensor_split(parts)[index])

    def __str__(self) -> str:
        rows = f"{self.rows} rows of dim {self.dim}" if self.rows > 1 else f"a row of dim {self.dim}"
        return f"{rows} for each sample"


PLAIN = SampleRows()


def count_samples(inputs: Mapping[str, Tensor]) -> int:
    """Return the number of samples of example inputs: the size of dim 0 that most of them have."""
    sizes = Counter(x.shape[0] for x in inputs.values() if x.ndim)
    return sizes.most_common(1)[0][0]


def find_rows(inputs: Mapping[str, Tensor], samples: int) -> dict[str, SampleRows]:
    """Return the place of samples in each input that has them elsewhere than in single rows of dim 0.

    A dim of the size `samples` is looked for, then the largest that is a multiple of it. For floating-point numbers,
    such as pixels, which have more dims that are no samples, dim 0 is looked at first.
    """
    found = {}
    for name, x in inputs.items():
        if not x.ndim or not samples or x.shape[0] == samples:
            continue
        equal = [SampleRows(dim) for dim, size in enumerate(x.shape) if size == samples and samples > 1]
        many = [SampleRows(dim, n // samples) for dim, n in enumerate(x.shape) if n > samples and n % samples == 0]
        first, many = [row for row in many if not row.dim], sorted(many, key=lambda row: -row.rows)
        if likely := [*first, *equal, *many] if x.is_floating_point() else [*equal, *many]:
            found[name] = likely[0]
    return found


def with_samples(inputs: Mapping[str, Tensor], samples: int) -> dict[str, Tensor]:
    """Return inputs of so many samples, all of them the first one of `inputs`, in no further memory."""
    count = count_samples(inputs)
    found = find_rows(inputs, count)
    rows = {n: found.get(n, PLAIN) for n, x in inputs.items() if n in found or (x.ndim and x.shape[0] == count)}
    parts = {n: row.apart(inputs[n])[:1] for n, row in rows.items()}
    return dict(inputs) | {n: rows[n].joined(x.expand(samples, *x.shape[1:])) for n, x in parts.items()}
