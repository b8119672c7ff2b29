"""Properties of each op of a folded graph that do not depend on placements and sizes; read off the graph once.

`GraphFacts` hold for every plan of a graph; a `Workbook` adds the memory traffic under one `kernels` option.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import fx

from autoptd.layout.placements import Split
from autoptd.passes.analysis.activations import repeated_steps
from autoptd.passes.analysis.attention import without_dropout
from autoptd.passes.analysis.dataflow import DataflowStep, Flow, counts_tokens, flow
from autoptd.passes.analysis.flops import LOOKUPS, PRODUCTS, Work, work
from autoptd.passes.analysis.fused_flow import KernelFacts, computes_loss, fused_flow, kernel_facts
from autoptd.passes.analysis.fusion import MemoryTraffic, traffic
from autoptd.passes.analysis.liveness import Walk, walk_flow
from autoptd.passes.analysis.saved_tensors import SavedForBackward, saved_tensors
from autoptd.passes.blocks import LayerBlock, find_blocks
from autoptd.passes.fold import Folded, Segment
from autoptd.passes.graph import infos
from autoptd.passes.opcall import OpCall
from autoptd.passes.rules.factor_notation import Loops
from autoptd.passes.rules.factors import Strategy
from autoptd.passes.rules.lookup import op_of
from autoptd.passes.sharding.expert_regions import expert_parameters, expert_regions
from autoptd.passes.sharding.megatron_splits import MegatronSplits, megatron_splits
from autoptd.passes.sharding.sharding import KindSharding, group_offers, ops_of
from autoptd.search.sharding.expert_work import places as places_of
from autoptd.search.sharding.fp8 import fp8_products
from autoptd.search.sharding.strategies import is_weight

DTYPE_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_NOTHING = MemoryTraffic(launches=0, backward_launches=0)


@dataclass(frozen=True)
class OpFacts:
    """One op: its call, forward work, memory traffic, tensors saved by autograd, and the `loops` of a product."""

    call: OpCall
    work: Work
    traffic: MemoryTraffic
    saved: SavedForBackward
    loops: Loops | None
    dtype: str
    recipe: str = ""  # of a product in fp8

    @property
    def trained(self) -> bool:
        return any(t.requires_grad for t in self.call.outputs)

    @property
    def is_lookup(self) -> bool:
        return self.call.target in LOOKUPS

    @cached_property
    def roles(self) -> Mapping[str, str]:
        """Factor of a product -> `m` (rows of the first operand), `n` (columns of the second), `k`, or `batch`."""
        assert self.loops is not None
        found = {}
        for name, places in self.loops.places.items():
            first, second, result = places[0] is not None, places[1] is not None, places[-1] is not None
            found[name] = ("batch" if first and second else "m" if first else "n") if result else "k"
        return found

    @cached_property
    def keys(self) -> str | None:
        """Role of the keys in a product of unfused attention: `n` in queries × keys, `k` in scores × values."""
        assert self.loops is not None
        sizes = self.loops.sizes
        tokens = {role for name, role in self.roles.items() if counts_tokens(sizes[name])}
        return next((role for role in ("n", "k") if {"m", role} <= tokens), None)

    def split_factor(self, strategy: Strategy) -> str | None:
        """Return the factor of a product that a strategy splits, if any."""
        if strategy.ranks == 1 or self.loops is None:
            return None
        placements = (*strategy.needs, *strategy.gives)
        for name, places in self.loops.places.items():
            there = [(p, q) for p, q in zip(places, placements, strict=True) if p is not None]
            if all(isinstance(q, Split) and q.dim == p.dim for p, q in there) and there:
                return name
        return None


class GraphFacts:
    """Facts that hold for every plan of a folded graph, computed on first use."""

    def __init__(self, folded: Folded) -> None:
        self.folded = folded
        self._hits: dict[str, tuple[tuple[str, int, str], ...]] = {}
        self._repeated: dict[tuple[str, str, str, bool], tuple[DataflowStep, ...]] = {}

    @cached_property
    def ops(self) -> Mapping[fx.Node, OpFacts]:
        """Every op of every kind, without memory traffic."""
        return {node: _read(node) for s in self.folded.representatives.values() for _, node in ops_of(s)}

    @cached_property
    def offers(self) -> Mapping[str, Mapping[tuple[str, int], frozenset[int]]]:
        """Kind -> useful group counts of a split per (tensor, dim)."""
        return {kind: group_offers(segment) for kind, segment in self.folded.representatives.items()}

    @cached_property
    def weights(self) -> frozenset[fx.Node]:
        """Parameters that are operands of products or tables of lookups."""
        segments = self.folded.representatives.values()
        return frozenset(node for s in segments for node in s.parameters if is_weight(node))

    @cached_property
    def experts(self) -> frozenset[str]:
        """The parameters that ep splits."""
        return expert_parameters(self.folded)

    @cached_property
    def expert_counts(self) -> frozenset[int]:
        """The numbers of experts of the model's mixtures."""
        return frozenset(region.count for s in self.folded.representatives.values() for region in expert_regions(s))

    def hits(self, pattern: str) -> tuple[tuple[str, int, str], ...]:
        """Return (kind, position, name) of the parameters that match a pattern."""
        if pattern not in self._hits:
            matches = re.compile(fnmatch.translate(pattern)).match
            self._hits[pattern] = tuple((k, i, n) for (k, i), names in self._slots.items() for n in names if matches(n))
        return self._hits[pattern]

    def slots(self, names: Iterable[str]) -> frozenset[tuple[str, int]]:
        """Return (kind, position) of the named parameters."""
        wanted = set(names)
        return frozenset(slot for slot, called in self._slots.items() if not wanted.isdisjoint(called))

    @cached_property
    def _slots(self) -> Mapping[tuple[str, int], list[str]]:
        """Parameter names by (kind, position)."""
        found: dict[tuple[str, int], list[str]] = {}
        for segment in self.folded.segments:
            for i, node in enumerate(segment.parameters):
                found.setdefault((segment.kind, i), []).append(self.folded.traced.parameters[node.name])
        return found

    @cached_property
    def megatron(self) -> MegatronSplits:
        """The placements of Megatron-LM. Raises PlanError for a model that it could not split."""
        return megatron_splits(self.folded)

    @cached_property
    def fp8(self) -> frozenset[fx.Node]:
        """Products that an fp8 recipe computes in fp8."""
        return fp8_products(self.folded)

    @cached_property
    def places(self) -> Mapping[fx.Node, str]:
        """The ops on rows of experts, and behind them: see `OpWork.place`."""
        return places_of(self.folded)

    @cached_property
    def blocks(self) -> Sequence[LayerBlock]:
        """The blocks of the model, in order."""
        return tuple(find_blocks(self.folded))

    @cached_property
    def block_ends(self) -> frozenset[int]:
        """The last segment of each block."""
        return frozenset(block.first + block.length - 1 for block in self.blocks)

    @cached_property
    def common_inputs(self) -> Mapping[str, tuple[int, ...]]:
        """Kind -> positions in `receives` of one tensor with a gradient that all segments of the kind receive, if they
        are more than two: the encoder's result in a decoder, or a bias of positions. A stage holds it once."""
        alike: dict[str, list[Segment]] = {}
        for segment in self.folded.segments:
            alike.setdefault(segment.kind, []).append(segment)
        found = {}
        for kind, mine in alike.items():
            places = enumerate(zip(*(s.receives for s in mine), strict=True)) if len(mine) > 2 else ()
            found[kind] = tuple(i for i, (n, *others) in places if {n} == {n, *others} and infos(n)[0].requires_grad)
        return found

    @cached_property
    def has_attention(self) -> bool:
        """True if any op is fused attention."""
        return any(op.work.kind == "attention" for op in self.ops.values())

    def repeated(
        self, kind: str, segment: Segment, decided: KindSharding, policy: str, ends: bool
    ) -> tuple[DataflowStep, ...]:
        """Return the ops and conversions of a segment that a recompute policy runs in the backward pass. `ends`: the
        segment is the last that is recomputed together, where the second run stops early."""
        placed = (*decided.strategies.values(), *decided.parameters, *decided.receives, *decided.sends)
        key = kind, ";".join(map(str, placed)), policy, ends
        if key not in self._repeated:
            region = flow([segment], {kind: decided})
            self._repeated[key] = tuple(repeated_steps(region.steps, policy, early_stop=ends))
        return self._repeated[key]


