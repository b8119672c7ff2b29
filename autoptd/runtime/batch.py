"""Split this dp rank's share of a batch into microbatches; refuse a wrong batch before any communication."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from autoptd.errors import InputsError
from autoptd.layout.layout import InputSpec
from autoptd.layout.sample_rows import PLAIN, SHARED

Microbatch = dict[str, Tensor]


def cut_batch(
    batch: Mapping[str, Tensor],
    inputs: Sequence[str],
    micro: int,
    microbatches: int | None,
    device: torch.device,
    shared: Collection[str] = (),
) -> list[Microbatch]:
    """Split a batch into consecutive slices of `micro` samples along dim 0; the last may be smaller.

    `microbatches`: the required number, None for any. `shared`: inputs that each gets whole, the last ones.
    Raises InputsError.
    """
    samples = _samples(batch, inputs, shared)
    count = -(-samples // micro)
    if microbatches is not None and count != microbatches:
        low, high = (microbatches - 1) * micro + 1, microbatches * micro
        raise InputsError(
            f"a batch of {samples} samples is {count} microbatches of up to {micro}, but the plan runs {microbatches}",
            where="this data-parallel rank's share of the batch",
            fix=f"give {high} samples per data-parallel rank (at least {low}), or plan for another batch",
        )
    wanting = [name for name in inputs if torch.is_grad_enabled() and batch[name].requires_grad]
    if wanting:
        raise InputsError(
            f"{wanting} require a gradient, but a step gives one to the model's own parameters alone",
            where=wanting[0],
            fix=f"give {wanting[0]}.detach(); what is to be trained with the model has to be a part of it",
        )
    given = {name: x.clone() if (x := batch[name]).is_inference() else x for name in inputs}  # backward may save it
    here = {name: x.to(device, non_blocking=True) for name, x in given.items()}
    cuts = [slice(i * micro, (i + 1) * micro) for i in range(count)]
    return [{name: x if name in shared else x[cut] for name, x in here.items()} for cut in cuts]


def by_sample(batch: Mapping[str, Tensor], specs: Mapping[str, InputSpec]) -> Mapping[str, Tensor]:
    """Return a batch with a row of dim 0 for each sample in every tensor. Leaves what is none to `cut_batch`."""
    if not isinstance(batch, Mapping):
        return batch
    found = dict(batch)
    for name, spec in specs.items():
        x, (dim, rows) = batch.get(name), (spec.rows.dim, spec.rows.rows)
        if isinstance(x, Tensor) and spec.rows not in (PLAIN, SHARED) and not x.is_meta:
            if x.ndim <= dim or x.shape[dim] % rows:
                raise InputsError(
                    f"{name!r} is of shape {list(x.shape)}, but was traced with {spec.rows}",
                    where=name,
                    fix="give every sample as many rows as in the traced inputs: pictures of their size and number",
                )
            found[name] = spec.rows.apart(x)
    return found


def share_of(batch: Mapping[str, Tensor], specs: Mapping[str, InputSpec], index: int, shares: int) -> dict[str, Tensor]:
    """Return one of `shares` equal shares of a global batch."""
    rows = {name: spec.rows for name, spec in specs.items()}
    return {name: rows.get(name, PLAIN).part(x, index, shares) for name, x in batch.items()}


def sample_count(microbatch: Microbatch) -> int:
    """Return the samples of a microbatch, whose first input has some."""
    return next(iter(microbatch.values())).shape[0]


def check_multiples(batch: Mapping[str, Tensor], multiples: Mapping[tuple[str, int], int]) -> None:
    """Raise InputsError for a sequence that cp ranks cannot split. Leaves non-tensors to `cut_batch`."""
    for (name, dim), divisor in multiples.items():
        x = batch.get(name) if isinstance(batch, Mapping) else None
        if isinstance(x, Tensor) and x.ndim > dim and x.shape[dim] % divisor:
            raise InputsError(
                f"{x.shape[dim]} tokens cannot be shared: they are cut into {divisor} equal parts",
                where=f"dim {dim} of {name!r}",
                fix=f"pad every sequence to a multiple of {divisor}, with ignored labels",
            )


def check_specs(batch: Mapping[str, Tensor], specs: Mapping[str, InputSpec]) -> None:
    """Raise InputsError for dtypes and sizes that the program does not support.

    A symbolic size, such as the tokens of a sample, may be smaller than planned but must be equal in all inputs.
    """
    met: dict[str, tuple[int, str]] = {}
    for name, spec in specs.items():
        x = batch[name]
        if x.dtype != spec.dtype:
            raise InputsError(
                f"{name!r} is of type {x.dtype}, but the plan was made for {spec.dtype}",
                where=name,
                fix=f"give {name}.to({spec.dtype}), or plan with inputs of this type",
            )
        if x.ndim != spec.lead + len(spec.sizes):
            raise InputsError(
                f"{name!r} has {x.ndim} dims, {list(x.shape)}, instead of {spec.lead + len(spec.sizes)}",
                where=name,
                fix="give the shape that the model was traced with: " + spec.text,
            )
        if spec.value and bool((x.reshape(x.shape[0], -1).cpu() != torch.tensor(spec.value, dtype=x.dtype)).any()):
            raise InputsError(
                f"a sample of {name!r} is not {_short(spec.value)}, which the program was made for: the model reads "
                "these numbers in Python",
                where=name,
                fix="give pictures of the planned size, by resizing them; or plan for each size, and take "
                "batches of one size",
            )
        sizes = zip(x.shape[spec.lead :], spec.sizes, spec.symbols, strict=True)
        for dim, (size, planned, symbol) in enumerate(sizes, spec.lead):
            _check_size(f"dim {dim} of {name!r}", size, planned, symbol)
            if symbol and met.setdefault(symbol, (size, name))[0] != size:
                known, other = met[symbol]
                raise InputsError(
                    f"dim {dim} of {name!r} is {size}, but that of {other!r} is {known}",
                    where=name,
                    fix="give both the same length: pad the shorter one",
                )


def check_written(batch: Mapping[str, Tensor], specs: Mapping[str, InputSpec]) -> None:
    """Raise InputsError for an input that the model writes to if, in one process, that might write to another as well.

    The program writes to a copy. Leaves what is no batch of tensors to `cut_batch`.
    """
    given = dict(batch) if isinstance(batch, Mapping) else {}
    given = {name: x for name, x in given.items() if isinstance(x, Tensor) and not x.is_meta}
    for name in [name for name, x in given.items() if name in specs and specs[name].written]:
        memory = given[name].untyped_storage().data_ptr()
        others = [n for n, x in given.items() if n != name and x.untyped_storage().data_ptr() == memory]
        if others or not given[name].is_contiguous():
            which = f"shares its memory with {others[0]!r}" if others else "is not contiguous: a view may be a copy"
            raise InputsError(
                f"the model writes to {name!r}, which {which}",
                where=name,
                fix=f"give {name}.clone(memory_format=torch.contiguous_format)",
            )


def _short(numbers: tuple[int, ...]) -> str:
    return str(list(numbers)) if len(numbers) <= _SHOWN else f"[{', '.join(map(str, numbers[:_SHOWN]))}, …]"


def _check_size(where: str, size: int, planned: int, symbol: str) -> None:
    if not symbol and size != planned:
        fix = f"give a size of {planned}, as in the traced inputs"
        raise InputsError(f"{where} is {size}, instead of {planned}", where=where, fix=fix)
    if size > planned:
        fix = f"truncate it to {planned}, or plan for {size}: the plan's memory and positions do not cover it"
        raise InputsError(f"{where} is {size}, longer than the planned {planned}", where=where, fix=fix)
    if size == 0:
        raise InputsError(f"{where} is 0: samples are empty", where=where, fix="skip such batches")


def stand_in(specs: Mapping[str, InputSpec], samples: int, device: torch.device) -> dict[str, Tensor]:
    """Return zeros of the planned sizes, for a rank without a valid batch that must still join the step."""
    lead = (samples,)
    sizes = {name: lead[: spec.lead] + spec.sizes for name, spec in specs.items()}
    return {n: torch.zeros(sizes[n], dtype=spec.dtype, device=device) for n, spec in specs.items()}


def digest(tensors: Sequence[Tensor]) -> Tensor:
    """Hash samples and their order to 20 bits; 0-dim float64 on the first tensor's device."""
    found = torch.zeros((), dtype=torch.int64, device=tensors[0].device if tensors else None)
    for x in tensors:
        x = x.detach().resolve_conj().resolve_neg()
        x = x.contiguous() if x.ndim else x.view(1)
        bits = x.view(_BITS[x.element_size()]).reshape(x.shape[0], -1)
        places = 2 * torch.arange(x.shape[0], device=x.device) + 1  # odd, so that no bit is lost
        found = found * 31 + (bits.sum(1, dtype=torch.int64) * places * _MIX).sum().to(found.device)
    return (((found ^ (found >> 20)) * _MIX >> 40) & 0xFFFFF).to(torch.float64)


