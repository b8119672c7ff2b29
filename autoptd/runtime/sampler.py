"""Distribution of samples over data-parallel ranks, with the same global batches under every plan."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import torch
from torch.utils.data import Sampler

from autoptd.errors import InputsError

_USED = count(1)


class ShareSampler(Sampler[list[int]]):
    """A `batch_sampler` that yields, for each step of an epoch, the indices of this rank's share of the global batch.

    Epoch e uses a permutation of the samples that depends on (seed, e) only. Each step takes the next `batch` samples,
    of which each rank has a consecutive range, the first ranks one sample more where they cannot be equal; an
    incomplete last batch is dropped. The position in the data is therefore the number of steps done, under any plan:
    `sampler.start_at(parallel.step)` resumes, also within an epoch. An iterator yields the rest of one epoch; the next
    iterator starts the next epoch.
    """

    def __init__(
        self, samples: int, batch: int, rank: int, ranks: int, *, shuffle: bool = True, seed: int = 0, step: int = 0
    ) -> None:
        """`samples`: size of the data set; `batch`: global batch size. Raises InputsError."""
        if batch < ranks:
            what = f"a batch of {batch} cannot be shared by {ranks} data-parallel ranks"
            raise InputsError(what, fix=f"use at least {ranks} samples")
        if samples < batch:
            raise InputsError(f"{samples} samples are less than one batch of {batch}", fix="use a smaller batch")
        self.samples, self.batch, self.rank, self.ranks = samples, batch, rank, ranks
        self.shuffle, self.seed = shuffle, seed
        self.used = 0  # the place of its last iterator among those of all samplers; 0 before the first
        self.start_at(step)

    def start_at(self, step: int) -> None:
        """Start the next iterator at this step, counted from 0 over all epochs."""
        if step < 0:
            raise InputsError(f"there is no step {step}", fix="count from 0")
        self._step = self._since = step

    def order(self) -> str:
        """Return in words the order of all samples, which is the same on all ranks.

        It says where the steps began: those of a rank that has left an iterator within an epoch go on from there.
        """
        order = f"shuffled by seed {self.seed}" if self.shuffle else "in their own order"
        return f"{self.samples} samples, {order}, from step {self._since}"

    def __len__(self) -> int:
        return self.samples // self.batch  # steps per epoch

    def __iter__(self) -> Iterator[list[int]]:
        epoch, first = divmod(self._step, len(self))
        self.used = next(_USED)
        self._since = self._step if first else self._since
        order = self._permutation(epoch)
        least, longer = divmod(self.batch, self.ranks)
        before, share = self.rank * least + min(self.rank, longer), least + (self.rank < longer)
        for k in range(first, len(self)):
            start = k * self.batch + before
            self._step = epoch * len(self) + k + 1
            yield order[start : start + share]

    def _permutation(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(self.samples))
        generator = torch.Generator().manual_seed((self.seed << 20) + epoch)
        return torch.randperm(self.samples, generator=generator).tolist()
