"""Which samples a data-parallel rank takes: the same global batches under every plan, from any step on."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from autoptd.errors import InputsError


class ShareSampler(Sampler[list[int]]):
    """For each step of an epoch the indices of this rank's share of the global batch: a `batch_sampler`.

    Epoch e goes through a permutation of the samples that (seed, e) alone decides; its step k takes the next `batch` of
    them, of which each rank has consecutive ones. What is left of an epoch is dropped. So where training stands is the
    number of steps done, whatever the plan: `sampler.start_at(parallel.step)` goes on from there, also in the middle of
    an epoch. An iterator gives the rest of one epoch; the next one begins the next.
    """

    def __init__(
        self, samples: int, batch: int, rank: int, ranks: int, *, shuffle: bool = True, seed: int = 0, step: int = 0
    ) -> None:
        """samples: of the data set; batch: of a step over all ranks. Raises InputsError."""
        if batch < 1 or batch % ranks:
            raise InputsError(
                f"a batch of {batch} cannot be shared by {ranks} data-parallel ranks", fix=f"use a multiple of {ranks}"
            )
        if samples < batch:
            raise InputsError(f"{samples} samples are less than one batch of {batch}", fix="use a smaller batch")
        self.samples, self.batch, self.rank, self.ranks = samples, batch, rank, ranks
        self.shuffle, self.seed = shuffle, seed
        self.start_at(step)

    def start_at(self, step: int) -> None:
        """Begin the next iterator with this step, counted from the first one of all epochs."""
        if step < 0:
            raise InputsError(f"there is no step {step}", fix="count from 0")
        self._step = step

    def __len__(self) -> int:
        """Steps of an epoch."""
        return self.samples // self.batch

    def __iter__(self) -> Iterator[list[int]]:
        epoch, first = divmod(self._step, len(self))
        order = self._order(epoch)
        share = self.batch // self.ranks
        for k in range(first, len(self)):
            start = k * self.batch + self.rank * share
            self._step = epoch * len(self) + k + 1
            yield order[start : start + share]

    def _order(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(self.samples))
        generator = torch.Generator().manual_seed((self.seed << 20) + epoch)
        return torch.randperm(self.samples, generator=generator).tolist()
