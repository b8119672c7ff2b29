"""Cut the graph where little is live, and find the pieces that repeat.

    prelude    cheap nodes without gradient, computed from inputs alone: recomputed wherever they are needed, never sent
    main       everything else, in program order
    segment    a stretch of main between two narrow places; the smallest piece a stage may consist of
    kind       segments that are the same up to parameter names: same ops, arguments, shapes and wiring
    unit       a run of kinds that repeats, such as (attention, MLP) × 32

A place is narrow when no fewer tensors cross any place near it. Equality of segments is read off the graph; names of
modules play no part in it. One representative of each kind is planned, whatever the depth.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
from torch import fx

from autoptd.passes.graph import ancestors, infos, is_getitem, operands, substitute
from autoptd.passes.losses.loss_form import LossForm, is_count, loss_form
from autoptd.passes.segment_names import base, common_prefix, name_kinds, segment_name
from autoptd.passes.signature import Unquoted, shapes_text, signature_of, structures
from autoptd.passes.trace.traced import Traced

_NEAR = 24  # nodes on each side that a narrow place is compared with
_HEAVY = [
    "linear",
    "matmul",
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "einsum",
    "conv1d",
    "conv2d",
    "conv3d",
    "convolution",
    "scaled_dot_product_attention",
]


@dataclass(frozen=True)
class Segment:
    """A stretch of main.

    `parameters`, `prelude` and `receives` are the outside nodes it reads, in order of first use; `sends` the nodes of
    its own that later segments read (or that the loss is). Position i of each means the same in all segments of a kind.
    """

    index: int
    kind: str
    name: str
    nodes: tuple[fx.Node, ...]
    parameters: tuple[fx.Node, ...]
    prelude: tuple[fx.Node, ...]
    receives: tuple[fx.Node, ...]
    sends: tuple[fx.Node, ...]


@dataclass(frozen=True)
class RepeatedUnit:
    """`count` repetitions of `length` segments, from segment `first`."""

    first: int
    length: int
    count: int

    @property
    def last(self) -> int:
        return self.first + self.length * self.count - 1


@dataclass(frozen=True)
class Cut:
    """How a sequence is cut over `ranks`, in a graph of one of them; `tokens` is the size of its part."""

    ranks: int
    zigzag: bool
    tokens: sympy.Symbol


@dataclass
class Folded:
    """The normalised graph, cut into segments. `cut`: of a graph that is that of one cp rank."""

    traced: Traced
    prelude: tuple[fx.Node, ...]
    segments: tuple[Segment, ...]
    units: tuple[RepeatedUnit, ...]
    loss: fx.Node
    counts: tuple[fx.Node, ...]
    unused_parameters: tuple[fx.Node, ...]
    cut: Cut | None = None
    representatives: dict[str, Segment] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for segment in self.segments:
            self.representatives.setdefault(segment.kind, segment)

    @property
    def loss_form(self) -> LossForm:
        """What the loss is, of the counts and sums of a batch."""
        return loss_form(self.traced.graph)

    def multiplicity(self, kind: str) -> int:
        return sum(s.kind == kind for s in self.segments)


def fold(traced: Traced) -> Folded:
    """Split a normalised graph into prelude and segments, name the kinds and find the units."""
    graph = traced.graph.graph
    output = next(n for n in graph.nodes if n.op == "output")
    loss, *counts = output.args
    prelude = find_prelude(graph, traced)
    main = [n for n in graph.nodes if n.op == "call_function" and n not in prelude]
    pieces = _cut(main, traced)
    known = structures(n for n in graph.nodes if n in prelude)
    pieces = _place_idle(pieces, [s.kind for s in _segments(pieces, traced, known, loss)], traced)
    segments = _segments(pieces, traced, known, loss)
    used = {traced.parameters[p.name] for s in segments for p in s.parameters}
    return Folded(
        traced=traced,
        prelude=tuple(n for n in graph.nodes if n in prelude and n.op == "call_function"),
        segments=segments,
        units=_aligned(list(find_units(_wired(segments))), _wired(segments), segments, traced),
        loss=loss,
        counts=tuple(counts),
        unused_parameters=tuple(
            n for n in graph.nodes if n.op == "placeholder" and traced.parameters.get(n.name, "") not in {*used, ""}
        ),
    )


def find_prelude(graph: fx.Graph, traced: Traced) -> set[fx.Node]:
    """Inputs, buffers, constants, and what is computed from them without gradient and without heavy work."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" and node.name not in traced.parameters:
            found.add(node)
        elif node.op == "call_function" and all(n in found for n in node.all_input_nodes):
            name = getattr(getattr(node.target, "_schema", None), "name", "::").split("::")[1]
            if name not in _HEAVY and not any(t.requires_grad for t in infos(node)):
                found.add(node)
    return found


def owner(node: fx.Node) -> fx.Node:
    """The node that computes a tensor: a `getitem` belongs to the op whose output it picks."""
    return node.args[0] if is_getitem(node) else node  # type: ignore[return-value]


