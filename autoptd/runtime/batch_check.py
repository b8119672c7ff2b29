"""What ranks must agree on about a batch, at no cost: two numbers in the all-reduce that ends a step anyway.

Each rank checks its own batch before it communicates. One that was given a wrong one (none, because its data loader ran
dry; another type; a longer sequence) must not leave its peers waiting, and nobody would hear of it before the end of
the step: so it goes through the step with a stand-in, zeros of the planned sizes, and adds to what all ranks sum up

    faults    1 where its batch is wrong                          0 on all ranks: the step is taken
    digest    digest · weight, Σ weight = 0 over a dp share       0: the ranks that share samples were given the same

Then no rank takes the step, and all raise the InputsError of the first rank that has one. Sums are exact: a digest
has 20 bits, weights are below n²/2 for the n ranks of a share, and float64 counts to 2^53.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from autoptd.errors import InputsError
from autoptd.layout.layout import Layout
from autoptd.runtime.batch import Microbatch, check_multiples, check_specs, cut_batch, digest, sample_count, stand_in
from autoptd.runtime.comm.interfaces import Communicators, all_gather_text

_TEXT = 2000  # bytes of an error that are passed on
NUMBERS = 2  # faults, digest
_PARTS, _BETWEEN = 3, "\x1f"  # what, where, fix


class Agreement:
    """This rank's view of the batch of a step, and what all ranks make of it."""

    def __init__(self, layout: Layout, communicators: Communicators) -> None:
        self._layout, self._comm = layout, communicators
        self._weight = _weight(layout, communicators)
        self._samples = layout.micro * layout.microbatches
        self._fault: InputsError | None = None
        self._digest = torch.zeros((), dtype=torch.float64)

    def take(self, batch: Mapping[str, Tensor], microbatches: int | None) -> list[Microbatch]:
        """This rank's microbatches, or a stand-in's. Raises InputsError at once where nobody waits for this rank."""
        self._fault = None
        try:
            found = self._cut(batch, microbatches)
        except InputsError as error:
            if self._comm.world.size == 1 or not self._layout.specs:
                raise
            self._fault = error
            return self._cut(stand_in(self._layout.specs, self._samples), microbatches)
        self._samples = sum(map(sample_count, found))
        self._digest = digest([batch[name] for name in self._layout.inputs])
        return found

    def _cut(self, batch: Mapping[str, Tensor], microbatches: int | None) -> list[Microbatch]:
        layout = self._layout
        check_multiples(batch, layout.multiples)
        found = cut_batch(batch, layout.inputs, layout.micro, microbatches, self._comm.device)
        check_specs(batch, layout.specs)
        return found

    def row(self) -> Tensor:
        """What this rank adds to the sum over the world: [NUMBERS], float64."""
        device = self._comm.device
        wrong = torch.tensor(self._fault is not None, dtype=torch.float64, device=device)
        return torch.stack((wrong, self._digest.to(device) * self._weight))

    def holds(self, agreed: Sequence[float]) -> bool:
        """Whether the step may be taken; `agreed`: the numbers, summed."""
        faults, digests = agreed
        return not faults and not digests

    def refuse(self, agreed: Sequence[float]) -> None:
        """On all ranks, where `holds` does not: raise one InputsError. A collective."""
        faults, _ = agreed
        if not faults:
            raise self._differ()
        rank, error = self._first()
        others = f" and {int(faults) - 1} more" if faults > 1 else ""
        place = f"rank {rank}{others}" + (f": {error[1]}" if error[1] else "")
        raise InputsError(error[0], where=place, fix=error[2]) from self._fault

    def _first(self) -> tuple[int, Sequence[str]]:
        """The lowest rank whose batch is wrong, and what is wrong with it."""
        fault = self._fault
        mine = "" if fault is None else _BETWEEN.join((fault.what, fault.where, fault.fix))
        each = all_gather_text(mine, self._comm.world, self._comm.device, _TEXT)
        first = next(rank for rank, text in enumerate(each) if text)
        return first, (each[first].split(_BETWEEN) + [""] * _PARTS)[:_PARTS]

    def _differ(self) -> InputsError:
        """Ranks that share samples were given different ones."""
        mine = self._digest.to(self._comm.device)
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
            fix="give the ranks of a share the same samples: by parallel.sampler(…), or by parallel.dp_rank",
        )


def _weight(layout: Layout, c: Communicators) -> int:
    """1, 2, 3 … over the ranks of a dp share, and on the last what makes the sum 0."""
    mesh = layout.mesh
    share = [rank for rank in range(mesh.world) if mesh.coordinates(rank)[1] == c.dp.rank]
    place = share.index(c.rank)
    last = len(share) - 1
    return place + 1 if place < last else -last * (last + 1) // 2
