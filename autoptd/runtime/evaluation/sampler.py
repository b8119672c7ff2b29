"""Distribution of the samples of an evaluation: every sample once, in order, on one data-parallel rank."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import Sampler

from autoptd.errors import InputsError


class EvaluationSampler(Sampler[list[int]]):
    """A `batch_sampler` that yields this rank's consecutive share of each global batch, the samples in order.

    No sample is dropped, repeated or padded. There are as few batches as possible, of nearly equal sizes: 13 samples in
    batches of 4 are 4 + 3 + 3 + 3. The first batches and ranks have one sample more where they cannot be equal, so a
    rank without a share of a batch has none of those after it either.
    """

    def __init__(self, samples: int, batch: int, rank: int, ranks: int) -> None:
        """`samples`: size of the data set; `batch`: of a global batch. Raises InputsError if there is none."""
        if samples < 1 or batch < 1:
            raise InputsError(f"{samples} samples in batches of {batch}", fix="give at least one of each")
        self.samples, self.batch, self.rank, self.ranks = samples, batch, rank, ranks

    def _shares(self) -> Iterator[range]:
        for samples in _parts(range(self.samples), -(-self.samples // self.batch)):
            yield list(_parts(samples, self.ranks))[self.rank]

    def __len__(self) -> int:
        return sum(map(bool, self._shares()))

    def __iter__(self) -> Iterator[list[int]]:
        return (list(share) for share in self._shares() if share)


def _parts(samples: range, count: int) -> Iterator[range]:
    """Yield consecutive parts of a range, the first ones longer by one where they cannot be equal."""
    least, longer = divmod(len(samples), count)
    for i in range(count):
        first = i * least + min(i, longer)
        yield samples[first : first + least + (i < longer)]