def _cut(main: list[fx.Node], traced: Traced) -> list[list[fx.Node]]:
    position = {n: i for i, n in enumerate(main)}
    last_use = [max((position[u] for u in n.users if u in position), default=i) for i, n in enumerate(main)]
    delta = [0] * (len(main) + 2)
    for i, last in enumerate(last_use):
        if is_getitem(main[i]) or not any(is_getitem(u) for u in main[i].users):
            delta[i + 1] += 1  # live at the places i+1 … last
            delta[last + 1] -= 1
    crossing = list(itertools.accumulate(delta[: len(main) + 1]))
    for i, node in enumerate(main):  # an op and the pickers of its outputs stay together
        if is_getitem(node):
            crossing[i] = len(main)
    pieces: list[list[fx.Node]] = [[]]
    places: list[int] = []  # narrow places since the piece began to work
    for i, node in enumerate(main):
        near = [x for x in crossing[max(1, i - _NEAR) : i + _NEAR + 1] if x > 0]
        if i > 0 and crossing[i] == min(near, default=0) and any(_works(n, traced) for n in pieces[-1]):
            places.append(len(pieces[-1]))
        if places and _works(node, traced):
            whole = pieces.pop()
            first, last = places[0], places[-1]
            pieces += [p for p in (whole[:first], whole[first:last]) if p] + [whole[last:]]
            places = []
        pieces[-1].append(node)
    if places:
        whole = pieces.pop()
        pieces += [whole[: places[0]], whole[places[0] :]]
    return pieces


def _place_idle(pieces: list[list[fx.Node]], kinds: list[str], traced: Traced) -> list[list[fx.Node]]:
    """Join each piece that does no work of its own to a neighbour: to the one before, unless that would set it apart
    from others of its kind and the one behind is alone anyway. A loss without weights after equal blocks stays apart.
    """
    repeats = Counter(kinds)
    found: list[list[fx.Node]] = []
    joined = False  # whether the piece before waits for this one
    for i, piece in enumerate(pieces):
        idle = not any(_works(n, traced) for n in piece)
        if joined:
            found[-1].extend(piece)
        elif idle and found:
            behind = repeats[kinds[i + 1]] if i + 1 < len(pieces) else 1
            if repeats[kinds[i - 1]] > 1 and behind == 1:
                found.append(list(piece))
                joined = True
                continue
            found[-1].extend(piece)
        else:
            found.append(list(piece))
        joined = False
    return found


def _works(node: fx.Node, traced: Traced) -> bool:
    """Whether a node reads a parameter or does heavy work."""
    return base(node) in _HEAVY or any(p.name in traced.parameters for p in node.all_input_nodes)


def _segments(
    pieces: list[list[fx.Node]], traced: Traced, prelude: Mapping[fx.Node, str], loss: fx.Node
) -> tuple[Segment, ...]:
    """`prelude`: node -> its structure."""
    signatures: list[str] = []
    segments = []
    for index, nodes in enumerate(pieces):
        inside = set(nodes)
        reads = list(dict.fromkeys(o for n in nodes for o in operands(n) if o not in inside))
        parameters = tuple(n for n in reads if n.op == "placeholder" and n.name in traced.parameters)
        outside = tuple(n for n in reads if n in prelude)
        receives = tuple(n for n in reads if n not in prelude and n not in parameters)
        sends = tuple(n for n in nodes if n is loss or any(u not in inside and u.op != "output" for u in n.users))
        signature = signature_of(nodes, parameters, outside, receives, sends, prelude)
        signatures.append(signature)
        segments.append(Segment(index, "", segment_name(nodes), tuple(nodes), parameters, outside, receives, sends))
    kinds = name_kinds(signatures, [s.name for s in segments])
    return tuple(replace(s, kind=kinds[signature]) for s, signature in zip(segments, signatures, strict=True))


def _wired(segments: tuple[Segment, ...]) -> list[str]:
    """Kinds with where each segment receives from: how many segments back, or which one if many receive it."""
    source = {n: (s.index, i) for s in segments for i, n in enumerate(s.sends)}
    readers = Counter(n for s in segments for n in s.receives)
    texts = []
    for segment in segments:
        wires = []
        for node in segment.receives:
            index, position = source[node]
            wires.append(f"{index}!{position}" if readers[node] > 2 else f"{segment.index - index}:{position}")
        texts.append(f"{segment.kind} {' '.join(wires)}")
    return texts


