"""Graph partitioning: cut the graph where few tensors are live, and find the pieces that repeat.

    prelude    cheap nodes without gradient, computed from inputs alone: recomputed wherever they are needed, never sent
    main       everything else, in program order
               (draws of random numbers are in main: their place in a segment keys them)
    segment    a run of main nodes between two narrow cuts; the smallest piece that a stage may consist of
    kind       segments that are equal up to parameter names: same ops, arguments, shapes and wiring
    unit       a sequence of kinds that repeats, such as (attention, MLP) × 32

Cuts are chosen in `cuts.py`. Whether segments are equal is decided from the graph, not
from module names. One representative of each kind is planned, whatever the depth of the model.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
from torch import fx

from autoptd.passes.cuts import HEAVY, end_with, merge_light, narrow_pieces
from autoptd.passes.graph import ancestors, infos, is_getitem, op_name, operands, output_of, substitute
from autoptd.passes.losses.loss_form import LossForm, loss_form, loss_node
from autoptd.passes.losses.statistics_form import BatchStatistics, batch_statistics
from autoptd.passes.losses.update_form import BufferUpdates, buffer_updates, sums_of
from autoptd.passes.opcall import is_random
from autoptd.passes.segment_names import common_prefix, name_kinds, segment_name
from autoptd.passes.signature import Unquoted, shapes_text, signature_of, structures
from autoptd.passes.trace.traced import Traced


@dataclass(frozen=True)
class Segment:
    """A run of consecutive main nodes.

    `parameters`, `prelude` and `receives` are the outside nodes that it reads, in order of first use. `sends` are its
    own nodes that later segments read, the loss, and sums over samples for buffers. Position i of each corresponds
    across all segments of a kind.
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
    """`count` repetitions of `length` segments each, starting at segment `first`."""

    first: int
    length: int
    count: int

    @property
    def last(self) -> int:
        return self.first + self.length * self.count - 1


@dataclass(frozen=True)
class Cut:
    """The split of a sequence over `ranks` cp ranks; `tokens` is the size of a rank's part in that rank's graph."""

    ranks: int
    zigzag: bool
    tokens: sympy.Symbol


@dataclass
class Folded:
    """The normalised graph, cut into segments. `cut` is set in the graph of a cp rank, `ep` in that of an ep rank."""

    traced: Traced
    prelude: tuple[fx.Node, ...]
    segments: tuple[Segment, ...]
    units: tuple[RepeatedUnit, ...]
    loss: fx.Node
    counts: tuple[fx.Node, ...]
    unused_parameters: tuple[fx.Node, ...]
    sums: tuple[fx.Node, ...] = ()  # over samples, that new values of buffers are computed from
    cut: Cut | None = None
    ep: int = 1
    representatives: dict[str, Segment] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for segment in self.segments:
            self.representatives.setdefault(segment.kind, segment)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes besides tp that this graph's ops communicate over: of "cp", "ep" and "dp"."""
        over_dp = self.traced.averaging == "per-microbatch-over-dp" or self.statistics.over_dp
        used = {"cp": self.cut is not None, "ep": self.ep > 1, "dp": over_dp}
        return tuple(axis for axis, is_used in used.items() if is_used)

    @property
    def loss_form(self) -> LossForm:
        """The loss as a function of the counts and sums over a batch."""
        return loss_form(self.traced.graph)

    @property
    def results(self) -> frozenset[fx.Node]:
        """The nodes that are added up over microbatches: the loss, or its partial sums, and `sums`."""
        return frozenset((self.loss, *self.sums))

    @property
    def updates(self) -> BufferUpdates:
        """The buffers that a step updates."""
        return buffer_updates(self.traced.graph)

    @property
    def statistics(self) -> BatchStatistics:
        """The sums over the batch that samples read within forward."""
        return batch_statistics(self.traced.graph)

    def multiplicity(self, kind: str) -> int:
        return sum(s.kind == kind for s in self.segments)


def fold(traced: Traced) -> Folded:
    """Split a normalised graph into prelude and segments, name the kinds and find the units."""
    graph = traced.graph.graph
    output: Any = output_of(graph)
    loss, *counts = output.args
    sums = sums_of(graph)
    results = {loss, *sums}
    prelude = find_prelude(graph, traced)
    main = [n for n in graph.nodes if n.op == "call_function" and n not in prelude]
    pieces = narrow_pieces(main, traced)
    known = structures(n for n in graph.nodes if n in prelude)
    pieces = merge_light(pieces, [s.kind for s in _segments(pieces, traced, known, results)], traced)
    pieces = end_with(pieces, loss)
    segments = _segments(pieces, traced, known, results)
    used = {traced.parameters[p.name] for s in segments for p in s.parameters}
    return Folded(
        traced=traced,
        prelude=tuple(n for n in graph.nodes if n in prelude and n.op == "call_function"),
        segments=segments,
        units=_aligned(list(find_units(wired(segments))), wired(segments), segments, traced),
        loss=loss,
        counts=tuple(counts),
        sums=sums,
        unused_parameters=tuple(
            n for n in graph.nodes if n.op == "placeholder" and traced.parameters.get(n.name, "") not in {*used, ""}
        ),
    )


