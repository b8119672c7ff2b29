"""Cut this dp rank's share of a batch into microbatches, and refuse a wrong one before anybody communicates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from autoptd.errors import InputsError

Microbatch = dict[str, Tensor]


def cut_batch(
    batch: Mapping[str, Tensor], inputs: Sequence[str], micro: int, microbatches: int | None, device: torch.device
) -> list[Microbatch]:
    """Consecutive slices of `micro` samples along dim 0, the last one maybe smaller.

    `microbatches`: how many it must give, None for any number (at least one). Raises InputsError.
    """
    samples = _samples(batch, inputs)
    count = -(-samples // micro)
    if microbatches is not None and count != microbatches:
        low, high = (microbatches - 1) * micro + 1, microbatches * micro
        raise InputsError(
            f"a batch of {samples} samples is {count} microbatches of up to {micro}, but the plan runs {microbatches}",
            where="this data-parallel rank's share of the batch",
            fix=f"give {high} samples per data-parallel rank (at least {low}), or plan for another batch",
        )
    here = {name: batch[name].to(device, non_blocking=True) for name in inputs}
    return [{name: x[i * micro : (i + 1) * micro] for name, x in here.items()} for i in range(count)]


def sample_count(microbatch: Microbatch) -> int:
    """Samples of a microbatch."""
    return next(iter(microbatch.values())).shape[0]


def check_multiples(batch: Mapping[str, Tensor], multiples: Mapping[tuple[str, int], int]) -> None:
    """Refuse a sequence that cp ranks cannot share. Raises InputsError; what is no tensor is left to `cut_batch`."""
    for (name, dim), divisor in multiples.items():
        x = batch.get(name) if isinstance(batch, Mapping) else None
        if isinstance(x, Tensor) and x.ndim > dim and x.shape[dim] % divisor:
            raise InputsError(
                f"{x.shape[dim]} tokens cannot be shared: they are cut into {divisor} equal parts",
                where=f"dim {dim} of {name!r}",
                fix=f"pad every sequence to a multiple of {divisor}, with labels that do not count",
            )


def _samples(batch: Mapping[str, Tensor], inputs: Sequence[str]) -> int:
    """Dim 0 of every input, which must agree."""
    if not isinstance(batch, Mapping):
        raise InputsError(
            f"a batch is a mapping of keyword tensors, not a {type(batch).__name__}",
            fix=f"give a dict of {list(inputs)}",
        )
    missing = [name for name in inputs if name not in batch]
    unknown = [name for name in batch if name not in inputs]
    if missing or unknown:
        what = [f"lacks {missing}"] * bool(missing) + [f"has {unknown} which the plan does not know"] * bool(unknown)
        raise InputsError("the batch " + " and ".join(what), fix=f"give exactly {list(inputs)}")
    wrong = [name for name in inputs if not isinstance(batch[name], Tensor) or batch[name].ndim == 0]
    if wrong:
        raise InputsError(f"{wrong} must be tensors whose dim 0 counts samples", fix="give a batch of tensors")
    sizes = {name: batch[name].shape[0] for name in inputs}
    if len(set(sizes.values())) > 1:
        raise InputsError(
            f"the batch's tensors hold different numbers of samples: {sizes}", fix="give as many samples of each"
        )
    samples = next(iter(sizes.values()), 0)
    if samples == 0:
        raise InputsError("the batch is empty", fix="drop the last, incomplete batch of the data loader")
    return samples
