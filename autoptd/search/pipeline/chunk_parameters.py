"""Local parameters of a model's segments and local bytes that cross between segments, computed once per sharding."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Container, Sequence
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import TypeVar

import torch
from torch import fx

from autoptd.cost_models.memory import Memory, alive
from autoptd.layout.placements import B, Broadcast, Placement
from autoptd.layout.placements import kind as kind_of
from autoptd.layout.state_bytes import Unit
from autoptd.passes.analysis.dataflow import CONVERTED, base_of, counts_tokens, stored_outside
from autoptd.passes.blocks import owned_by_blocks
from autoptd.passes.fold import Folded
from autoptd.passes.graph import ancestors, infos
from autoptd.passes.trace.traced import BATCH, SEQUENCE
from autoptd.search.loss_end import LossEnd, loss_end
from autoptd.search.meshes import Candidate
from autoptd.search.pipeline.messages import Bytes
from autoptd.search.pipeline.stage_parameters import Held, kinds_with_gradient, parameter_dtypes, shared_mask_types
from autoptd.search.sharding.kind_cost import ChunkCost as ChunkCost
from autoptd.search.sharding.tensors import Sharded, Tensors

T = TypeVar("T")
Outside = tuple[tuple[tuple[str, int], ...], tuple[tuple[str, int], ...]]  # buffers, computed tensors: names and bytes


class ChunkParameters:
    """Parameters of runs of segments of one sharded model under one candidate."""

    def __init__(self, tensors: Tensors, sharded: Sharded, candidate: Candidate) -> None:
        self.tensors, self.sharded, self.candidate = tensors, sharded, candidate
        self.folded: Folded = tensors.folded

    @property
    def _crossing_bytes(self) -> list[tuple[Bytes, Bytes]]:
        return self._memoised("crossing bytes", self._count_crossing)

    @property
    def _parameters(self) -> list[list[tuple[str, int, Placement, bool, bool]]]:
        return self._memoised(f"parameters, ep {self.candidate.ep}", self._list_parameters)

    @property
    def _experts(self) -> Container[str]:
        """The parameters that are split over ep ranks."""
        return self.tensors.workbook.facts.experts if self.candidate.ep > 1 else ()

    @property
    def names(self) -> tuple[int, ...]:
        """A number for each segment, equal for segments that cost the same anywhere."""
        return self._memoised(f"names, ep {self.candidate.ep}", self._name_segments)

    def _memoised(self, what: str, compute: Callable[[], T]) -> T:
        """Return a value that depends on the sharding alone, computed once for all candidates."""
        memo = self.sharded.memo
        if what not in memo:
            memo[what] = compute()
        return memo[what]  # type: ignore[no-any-return]

    def _name_segments(self) -> tuple[int, ...]:
        """Name segments of one kind, equal parameters and equal crossing tensors alike: those that end a block, and
        others."""
        known, ends = dict[tuple[object, ...], int](), self.tensors.workbook.facts.block_ends
        keys = zip(self.folded.segments, self._parameters, (*self._crossing_bytes[1:], ((0, 0), (0, 0))), strict=True)
        return tuple(
            # where a kind's parameters are stored is decided once
            known.setdefault(
                (s.kind, s.index in ends, tuple((p[1], p[3], p[4]) for p in parameters), behind), len(known)
            )
            for s, parameters, behind in keys
        )

    def _count_crossing(self) -> list[tuple[Bytes, Bytes]]:
        """Return the local bytes of tensors that cross each boundary between segments, and of their gradients."""
        placed: dict[fx.Node, tuple[int, Placement]] = {}
        last: dict[fx.Node, int] = {}
        for segment in self.folded.segments:
            decided = self.sharded.sharding.kinds[segment.kind]
            for node in segment.receives:
                last[node] = segment.index
            for node, placement in zip(segment.sends, decided.sends, strict=True):
                placed[node] = segment.index, placement
        forward, backward = ([[0, 0] for _ in self.folded.segments] for _ in range(2))
        for node, until in last.items():
            (made, placement), tensor = placed[node], infos(node)[0]
            nbytes = self.tensors.nbytes(tensor, placement)
            for place in range(made + 1, until + 1):  # equal on all tp ranks, or not: see `Wire.is_whole`
                forward[place][not isinstance(placement, Broadcast)] += nbytes
                backward[place][placement != B] += nbytes * tensor.requires_grad
        return [((a, b), (c, d)) for (a, b), (c, d) in zip(forward, backward, strict=True)]

    def numel(self, first: int, last: int, placement: Placement | None = None, experts: bool | None = None) -> int:
        """Return local trained elements in one placement or in all; tied parameters count once.

        `experts`: of parameters that are split over ep ranks, or of the others; None: of both.

        Without a pipeline a tied parameter counts where it is read first; with one, on every stage that reads it.
        """
        alone = first == last and self.candidate.pp == 1
        what = f"elements {placement} {experts} {alone}, ep {self.candidate.ep}"
        totals, tied = self._memoised(what, lambda: self._count_elements(placement, experts, alone))
        twice = sum(count for before, i, count in tied if first <= before and i <= last)
        return totals[last + 1] - totals[first] - twice

    def numel_read_first(self, segment: int, experts: bool | None) -> int:
        """Return local trained elements of a segment that none before it reads, of experts as in `numel`."""
        what = f"elements read first, {experts}, ep {self.candidate.ep}"
        totals, _ = self._memoised(what, lambda: self._count_elements(None, experts, alone=True))
        return totals[segment + 1] - totals[segment]

    def _count_elements(
        self, placement: Placement | None, experts: bool | None, alone: bool
    ) -> tuple[list[int], list[tuple[int, int, int]]]:
        """Return the elements before each segment, and of parameters that are read again (segment before, segment,
        elements)."""
        totals, tied, reader = [0], list[tuple[int, int, int]](), dict[str, int]()
        for i, mine in enumerate(self._parameters):
            total = totals[-1]
            for name, count, stored, is_frozen, is_first in mine:
                wanted = placement in (None, stored) and experts in (None, name in self._experts)
                if is_frozen or not wanted or (alone and not is_first):
                    continue
                total += count
                if name in reader:
                    tied.append((reader[name], i, count))
                reader[name] = i
            totals.append(total)
        return totals, tied

    def untied_numel(self, first: int, last: int) -> list[tuple[int, bool]]:
        """Return local trained elements that no other segment reads, by buffer, and whether they are of experts."""
        totals = self._memoised(f"untied elements, ep {self.candidate.ep}", self._count_untied)
        return [(each[last + 1] - each[first], experts) for each, experts in totals]

    def _count_untied(self) -> list[tuple[list[int], bool]]:
        """Return such elements before each segment, for each buffer."""
        found: dict[tuple[str, torch.dtype, bool], list[int]] = {}
        for i, mine in enumerate(self._parameters):
            for name, count, stored, frozen, _ in mine:
                if not frozen and name not in self._tied:
                    key = kind_of(stored), self._dtypes[name], name in self._experts
                    found.setdefault(key, [0] * len(self._parameters))[i] += count
        return [([0, *accumulate(each)], experts) for (*_, experts), each in found.items()]

    def shared_numel(self, first: int, last: int) -> int:
        """Return local elements of parameters that several segments read, each time one is read."""
        totals = self._memoised(f"shared elements, ep {self.candidate.ep}", self._count_shared)
        return totals[last + 1] - totals[first]

    def _count_shared(self) -> list[int]:
        """Return the elements of such parameters before each segment."""
        readers = Counter(name for mine in self._parameters for name, *_ in mine)
        each = (sum(count for name, count, *_ in mine if readers[name] > 1) for mine in self._parameters)
        return [0, *accumulate(each)]

    def frozen_bytes(self, first: int, last: int, *, backward: bool = False) -> int:
        """Return local bytes of frozen parameters; `backward`: only of segments through which gradients flow."""
        alone, passed = (
            first == last and self.candidate.pp == 1,
            self._memoised("passed", lambda: kinds_with_gradient(self.folded)),
        )
        segments = [i for i in range(first, last + 1) if not backward or self.folded.segments[i].kind in passed]
        held = [p for i in segments for p in self._parameters[i] if p[3] and (p[4] or not alone)]
        return sum(count * self._dtypes[name].itemsize for name, count in {p[0]: p[1] for p in held}.items())

    def _list_parameters(self) -> list[list[tuple[str, int, Placement, bool, bool]]]:
        """Return for each segment its parameters: (name, local elements, placement, frozen, first read here)."""
        traced, experts = self.folded.traced, self._experts
        local = {kind: self._local_numel(kind) for kind in self.folded.representatives}
        reader: dict[str, int] = {}
        found = []
        for segment in self.folded.segments:
            mine = []
            for node, (whole, stored) in zip(segment.parameters, local[segment.kind], strict=True):
                name = traced.parameters[node.name]
                count = whole // (self.candidate.ep if name in experts else 1)
                first = reader.setdefault(name, segment.index) == segment.index
                mine.append((name, count, stored, name in traced.frozen, first))
            found.append(mine)
        return found

    def _local_numel(self, kind: str) -> list[tuple[int, Placement]]:
        """Return the local elements without ep, and the placement, of each parameter of a kind."""
        decided, nodes = self.sharded.sharding.kinds[kind], self.folded.representatives[kind].parameters
        tensors = [infos(node)[0] for node in nodes]
        return [
            (self.tensors.nbytes(tensor, stored) // tensor.dtype.itemsize, stored)
            for tensor, stored in zip(tensors, decided.parameters, strict=True)
        ]

    @property
    def _dtypes(self) -> dict[str, torch.dtype]:
        return self._memoised("dtypes", lambda: parameter_dtypes(self.folded))

    def _units(self, names: Sequence[str], runs: list[tuple[int, int]], cut: Sequence[tuple[int, int]]) -> list[Unit]:
        """Return the units that parameters are all-gathered with: the block that owns one, else the stages that read
        it. The first stage holds unused parameters."""
        blocks, readers, stages = self._blocks, self._readers, cut or runs

        def read(name: str) -> tuple[int, ...]:
            where = readers.get(name, set[int]())
            return tuple(k for k, (first, last) in enumerate(stages) if any(first <= i <= last for i in where)) or (0,)

        return [(blocks[name], (0,)) if name in blocks else ("", read(name)) for name in names]

    def units(self, first: int, last: int) -> int:
        """Return the number of buckets of `_units` in a run of segments, if each is smaller than a bucket may be:
        parameters that follow each other and have one owner, a block or none, share a bucket."""
        begun = self._memoised("units", self._count_units)
        return 1 + begun[last] - begun[first]

    def _count_units(self) -> list[int]:
        """Return by segment how often the owner of parameters has changed."""
        owners = [[self._blocks.get(p[0], "") for p in mine] for mine in self._parameters]
        found, owner = list[int](), next((mine[0] for mine in owners if mine), "")
        for mine in owners:
            changed = bool(mine) and mine[0] != owner
            found.append((found[-1] if found else 0) + changed)
            owner = mine[0] if mine else owner
        return found

    @property
    def _blocks(self) -> dict[str, str]:
        return self._memoised("blocks", self._name_blocks)

    def _name_blocks(self) -> dict[str, str]:
        """Return parameter -> path of the block that owns it."""
        return {name: name.removesuffix(own).rstrip(".") for name, own in owned_by_blocks(self.folded)[0].items()}

    def _sharers(self, cut: Sequence[tuple[int, int]]) -> dict[str, frozenset[int]]:
        """Return parameter -> pipeline ranks that hold it, if these are several."""
        if self.candidate.pp == 1 or not cut or not self._tied:
            return {}
        starts, holder = [first for first, _ in cut], self.candidate.route.holder
        found = {
            name: frozenset(holder(bisect_right(starts, i) - 1) for i in readers)
            for name, readers in self._tied.items()
        }
        return {name: ranks for name, ranks in found.items() if len(ranks) > 1}

    @property
    def _order(self) -> dict[str, int]:
        return self._memoised("order", self._find_order)

    def _find_order(self) -> dict[str, int]:
        """Return parameter -> its position in the model's forward order."""
        names = dict.fromkeys(parameter[0] for mine in self._parameters for parameter in mine)
        return {name: i for i, name in enumerate(names)}

    @property
    def _held(self) -> list[list[tuple[str, Held, bool]]]:
        """The parameters of each segment: (name, what a stage holds of it, first read here)."""
        return self._memoised(f"held, ep {self.candidate.ep}", self._list_held)

    def _list_held(self) -> list[list[tuple[str, Held, bool]]]:
        order = self._order
        return [
            [(name, Held(order[name], count, stored, frozen), first) for name, count, stored, frozen, first in mine]
            for mine in self._parameters
        ]

    @property
    def _unused(self) -> dict[str, Held]:
        return self._memoised("unused", self._find_unused)

    def _find_unused(self) -> dict[str, Held]:
        """Return the parameters that do not reach the loss."""
        traced, found = self.folded.traced, {}
        for node in self.folded.unused_parameters:
            name, tensor = traced.parameters[node.name], infos(node)[0]
            count = self.tensors.nbytes(tensor) // tensor.dtype.itemsize
            found[name] = Held(len(self._order), count, B, name in traced.frozen)
        return found

    @property
    def _tied(self) -> dict[str, set[int]]:
        return self._memoised("tied", lambda: {n: where for n, where in self._readers.items() if len(where) > 1})

    @property
    def _readers(self) -> dict[str, set[int]]:
        return self._memoised("readers", self._find_readers)

    def _find_readers(self) -> dict[str, set[int]]:
        """Return parameter -> the segments that read it."""
        readers: dict[str, set[int]] = {}
        for i, parameters in enumerate(self._parameters):
            for name, *_ in parameters:
                readers.setdefault(name, set()).add(i)
        return readers

    # ---- beside parameters and blocks ----

    @cached_property
    def loss_end(self) -> LossEnd:
        """Work of a loss that is computed once per step from all samples of the batch."""
        c, sizes = self.candidate, dict(self.tensors.values)
        sizes[BATCH] = c.dp * c.micro * c.microbatches
        if SEQUENCE in sizes:
            sizes[SEQUENCE] *= c.cp
        return loss_end(self.folded.loss_form, sizes)

    def held_beside(self, runs: Sequence[tuple[int, int]], cut: Sequence[tuple[int, int]] = ()) -> Memory:
        """Return what a rank with these runs holds beside parameters and what its blocks save: buffers of the model;
        masks and tables that a stage computes from inputs, and tensors that all its blocks receive, of each microbatch
        in flight; the sum of their gradients; on the rank with the last segment, what a loss of the whole batch holds.
        `cut`: as of `state`; if it is not known, an upper bound."""
        c, outside = self.candidate, self._memoised("outside", self._list_outside)
        common, gradients = self._memoised("common inputs", self._list_common_inputs), 0
        buffers, computed = dict[str, int](), list[int]()
        for first, last in runs:
            made, taken = dict[str, int](), dict[str, int]()
            for both in set(outside[first : last + 1]):
                buffers.update(both[0])
                made.update(both[1])
            for kind in {s.kind for s in self.folded.segments[first : last + 1]} & common.keys() if common else ():
                taken.update(common[kind])
            computed.append(sum(made.values()) + sum(taken.values()))
            gradients = max(gradients, sum(taken.values()))
        rank = c.route.holder(list(cut).index(runs[0])) if cut else 0
        flying = alive(rank, c.pp, c.microbatches, c.schedule, c.virtual)
        each = computed if len(computed) == len(flying.rows[0]) else computed * len(flying.rows[0])
        holds = any(last == len(self.folded.segments) - 1 for _, last in runs)
        return Memory(
            parameters=sum(buffers.values()),
            activations=flying.kept(each),
            temporary=gradients + (self.loss_end.held_bytes if holds else 0),
        )

    def _list_common_inputs(self) -> dict[str, tuple[tuple[str, int], ...]]:
        """Return kind -> local bytes of each tensor that all its segments receive, if there is one."""
        found, size = {}, (self.tensors.number, self.tensors.ranks, self.tensors.cp)
        for kind, places in self.tensors.workbook.facts.common_inputs.items():
            received, placed = self.folded.representatives[kind].receives, self.sharded.sharding.kinds[kind].receives
            storages = (stored_outside(received[i], placed[i], "received") for i in places)
            if places:
                found[kind] = tuple((storage.name, storage.nbytes(*size)) for storage in storages)
        return found

    def _list_outside(self) -> list[Outside]:
        """Return for each segment the bytes of the buffers that it needs, and of the tensors that it reads and that
        its stage computes from inputs, each with its name. Those have the full length of the sequence under cp."""
        masks = shared_mask_types(self.tensors, self.sharded)
        inputs, found = self.folded.traced.inputs, dict[tuple[fx.Node, ...], Outside]()
        for read in {segment.prelude for segment in self.folded.segments}:
            given = (n for n in ancestors(read) if n.op == "placeholder" and n.name not in inputs)
            buffers = {n.name: self._whole_bytes(n) for n in given if infos(n)[0].ndim}  # numbers are literals
            made = (base_of(n) for n in read if n not in masks)
            computed = {n.name: self._whole_bytes(n) for n in made if n.op != "placeholder"}
            for mask in (n for n in read if n in masks):
                computed[f"{mask.name}{CONVERTED}"] = self._whole_bytes(mask) * masks[mask].itemsize
            found[read] = tuple(buffers.items()), tuple(computed.items())
        return [found[segment.prelude] for segment in self.folded.segments]

    def _whole_bytes(self, node: fx.Node) -> int:
        """Return the bytes of what a node makes, at the length of the whole sequence."""
        number, cp = self.tensors.number, self.tensors.cp
        each = (prod(number(n) * (cp if counts_tokens(n) else 1) for n in t.shape) for t in infos(node))
        return sum(numel * t.dtype.itemsize for numel, t in zip(each, infos(node), strict=True))
