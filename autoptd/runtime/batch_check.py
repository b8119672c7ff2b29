"""Agreement of all ranks on the batch of a step, by nine numbers in the all-reduce that ends the step anyway.

Each rank checks its own batch before it communicates. A rank with a wrong batch (none, because its data loader ran
dry; another dtype; a longer sequence) must not leave its peers waiting. It therefore runs the step with a substitute,
zeros of the planned sizes, and all ranks sum up

    faults    1 if the rank's batch is wrong, else 0           sum 0: the step is taken
    options   digest · weight of optimizer and loss scale,     sum 0: all ranks update with the same ones
              Σ weight = 0 over all ranks
    order     1, digest and digest² of its sampler's order,    1st · 3rd sum = (2nd sum)²: all samplers have the same
              0 for a rank without a sampler
    repeated  digest and digest² of the samples, in the first  n · 2nd sum = (1st sum)²: all dp shares are the same,
              step and on more than one dp rank only; else 0   and a warning says so
    digest    digest · weight, Σ weight = 0 over a dp share    sum 0: ranks that share samples got the same ones
    shared    the same of inputs without samples, Σ over all   sum 0: all ranks got the same ones

Otherwise no rank takes the step, and all raise the InputsError of the first rank that has one. The sums are exact: a
digest has 20 bits (of orders and of the first step 16), weights are below n²/2 for the n ranks of a share, and float64
is exact up to 2^53.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autoptd.errors import InputsError
from autoptd.layout.layout import Layout
from autoptd.layout.size_conditions import SAMPLES, Conditions, refuse_other_sizes
from autoptd.ops.group import on_device
from autoptd.runtime.batch import (
    Microbatch,
    by_sample,
    check_multiples,
    check_specs,
    check_written,
    cut_batch,
    digest,
    sample_count,
    stand_in,
)
from autoptd.runtime.comm.handshake import apart
from autoptd.runtime.comm.interfaces import Communicators, all_gather_text

_TEXT = 2000  # bytes of an error that other ranks receive
NUMBERS = 9  # faults, options, order (3), repeated (2), digest, shared
_PARTS, _SEPARATOR = 3, "\x1f"  # what, where, fix


class Agreement:
    """The check of one step's batch: this rank's result, and the joint decision of all ranks."""

    def __init__(self, layout: Layout, communicators: Communicators, order: Callable[[], str] = str) -> None:
        """`order`: returns in words the order in which this rank takes samples; "" if it has no sampler."""
        self._layout, self._comm, self._order = layout, communicators, order
        mesh = layout.mesh
        share, place = mesh.pp * mesh.cp * mesh.tp, mesh.place_in_share(communicators.rank)
        self._compared = (share > 1, mesh.world > 1)  # whether another rank takes the same samples, shared inputs
        self._weights = [_weight(place, share), _weight(communicators.rank, mesh.world)]
        self._fault: InputsError | None = None
        self._digests = [torch.zeros((), dtype=torch.float64)] * 2
        self._options = ""  # the optimizer's and the loss scale's, in words
        self._first_step = mesh.dp > 1  # which alone compares the samples of dp shares
        self._mine = torch.zeros((), dtype=torch.float64)  # the digest of this rank's samples in it

    def take(
        self,
        batch: Mapping[str, Any],
        microbatches: int | None,
        check: Callable[[], None] = lambda: None,
        further: Conditions = (),
    ) -> list[Microbatch]:
        """Return this rank's microbatches, or a substitute's. In a world of one rank, raises InputsError at once.

        check: raises InputsError for what else is wrong on this rank. further: conditions on the batch, beside those
        of the layout.
        """
        self._fault = None
        try:
            check()
            flat = self._layout.nest.flat(batch)
            check_written(flat, self._layout.specs)
            batch = by_sample(flat, self._layout.specs)
            found = self._cut(batch, microbatches, further)
        except InputsError as error:
            if self._comm.world.size == 1 or not self._layout.specs:
                raise
            self._fault = error
            return self._substitute(microbatches)
        shared = self._layout.shared
        names = [name for name in self._layout.inputs if name not in shared], shared
        self._digests = [
            digest([batch[name] for name in each] if compared else ())
            for each, compared in zip(names, self._compared, strict=True)
        ]
        if self._first_step:
            self._mine = digest([batch[name] for name in names[0]]).remainder(1 << 16)
        return found

    def nothing(self) -> list[Microbatch]:
        """Return a microbatch of zeros for a rank whose data has ended; it has no fault, and counts no sample."""
        self._fault = None
        self._digests = [torch.zeros((), dtype=torch.float64)] * 2
        return self._substitute(None)[:1]

    def _substitute(self, microbatches: int | None) -> list[Microbatch]:
        """Return microbatches of zeros, of as many samples as the plan has."""
        planned = self._layout.micro * self._layout.microbatches
        return self._cut(stand_in(self._layout.specs, planned, self._comm.device), microbatches)

    def _cut(self, batch: Mapping[str, Tensor], microbatches: int | None, further: Conditions = ()) -> list[Microbatch]:
        layout, conditions = self._layout, (*self._layout.conditions, *further)
        check_multiples(batch, layout.multiples)
        found = cut_batch(batch, layout.inputs, layout.micro, microbatches, self._comm.device, layout.shared)
        check_specs(batch, layout.specs)
        if conditions or layout.parts:
            sizes = self._sizes(batch, sum(map(sample_count, found)))
            refuse_other_sizes(conditions, sizes, InputsError)
            self._check_parts(sizes)
        return found

    def _check_parts(self, sizes: Mapping[str, int]) -> None:
        """Raise InputsError for sizes that tp ranks cannot split. sizes: those of a batch, by symbol."""
        layout, local = self._layout, dict(sizes)
        where: dict[str, str] = {}
        for name, spec in layout.specs.items():
            for dim, symbol in enumerate(spec.symbols, spec.lead):
                where.setdefault(symbol, f"dim {dim} of {name!r}")
        for symbol in {layout.specs[name].symbols[dim - layout.specs[name].lead] for name, dim in layout.multiples}:
            local[symbol] //= layout.mesh.cp
        for each in layout.parts:
            each.refuse_remainder(local, where, layout.mesh.cp)

    def _sizes(self, batch: Mapping[str, Tensor], own: int) -> dict[str, int]:
        """Return the sizes of a batch, by symbol. own: samples of this rank."""
        layout = self._layout
        shares = {layout.samples // layout.mesh.dp, -(-layout.samples // layout.mesh.dp)}
        found = {SAMPLES: layout.samples if own in shares else own * layout.mesh.dp}
        for name, spec in layout.specs.items():
            sizes = batch[name].shape[spec.lead :]
            found.update((symbol, n) for symbol, n in zip(spec.symbols, sizes, strict=True) if symbol)
        return found

    def row(self, *options: Callable[[], str]) -> Tensor:
        """Return this rank's contribution to the sum over the world: [NUMBERS], float64.

        options: each returns some of those of optimizer and loss scale in words, a line for each.
        """
        self._options, self._sampled = "", ""
        if self._compared[1]:
            self._options, self._sampled = "\n".join(each() for each in options), self._order()
        number, order = _bits(self._options, 20), _bits(self._sampled, 16) if self._sampled else 0
        numbers = [self._fault is not None, number * self._weights[1], bool(self._sampled), order, order**2]
        digests = [each * weight for each, weight in zip(self._digests, self._weights, strict=True)]
        if self._first_step:
            digests = [self._mine, self._mine.square(), *digests]
        else:
            numbers += [0, 0]
        device = self._comm.device
        found = (on_device(each, torch.float64, device).view(1) for each in digests)
        return torch.cat((on_device(list(map(float, numbers)), torch.float64, device), *found))

    def holds(self, agreed: Sequence[float]) -> bool:
        """Return whether the step may be taken; `agreed`: the rows of all ranks, summed.

        Warns on rank 0 if all data-parallel ranks have the same samples in the first step.
        """
        faults, options, *order, total, squares, differ, shared = agreed
        if any((faults, options, differ, shared)) or not _are_equal(*order):
            return False
        if self._first_step:
            self._first_step = False
            if _are_equal(self._comm.world.size, total, squares) and self._comm.rank == 0:
                dp = self._layout.mesh.dp
                warnings.warn(
                    f"all {dp} data-parallel ranks took the same samples, so that each counts {dp} times: "
                    "parallel.sampler(…), or a rank's part by parallel.dp_rank of parallel.dp_size, gives each its own",
                    stacklevel=5,
                )
        return True

    def refuse(self, agreed: Sequence[float]) -> None:
        """Raise the same InputsError on all ranks, when `holds` is False. A collective."""
        faults, options, *order, _, _, _, shared = agreed
        if shared and not faults:
            raise InputsError(
                "ranks were given different values of inputs that all samples share",
                where=", ".join(self._layout.shared),
                fix="give the same on all ranks: compute it from the step, or draw it on one rank and send it",
            )
        if options and not faults:
            raise self._other_options()
        if not faults:
            raise self._differ() if _are_equal(*order) else self._other_order()
        rank, error = self._first()
        others = f" and {int(faults) - 1} more" if faults > 1 else ""
        place = f"rank {rank}{others}" + (f": {error[1]}" if error[1] else "")
        raise InputsError(error[0], where=place, fix=error[2]) from self._fault

    def _first(self) -> tuple[int, Sequence[str]]:
        """Return the lowest rank with a wrong batch, and its error."""
        fault = self._fault
        mine = "" if fault is None else _SEPARATOR.join((fault.what, fault.where, fault.fix))
        each = all_gather_text(mine, self._comm.world, self._comm.device, _TEXT)
        first = next(rank for rank, text in enumerate(each) if text)
        return first, (each[first].split(_SEPARATOR) + [""] * _PARTS)[:_PARTS]

    def _other_options(self) -> InputsError:
        """Return the error for ranks whose optimizers have different options. A collective."""
        each = [
            text.splitlines() for text in all_gather_text(self._options, self._comm.world, self._comm.device, _TEXT)
        ]
        lines = next((list(line) for line in zip(*each, strict=False) if len(set(line)) > 1), [])
        return InputsError(
            "the ranks have different options of the optimizer or of loss_scale",
            where="\n".join(apart(lines)),
            fix="change param_groups, loss_scale and schedulers on all ranks alike, as by loss and grad_norm",
        )

    def _other_order(self) -> InputsError:
        """Return the error for ranks whose samplers have different orders. A collective."""
        each = all_gather_text(self._sampled, self._comm.world, self._comm.device, _TEXT)
        first: dict[str, int] = {}  # the rank that has it
        for rank, text in enumerate(each):
            if text:
                first.setdefault(text, rank)
        return InputsError(
            "ranks take samples in different orders, so that steps repeat some and leave out others",
            where="\n".join(f"rank {rank}: {text}" for text, rank in list(first.items())[:2]),
            fix="give parallel.sampler(…) the same arguments on all ranks, start it at the same step, and take as many "
            "batches of it; a batch that one rank alone has looked at is gone: start_at(parallel.step) goes back",
        )

    def _differ(self) -> InputsError:
        """Return the error for ranks of one dp share with different samples."""
        mine = self._digests[0].to(self._comm.device)
        each = self._comm.world.all_gather(mine.view(1)).view(-1).tolist()
        mesh = self._layout.mesh
        shares: dict[int, list[int]] = {}
        for rank in range(mesh.world):
            shares.setdefault(mesh.coordinates(rank)[1], []).append(rank)
        apart = {dp: ranks for dp, ranks in shares.items() if len({each[rank] for rank in ranks}) > 1}
        lines = [f"data-parallel share {dp}: ranks {', '.join(map(str, ranks))}" for dp, ranks in apart.items()]
        return InputsError(
            "ranks that take the same share of the batch were given different batches",
            where="\n".join(lines[:4]),
            fix="give the ranks of a share the same samples: use parallel.sampler(…) or parallel.dp_rank",
        )


def check_evaluates(layout: Layout) -> None:
    """Raise InputsError for statistics of the batch for which no running ones are known to stand in."""
    if layout.statistics == "unknown":
        raise InputsError(
            "samples are normalised by statistics of their batch, computed by hand, which no evaluation step takes",
            where="eval_step",
            fix="evaluate the plain model with par.state_dict(), or use nn.BatchNorm with running statistics",
        )


def _weight(place: int, ranks: int) -> int:
    """Return 1, 2, 3 … by a rank's place among some; for the last one minus the sum of the others."""
    last = ranks - 1
    return place + 1 if place < last else -last * (last + 1) // 2


def _are_equal(count: float, total: float, squares: float) -> bool:
    """Return whether `count` integers with this sum and sum of squares are all the same (Cauchy and Schwarz)."""
    return int(count) * int(squares) == int(total) ** 2


def _bits(text: str, bits: int) -> int:
    """Return a digest of a text, below 2^bits."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> (32 - bits)
