"""Whole parameters for optimizers that are not elementwise: brought together at their owners, updated, sent back.

`layout/owners.py` says which rank updates which parameter. Between steps a rank's elements of the parameters (`pieces`)
are their only copy: the storage of an owner's whole parameter exists during a step only, unless it is a view of a piece
that holds all elements. Gradients come as the plan reduces, scales and clips them, in the main dtype. Per step and
round (`Owners.moved`), in the group of the stage's ranks:

    exchange  each source sends gradient and value of its elements to the owner
    update    the user's optimizer, on parameters of the model's own shapes
    exchange  the owner sends new values to each rank that holds elements
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from autoptd.layout.owners import OwnedPart, Owners, WholeParameter
from autoptd.layout.regions import regions_of
from autoptd.ops.group import Group, SingleRankGroup
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.zero.param_buffers import ParameterShard

ROUND_ELEMENTS = 2**23  # elements per rank whose exchange shares one buffer


class WholeTensors:
    """This rank's whole parameters (`parameters`, by name), and the exchange with the ranks that hold their elements.

    Construction is a collective of the world if `names` is not empty; equal names on all ranks. `dtypes`: the main type
    of each parameter of this stage.
    """

    def __init__(
        self,
        names: Collection[str],
        owners: Owners,
        c: Communicators,
        pieces: Sequence[ParameterShard],
        dtypes: Mapping[str, torch.dtype],
    ) -> None:
        self._owners, self._rank = owners, c.rank
        self._pieces = {piece.name: piece for piece in pieces if piece.name in names}
        self._group = _stage_group(c) if names else SingleRankGroup()
        self._dtypes, self._device = dtypes, c.device
        self._rounds = owners.moved(dtypes, ROUND_ELEMENTS)
        moved = {whole.name for each in self._rounds for whole in each if whole.owner == self._rank}
        self.parameters: dict[str, nn.Parameter] = {}
        for whole in owners.of(self._rank):
            shape = owners.held[whole.name].shape
            if whole.name in moved:
                value = torch.zeros(shape, dtype=dtypes[whole.name], device=c.device)
            else:
                value = self._pieces[whole.name].param.detach().view(shape)
            self.parameters[whole.name] = nn.Parameter(value)
        self._moved = [self.parameters[name] for name in moved]
        self._free()

    @contextmanager
    def gathered(self, used: Collection[str]) -> Iterator[None]:
        """Bring values and gradients together for the duration of the block, then send new values back. A collective.

        `used`: parameters with a gradient in this step; others get none, as in torch.
        """
        gradients: dict[str, Tensor] = {}
        for parameter in self._moved:
            parameter.untyped_storage().resize_(parameter.numel() * parameter.itemsize)
        for each in self._rounds:
            self._bring(each, gradients)
        for name, parameter in self.parameters.items():
            whole = gradients[name] if name in gradients else self._pieces[name].grad.view(parameter.shape)
            parameter.grad = whole if name in used else None
        gradients.clear()
        yield
        for parameter in self.parameters.values():
            parameter.grad = None
        for each in self._rounds:
            self._send_back(each)
        self._free()

    def _free(self) -> None:
        for parameter in self._moved:
            parameter.untyped_storage().resize_(0)

    def _bring(self, each: Sequence[WholeParameter], gradients: dict[str, Tensor]) -> None:
        ranks, me = self._owners.ranks, self._rank
        leaving = [[(w, p) for w in each if w.owner == to for p in w.sources if p.rank == me] for to in ranks]
        coming = [[(w, p) for w in each if w.owner == me for p in w.sources if p.rank == by] for by in ranks]
        mine = [x for row in leaving for w, _ in row for x in (self._piece(w).grad, self._piece(w).param.detach())]
        found = self._exchange(each, mine, leaving, coming, 2)
        for whole, part in (pair for row in coming for pair in row):
            parameter = self.parameters[whole.name]
            gradient = gradients.setdefault(whole.name, torch.empty_like(parameter.detach()))
            self._fill(gradient, whole, part, next(found))
            self._fill(parameter.detach(), whole, part, next(found))

    def _send_back(self, each: Sequence[WholeParameter]) -> None:
        ranks, me = self._owners.ranks, self._rank
        leaving = [[(w, p) for w in each if w.owner == me for p in w.parts if p.rank == to] for to in ranks]
        coming = [[(w, p) for w in each if w.owner == by for p in w.parts if p.rank == me] for by in ranks]
        mine = [self._elements(w, p) for row in leaving for w, p in row]
        found = self._exchange(each, mine, leaving, coming, 1)
        for whole, _ in (pair for row in coming for pair in row):
            self._piece(whole).param.detach().copy_(next(found))

    def _exchange(
        self,
        each: Sequence[WholeParameter],
        mine: Sequence[Tensor],
        leaving: Sequence[Sequence[tuple[WholeParameter, OwnedPart]]],
        coming: Sequence[Sequence[tuple[WholeParameter, OwnedPart]]],
        times: int,
    ) -> Iterator[Tensor]:
        """Exchange `times` tensors for each part; return those that come. A collective, whatever this rank has."""
        send, receive = ([times * sum(p.numel for _, p in row) for row in rows] for rows in (leaving, coming))
        x = torch.cat([*mine, torch.empty(0, dtype=self._dtypes[each[0].name], device=self._device)])
        sizes = [p.numel for row in coming for _, p in row for _ in range(times)]
        return iter(self._group.exchange(x, send, receive).split(sizes))

    def _piece(self, whole: WholeParameter) -> ParameterShard:
        return self._pieces[whole.name]

    def _fill(self, out: Tensor, whole: WholeParameter, part: OwnedPart, flat: Tensor) -> None:
        """Write a part's elements to their places in a whole tensor."""
        for target, source in self._boxes(out, whole, part, flat):
            target.copy_(source)

    def _elements(self, whole: WholeParameter, part: OwnedPart) -> Tensor:
        """Return a part's elements [n] of an updated parameter."""
        value = self.parameters[whole.name].detach()
        flat = value.new_empty(part.numel)
        for source, target in self._boxes(value, whole, part, flat):
            target.copy_(source)
        return flat

    def _boxes(
        self, whole: Tensor, of: WholeParameter, part: OwnedPart, flat: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the same elements as views of a whole tensor and of a part of it."""
        spec = self._owners.held[of.name]
        for region in regions_of(spec, self._owners.layout.mesh, part.rank, part.start, part.stop):
            box = whole
            for dim, (first, count) in enumerate(zip(region.offsets, region.sizes, strict=True)):
                box = box.narrow(dim, first, count)
            yield box, region.of(flat)


def _stage_group(c: Communicators) -> Group:
    """Create the group of all ranks of each stage, and return this rank's. All ranks of the world call it."""
    if c.mesh.pp == 1:
        return c.world
    width, mine = c.mesh.copies * c.mesh.tp, None
    for stage in range(c.mesh.pp):
        made = c.make_group(tuple(range(stage * width, (stage + 1) * width)))
        mine = made if made is not None else mine
    assert mine is not None
    mine.all_reduce(torch.ones(1, device=c.device))
    return mine
