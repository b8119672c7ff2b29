"""Keyed random bits: those of an element are a function of its key alone, so that no plan can change what is drawn.

    key of an element = (seed, step, op, global sample, position in each dim of the sample's whole tensor)

The key does not depend on the split of the batch into dp shares and microbatches, of tensors into slices, of the model
into stages, or on recomputation. Every rank computes the keys of the elements that it holds, without generator state.
Dropout compares the bits with a threshold (`Elements.keep`); `random.py` makes numbers of any distribution of them.

The op's key, the sample and the positions in all dims but the last are folded one after the other into 64 bits by steps
of SplitMix64 (Steele, Lea and Flood 2014, Fast splittable pseudorandom number generators; constants quoted from
memory), which takes a few operations per row. Each element then mixes the two 32-bit parts of its row's word with the
word of its column by two rounds of xor-shift and multiply, those of the 32-bit finalizer "lowbias32" (Wellons,
hash-prospector; constants quoted from memory). This takes eleven vectorised 32-bit operations per element, half the
time of `bernoulli_` on a CPU. Philox (Salmon et al. 2011) takes ten rounds of two 64-bit products, which no torch op
does in one pass.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Lock
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

_ELEMENTS_AT_ONCE = {"cpu": 1 << 16}  # mixed by one op, so that temporaries fit into a core's cache
_ELEMENTS_AT_ONCE_ELSEWHERE = 1 << 25
_SEEDING = Lock()  # for ranks that are threads, which share torch's generators


class DimSlice(Protocol):
    """A slice of a dim that this rank holds. If a dim is split several times, the innermost slice comes first."""

    @property
    def dim(self) -> int: ...

    @property
    def size(self) -> int:
        """Length of the whole dim over that of the slice."""

    def whole(self, index: Tensor, length: int) -> Tensor:
        """Map positions in the slice, which is `length` long, to positions in the whole dim."""


@dataclass(frozen=True)
class Samples:
    """Position of samples in a tensor: dim `dim` is (outer, samples, inner); after a reshape to (b s), inner is s."""

    dim: int = 0
    outer: int = 1
    inner: int = 1


FIRST_DIM = Samples()
MICROBATCH: Literal["microbatch"] = "microbatch"  # rows that belong to no single sample: one draw per microbatch
SamplePosition: TypeAlias = "Samples | Literal['microbatch'] | None"  # None: one draw for all samples, as of weights


@dataclass
class DropoutKey:
    """Seed and training progress, from which keys are made. Dropout is the identity unless `active`.

    The trainer sets `step` and `share`, the first sample of this dp rank's share of the batch; the executor sets
    `sample`, the first one of the microbatch within the share. `share` may be a 0-dim tensor, so that the host need not
    wait for it. `rank`: among the dp ranks. `device`: where tensors of random numbers are made.
    """

    seed: int = 0
    step: int = 0
    share: int | Tensor = 0
    sample: int = 0
    active: bool = True
    device: torch.device | None = None
    rank: int = 0

    def word(self, key: str) -> int:
        """Return 64 bits, as a signed integer, for one op of one step."""
        where = f"{self.seed}/{self.step}/{key}"
        return int.from_bytes(hashlib.blake2b(where.encode(), digest_size=8).digest(), "big", signed=True)

    def elements(
        self, shape: Sequence[int], key: str, samples: SamplePosition, parts: Sequence[DimSlice], device: torch.device
    ) -> Elements:
        """Return the elements of a local tensor in the current microbatch."""
        return Elements(self.word(key), self.share + self.sample, tuple(shape), samples, tuple(parts), device)

    @contextmanager
    def seeded(
        self, key: str, samples: SamplePosition, parts: Sequence[DimSlice], device: torch.device
    ) -> Iterator[None]:
        """Seed torch's generator of a device for one op, whose numbers then depend on the plan.

        Ops, steps, dp ranks, microbatches and parts of a tensor have seeds of their own; ranks that hold the same part
        have the same, and so has a recomputed op.
        """
        which = "" if samples is None else f"/{self.rank}.{self.sample}"
        generator = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]
        with _SEEDING:
            state = generator.get_state()
            generator.manual_seed(self.word(f"{key}{which}/{list(parts)}"))
            try:
                yield
            finally:
                generator.set_state(state)


@dataclass(frozen=True)
class Coordinates:
    """Coordinates along one dim: each local element's position in its sample's whole tensor, and its sample."""

    position: Tensor
    sample: Tensor | None = None

    def __len__(self) -> int:
        return len(self.position)

    def words(self, word: Tensor) -> Tensor:
        """Fold `word` [...] with every element: [..., length]."""
        word = word.unsqueeze(-1)
        if self.sample is not None:
            word = _fold(word, self.sample)
        return _fold(word, self.position)


@dataclass(frozen=True)
class Elements:
    """A description of a local tensor's elements; it holds no tensor, so that saving it for backward is free."""

    word: int  # of the op and the step
    first: int | Tensor  # first sample of the microbatch, in the global batch
    shape: tuple[int, ...]
    samples: SamplePosition
    parts: tuple[DimSlice, ...]
    device: torch.device
    ranges: tuple[tuple[int, int, int], ...] = ()  # (dim, start, stop) that narrow it; at most one per dim

    def narrow(self, dim: int, start: int, stop: int) -> Elements:
        """Return the elements from `start` to `stop` along a dim, which was not narrowed before."""
        return replace(self, ranges=(*self.ranges, (dim % len(self.shape), start, stop)))

    def keep(self, p: float) -> Tensor:
        """Return which elements are kept, each with probability 1 − p to within 2⁻³²: bool, of the local shape."""
        below = round((1 - p) * 2**32) - 2**31
        if below > 2**31 - 1:
            dims = [self._coordinates(dim) for dim in range(len(self.shape))]
            return torch.ones([len(d) for d in dims], dtype=torch.bool, device=self.device)
        return self.each(lambda bits, out: torch.lt(bits, below, out=out), torch.bool)

    def again(self) -> Elements:
        """Return the same elements with other bits, which are independent of those of these."""
        return replace(self, word=self.word ^ _OTHER)

    def each(self, made: Callable[[Tensor, Tensor], object], dtype: torch.dtype) -> Tensor:
        """Return a tensor of the local shape. `made(bits, out)` fills its parts from 32 bits per element, as int32."""
        dims = [self._coordinates(dim) for dim in range(len(self.shape))]
        low, high, column = self._words(dims)
        found = torch.empty(low.shape[0], len(column), dtype=dtype, device=self.device)
        for at in _row_blocks(found):
            made(_mixed(low[at], high[at], column), found[at])
        return found.view([len(d) for d in dims])

    def _words(self, dims: Sequence[Coordinates]) -> tuple[Tensor, Tensor, Tensor]:
        """Return both halves of the word of each row, [rows, 1], and the word of each column, [columns]; int32."""
        rows = torch.full((), self.word, dtype=torch.int64, device=self.device)
        if self.samples == MICROBATCH:
            rows = _fold(rows, torch.zeros_like(rows) + self.first)
        columns = _fold(rows, torch.full_like(rows, -2))
        for dim in dims[:-1]:
            rows = dim.words(rows)
        columns = dims[-1].words(columns) if dims else columns.view(1)
        low, high = (half.reshape(-1, 1) for half in rows.unsqueeze(-1).view(torch.int32).unbind(-1))
        return low, high, columns.view(torch.int32)[::2]

    def _coordinates(self, dim: int) -> Coordinates:
        index, whole = torch.arange(self.shape[dim], device=self.device), self.shape[dim]
        for part in (p for p in self.parts if p.dim % len(self.shape) == dim):
            index, whole = part.whole(index, whole), whole * part.size
        for _, start, stop in (r for r in self.ranges if r[0] == dim):
            index = index[start:stop]
        if not isinstance(self.samples, Samples) or self.samples.dim % len(self.shape) != dim:
            return Coordinates(index)
        inner = self.samples.inner
        count = whole // (self.samples.outer * inner)
        sample = (index // inner) % count + self.first
        return Coordinates(index // (inner * count) * inner + index % inner, sample)


def _row_blocks(x: Tensor) -> Iterator[slice]:
    """Return slices of the rows of x, of a size that is fast on its device."""
    step = max(1, _ELEMENTS_AT_ONCE.get(x.device.type, _ELEMENTS_AT_ONCE_ELSEWHERE) // max(1, x.shape[1]))
    return (slice(i, i + step) for i in range(0, x.shape[0], step))


def _signed(value: int, bits: int) -> int:
    return value - (value >> (bits - 1) << bits)


_GAMMA, _FIRST, _SECOND = (_signed(x, 64) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_OTHER = _signed(0xD1B54A32D192ED03, 64)
_THIRD, _FOURTH = (_signed(x, 32) for x in (0x7FEB352D, 0x846CA68B))


def _fold(word: Tensor, number: Tensor) -> Tensor:
    """Advance SplitMix64 by `number` steps from `word`, broadcast, int64; injective in `number` for each word."""
    x = word + (number + 1) * _GAMMA
    x ^= _shifted(x, 30, 64)
    x *= _FIRST
    x ^= _shifted(x, 27, 64)
    x *= _SECOND
    x ^= _shifted(x, 31, 64)
    return x


def _mixed(low: Tensor, high: Tensor, column: Tensor) -> Tensor:
    """Mix words of rows and columns into a new int32 tensor [rows, columns]; its upper bits, which count, are good."""
    x = low ^ column
    x ^= _shifted(x, 16, 32)
    x *= _THIRD
    x += high
    x ^= _shifted(x, 15, 32)
    x *= _FOURTH
    return x


def _shifted(x: Tensor, by: int, bits: int) -> Tensor:
    """Shift x right by `by` bits, filling with zeros."""
    return (x >> by).bitwise_and_((1 << (bits - by)) - 1)
