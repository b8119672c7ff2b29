"""Whole parameters for optimizers that are not elementwise: brought together at their owners, updated, sent back.

`layout/owners.py` says which rank updates which parameter. Between steps a rank's elements of the parameters (`pieces`)
are their only copy: an owner's whole parameter has elements during a step only, unless it is a view of a piece that
holds all of them. Gradients come as the plan reduces, scales and clips them, in the main dtype. Per step and round
(`Owners.rounds`), in the group of the stage's ranks:

    exchange  each source sends gradient and value of its elements to the owner
    update    the user's optimizer, on parameters of the model's own shapes
    exchange  the owner sends new values to each rank that holds elements
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from autoptd.layout.owners import OwnedPart, Owners, WholeParameter
from autoptd.layout.regions import Region, regions_of
from autoptd.ops.group import SingleRankGroup
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.zero.param_buffers import ParameterShard

ROUND_ELEMENTS = 2**23  # elements per rank whose exchange shares one buffer


@dataclass(frozen=True)
class _MovedElements:
    """Elements of a whole parameter that this rank sends or receives; at the owner, their boxes in the whole tensor."""

    name: str
    part: OwnedPart
    boxes: tuple[Region, ...] = ()


@dataclass
class _OwnerRoute:
    """The elements that this rank exchanges with each rank of the group, in one direction."""

    leaving: dict[int, list[_MovedElements]] = field(default_factory=dict)
    coming: dict[int, list[_MovedElements]] = field(default_factory=dict)

    def sizes(self, ranks: range, times: int) -> tuple[list[int], list[int]]:
        """Return the elements sent to and received from each rank, if each part stands for `times` tensors."""
        send, receive = [0] * len(ranks), [0] * len(ranks)
        for way, sizes in ((self.leaving, send), (self.coming, receive)):
            for rank, moved in way.items():
                sizes[rank - ranks.start] = times * sum(each.part.numel for each in moved)
        return send, receive

    def sent(self) -> Iterator[_MovedElements]:
        return (moved for rank in sorted(self.leaving) for moved in self.leaving[rank])

    def received(self) -> Iterator[_MovedElements]:
        return (moved for rank in sorted(self.coming) for moved in self.coming[rank])


class WholeTensors:
    """This rank's whole parameters (`parameters`, by name), and the exchange with the ranks that hold their elements.

    Construction is a collective of the world if `names` is not empty; equal names on all ranks. `dtypes`: the main type
    of each parameter of this stage. Parameters have their elements until the first `free`, for the optimizer's
    constructor.
    """

    def __init__(
        self,
        names: Collection[str],
        owners: Owners,
        c: Communicators,
        pieces: Sequence[ParameterShard],
        dtypes: Mapping[str, torch.dtype],
    ) -> None:
        self._owners, self._rank, self._device = owners, c.rank, c.device
        self._pieces = {piece.name: piece for piece in pieces if piece.name in names}
        self._group = c.make_group("stage", c.mesh.stage_ranks(c.stage)) if names else SingleRankGroup()
        rounds = owners.rounds(c.rank, dtypes, ROUND_ELEMENTS)
        self._rounds = [(dtype, self._routes(each)) for dtype, each in rounds]
        moved = [whole.name for _, each in rounds for whole in each if whole.owner == self._rank]
        self.parameters: dict[str, nn.Parameter] = {}
        for whole in owners.of(self._rank):
            shape = owners.held[whole.name].shape
            if whole.name in moved:
                value = torch.zeros(shape, dtype=dtypes[whole.name], device=c.device)
            else:
                value = self._pieces[whole.name].param.detach().view(shape)
            self.parameters[whole.name] = nn.Parameter(value)
        self._moved = [name for name in moved if owners.held[name].shape]

    def _routes(self, each: Sequence[WholeParameter]) -> tuple[_OwnerRoute, _OwnerRoute]:
        """Return this rank's routes to the owners and back, for one round."""
        there, back, owners = _OwnerRoute(), _OwnerRoute(), self._owners
        for whole in each:
            if whole.owner == self._rank:
                for parts, at_owner in ((owners.sources(whole), there.coming), (owners.parts(whole), back.leaving)):
                    for part in parts:
                        moved = _MovedElements(whole.name, part, self._boxes(whole, part))
                        at_owner.setdefault(part.rank, []).append(moved)
            if (mine := owners.part_of(whole, self._rank)) is not None:
                back.coming.setdefault(whole.owner, []).append(_MovedElements(whole.name, mine))
                if owners.is_source(whole, self._rank):
                    there.leaving.setdefault(whole.owner, []).append(_MovedElements(whole.name, mine))
        return there, back

    def _boxes(self, whole: WholeParameter, part: OwnedPart) -> tuple[Region, ...]:
        spec, mesh = self._owners.held[whole.name], self._owners.layout.mesh
        return regions_of(spec, mesh, part.rank, part.start, part.stop)

    @contextmanager
    def gathered(self, used: Collection[str]) -> Iterator[None]:
        """Bring values and gradients together for the duration of the block, then send new values back. A collective.

        `used`: parameters with a gradient in this step; others get none, as in torch.
        """
        gradients: dict[str, Tensor] = {}
        for name in self._moved:
            parameter = self.parameters[name]
            parameter.data = parameter.data.new_empty(self._owners.held[name].shape)
        for dtype, (there, _) in self._rounds:
            self._bring(there, dtype, gradients)
        for name, parameter in self.parameters.items():
            whole = gradients[name] if name in gradients else self._pieces[name].grad.view(parameter.shape)
            parameter.grad = whole if name in used else None
        gradients.clear()
        yield
        for parameter in self.parameters.values():
            parameter.grad = None
        for dtype, (_, back) in self._rounds:
            self._send_back(back, dtype)
        self.free()

    def free(self) -> None:
        """Free the parameters that are brought together: they have no elements between steps, but as many dims."""
        for name in self._moved:
            parameter = self.parameters[name]
            parameter.data = parameter.data.new_empty((0,) * parameter.ndim)

    def _bring(self, route: _OwnerRoute, dtype: torch.dtype, gradients: dict[str, Tensor]) -> None:
        pieces = [self._pieces[moved.name] for moved in route.sent()]
        found = self._exchange(route, dtype, [x for piece in pieces for x in (piece.grad, piece.param.detach())], 2)
        for moved in route.received():
            value = self.parameters[moved.name].detach()
            gradient = gradients.setdefault(moved.name, torch.empty_like(value))
            self._fill(gradient, moved, next(found))
            self._fill(value, moved, next(found))

    def _send_back(self, route: _OwnerRoute, dtype: torch.dtype) -> None:
        found = self._exchange(route, dtype, [self._elements(moved) for moved in route.sent()], 1)
        for moved in route.received():
            self._pieces[moved.name].param.detach().copy_(next(found))

    def _exchange(self, route: _OwnerRoute, dtype: torch.dtype, mine: Sequence[Tensor], times: int) -> Iterator[Tensor]:
        """Exchange `times` tensors for each part; return those that come. A collective, whatever this rank has."""
        send, receive = route.sizes(self._owners.ranks, times)
        x = torch.cat([*mine, torch.empty(0, dtype=dtype, device=self._device)])
        sizes = [moved.part.numel for moved in route.received() for _ in range(times)]
        return iter(self._group.exchange(x, send, receive).split(sizes))

    def _fill(self, out: Tensor, moved: _MovedElements, flat: Tensor) -> None:
        """Write a part's elements to their places in a whole tensor."""
        for region in moved.boxes:
            _box(out, region).copy_(region.of(flat))

    def _elements(self, moved: _MovedElements) -> Tensor:
        """Return a part's elements [n] of an updated parameter."""
        value = self.parameters[moved.name].detach()
        flat = value.new_empty(moved.part.numel)
        for region in moved.boxes:
            region.of(flat).copy_(_box(value, region))
        return flat


def _box(whole: Tensor, region: Region) -> Tensor:
    for dim, (first, count) in enumerate(zip(region.offsets, region.sizes, strict=True)):
        whole = whole.narrow(dim, first, count)
    return whole
