"""Build the splits ILP from a folded graph.

Every kind enters once, weighted by its number of segments. Edges between kinds are ties: sender and receivers of a
tensor agree on its placement, and so do all kinds that read a shared parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property

import sympy
from torch import fx

from autoptd.cost_models.cluster import Cluster
from autoptd.errors import PlanError
from autoptd.layout.placements import BP, B, Broadcast, O, Placement, Split, parse_placement
from autoptd.layout.placements import kind as kind_of
from autoptd.passes.fold import Folded, Segment
from autoptd.passes.graph import infos, is_getitem, operands
from autoptd.passes.opcall import TensorInfo
from autoptd.passes.rules.factors import Strategy
from autoptd.passes.sharding.expert_regions import expert_dims, expert_regions
from autoptd.passes.sharding.megatron_splits import MEGATRON, ParameterSplit
from autoptd.passes.sharding.sharding import (
    Sharding,
    ops_of,
    output_names,
    sum_placement,
    tensor_name,
)
from autoptd.search.sharding.cost import Prices
from autoptd.search.sharding.ilp import SplitPrograms
from autoptd.search.sharding.kind_cost import PARTIAL
from autoptd.search.sharding.op_table import Workbook
from autoptd.search.sharding.problem import Choice, Node, Scope, SplitProblem
from autoptd.search.sharding.strategies import ExpertsOnTp, counts_tokens, legal_strategies


class SplitNumbers(Prices):
    """The splits ILP of one folded graph on one cluster, for fixed tp, b and s."""

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
        experts: ExpertsOnTp = "any",
        legal: Mapping[str, dict[int, list[Strategy]]] | None = None,
        sequence_parallel: bool = True,
        policies: Iterable[str] = PARTIAL,
        world: int = 0,
        context: str = "ring",
        programs: SplitPrograms | None = None,
        like: Prices | None = None,
    ) -> None:
        """`static_bytes`: bytes that a parameter element occupies (parameter, gradient, optimizer).

        `policies`: recompute policies to compute costs for. `pins`: parameter-name pattern -> placement, or MEGATRON
        for that of Megatron-LM; the last pattern that matches counts. `whole`: names of parameters that are not split.
        Both apply to all equal segments if they name a parameter of one.
        `programs`: cache of programs built before; `like`: as in `Prices`.
        """
        super().__init__(workbook or Workbook(folded), cluster, ranks, values, cp, world, context, like)
        self.folded = folded
        self.microbatches = microbatches
        self.static_bytes = static_bytes
        alone = {pattern: text for pattern, text in (pins or {}).items() if ranks > 1 or text != MEGATRON}
        self.pins, self.whole, self.experts = alone, tuple(whole), experts
        self.sequence_parallel = sequence_parallel
        self.policies = tuple(policies)
        self.programs = programs or SplitPrograms()
        self.legal = legal or legal_strategies(folded, ranks, self.sizes, sequence_parallel=sequence_parallel)

    # ---- the problem ----

    @cached_property
    def problem(self) -> SplitProblem:
        """The input of `solve_splits`."""
        nodes: list[Node] = []
        infos_by_tensor: dict[str, tuple[TensorInfo, int, bool]] = {}  # tensor -> (info, multiplicity, in prelude)
        saved_bytes: dict[tuple[str, Placement], float] = {}
        for kind, segment in self.folded.representatives.items():
            for node, tensors in self._kind_nodes(kind, segment, saved_bytes):
                nodes.append(node)
                infos_by_tensor.update(tensors)
        given: dict[str, dict[Placement, None]] = {}
        wanted: dict[str, dict[Placement, None]] = {}
        for node in nodes:
            for choice in node.choices:
                for tensor, placement in choice.gives:
                    given.setdefault(tensor, {})[placement] = None
                for tensor, placement in choice.needs:
                    wanted.setdefault(tensor, {})[placement] = None
        conversions = {}
        for tensor, targets in wanted.items():
            if tensor in self._used_in_place:
                continue
            meta, times, in_prelude = infos_by_tensor[tensor]
            seconds = {kinds: times * sum(passes) for kinds, passes in self.conversions_of(meta).items()}
            for source in given.get(tensor, ()):
                for target in targets:
                    if source != target and self._convertible(meta, source, target, in_prelude):
                        is_free = target == O
                        conversions[tensor, source, target] = (
                            0.0 if is_free else seconds[kind_of(source), kind_of(target)]
                        )
        return SplitProblem(
            nodes=tuple(nodes),
            conversion_s=conversions,
            saved_bytes=saved_bytes,
            ties=tuple(dict.fromkeys(self._ties())),
            fixed=self._fixed(nodes),
            called={f"{kind}/parameter:{i}": name for (kind, i), (_, name) in self._pins_by_slot.items()},
        )

    def _convertible(self, tensor: TensorInfo, source: Placement, target: Placement, in_prelude: bool) -> bool:
        """Return whether a conversion is legal.

        Integers have no partial values, `_may_cut` limits new splits, and the prelude alone is computed anew for a
        rank's own tokens.
        """
        if O in (source, target):
            return in_prelude and source == B
        if isinstance(target, Split) and not isinstance(source, Split) and not self._may_cut(tensor):
            return False
        is_number = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        return is_number or not any(str(p) == "P" for p in (source, target))

    def _may_cut(self, tensor: TensorInfo) -> bool:
        """Return whether tp may split a tensor between ops: without sequence parallelism not one with a token dim."""
        return self.sequence_parallel or not any(counts_tokens(n) for n in tensor.shape)

    def _kind_nodes(
        self, kind: str, segment: Segment, saved_bytes: dict[tuple[str, Placement], float]
    ) -> Iterator[tuple[Node, dict[str, tuple[TensorInfo, int, bool]]]]:
        times = self.folded.multiplicity(kind)
        offers = self.workbook.facts.offers[kind]
        scope = Scope(kind, segment)
        experts = expert_dims(segment) if self.experts == "widths" else {}
        for i, node in enumerate(segment.parameters):
            info = infos(node)[0]
            choices = tuple(self._parameter_choices(scope(node), info, times, offers, node, (kind, i), experts))
            yield Node(scope.parameter(i), choices), {scope(node): (info, times, False)}
        for i, node in enumerate(segment.prelude):
            name = scope(node)
            yield (
                Node(f"{kind}/prelude:{i}", (Choice("B", gives=((name, B),)),)),
                {name: (infos(node)[0], times, True)},
            )
        for i, node in enumerate(segment.receives):
            info, name = infos(node)[0], scope(node)
            options = self._edge_placements(info, tensor_name(node))
            choices = tuple(Choice(str(p), gives=((name, p),)) for p in options)
            yield Node(scope.receive(i), choices), {name: (info, times, False)}
        for i, node in ops_of(segment):
            legal = [s for s in self.legal[kind][i] if self._is_in_scheme(scope, node, s)]
            choices = tuple(self._op_choice(scope, node, s, times, saved_bytes) for s in legal)
            outputs = dict(zip(output_names(node), infos(node), strict=True))
            yield Node(f"{kind}/{node.name}", choices), {t: (info, times, False) for t, info in outputs.items()}
        results = {self.folded.loss: (B,), **dict.fromkeys(self.folded.sums, (sum_placement(self.ranks),))}
        for i, node in enumerate(segment.sends):
            name = scope(node)
            options = results.get(node) or self._edge_placements(infos(node)[0], tensor_name(node))
            yield Node(scope.send(i), tuple(Choice(str(p), needs=((name, p),)) for p in options)), {}

    def _edge_placements(self, tensor: TensorInfo, name: str) -> tuple[Placement, ...]:
        """Return the placements in which a tensor may cross between segments: never partial values."""
        broadcasts: tuple[Placement, ...] = (B, BP) if tensor.requires_grad else (B,)
        if self.ranks == 1 or not self._may_cut(tensor):
            return broadcasts
        splits = (Split(d) for d, n in enumerate(tensor.shape) if self.sizes.divisible(n, self.ranks))
        return (*broadcasts, *(split for split in splits if self._may_split(name, tensor, split)))

    def _may_split(self, name: str, tensor: TensorInfo, placement: Placement) -> bool:
        """Return whether an activation may have a placement: Megatron-LM splits widths and tokens alone."""
        if not self._as_megatron or not isinstance(placement, Split):
            return True
        return self._is_width(name, placement) or counts_tokens(tensor.shape[placement.dim])

    def _is_width(self, name: str, placement: Placement) -> bool:
        return self.workbook.facts.megatron.widths.get(name) == placement

    def _is_in_scheme(self, scope: Scope, node: fx.Node, strategy: Strategy) -> bool:
        """Return whether a strategy splits what `_may_split` allows; with a width, ops split all that they read."""
        if not self._as_megatron:
            return True
        placed = [*zip(map(scope, operands(node)), self.workbook.ops[node].call.operands, strategy.needs, strict=True)]
        placed += zip(output_names(node), infos(node), strategy.gives, strict=True)
        along = any(self._is_width(name, p) for name, _, p in placed)
        return along or all(name in self._used_in_place or self._may_split(name, t, p) for name, t, p in placed)

    def _parameter_choices(
        self,
        name: str,
        tensor: TensorInfo,
        times: int,
        offers: Mapping[tuple[str, int], frozenset[int]],
        node: fx.Node,
        slot: tuple[str, int],
        experts: Mapping[fx.Node, int],
    ) -> Iterator[Choice]:
        static = times * self.static_bytes / tensor.dtype.itemsize
        splits = [
            Split(dim, groups)
            for dim, size in enumerate(tensor.shape)
            for groups in sorted({1} | offers.get((tensor_name(node), dim), frozenset()))
            if self.ranks > 1
            and slot not in self._whole_slots
            and node not in self._of_own_tokens
            and experts.get(node) != dim
            and self.sizes.divisible(size, self.ranks, groups)
        ]
        whole = not splits or node not in self.workbook.facts.weights or slot in self._pinned_slots
        if whole and not (node in self._of_own_tokens and node in self._experts):
            yield Choice("B", gives=((name, B),), bytes=static * self.nbytes(tensor))
        if whole and tensor.requires_grad and self.ranks > 1:
            sync = self.collective("all_reduce", self.nbytes(tensor)) / self.microbatches
            yield Choice("Bp", gives=((name, BP),), seconds=times * sync, bytes=static * self.nbytes(tensor))
        for split in splits:
            yield Choice(str(split), gives=((name, split),), bytes=static * self.nbytes(tensor, split))

    def allows(self, sharding: Sharding) -> bool:
        """Return whether a sharding for the same ranks and sizes is made of this problem's choices."""
        for kind, decided in sharding.kinds.items():
            segment = self.folded.representatives[kind]
            experts = expert_dims(segment) if self.experts == "widths" else {}
            placed = zip(segment.parameters, decided.parameters, strict=True)
            if any(isinstance(p, Split) and experts.get(node) == p.dim for node, p in placed):
                return False
            if any(strategy not in self.legal[kind][i] for i, strategy in decided.strategies.items()):
                return False
        return True

    def parameter_node(self, name: str) -> Node | None:
        """Return the node of a parameter's placements; None if no op of the graph uses the parameter."""
        names = self.folded.traced.parameters
        for kind, segment in self.folded.representatives.items():
            for i, node in enumerate(segment.parameters):
                if names[node.name] == name:
                    own = Scope(kind, segment).parameter(i)
                    return next(n for n in self.problem.nodes if n.name == own)
        return None

    @cached_property
    def _pinned_slots(self) -> frozenset[tuple[str, int]]:
        """(kind, position) of the parameters with a placement fixed by the user."""
        return frozenset(self._pins_by_slot)

    @cached_property
    def _pins_by_slot(self) -> Mapping[tuple[str, int], tuple[str, str]]:
        """(kind, position) -> the last pattern that matches one of its parameters, and the parameter's name."""
        hits = ((pattern, hit) for pattern in self.pins for hit in self.workbook.facts.hits(pattern))
        return {(kind, i): (pattern, name) for pattern, (kind, i, name) in hits}

    @cached_property
    def _as_megatron(self) -> Mapping[tuple[str, int], ParameterSplit]:
        """The parameters placed as in Megatron-LM, but for those that it pads and experts that tp leaves whole."""
        found = {}
        for (kind, i), (pattern, name) in self._pins_by_slot.items():
            node, theirs = self.folded.representatives[kind].parameters[i], self.pins[pattern] == MEGATRON
            if theirs and not (self.experts == "none" and node in self._experts):
                placed = self.workbook.facts.megatron.parameters[name]
                if placed.divides(self.ranks) or not placed.padded:
                    found[kind, i] = placed
        return found

    @cached_property
    def _of_own_tokens(self) -> frozenset[fx.Node]:
        """Parameters that ops on a rank's own tokens read, possibly through ops on them alone: they stay whole."""
        found = set[fx.Node]()
        for kind, segment in self.folded.representatives.items():
            own = {segment.nodes[i] for i, options in self.legal[kind].items() if any(O in s.needs for s in options)}
            for node in segment.parameters if own else ():
                reached = {node}
                for n in segment.nodes:
                    if n not in own and not is_getitem(n) and reached.issuperset(operands(n)) and operands(n):
                        reached.add(n)
                if any(not own.isdisjoint(n.users) for n in reached):
                    found.add(node)
        return frozenset(found)

    @cached_property
    def _experts(self) -> frozenset[fx.Node]:
        """Parameters of experts, whose gradients are summed over the experts' mesh."""
        segments = self.folded.representatives.values()
        return frozenset(n for s in segments for r in expert_regions(s) for n in r.weights if n in s.parameters)

    @cached_property
    def _used_in_place(self) -> frozenset[str]:
        """The tensors of weights that no rank gathers for use, since Megatron-LM sends activations alone."""
        found: dict[str, None] = {}
        for kind, segment in self.folded.representatives.items():
            scope = Scope(kind, segment)
            split = {n for i, n in enumerate(segment.parameters) if self._is_split_as_megatron(kind, i)}
            for node in segment.nodes if split else ():
                if set(operands(node)) <= split and operands(node):
                    split.add(node)
            found |= dict.fromkeys(map(scope, split))
        return frozenset(found)

    def _is_split_as_megatron(self, kind: str, i: int) -> bool:
        placed = self._as_megatron.get((kind, i))
        return placed is not None and placed.split is not None

    @cached_property
    def _whole_slots(self) -> frozenset[tuple[str, int]]:
        """(kind, position) of the parameters that must stay whole."""
        theirs = (slot for slot, placed in self._as_megatron.items() if placed.split is None)
        return self.workbook.facts.slots(self.whole).union(theirs)

    def _op_choice(
        self,
        scope: Scope,
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
            scope = Scope(segment.kind, segment)
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
        """Return node -> label of the parameters that `pins` fixes. Raises PlanError for an impossible placement."""
        found = {}
        choices = {n.name: [c.label for c in n.choices] for n in nodes}
        for (kind, i), (pattern, name) in self._pins_by_slot.items():
            segment, text = self.folded.representatives[kind], self.pins[pattern]
            mine, where = Scope(kind, segment).parameter(i), f"fix['splits'][{pattern!r}]"
            theirs = self._as_megatron.get((kind, i))
            if text == MEGATRON and (theirs is None or (theirs.split is None and theirs.divides(self.ranks))):
                continue  # free, or among the `whole`
            if theirs is not None and not theirs.divides(self.ranks):
                raise PlanError(
                    f"{name} has {theirs.parts} part{'s' * (theirs.parts > 1)} along the dim that Megatron-LM splits, "
                    f"which tp {self.ranks} does not divide",
                    where=where,
                    fix=f"use a tp that divides {theirs.parts}, or leave splits out",
                )
            try:
                placement = str(parse_placement(text) if theirs is None else theirs)
            except ValueError as error:
                raise PlanError(str(error), where=where) from error
            if placement not in choices[mine]:
                raise PlanError(
                    f"parameter {name} of shape {list(infos(segment.parameters[i])[0].shape)} cannot be placed as "
                    f"{placement} on tp {self.ranks}",
                    where=where,
                    fix=f"possible: {', '.join(choices[mine])}",
                )
            found[mine] = placement
        return found
