"""What the tensor-level search decides, per kind of segment: a strategy for every op, a placement for every edge.

    op          one Strategy (what it needs, what it gives)
    parameter   the placement it is stored in
    receive     the placement in which a segment is given a tensor of an earlier one
    send        the placement in which it hands one on: that of whoever receives it

Conversions are not decided: they follow where the placement given is not the one needed, once per (tensor, placement).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autoptd.cost_models.complaints import brief
from autoptd.errors import PlanFileError, nearest
from autoptd.layout.placements import B, Broadcast, PartialSum, Placement, Split, parse_placement
from autoptd.passes.fold import Folded, Segment
from autoptd.passes.graph import infos, is_getitem, op_call, operands
from autoptd.passes.opcall import Sizes
from autoptd.passes.rules.factors import Strategy, Wired, groups_of, propagate_groups
from autoptd.passes.rules.lookup import rule_for, strategies

_AGAIN = "plan the model again"


@dataclass(frozen=True)
class KindSharding:
    """The decisions for one kind, by position in its segments' tuples (`getitem` nodes have no strategy)."""

    strategies: Mapping[int, Strategy]
    parameters: tuple[Placement, ...]
    receives: tuple[Placement, ...]
    sends: tuple[Placement, ...]


@dataclass(frozen=True)
class Sharding:
    """Decisions for every kind, over `ranks` tensor-parallel ranks. `whole`: where tokens are cut, those before."""

    ranks: int
    kinds: Mapping[str, KindSharding]
    whole: Whole | None = None


@dataclass(frozen=True)
class Whole:
    """Segments at full length, and the decisions for them: what is quadratic in the tokens is seen there."""

    segments: Sequence[Segment]
    kinds: Mapping[str, KindSharding]


def ops_of(segment: Segment) -> Iterator[tuple[int, fx.Node]]:
    """The positions and nodes that have a strategy."""
    return ((i, n) for i, n in enumerate(segment.nodes) if not is_getitem(n))


def tensor_name(node: fx.Node) -> str:
    """`name`, or `name[i]` for the i-th output of an op with several."""
    return f"{node.args[0].name}[{node.args[1]}]" if is_getitem(node) else node.name  # type: ignore[union-attr]


def output_names(node: fx.Node) -> tuple[str, ...]:
    """The tensors that a node makes."""
    if isinstance(node.meta["info"], tuple):
        return tuple(f"{node.name}[{i}]" for i in range(len(infos(node))))
    return (node.name,)


def expand_kind(segment: Segment, ranks: int, sizes: Sizes) -> dict[int, list[Strategy]]:
    """Every legal strategy of every op of a segment, in a fixed order."""
    wired = {i: wire(n) for i, n in ops_of(segment)}
    offered = propagate_groups(list(wired.values()))
    return {
        i: strategies(w.call, ranks, sizes, groups_of(w, offered), {w.call.target: w.rule} if w.rule else {})
        for i, w in wired.items()
    }


def group_offers(segment: Segment) -> Mapping[tuple[str, int], frozenset[int]]:
    """Group counts worth offering per (tensor, dim) of a segment."""
    return propagate_groups([wire(n) for _, n in ops_of(segment)])


def wire(node: fx.Node) -> Wired:
    """A node with its rule and the names of its tensors."""
    call = op_call(node)
    return Wired(call, rule_for(call), (*map(tensor_name, operands(node)), *output_names(node)))


