"""Decisions of the tensor-level search per kind of segment: a strategy for every op, a placement for every edge.

    op          its Strategy: the placements that it needs and those that it gives
    parameter   the placement in which it is stored
    receive     the placement in which a segment receives a tensor of an earlier one
    send        the placement in which it sends one: that in which later segments receive it

Conversions follow from these: one per (tensor, placement), wherever the given placement differs from the needed one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from autoptd.cost_models.complaints import brief
from autoptd.errors import PlanFileError, nearest
from autoptd.layout.placements import B, Broadcast, O, OwnRows, P, PartialSum, Placement, Split, parse_placement
from autoptd.passes.fold import Folded, Segment
from autoptd.passes.graph import infos, is_getitem, operands
from autoptd.passes.opcall import Sizes
from autoptd.passes.rules.factors import Strategy, Wired, expand, groups_of, propagate_groups
from autoptd.passes.rules.lookup import op_of
from autoptd.passes.sharding.context_parallel import own_token_strategies

_REPLAN = "plan the model again"


@dataclass(frozen=True)
class KindSharding:
    """The decisions for one kind, by position in its segments' tuples (`getitem` nodes have no strategy)."""

    strategies: Mapping[int, Strategy]
    parameters: tuple[Placement, ...]
    receives: tuple[Placement, ...]
    sends: tuple[Placement, ...]

    @cached_property
    def text(self) -> str:
        """A text that is equal for equal decisions."""
        placed = (" ".join(map(str, each)) for each in (self.parameters, self.receives, self.sends))
        return "; ".join([*map(str, self.strategies.values()), *placed])


@dataclass(frozen=True)
class Sharding:
    """Decisions for every kind, over `ranks` tp ranks. `whole`: under cp and ep, those before tokens and experts were
    split."""

    ranks: int
    kinds: Mapping[str, KindSharding]
    whole: Whole | None = None


@dataclass(frozen=True)
class Whole:
    """Segments at full sequence length and their decisions, which show the tensors quadratic in the tokens."""

    segments: Sequence[Segment]
    kinds: Mapping[str, KindSharding]


def ops_of(segment: Segment) -> Iterator[tuple[int, fx.Node]]:
    """Return the positions and nodes that have a strategy."""
    return ((i, n) for i, n in enumerate(segment.nodes) if not is_getitem(n))


def tensor_name(node: fx.Node) -> str:
    """Return `name`, or `name[i]` for the i-th output of an op with several."""
    return f"{node.args[0].name}[{node.args[1]}]" if is_getitem(node) else node.name  # type: ignore[union-attr]


def output_names(node: fx.Node) -> tuple[str, ...]:
    """Return the names of a node's output tensors."""
    if isinstance(node.meta["info"], tuple):
        return tuple(f"{node.name}[{i}]" for i in range(len(infos(node))))
    return (node.name,)


def expand_kind(
    segment: Segment, ranks: int, sizes: Sizes, offered: Mapping[tuple[str, int], frozenset[int]] | None = None
) -> dict[int, list[Strategy]]:
    """Return every legal strategy of every op of a segment, in a fixed order.

    `offered`: its `group_offers`, where they are known: they depend on neither ranks nor sizes.
    """
    wired = {i: wire(n) for i, n in ops_of(segment)}
    offered = propagate_groups(list(wired.values())) if offered is None else offered
    return {i: expand(w.op, ranks, sizes, groups_of(w, offered)) for i, w in wired.items()}


def group_offers(segment: Segment) -> Mapping[tuple[str, int], frozenset[int]]:
    """Return the group counts to offer per (tensor, dim) of a segment."""
    return propagate_groups([wire(n) for _, n in ops_of(segment)])


def wire(node: fx.Node) -> Wired:
    """Return a node's op with the names of its tensors."""
    return Wired(op_of(node), (*map(tensor_name, operands(node)), *output_names(node)))


class Contradiction(ValueError):
    """Error for a tensor received in several placements, which is impossible because it is sent once."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(what)
        self.kind = kind


def sum_placement(ranks: int) -> Placement:
    """Return the placement in which a stage returns sums for buffers: they are added up over all ranks anyway."""
    return P if ranks > 1 else B


def sends_of(
    folded: Folded, ranks: int, receives: Mapping[str, tuple[Placement, ...]]
) -> dict[str, tuple[Placement, ...]]:
    """Return each kind's send placements, those in which later kinds receive; the loss is Broadcast, sums are partial.

    Raises Contradiction.
    """
    wanted: dict[fx.Node, Placement] = {folded.loss: B, **dict.fromkeys(folded.sums, sum_placement(ranks))}
    for segment in folded.segments:
        for node, placement in zip(segment.receives, receives[segment.kind], strict=True):
            known = wanted.setdefault(node, placement)
            if known != placement:
                raise Contradiction(segment.kind, f"{node.name} is received as {known} and as {placement}")
    found: dict[str, tuple[Placement, ...]] = {}
    for segment in folded.segments:
        sends = tuple(wanted.get(n, B) for n in segment.sends)
        if (before := found.setdefault(segment.kind, sends)) != sends:
            several = f"{' '.join(map(str, before))} and as {' '.join(map(str, sends))}"
            raise Contradiction(segment.kind, f"tensors sent by segments of this kind are received as {several}")
    return found


# Text form in plan files.


def to_text(folded: Folded, sharding: Sharding) -> tuple[dict[str, dict[str, str]], dict[str, list[str]]]:
    """Return (strategies by kind and node of its first segment, placements in which each kind receives)."""
    chosen: dict[str, dict[str, str]] = {}
    boundaries: dict[str, list[str]] = {}
    for kind, decided in sharding.kinds.items():
        nodes = folded.representatives[kind].nodes
        chosen[kind] = {nodes[i].name: str(s) for i, s in decided.strategies.items()}
        boundaries[kind] = [str(p) for p in decided.receives]
    return chosen, boundaries


def parameter_splits(folded: Folded, sharding: Sharding) -> dict[str, str]:
    """Return every parameter's placement by its original name; a parameter that no op reads is replicated."""
    names = folded.traced.parameters
    found = {names[n.name]: "B" for n in folded.unused_parameters}
    for segment in folded.segments:
        for node, placement in zip(segment.parameters, sharding.kinds[segment.kind].parameters, strict=True):
            found[names[node.name]] = str(placement)
    return found


