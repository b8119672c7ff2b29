"""From a folded graph to the numbers of the splits ILP, and back to a sharding with its cost.

Every kind enters once, weighted by how many segments are of it. Edges between kinds are ties: a kind must hand a
tensor on in the placement in which every receiver takes it; parameters that several kinds read lie one way for all.
"""

from __future__ import annotations

import fnmatch
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import sympy
from torch import fx

from autoptd.cost_models.cluster import Cluster
from autoptd.errors import PlanError, nearest
from autoptd.passes.factors import Strategy
from autoptd.passes.fold import Folded, Segment
from autoptd.passes.graph import infos, op_call, operands
from autoptd.passes.opcall import Size, TensorInfo
from autoptd.passes.placements import BP, B, Broadcast, Placement, Split, conversion, parse_placement
from autoptd.passes.saved import saved_tensors
from autoptd.passes.sharding import (
    KindSharding,
    Sharding,
    group_offers,
    ops_of,
    output_names,
    sends_of,
    tensor_name,
)
from autoptd.search.legal import counts_tokens, is_weight, legal_strategies
from autoptd.search.prices import Prices
from autoptd.search.splits import Choice, Node, SplitProblem, SplitSolution, solve_splits


@dataclass(frozen=True)
class KindCost:
    """One segment of a kind on one rank: seconds and bytes per microbatch."""

    forward_s: float
    backward_s: float
    forward_comm_s: float  # part of forward_s
    backward_comm_s: float
    activation_bytes: int  # kept for the backward pass
    input_bytes: int  # of what it receives: all that a full recompute keeps
    temporary_bytes: int  # the largest op's operands and results
    collectives: tuple[str, ...]  # as the emitted code issues them, forward then backward


@dataclass(frozen=True)
class Sharded:
    """A sharding and what it costs."""

    sharding: Sharding
    costs: Mapping[str, KindCost]
    seconds: float  # one microbatch through the whole model, forward and backward
    gap: float


