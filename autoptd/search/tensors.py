"""From a folded graph to the numbers of the splits ILP, and back to a sharding with its cost.

Every kind enters once, weighted by how many segments are of it. Edges between kinds are ties: a kind must hand a
tensor on in the placement in which every receiver takes it; parameters that several kinds read lie one way for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import sympy
import torch
from torch import fx

from autoptd.cost_models.cluster import Cluster
from autoptd.cost_models.op_time import OpWork
from autoptd.errors import PlanError
from autoptd.passes.factors import Strategy
from autoptd.passes.fold import Folded, Segment
from autoptd.passes.graph import infos, operands
from autoptd.passes.liveness import Peak
from autoptd.passes.opcall import TensorInfo
from autoptd.passes.placements import BP, B, Broadcast, Placement, Split, conversion, parse_placement
from autoptd.passes.sharding import (
    KindSharding,
    Sharding,
    ops_of,
    output_names,
    sends_of,
    tensor_name,
)
from autoptd.search.kinds import PARTIAL, KindCost, KindWork, price
from autoptd.search.legal import counts_tokens, legal_strategies
from autoptd.search.prices import Prices
from autoptd.search.split_program import SplitPrograms
from autoptd.search.splits import Choice, Node, SplitProblem, SplitSolution, solve_splits
from autoptd.search.workbook import Workbook


@dataclass(frozen=True)
class Sharded:
    """A sharding and what it costs."""

    sharding: Sharding
    costs: Mapping[str, KindCost]
    seconds: float  # one microbatch through the whole model, forward and backward
    compute_seconds: float  # without communication
    gap: float
    every_kind: tuple[tuple[int, KindCost], ...] = ()  # how many segments are of each kind, and what one costs
    peaks: dict[Any, Peak] = field(default_factory=dict, compare=False)  # of blocks, as they are asked for
    noted: dict[str, Any] = field(default_factory=dict, compare=False)  # of all segments, by `search/chunks.py`

    @property
    def kept_bytes(self) -> int:
        """Kept for the backward pass of one microbatch by the whole model, without recomputation."""
        return sum(times * cost.activation_bytes for times, cost in self.every_kind)


class Tensors(Prices):
    """The tensor-level problem of one folded graph on one cluster for fixed tp, b and s."""

    def __init__(
        self,
        folded: Folded,
        cluster: Cluster,
        ranks: int,
        values: Mapping[sympy.Symbol, int],
        *,
        workbook: Workbook | None = None,
        cp: int = 1,
        microbatches: int,
        static_bytes: float = 16.0,
        pins: Mapping[str, str] | None = None,
        whole: Iterable[str] = (),
        legal: Mapping[str, dict[int, list[Strategy]]] | None = None,
        sequence_parallel: bool = True,
        policies: Iterable[str] = PARTIAL,
        world: int = 0,
        context: str = "ring",
        programs: SplitPrograms | None = None,
    ) -> None:
        """`static_bytes`: bytes that a parameter element occupies (parameter, gradient, optimizer).

        `policies`: those of recomputation that costs are to be told for. `pins`: parameter-name pattern -> placement;
        `whole`: names of parameters that are not split. Equal segments lie alike: one that is named stands for all.
        `programs`: of problems solved before.
        """
        super().__init__(workbook or Workbook(folded), cluster, ranks, values, cp, world, context)
        self.folded = folded
        self.microbatches = microbatches
        self.static_bytes = static_bytes
        self.pins, self.whole = pins or {}, tuple(whole)
        self.sequence_parallel = sequence_parallel
        self.policies = tuple(policies)
        self.programs = programs or SplitPrograms()
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

    def _convertible(self, tensor: TensorInfo, source: Placement, target: Placement) -> bool:
        """Integers have no addends; without sequence parallelism nothing whole or summed is cut between ops."""
        if isinstance(target, Split) and not isinstance(source, Split) and not self._may_cut(tensor):
            return False
        is_number = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        return is_number or not any(str(p) == "P" for p in (source, target))

    def _may_cut(self, tensor: TensorInfo) -> bool:
        """Whether tp may split what lies between products: only with sequence parallelism, where it counts tokens."""
        return self.sequence_parallel or not any(counts_tokens(n) for n in tensor.shape)

    def _kind_nodes(
        self, kind: str, segment: Segment, saved_bytes: dict[tuple[str, Placement], float]
    ) -> Iterator[tuple[Node, dict[str, tuple[TensorInfo, int, bool]]]]:
        times = self.folded.multiplicity(kind)
        offers = self.workbook.facts.offers[kind]
        scope = _Scope(kind, segment)
        for i, node in enumerate(segment.parameters):
            info = infos(node)[0]
            choices = tuple(self._parameter_choices(scope(node), info, times, offers, node, (kind, i)))
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
        if self.ranks == 1 or not self._may_cut(tensor):
            return broadcasts
        return (*broadcasts, *(Split(d) for d, n in enumerate(tensor.shape) if self.sizes.divisible(n, self.ranks)))

    def _parameter_choices(
        self,
        name: str,
        tensor: TensorInfo,
        times: int,
        offers: Mapping[tuple[str, int], frozenset[int]],
        node: fx.Node,
        slot: tuple[str, int],
    ) -> Iterator[Choice]:
        static = times * self.static_bytes / tensor.dtype.itemsize
        splits = [
            Split(dim, groups)
            for dim, size in enumerate(tensor.shape)
            for groups in sorted({1} | offers.get((tensor_name(node), dim), frozenset()))
            if self.ranks > 1 and slot not in self._kept and self.sizes.divisible(size, self.ranks, groups)
        ]
        whole = not splits or node not in self.workbook.facts.weights or slot in self._pinned
        if whole:
            yield Choice("B", gives=((name, B),), bytes=static * self.nbytes(tensor))
        if whole and tensor.requires_grad and self.ranks > 1:
            sync = self.collective("all_reduce", self.nbytes(tensor)) / self.microbatches
            yield Choice("Bp", gives=((name, BP),), seconds=times * sync, bytes=static * self.nbytes(tensor))
        for split in splits:
            yield Choice(str(split), gives=((name, split),), bytes=static * self.nbytes(tensor, split))

    def parameter_node(self, name: str) -> Node | None:
        """The placements that a parameter may be stored in; None for one that no op of the graph uses."""
        names = self.folded.traced.parameters
        for kind, segment in self.folded.representatives.items():
            for i, node in enumerate(segment.parameters):
                if names[node.name] == name:
                    own = _Scope(kind, segment).parameter(i)
                    return next(n for n in self.problem.nodes if n.name == own)
        return None

    @cached_property
    def _pinned(self) -> frozenset[tuple[str, int]]:
        """(kind, position) of the parameters that somebody placed by hand."""
        return frozenset((kind, i) for pattern in self.pins for kind, i, _ in self.workbook.facts.hits(pattern))

    @cached_property
    def _kept(self) -> frozenset[tuple[str, int]]:
        """Those that are to stay whole."""
        return self.workbook.facts.slots(self.whole)

    def _op_choice(
        self,
        scope: _Scope,
        node: fx.Node,
        strategy: Strategy,
        times: int,
        saved_bytes: dict[tuple[str, Placement], float],
    ) -> Choice:
        forward, backward = self.op_seconds(node, strategy)
        op = self.workbook.ops[node]
        call = op.call
        needs = tuple((scope(o), p) for o, p in zip(operands(node), strategy.needs, strict=True))
        gives = tuple(zip(output_names(node), strategy.gives, strict=True))
        saved: list[tuple[str, Placement]] = []
        if any(t.requires_grad for t in call.outputs):
            keeps = op.saved
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
            for kind, i, name in self.workbook.facts.hits(pattern):
                segment = self.folded.representatives[kind]
                mine = _Scope(kind, segment).parameter(i)
                if placement not in choices[mine]:
                    raise PlanError(
                        f"parameter {name} of shape {list(infos(segment.parameters[i])[0].shape)} cannot lie as "
                        f"{placement} on tp {self.ranks}",
                        where=f"fix['splits'][{pattern!r}]",
                        fix=f"possible: {', '.join(choices[mine])}",
                    )
                found[mine] = placement
        return found

    # ---- the answer ----

    def solve(
        self, second_per_byte: float = 0.0, time_limit_s: float = 20.0, fixed: Mapping[str, str] | None = None
    ) -> Sharded:
        """The cheapest sharding. `second_per_byte`: what a kept byte is worth; `fixed`: labels by node of `problem`."""
        if self.ranks == 1 and not fixed and not self.pins:
            return self.priced(self._whole)  # one rank has no choice
        labels = {**self.problem.fixed, **(fixed or {})}
        asked = replace(self.problem, second_per_byte=second_per_byte, fixed=labels)
        solution = solve_splits(asked, time_limit_s, self.programs)
        return self.priced(self._sharding(solution), solution)

    @property
    def _whole(self) -> Sharding:
        """Everything on every rank."""
        kinds = {}
        for kind, segment in self.folded.representatives.items():
            strategies = {i: next(filter(_is_whole, options)) for i, options in self.legal[kind].items()}
            outside = (segment.parameters, segment.receives, segment.sends)
            kinds[kind] = KindSharding(strategies, *((B,) * len(tensors) for tensors in outside))
        return Sharding(self.ranks, kinds)

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
        kinds = self.folded.representatives.items()
        return self.sharded(sharding, {k: self._kind_work(k, s, sharding.kinds[k]) for k, s in kinds}, solution)

    def sharded(
        self, sharding: Sharding, works: Mapping[str, KindWork], solution: SplitSolution | None = None
    ) -> Sharded:
        """The works of every kind, priced."""
        costs = {k: price(w, self.cluster, self.ranks, self.world) for k, w in works.items()}
        total = sum(self.folded.multiplicity(k) * (c.forward_s + c.backward_s) for k, c in costs.items())
        comm = sum(self.folded.multiplicity(k) * (c.forward_comm_s + c.backward_comm_s) for k, c in costs.items())
        every = tuple((self.folded.multiplicity(k), c) for k, c in costs.items())
        return Sharded(sharding, costs, total, total - comm, solution.gap if solution else 0.0, every)

    def _kind_work(self, kind: str, segment: Segment, decided: KindSharding) -> KindWork:
        ring = exchanged = 0
        given, meta = self._given(segment, decided)
        wanted: dict[tuple[fx.Node, Placement], None] = {}
        works: tuple[list[OpWork], list[OpWork]] = ([], [])
        weights: list[OpWork] = []
        comm: tuple[list[tuple[str, int]], list[tuple[str, int]]] = ([], [])
        for i, node in ops_of(segment):
            strategy = decided.strategies[i]
            op = self.workbook.ops[node]
            forward, backward = self.kernels(node, strategy)
            works[0].extend(forward)
            works[1].extend(backward)
            weights += self._weight_works(node, backward)
            comm[0].extend((name, self.number(elements) * 4) for name, elements in strategy.collectives)
            if op.work.kind == "attention":
                ring += sum(self.nbytes(t, p) for t, p in zip(op.call.operands[1:3], strategy.needs[1:3], strict=True))
                exchanged += self.nbytes(op.call.operands[0], strategy.needs[0])
                exchanged += self.nbytes(op.call.outputs[0], strategy.gives[0])
            for operand, placement in zip(operands(node), strategy.needs, strict=True):
                wanted[operand, placement] = None
        for node, placement in zip(segment.sends, decided.sends, strict=True):
            wanted[node, placement] = None
        for node, placement in wanted:
            self._convert(meta[node], given[node], placement, works, comm)
        peak = self.workbook.walk([segment], {kind: decided}, "none").peak(self.number, self.ranks, self.cp)
        return KindWork(
            forward=tuple(works[0]),
            backward=tuple(works[1]),
            again={policy: self._again(segment, decided, policy) for policy in self.policies},
            forward_collectives=tuple(comm[0]),
            backward_collectives=tuple(comm[1]),
            activation_bytes=peak.kept,
            input_bytes=sum(
                self.nbytes(infos(n)[0], p) for n, p in zip(segment.receives, decided.receives, strict=True)
            ),
            temporary_bytes=peak.temporary,
            weights=tuple(weights),
            ring_bytes=ring,
            exchanged_bytes=ring + exchanged,
        )

    def _weight_works(self, node: fx.Node, backward: Sequence[OpWork]) -> list[OpWork]:
        """The products of a backward pass that make the gradient of a parameter: one for each trained operand."""
        if self.workbook.ops[node].work.kind != "matmul":
            return []
        both = zip(operands(node)[:2], self.workbook.ops[node].call.operands[:2], strict=True)
        trained = [n for n, t in both if t.requires_grad]
        known = self.folded.traced.parameters
        return [w for n, w in zip(trained, backward, strict=False) if _untransposed(n).name in known]

    def _again(self, segment: Segment, decided: KindSharding, policy: str) -> tuple[OpWork, ...]:
        """Forward kernels that a policy of recomputation runs again in the backward pass."""
        positions = {node: i for i, node in enumerate(segment.nodes)}
        nodes = self.workbook.facts.again(segment.kind, segment, decided, policy)
        return tuple(w for n in nodes for w in self.kernels(n, decided.strategies[positions[n]])[0])

    def _convert(
        self,
        tensor: TensorInfo,
        source: Placement,
        target: Placement,
        works: tuple[list[OpWork], ...],
        comm: tuple[list[tuple[str, int]], ...],
    ) -> None:
        """What one conversion launches or communicates, forward and backward."""
        row = conversion(source, target)
        if not row.function:
            return
        whole = self.nbytes(tensor)
        move = OpWork("memory", 0, whole // self.ranks, "bf16")
        for i, name in enumerate((row.forward, row.backward)):
            if i == 0 or tensor.requires_grad:
                if name:
                    comm[i].append((name, whole))
                else:
                    works[i].append(move)

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


def _is_whole(strategy: Strategy) -> bool:
    return all(placement == B for placement in (*strategy.needs, *strategy.gives))


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


def _untransposed(node: fx.Node) -> fx.Node:
    """What a product reads: weights stored [in, out] come to it through `t`."""
    while node.target is torch.ops.aten.t.default:
        (node,) = node.all_input_nodes
    return node