class Contradiction(ValueError):
    """A tensor that is to be received in several placements, which is impossible: it is sent once."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(what)
        self.kind = kind


def sends_of(folded: Folded, receives: Mapping[str, tuple[Placement, ...]]) -> dict[str, tuple[Placement, ...]]:
    """Each kind's sends, from the placements in which later kinds receive them; the loss is Broadcast.

    Raises Contradiction.
    """
    wanted: dict[fx.Node, Placement] = {folded.loss: B}
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
            raise Contradiction(segment.kind, f"what segments of this kind send is received as {several}")
    return found


# Text form, as plans hold it.


def to_text(folded: Folded, sharding: Sharding) -> tuple[dict[str, dict[str, str]], dict[str, list[str]]]:
    """(strategies by kind and node of its first segment, placements of what each kind receives)."""
    chosen: dict[str, dict[str, str]] = {}
    boundaries: dict[str, list[str]] = {}
    for kind, decided in sharding.kinds.items():
        nodes = folded.representatives[kind].nodes
        chosen[kind] = {nodes[i].name: str(s) for i, s in decided.strategies.items()}
        boundaries[kind] = [str(p) for p in decided.receives]
    return chosen, boundaries


def parameter_splits(folded: Folded, sharding: Sharding) -> dict[str, str]:
    """Placement of every parameter by its original name; a parameter that nothing reads is whole everywhere."""
    names = folded.traced.parameters
    found = {names[n.name]: "B" for n in folded.unused_parameters}
    for segment in folded.segments:
        for node, placement in zip(segment.parameters, sharding.kinds[segment.kind].parameters, strict=True):
            found[names[node.name]] = str(placement)
    return found


def activation_splits(folded: Folded, sharding: Sharding) -> dict[str, str]:
    """Placement in which each op of each kind's first segment gives its result, by kind and node."""
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
    """Read decisions back. Raises PlanFileError with the field's path where they do not suit the graph."""
    receives = {}
    for kind in folded.representatives:
        if kind not in chosen or kind not in boundaries:
            field = "strategies" if kind not in chosen else "boundaries"
            raise PlanFileError(f"{field} lacks {kind!r}", where=field, fix=_AGAIN)
        receives[kind] = tuple(map(parse_placement, boundaries[kind]))
        if len(receives[kind]) != len(folded.representatives[kind].receives):
            raise PlanFileError(
                f"{len(receives[kind])} placements for {len(folded.representatives[kind].receives)} tensors",
                where=f"boundaries[{kind!r}]",
                fix=_AGAIN,
            )
    _check_places(folded, ranks, sizes, boundaries, parameters)
    try:
        sends = sends_of(folded, receives)
    except Contradiction as error:
        raise PlanFileError(str(error), where=f"boundaries[{error.kind!r}]", fix=_AGAIN) from error
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
    """Refuse placements in which a parameter or a received tensor cannot lie. Raises PlanFileError."""
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
    shape, held = infos(node)[0].shape, node.op == "placeholder"
    match parse_placement(text):
        case Split(dim, groups):
            possible = dim < len(shape) and sizes.divisible(shape[dim], ranks, groups)
        case PartialSum():
            possible = not held  # what a parameter is kept as, it is trained as
        case Broadcast():
            possible = True
    if not possible:
        lies = f"a tensor of shape [{', '.join(map(str, shape))}] cannot be placed as {text} on tp {ranks}"
        raise PlanFileError(lies, where=where, fix=_AGAIN)


def _read_strategies(
    segment: Segment, kind: str, ranks: int, sizes: Sizes, chosen: Mapping[str, str]
) -> dict[int, Strategy]:
    found = {}
    legal = expand_kind(segment, ranks, sizes)
    for i, options in legal.items():
        name = segment.nodes[i].name
        text = _field(chosen, name, f"strategies[{kind!r}]")
        by_text = {str(s): s for s in options}
        if text not in by_text:
            raise PlanFileError(
                f"{brief(repr(text))} is no legal strategy of {name}",
                where=f"strategies[{kind!r}][{name!r}]",
                fix=nearest(text, by_text),
            )
        found[i] = by_text[text]
    return found


def _field(values: Mapping[str, str], name: str, field: str) -> str:
    if name not in values:
        raise PlanFileError(f"{field} lacks {name!r}", where=field, fix=_AGAIN)
    return values[name]