def activation_splits(folded: Folded, sharding: Sharding) -> dict[str, str]:
    """Return the placement of each op's results in each kind's first segment, by `kind/tensor`."""
    found = {}
    for kind, decided in sharding.kinds.items():
        nodes = folded.representatives[kind].nodes
        for i, strategy in decided.strategies.items():
            for name, placement in zip(output_names(nodes[i]), strategy.gives, strict=True):
                found[f"{kind}/{name}"] = str(placement)
    return found


def from_text(
    folded: Folded,
    ranks: int,
    sizes: Sizes,
    chosen: Mapping[str, Mapping[str, str]],
    boundaries: Mapping[str, list[str]],
    parameters: Mapping[str, str],
) -> Sharding:
    """Read decisions back from text. Raises PlanFileError with the field's path if they do not fit the graph."""
    receives = {}
    for kind in folded.representatives:
        if kind not in chosen or kind not in boundaries:
            field = "strategies" if kind not in chosen else "boundaries"
            raise PlanFileError(f"{field} lacks {kind!r}", where=field, fix=_REPLAN)
        receives[kind] = tuple(map(parse_placement, boundaries[kind]))
        if len(receives[kind]) != len(folded.representatives[kind].receives):
            raise PlanFileError(
                f"{len(receives[kind])} placements for {len(folded.representatives[kind].receives)} tensors",
                where=f"boundaries[{kind!r}]",
                fix=_REPLAN,
            )
    _check_places(folded, ranks, sizes, boundaries, parameters)
    try:
        sends = sends_of(folded, ranks, receives)
    except Contradiction as error:
        raise PlanFileError(str(error), where=f"boundaries[{error.kind!r}]", fix=_REPLAN) from error
    kinds = {}
    for kind, segment in folded.representatives.items():
        kinds[kind] = KindSharding(
            strategies=_read_strategies(segment, kind, ranks, sizes, chosen[kind]),
            parameters=tuple(parse_placement(parameters[folded.traced.parameters[n.name]]) for n in segment.parameters),
            receives=receives[kind],
            sends=sends[kind],
        )
    return Sharding(ranks, kinds)


def _check_places(
    folded: Folded, ranks: int, sizes: Sizes, boundaries: Mapping[str, list[str]], parameters: Mapping[str, str]
) -> None:
    """Raise PlanFileError if a parameter or a received tensor cannot have its placement."""
    for segment in folded.segments:
        for node in segment.parameters:
            name = folded.traced.parameters[node.name]
            _check_place(
                node, _field(parameters, name, "splits.parameters"), ranks, sizes, f"splits.parameters[{name!r}]"
            )
    for kind, segment in folded.representatives.items():
        for i, (node, text) in enumerate(zip(segment.receives, boundaries[kind], strict=True)):
            _check_place(node, text, ranks, sizes, f"boundaries[{kind!r}][{i}]")


def _check_place(node: fx.Node, text: str, ranks: int, sizes: Sizes, where: str) -> None:
    shape, is_parameter = infos(node)[0].shape, node.op == "placeholder"
    match parse_placement(text):
        case Split(dim, groups):
            possible = dim < len(shape) and sizes.divisible(shape[dim], ranks, groups)
        case PartialSum():
            possible = not is_parameter  # the optimizer updates the stored values
        case Broadcast():
            possible = True
        case OwnRows():
            possible = False  # segments begin and end with tokens in order
    if not possible:
        what = f"a tensor of shape [{', '.join(map(str, shape))}] cannot be placed as {text} on tp {ranks}"
        raise PlanFileError(what, where=where, fix=_REPLAN)


def _read_strategies(
    segment: Segment, kind: str, ranks: int, sizes: Sizes, chosen: Mapping[str, str]
) -> dict[int, Strategy]:
    found = {}
    legal = expand_kind(segment, ranks, sizes)
    if any(re.search(rf"\b{O}\b", text) for text in chosen.values()):
        own = own_token_strategies(segment, ranks, sizes)
        legal = {i: [*options, *([own[n]] if (n := segment.nodes[i]) in own else [])] for i, options in legal.items()}
    for i, options in legal.items():
        name = segment.nodes[i].name
        text = _field(chosen, name, f"strategies[{kind!r}]")
        by_text = {str(s): s for s in options}
        if text not in by_text:
            raise PlanFileError(
                f"{brief(repr(text))} is not a legal strategy of {name}",
                where=f"strategies[{kind!r}][{name!r}]",
                fix=nearest(text, by_text),
            )
        found[i] = by_text[text]
    return found


def _field(values: Mapping[str, str], name: str, field: str) -> str:
    if name not in values:
        raise PlanFileError(f"{field} lacks {name!r}", where=field, fix=_REPLAN)
    return values[name]