_SHOWN = 8  # numbers of an input named in an error
_MIX = 0x9E3779B97F4A7C1  # odd, from the golden ratio: spreads similar sums
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}  # bytes -> integer dtype


def _samples(batch: Mapping[str, Tensor], inputs: Sequence[str], shared: Collection[str]) -> int:
    """Return the number of samples, dim 0 of every input. Raises InputsError."""
    if batch is None:
        raise InputsError(
            "there is no batch: the data loader ran dry",
            fix="end the epoch at the same step on every rank: parallel.sampler(…) gives all as many batches; "
            "evaluate(…) goes on with those of the other ranks",
        )
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
    counted = [name for name in inputs if name not in shared]
    if numbers := [name for name in shared if not isinstance(batch[name], Tensor)]:
        raise InputsError(f"{numbers} must be tensors", fix=f"give {numbers[0]}=torch.tensor(…)")
    wrong = [name for name in counted if not isinstance(batch[name], Tensor) or batch[name].ndim == 0]
    if wrong:
        raise InputsError(f"{wrong} must be tensors whose dim 0 counts samples", fix="give a batch of tensors")
    if empty := [name for name in inputs if batch[name].is_meta]:
        raise InputsError(f"{empty} are on the meta device, without values", fix="give tensors that hold data")
    if sparse := [name for name in inputs if batch[name].layout != torch.strided]:
        raise InputsError(f"{sparse} have the layout {batch[sparse[0]].layout}", fix=f"give {sparse[0]}.to_dense()")
    sizes = {name: batch[name].shape[0] for name in counted}
    if len(set(sizes.values())) > 1:
        raise InputsError(
            f"the batch's tensors hold different numbers of samples: {sizes}", fix="give equally many samples of each"
        )
    samples = next(iter(sizes.values()), 0)
    if samples == 0:
        raise InputsError("the batch is empty", fix="drop the last, incomplete batch of the data loader")
    return samples