class Workbook:
    """The ops of every kind of segment under one choice of kernels ("eager", "fused", "compiled"), of attention, of a
    recipe of products in fp8, of kernels that permute rows of experts, and of dropout by attention's own kernel."""

    def __init__(
        self,
        folded: Folded,
        kernels: str = "eager",
        attention: str = "",
        facts: GraphFacts | None = None,
        fp8: str = "",
        permutation: str = "",
        fast_dropout: bool = False,
    ) -> None:
        self.folded, self.kernels, self.attention, self.fp8 = folded, kernels, attention, fp8
        self.permutation = permutation or ("fused" if kernels == "fused" else "")
        self.facts, self.fast_dropout = facts or GraphFacts(folded), fast_dropout
        self.ops: dict[fx.Node, OpFacts] = {}
        self._flows: dict[Hashable, Flow] = {}
        self._firsts: dict[tuple[str, ...], Sequence[Segment]] = {}
        self._walks: dict[Hashable, Walk] = {}
        self._kernel_facts: dict[str, KernelFacts] = {}
        for segment in folded.representatives.values():
            moves = traffic(segment.nodes, segment.sends, kernels)
            for _, node in ops_of(segment):
                found = replace(self.facts.ops[node], traffic=moves.get(node, _NOTHING))
                if fp8 and node in self.facts.fp8:
                    found = replace(found, dtype="fp8", recipe=fp8)
                self.ops[node] = replace(found, call=without_dropout(found.call)) if fast_dropout else found

    def walk(
        self,
        segments: Sequence[Segment],
        kinds: Mapping[str, KindSharding],
        policy: str,
        *,
        regather: bool = False,
        in_place_loss: bool = False,
    ) -> Walk:
        """Return the liveness walk over consecutive segments, cached by their kinds and shardings.

        Its tensors have the names that they have in `first_like(segments)`."""
        segments, names = self.first_like(segments), tuple(s.kind for s in segments)
        under = names, tuple(kinds[name].text for name in dict.fromkeys(names))
        key = under, policy, regather, in_place_loss
        if key not in self._walks:
            region = self._flow(under, segments, kinds, in_place_loss)
            self._walks[key] = walk_flow(region, policy, regather=regather, in_place_loss=in_place_loss)
        return self._walks[key]

    def first_like(self, segments: Sequence[Segment]) -> Sequence[Segment]:
        """Return the first consecutive segments of these kinds that were asked for, which stand for all others."""
        return self._firsts.setdefault(tuple(s.kind for s in segments), segments)

    def _flow(
        self, under: Hashable, segments: Sequence[Segment], kinds: Mapping[str, KindSharding], in_place_loss: bool
    ) -> Flow:
        """Return the dataflow under the kernels, cached; a loss in place is by hand, and its segment not compiled."""
        compiled = [s for s in segments if self.kernels == "compiled" and not (in_place_loss and computes_loss(s))]
        key = under, len(compiled)
        if key not in self._flows:
            for segment in compiled:
                if segment.kind not in self._kernel_facts:
                    self._kernel_facts[segment.kind] = kernel_facts(segment)
            facts = {segment.kind: self._kernel_facts[segment.kind] for segment in compiled}
            found = flow(segments, kinds)
            if self.fast_dropout:
                found = replace(found, steps=tuple(map(_undropped, found.steps)))
            self._flows[key] = fused_flow(found, segments, facts) if facts else found
        return self._flows[key]


def _undropped(step: DataflowStep) -> DataflowStep:
    return step if step.call is None else replace(step, call=without_dropout(step.call))


def _read(node: fx.Node) -> OpFacts:
    op = op_of(node)
    call = op.call
    floats = [t.dtype for t in (*call.operands, *call.outputs) if t.dtype in DTYPE_NAMES]
    return OpFacts(
        call=call,
        work=work(call),
        traffic=_NOTHING,
        saved=saved_tensors(call),
        loops=op.loops if call.target in PRODUCTS else None,
        dtype=DTYPE_NAMES[floats[0]] if floats else "fp32",
    )