def find_prelude(graph: fx.Graph, traced: Traced) -> set[fx.Node]:
    """Return inputs, buffers, constants, and the nodes computed from them without gradient or heavy work.

    Heavy work that counts alone need is done before the forward pass, not in a segment.
    """
    found, results = set[fx.Node](), {loss_node(graph), *sums_of(graph)}  # which may be computed from inputs alone
    needed = ancestors(results)
    for node in graph.nodes:
        if node.op == "placeholder" and node.name not in traced.parameters:
            found.add(node)
        elif node.op == "call_function" and is_random(node.target):
            continue  # keyed by its place in a segment
        elif node.op == "call_function" and node not in results and all(n in found for n in node.all_input_nodes):
            name = getattr(getattr(node.target, "_schema", None), "name", "::").split("::")[1]
            if (name not in HEAVY or node not in needed) and not any(t.requires_grad for t in infos(node)):
                found.add(node)
    return found


def owner(node: fx.Node) -> fx.Node:
    """Return the node that computes a tensor: for a `getitem`, the op whose output it picks."""
    return node.args[0] if is_getitem(node) else node  # type: ignore[return-value]


def _segments(
    pieces: list[list[fx.Node]], traced: Traced, prelude: Mapping[fx.Node, str], results: Collection[fx.Node]
) -> tuple[Segment, ...]:
    """Return the segments of the pieces, with their kinds. `prelude`: node -> its structure."""
    signatures: list[str] = []
    segments = []
    for index, nodes in enumerate(pieces):
        inside = set(nodes)
        reads = list(dict.fromkeys(o for n in nodes for o in operands(n) if o not in inside))
        parameters = tuple(n for n in reads if n.op == "placeholder" and n.name in traced.parameters)
        outside = tuple(n for n in reads if n in prelude)
        receives = tuple(n for n in reads if n not in prelude and n not in parameters)
        sends = tuple(n for n in nodes if n in results or any(u not in inside and u.op != "output" for u in n.users))
        signature = signature_of(nodes, parameters, outside, receives, sends, prelude)
        signatures.append(signature)
        segments.append(Segment(index, "", segment_name(nodes), tuple(nodes), parameters, outside, receives, sends))
    kinds = name_kinds(signatures, [s.name for s in segments])
    return tuple(replace(s, kind=kinds[signature]) for s, signature in zip(segments, signatures, strict=True))


def wired(segments: tuple[Segment, ...]) -> list[str]:
    """Return kinds with the source of each received tensor: segments back, or the index if more than two receive it."""
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
    """Yield units greedily: from each position, the repetition that covers most; among equals, the shortest period.

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
    """Rotate each unit, if that costs no repetition, so that its parameters' names repeat too.

    (norm, attention, norm, MLP) × 12 that starts with the embedding's norm becomes (attention, norm, MLP, norm) × 12
    from the next segment on, so that each repetition is one of the user's modules.
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
    """Return whether the parameter names of all repetitions, without their common prefixes, are equal."""
    patterns = set()
    for k in range(unit.count):
        start = unit.first + shift + k * unit.length
        names = [traced.parameters[p.name] for s in segments[start : start + unit.length] for p in s.parameters]
        paths = [n.split(".") for n in names]
        patterns.add(tuple(n[len(".".join(common_prefix(paths))) :] for n in names) if names else ())
    return len(patterns) == 1


def graph_hash(traced: Traced) -> str:
    """Return the sha256 of the normalised graph (ops, arguments, shapes, wiring, parameter names) and its loss form."""
    return "sha256:" + hashlib.sha256("\n".join(hashed_lines(traced)).encode()).hexdigest()


def hashed_lines(traced: Traced) -> list[str]:
    """Return the text that the hash of a normalised graph is of."""
    form = loss_form(traced.graph)
    lines = _hashed(traced, traced.graph.graph)
    if form.outer is not None:
        lines += ["outer", *_hashed(traced, form.outer)]
    if updates := buffer_updates(traced.graph).values:
        lines += ["updates", *updates, *_hashed(traced, buffer_updates(traced.graph).graph)]
    lines += [f"input {name}: {rows}" for name, rows in sorted(traced.rows.items())]
    lines += [f"input {name} is {row.tolist()}" for name, row in sorted(traced.known.items())]
    if set(form.combines) - {"sum"} or form.notes:
        lines += [f"counts {form.combines}", *form.notes]
    return lines


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
            lines.append(f"%{i} {op_name(node)} {args} {kwargs} {shapes_text(node) if node.op != 'output' else ''}")
    return lines


def needed_prelude(folded: Folded, segments: Iterable[Segment]) -> list[fx.Node]:
    """Return, in program order, the prelude nodes that these segments read, and all that those are computed from."""
    wanted = ancestors(n for s in segments for n in s.prelude)
    return [n for n in folded.traced.graph.graph.nodes if n in wanted]


def crossing(folded: Folded, place: int) -> list[fx.Node]:
    """Return the tensors that cross from segments before `place` to segments from `place` on."""
    return [
        n
        for s in folded.segments[:place]
        for n in s.sends
        if any(n in later.receives for later in folded.segments[place:])
    ]