def find_units(kinds: list[str]) -> Iterator[RepeatedUnit]:
    """Greedily take, at each place, the repetition that covers most; the shortest period among equals.

    >>> list(find_units(list("eamamamh")))
    [RepeatedUnit(first=0, length=1, count=1), RepeatedUnit(first=1, length=2, count=3),
     RepeatedUnit(first=7, length=1, count=1)]
    """
    at = 0
    while at < len(kinds):
        best = RepeatedUnit(at, 1, 1)
        for length in range(1, (len(kinds) - at) // 2 + 1):
            count = 1
            while kinds[at + count * length : at + (count + 1) * length] == kinds[at : at + length]:
                count += 1
            if count > 1 and length * count > best.length * best.count:
                best = RepeatedUnit(at, length, count)
        yield best
        at = best.last + 1


def _aligned(
    units: list[RepeatedUnit], kinds: list[str], segments: tuple[Segment, ...], traced: Traced
) -> tuple[RepeatedUnit, ...]:
    """Where a repetition may as well begin a few segments later, begin it where its parameters' names repeat too.

    (norm, attention, norm, MLP) × 12 that starts with the embedding's norm is (attention, norm, MLP, norm) × 12 from
    the next segment on, and then every repetition is one module of the user's.
    """
    found: list[RepeatedUnit] = []
    at = 0
    for unit in units:
        if unit.last < at:
            continue
        unit = RepeatedUnit(max(at, unit.first), unit.length, unit.count) if unit.count == 1 else unit
        shifts = [0]
        while (
            unit.count > 1
            and len(shifts) < unit.length
            and kinds[unit.last + len(shifts) : unit.last + len(shifts) + 1] == [kinds[unit.first + len(shifts) - 1]]
        ):
            shifts.append(len(shifts))
        shift = next((k for k in shifts if _names_repeat(unit, k, segments, traced)), 0)
        found += [RepeatedUnit(unit.first + k, 1, 1) for k in range(shift)]
        found.append(RepeatedUnit(unit.first + shift, unit.length, unit.count))
        at = found[-1].last + 1
    return tuple(found)


def _names_repeat(unit: RepeatedUnit, shift: int, segments: tuple[Segment, ...], traced: Traced) -> bool:
    """Whether the parameter names of all repetitions differ by a number in one place only."""
    patterns = set()
    for k in range(unit.count):
        start = unit.first + shift + k * unit.length
        names = [traced.parameters[p.name] for s in segments[start : start + unit.length] for p in s.parameters]
        paths = [n.split(".") for n in names]
        patterns.add(tuple(n[len(".".join(common_prefix(paths))) :] for n in names) if names else ())
    return len(patterns) == 1


def graph_hash(traced: Traced) -> str:
    """sha256 of the normalised graph: ops, arguments, shapes, wiring and parameter names; its loss's form as well."""
    form = loss_form(traced.graph)
    lines = _hashed(traced, traced.graph.graph)
    if form.outer is not None:
        lines += ["outer", *_hashed(traced, form.outer)]
    if set(form.combines) - {"sum"} or form.notes:
        lines += [f"counts {form.combines}", *form.notes]
    return "sha256:" + hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _hashed(traced: Traced, graph: fx.Graph) -> list[str]:
    lines = []
    names: dict[fx.Node, str] = {}
    for i, node in enumerate(graph.nodes):
        names[node] = f"%{i}"
        if node.op == "placeholder":
            source = traced.parameters.get(node.name) or traced.buffers.get(node.name) or traced.inputs.get(node.name)
            lines.append(f"%{i} {source or node.name.split('_')[0]} {shapes_text(node)}")
        else:
            args: Any = substitute(node.args, lambda n: Unquoted(names[n]))
            kwargs = {k: substitute(v, lambda n: Unquoted(names[n])) for k, v in node.kwargs.items()}
            lines.append(f"%{i} {base(node)} {args} {kwargs} {shapes_text(node) if node.op != 'output' else ''}")
    return lines


def needed_prelude(folded: Folded, segments: Iterable[Segment]) -> list[fx.Node]:
    """The prelude nodes that these segments read and what those are computed from, inputs and buffers included, in
    program order."""
    wanted = ancestors(n for s in segments for n in s.prelude)
    return [n for n in folded.traced.graph.graph.nodes if n in wanted]


def reads_counts(folded: Folded, first: int, last: int) -> bool:
    """Whether a stage of these segments is given the counts of the batch: any that reads one, and the last."""
    segments = folded.segments[first : last + 1]
    return last == len(folded.segments) - 1 or any(map(is_count, needed_prelude(folded, segments)))


def held_tensors(folded: Folded, first: int, last: int) -> list[fx.Node]:
    """Buffers and constants, as placeholders, that a stage reads in its segments, for its counts and for its loss."""
    wanted = set(needed_prelude(folded, folded.segments[first : last + 1]))
    if reads_counts(folded, first, last):
        wanted |= ancestors(folded.counts)
    names = {n.name for n in wanted if n.op == "placeholder"}
    if last == len(folded.segments) - 1 and folded.loss_form.outer is not None:
        names |= {n.name for n in folded.loss_form.outer.nodes if n.op == "placeholder"}
    traced = folded.traced
    known = {*traced.inputs, *traced.parameters}
    graph = traced.graph.graph.nodes
    return [n for n in graph if n.op == "placeholder" and n.name in names - known and not is_count(n)]


def crossing(folded: Folded, place: int) -> list[fx.Node]:
    """The tensors alive between segment `place - 1` and segment `place`: read at or after it, made before it."""
    return [
        n
        for s in folded.segments[:place]
        for n in s.sends
        if any(n in later.receives for later in folded.segments[place:])
    ]