class Tensors(Prices):
    """The tensor-level problem of one folded graph on one cluster for fixed tp, b and s."""

    def __init__(
        self,
        folded: Folded,
        cluster: Cluster,
        ranks: int,
        values: Mapping[sympy.Symbol, int],
        *,
        microbatches: int,
        static_bytes: float = 16.0,
        pins: Mapping[str, str] | None = None,
        legal: Mapping[str, dict[int, list[Strategy]]] | None = None,
        sequence_parallel: bool = True,
    ) -> None:
        """`static_bytes`: bytes that a parameter element occupies (parameter, gradient, optimizer)."""
        super().__init__(cluster, ranks, values)
        self.folded = folded
        self.microbatches = microbatches
        self.static_bytes = static_bytes
        self.pins = pins or {}
        self.sequence_parallel = sequence_parallel
        self.legal = legal or legal_strategies(folded, ranks, self.sizes, sequence_parallel=sequence_parallel)

    # ---- the problem ----

    @cached_property
    def problem(self) -> SplitProblem:
        """Numbers for `solve_splits`."""
        nodes: list[Node] = []
        infos_by_tensor: dict[str, tuple[TensorInfo, int, bool]] = {}  # tensor -> (info, multiplicity, is parameter)
        saved_bytes: dict[tuple[str, Placement], float] = {}
        for kind, segment in self.folded.representatives.items():
            for node, tensors in self._kind_nodes(kind, segment, saved_bytes):
                nodes.append(node)
                infos_by_tensor.update(tensors)
        given: dict[str, set[Placement]] = {}
        wanted: dict[str, set[Placement]] = {}
        for node in nodes:
            for choice in node.choices:
                for tensor, placement in choice.gives:
                    given.setdefault(tensor, set()).add(placement)
                for tensor, placement in choice.needs:
                    wanted.setdefault(tensor, set()).add(placement)
        conversions = {}
        for tensor, targets in wanted.items():
            meta, times, _ = infos_by_tensor[tensor]
            for source in given.get(tensor, ()):
                for target in targets:
                    if source != target and self._convertible(meta, source, target):
                        conversions[tensor, source, target] = times * sum(self.conversion_seconds(meta, source, target))
        return SplitProblem(
            nodes=tuple(nodes),
            conversion_s=conversions,
            saved_bytes=saved_bytes,
            ties=tuple(dict.fromkeys(self._ties())),
            fixed=self._fixed(nodes),
        )

    @staticmethod
    def _convertible(tensor: TensorInfo, source: Placement, target: Placement) -> bool:
        """Integers have no addends; everything else has its row in the table."""
        is_number = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        return is_number or not any(str(p) == "P" for p in (source, target))

    def _kind_nodes(
        self, kind: str, segment: Segment, saved_bytes: dict[tuple[str, Placement], float]
    ) -> Iterator[tuple[Node, dict[str, tuple[TensorInfo, int, bool]]]]:
        times = self.folded.multiplicity(kind)
        offers = group_offers(segment)
        scope = _Scope(kind, segment)
        for i, node in enumerate(segment.parameters):
            info = infos(node)[0]
            choices = tuple(self._parameter_choices(scope(node), info, times, offers, node))
            yield Node(scope.parameter(i), choices), {scope(node): (info, times, True)}
        for i, node in enumerate(segment.prelude):
            name = scope(node)
            yield (
                Node(f"{kind}/prelude:{i}", (Choice("B", gives=((name, B),)),)),
                {name: (infos(node)[0], times, False)},
            )
        for i, node in enumerate(segment.receives):
            info, name = infos(node)[0], scope(node)
            options = self._edge_placements(info)
            choices = tuple(Choice(str(p), gives=((name, p),)) for p in options)
            yield Node(scope.receive(i), choices), {name: (info, times, False)}
        for i, node in ops_of(segment):
            choices = tuple(self._op_choice(scope, node, s, times, saved_bytes) for s in self.legal[kind][i])
            outputs = dict(zip(output_names(node), infos(node), strict=True))
            yield Node(f"{kind}/{node.name}", choices), {t: (info, times, False) for t, info in outputs.items()}
        for i, node in enumerate(segment.sends):
            name = scope(node)
            options = (B,) if node is self.folded.loss else self._edge_placements(infos(node)[0])
            yield Node(scope.send(i), tuple(Choice(str(p), needs=((name, p),)) for p in options)), {}

    def _edge_placements(self, tensor: TensorInfo) -> tuple[Placement, ...]:
        """Placements in which a tensor may cross from segment to segment: never as addends."""
        broadcasts: tuple[Placement, ...] = (B, BP) if tensor.requires_grad else (B,)
        return (
            *broadcasts,
            *(Split(d) for d, size in enumerate(tensor.shape) if self._splittable(size) and self._may(size)),
        )

    def _may(self, size: Size) -> bool:
        return self.sequence_parallel or not counts_tokens(size)

    def _splittable(self, size: Size) -> bool:
        allowed = self.sequence_parallel or not counts_tokens(size)
        return allowed and self.ranks > 1 and self.sizes.divisible(size, self.ranks)

    def _parameter_choices(
        self, name: str, tensor: TensorInfo, times: int, offers: Mapping[tuple[str, int], frozenset[int]], node: fx.Node
    ) -> Iterator[Choice]:
        static = times * self.static_bytes / tensor.dtype.itemsize
        splits = [
            Split(dim, groups)
            for dim, size in enumerate(tensor.shape)
            for groups in sorted({1} | offers.get((tensor_name(node), dim), frozenset()))
            if self.ranks > 1 and self.sizes.divisible(size, self.ranks, groups)
        ]
        whole = not splits or not is_weight(node) or self.folded.traced.parameters[node.name] in self.pinned
        if whole:
            yield Choice("B", gives=((name, B),), bytes=static * self.nbytes(tensor))
        if whole and tensor.requires_grad and self.ranks > 1:
            sync = self.collective("all_reduce", self.nbytes(tensor)) / self.microbatches
            yield Choice("Bp", gives=((name, BP),), seconds=times * sync, bytes=static * self.nbytes(tensor))
        for split in splits:
            yield Choice(str(split), gives=((name, split),), bytes=static * self.nbytes(tensor, split))

    def parameter_labels(self, name: str) -> list[str]:
        """Placements that a parameter may be stored in."""
        names = self.folded.traced.parameters
        for kind, segment in self.folded.representatives.items():
            for i, node in enumerate(segment.parameters):
                if names[node.name] == name:
                    own = _Scope(kind, segment).parameter(i)
                    return next([c.label for c in n.choices] for n in self.problem.nodes if n.name == own)
        return []

    @cached_property
    def pinned(self) -> frozenset[str]:
        """Parameters that somebody placed by hand."""
        names = self.folded.traced.parameters.values()
        return frozenset(n for n in names if any(fnmatch.fnmatchcase(n, pattern) for pattern in self.pins))

    def _op_choice(
        self,
        scope: _Scope,
        node: fx.Node,
        strategy: Strategy,
        times: int,
        saved_bytes: dict[tuple[str, Placement], float],
    ) -> Choice:
        forward, backward = self.op_seconds(node, strategy)
        call = op_call(node)
        needs = tuple((scope(o), p) for o, p in zip(operands(node), strategy.needs, strict=True))
        gives = tuple(zip(output_names(node), strategy.gives, strict=True))
        saved: list[tuple[str, Placement]] = []
        if any(t.requires_grad for t in call.outputs):
            keeps = saved_tensors(call)
            kept = [(needs[i], call.operands[i]) for i in keeps.operands if not scope.is_outside(operands(node)[i])]
            kept += [(gives[i], call.outputs[i]) for i in keeps.outputs]
            for (tensor, placement), meta in kept:
                pair = (tensor, B if isinstance(placement, Broadcast) else placement)
                saved.append(pair)
                saved_bytes[pair] = float(times * self.nbytes(meta, placement))
            for i, extra in enumerate(keeps.extra):
                pair = (f"{node.name}:extra{i}", B if strategy.ranks == 1 else Split(0))
                saved.append(pair)
                saved_bytes[pair] = times * self.nbytes(extra) / strategy.ranks
        return Choice(
            label=str(strategy),
            needs=tuple(dict.fromkeys(needs)),
            gives=gives,
            seconds=times * (forward + backward),
            saved=tuple(dict.fromkeys(saved)),
        )

    def _ties(self) -> Iterator[tuple[str, str]]:
        senders: dict[fx.Node, str] = {}
        owners: dict[str, str] = {}
        for segment in self.folded.segments:
            scope = _Scope(segment.kind, segment)
            for i, node in enumerate(segment.receives):
                yield senders[node], scope.receive(i)
            for i, node in enumerate(segment.sends):
                senders[node] = scope.send(i)
            for i, node in enumerate(segment.parameters):
                name = self.folded.traced.parameters[node.name]
                mine = scope.parameter(i)
                if owners.setdefault(name, mine) != mine:
                    yield owners[name], mine

    def _fixed(self, nodes: list[Node]) -> dict[str, str]:
        """Labels of the parameters that a name pattern pins. Raises PlanError for what cannot be."""
        found = {}
        choices = {n.name: [c.label for c in n.choices] for n in nodes}
        for pattern, text in self.pins.items():
            try:
                placement = str(parse_placement(text))
            except ValueError as error:
                raise PlanError(str(error), where=f"fix['splits'][{pattern!r}]") from error
            hits = 0
            for segment in self.folded.segments:
                for i, node in enumerate(segment.parameters):
                    name = self.folded.traced.parameters[node.name]
                    if not fnmatch.fnmatchcase(name, pattern):
                        continue
                    hits += 1
                    mine = _Scope(segment.kind, segment).parameter(i)
                    if placement not in choices[mine]:
                        raise PlanError(
                            f"parameter {name} of shape {list(infos(node)[0].shape)} cannot lie as {placement} "
                            f"on tp {self.ranks}",
                            where=f"fix['splits'][{pattern!r}]",
                            fix=f"possible: {', '.join(choices[mine])}",
                        )
                    found[mine] = placement
            if not hits:
                layers = re.compile(r"(?<=\.)\d+(?=\.)")  # named once for all
                names = {layers.sub("*", name) for name in self.folded.traced.parameters.values()}
                raise PlanError(
                    f"no parameter is called {pattern!r}",
                    where=f"fix['splits'][{pattern!r}]",
                    fix=textwrap.shorten(nearest(layers.sub("*", pattern), names), 300, placeholder=" …"),
                )
        return found

    # ---- the answer ----

    def solve(self, second_per_byte: float = 0.0, time_limit_s: float = 20.0) -> Sharded:
        """The cheapest sharding; `second_per_byte` is what a kept byte is worth."""
        solution = solve_splits(replace(self.problem, second_per_byte=second_per_byte), time_limit_s)
        return self.priced(self._sharding(solution), solution)

    def _sharding(self, solution: SplitSolution) -> Sharding:
        receives: dict[str, tuple[Placement, ...]] = {}
        partial: dict[str, tuple[dict[int, Strategy], tuple[Placement, ...]]] = {}
        for kind, segment in self.folded.representatives.items():
            scope = _Scope(kind, segment)
            by_text = {i: {str(s): s for s in options} for i, options in self.legal[kind].items()}
            chosen = {i: by_text[i][solution.choices[f"{kind}/{n.name}"]] for i, n in ops_of(segment)}
            stored = tuple(
                parse_placement(solution.choices[scope.parameter(i)]) for i in range(len(segment.parameters))
            )
            partial[kind] = chosen, stored
            receives[kind] = tuple(
                parse_placement(solution.choices[scope.receive(i)]) for i in range(len(segment.receives))
            )
        sends = sends_of(self.folded, receives)
        kinds = {k: KindSharding(c, p, receives[k], sends[k]) for k, (c, p) in partial.items()}
        return Sharding(self.ranks, kinds)

    def priced(self, sharding: Sharding, solution: SplitSolution | None = None) -> Sharded:
        """What a sharding costs, per segment of each kind."""
        costs = {k: self._kind_cost(k, s, sharding.kinds[k]) for k, s in self.folded.representatives.items()}
        total = sum(self.folded.multiplicity(k) * (c.forward_s + c.backward_s) for k, c in costs.items())
        return Sharded(sharding, costs, total, solution.gap if solution else 0.0)

    def _kind_cost(self, kind: str, segment: Segment, decided: KindSharding) -> KindCost:
        forward = backward = forward_comm = backward_comm = 0.0
        temporary = 0
        given, meta = self._given(segment, decided)
        wanted: dict[tuple[fx.Node, Placement], None] = {}
        saved: dict[tuple[str, Placement], int] = {}
        collectives: list[str] = []
        scope = _Scope(kind, segment)
        kept: dict[tuple[str, Placement], float] = {}
        for i, node in ops_of(segment):
            strategy = decided.strategies[i]
            f, b = self.op_seconds(node, strategy)
            forward, backward = forward + f, backward + b
            collectives += [name for name, _ in strategy.collectives]
            choice = self._op_choice(scope, node, strategy, 1, kept)
            for pair in choice.saved:
                saved[pair] = int(kept[pair])
            for operand, placement in zip(operands(node), strategy.needs, strict=True):
                wanted[operand, placement] = None
            tensors = [
                *zip(op_call(node).operands, strategy.needs, strict=True),
                *zip(infos(node), strategy.gives, strict=True),
            ]
            temporary = max(temporary, sum(self.nbytes(t, p) for t, p in tensors))
        for node, placement in zip(segment.sends, decided.sends, strict=True):
            wanted[node, placement] = None
        for node, placement in wanted:
            f, b = self.conversion_seconds(meta[node], given[node], placement)
            row = conversion(given[node], placement)
            forward, backward = forward + f, backward + b
            if row.forward:
                forward_comm += f
                collectives.append(row.forward)
            if row.backward and meta[node].requires_grad:
                backward_comm += b
                collectives.append(row.backward)
        inputs = sum(self.nbytes(infos(n)[0], p) for n, p in zip(segment.receives, decided.receives, strict=True))
        return KindCost(
            forward,
            backward,
            forward_comm,
            backward_comm,
            sum(saved.values()),
            inputs,
            temporary,
            tuple(collectives),
        )

    @staticmethod
    def _given(segment: Segment, decided: KindSharding) -> tuple[dict[fx.Node, Placement], dict[fx.Node, TensorInfo]]:
        given: dict[fx.Node, Placement] = dict(zip(segment.parameters, decided.parameters, strict=True))
        given |= dict(zip(segment.receives, decided.receives, strict=True))
        given |= dict.fromkeys(segment.prelude, B)
        outputs = {n: decided.strategies[i].gives for i, n in ops_of(segment)}
        for node in segment.nodes:
            source, index = (node, 0) if node in outputs else (node.args[0], node.args[1])
            given[node] = outputs[source][index]  # type: ignore[index]
        return given, {n: infos(n)[0] for n in given}


@dataclass(frozen=True)
class _Scope:
    """Names within a kind: tensors from outside the segment get the kind as a prefix."""

    kind: str
    segment: Segment

    def __call__(self, node: fx.Node) -> str:
        return f"{self.kind}:{node.name}" if self.is_input(node) else tensor_name(node)

    def is_input(self, node: fx.Node) -> bool:
        return node not in self.segment.nodes

    def is_outside(self, node: fx.Node) -> bool:
        """Parameters and prelude: kept anyway, not for the backward pass."""
        return node in self.segment.parameters or node in self.segment.prelude

    def parameter(self, i: int) -> str:
        return f"{self.kind}/parameter:{i}"

    def receive(self, i: int) -> str:
        return f"{self.kind}/receive:{i}"

    def send(self, i: int) -> str:
        return f"{self.kind}/send:{i}"
