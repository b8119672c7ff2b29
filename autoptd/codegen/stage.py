"""Source of a stage class: the tensors that it receives, its computation block by block, and the tensors that it sends.

received ─┐
inputs ───┼─ prelude ─ pieces: block calls (runs of equal calls as a loop) and single ops ─ sends, or the loss
counts ───┘
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from autoptd.codegen.block import (
    AXES,
    BlockClass,
    arguments_of,
    attribute,
    axis_lines,
    dtype_text,
    owned_by,
    parameter_line,
    parameter_placement,
    passed_on,
    placement_of,
    results_of,
    wire_line,
    write_block,
)
from autoptd.codegen.blocks import BlockNames, BlockSegments, pieces_of
from autoptd.codegen.body import Body, Made
from autoptd.codegen.expressions import size_text, value_text
from autoptd.codegen.freeing import free_early
from autoptd.codegen.loss import (
    BufferFunctions,
    LossFunctions,
    count_text,
    input_node,
    names_of,
    size_source,
    state_text,
)
from autoptd.codegen.names import hint, variable
from autoptd.codegen.quoting import literal, numbered
from autoptd.codegen.recompute import in_place_of, recomputation_of
from autoptd.layout.placements import B
from autoptd.passes.fold import Folded, crossing, needed_prelude
from autoptd.passes.graph import info
from autoptd.passes.held_tensors import held_tensors, reads_counts
from autoptd.passes.losses.loss_form import is_count
from autoptd.passes.sharding.sharding import Sharding, sum_placement
from autoptd.passes.sharding.shared_masks import shared_masks
from autoptd.passes.trace.traced import SEQUENCE, Averaging


@dataclass(frozen=True)
class StageSource:
    """Source of a stage class without its name, and of the block classes it uses, by class name."""

    body: str
    blocks: dict[str, str]
    dropout: bool
    made: dict[str, tuple[Made, ...]] = field(default_factory=dict)  # by class; "" for the stage's own lines


@dataclass(frozen=True)
class _BlockCall:
    piece: BlockSegments
    block: BlockClass
    arguments: str
    results: str


@dataclass
class _StageWriter:
    layout: BlockNames
    sharding: Sharding
    pieces: list[BlockSegments]
    body: Body
    blocks: dict[str, str] = field(default_factory=dict)
    made: dict[str, tuple[Made, ...]] = field(default_factory=dict)  # by class
    setup: list[str] = field(default_factory=list)  # lines of __init__
    calls: list[_BlockCall] = field(default_factory=list)  # block calls not yet written
    results: list[tuple[int, Made]] = field(default_factory=list)  # of block calls, and their lines
    classes: dict[object, BlockClass] = field(default_factory=dict)  # by the pieces that they are written from
    preludes: Sequence[fx.Node] = ()  # what the stage computes before its pieces
    groups: int = 0
    arguments: list[str] = field(default_factory=list)  # lines that rename arguments

    @property
    def folded(self) -> Folded:
        return self.layout.folded

    @property
    def group(self) -> str:
        """Name of the attribute for lists of blocks, which no attribute of the model has."""
        traced = self.folded.traced
        roots = {name.partition(".")[0] for name in (*traced.parameters.values(), *traced.buffers.values())}
        return next(name for name in ("blocks", "calls", "_blocks") if name not in roots)


def write_stage(
    layout: BlockNames, sharding: Sharding, first: int, last: int, recompute: Mapping[int, str]
) -> StageSource:
    """Write the stage of segments `first` to `last`; `recompute`: segment -> policy."""
    folded = layout.folded
    pieces = pieces_of(layout, sharding, first, last, recompute)
    is_last = last == len(folded.segments) - 1
    received = crossing(folded, first)
    sent = [] if is_last else crossing(folded, last + 1)
    body = Body(sharding, names_of(folded), fast_dropout=layout.fast_dropout)
    writer = _StageWriter(layout, sharding, pieces, body)
    preludes = _prelude(writer)
    body.called = {n: name for piece in pieces if (name := passed_on(folded, piece)) for n in piece.receives}
    given = {n: body.names.fresh(body.called.get(n) or variable(n)) for n in received}
    for node, text in given.items():
        body.bind(node, placement_of(sharding, folded, node), text)
    inputs = [n for n in preludes if n.op == "placeholder" and n.name in folded.traced.inputs]
    for node in inputs:
        _bind_input(writer, node)
    _declare(writer, preludes, first, last)
    body.prelude([n for n in preludes if n.op == "call_function"])
    writer.preludes = [n for n in preludes if n.op == "call_function"]
    _convert_masks(writer, preludes)
    body.lines += [""] if body.lines else []
    for i, piece in enumerate(pieces):
        _write_piece(writer, piece, pieces[i + 1 :], sent)
    _flush(writer)
    return _assemble(writer, received, given, inputs, sent, (first, last))


def _convert_masks(writer: _StageWriter, preludes: Sequence[fx.Node]) -> None:
    """Write the conversion of masks that several attentions of the model read."""
    layout, body = writer.layout, writer.body
    if not layout.sizes:
        return
    for mask, dtype in shared_masks(layout.folded, writer.sharding, layout.number).items():
        if mask in preludes:
            name = body.held[mask, B] if body.held[mask, B].isidentifier() else body.names.fresh(hint(mask))
            body.lines.append(f"{name} = ops.additive_mask({body.held[mask, B]}, {dtype_text(dtype)})")
            body.bind(mask, B, name)


def _bind_input(writer: _StageWriter, node: fx.Node) -> None:
    variable, lines = writer.body.names.argument(writer.folded.traced.inputs[node.name])
    writer.body.bind(node, B, variable)
    writer.arguments += lines


def _prelude(writer: _StageWriter) -> list[fx.Node]:
    """Return all prelude nodes that the stage needs, including placeholders, in program order."""
    return needed_prelude(writer.folded, (s for p in writer.pieces for s in p.segments))


def _declare(writer: _StageWriter, preludes: Sequence[fx.Node], first: int, last: int) -> None:
    """Declare buffers, and parameters that no block owns."""
    folded, traced = writer.folded, writer.folded.traced
    owned = {p for piece in writer.pieces for p in owned_by(writer.layout, piece)}
    done: set[str] = set()
    for piece in writer.pieces:
        for node in piece.parameters:
            name = traced.parameters[node.name]
            placement = parameter_placement(writer.sharding, piece, node)
            writer.body.bind(node, placement, attribute(name))
            if node not in owned and name not in done:
                done.add(name)
                writer.setup.append(parameter_line(name, node, placement, writer.sharding.ranks, name in traced.frozen))
    if first == 0:
        for node in folded.unused_parameters:
            name = traced.parameters[node.name]
            if name not in done:
                done.add(name)
                writer.setup.append(
                    parameter_line(name, node, B, writer.sharding.ranks, name in traced.frozen) + ", unused"
                )
    for node in filter(is_count, preludes):
        writer.body.bind(node, B, count_text(node))
    for node in held_tensors(folded, first, last):
        name = traced.buffers.get(node.name) or node.name
        shape = value_text(tuple(info(node).shape))
        keep = ", persistent=False" if name in traced.transient or node.name not in traced.buffers else ""
        writer.setup.append(f"buffer(self, {literal(name)}, {shape}, {dtype_text(info(node).dtype)}{keep})")
        writer.body.bind(node, B, state_text(traced, node))


def _write_piece(
    writer: _StageWriter, piece: BlockSegments, later: Sequence[BlockSegments], sent: Sequence[fx.Node]
) -> None:
    if not piece.block:
        _flush(writer)
        writer.body.joins_heads = piece.policy == "logits"
        how = piece.segments, writer.sharding, piece.policy, writer.layout.regather
        writer.body.recomputation = recomputation_of(*how, writer.layout.rings)
        writer.body.in_place = in_place_of(*how) if writer.layout.loss_in_place else {}
        for segment in piece.segments:
            writer.body.segment(segment)
        return
    model = piece.block, piece.policy, *((part.block, part.model[0].index) for part in (piece, *piece.parts))
    if model not in writer.classes:  # a class is written from its first instance
        writer.classes[model] = write_block(writer.layout, writer.sharding, piece)
    block = writer.classes[model]
    for written in block.all():
        known = writer.blocks.setdefault(written.name, written.source)
        assert known == written.source, f"two instances of {written.name} differ"
        writer.made[written.name] = written.made
    needed = {n for p in later for n in p.receives} | set(sent)
    arguments = arguments_of(writer.layout, writer.sharding, writer.body, piece, block)
    results = results_of(writer.layout, writer.sharding, writer.body, piece, needed)
    writer.calls.append(_BlockCall(piece, block, arguments, results))


def _flush(writer: _StageWriter) -> None:
    """Write the pending block calls; a run of equal ones becomes a loop."""
    calls, writer.calls = writer.calls, []
    at = 0
    while at < len(calls):
        end = at + 1
        while end < len(calls) and _alike(calls[at], calls[end]):
            end += 1
        _write_run(writer, calls[at:end])
        at = end


def _alike(a: _BlockCall, b: _BlockCall) -> bool:
    return (
        a.block.name == b.block.name
        and a.arguments == b.arguments
        and a.results == b.results
        and a.piece.called_by == b.piece.called_by
    )


def _write_run(writer: _StageWriter, run: list[_BlockCall]) -> None:
    call, writer.groups = run[0], writer.groups + 1
    group = writer.group if writer.groups == 1 else f"{writer.group}_{writer.groups}"
    paths = [c.piece.prefix for c in run]
    loop = _loop_over(paths)
    extra = "".join(f", self.{axis}" for axis in call.block.axes)
    if call.block.dropout:
        length = len(call.piece.segments) if len(run) == 1 else run[1].piece.first - run[0].piece.first
        extra += ", dropout, first"
        starts = f"range({run[0].piece.first}, {run[-1].piece.first + 1}, {length})"
    if not owned_by(writer.layout, call.piece):
        made = f"{call.block.name}(tp{extra})"
        over = f"for first in {starts}" if call.block.dropout else f"for _ in range({len(run)})"
        writer.setup.append(f"self.{group} = [{made} {over}]")
    elif loop is None:
        made = f"submodule(self, path, {call.block.name}(tp{extra}))"
        over = f"zip({paths!r}, {starts})" if call.block.dropout else repr(tuple(paths))
        loops = "for path, first in" if call.block.dropout else "for path in"
        writer.setup.append(f"self.{group} = [{made} {loops} {over}]")
    else:
        pattern, numbers = loop
        made = f"submodule(self, {pattern}, {call.block.name}(tp{extra}))"
        over = f"for i, first in zip({numbers}, {starts})" if call.block.dropout else f"for i in {numbers}"
        writer.setup.append(f"self.{group} = [{made} {over}]")
    by = call.piece.called_by
    run_it = f"{by}(block, {call.arguments})" if by else f"block({call.arguments})"
    writer.body.lines += [f"for block in self.{group}:", f"    {call.results} = {run_it}"]
    for node, name in zip(run[-1].piece.sends(writer.folded), call.results.split(", "), strict=True):
        placed = placement_of(writer.sharding, writer.folded, node)
        writer.results.append((len(writer.body.lines) - 1, (name, node, placed)))


def _loop_over(paths: Sequence[str]) -> tuple[str, str] | None:
    """Return (`f"transformer.h.{i}"`, `range(0, 12)`) if one number of the paths counts up in equal steps."""
    split = [re.split(r"(0(?![0-9])|[1-9][0-9]*)", p) for p in paths]
    if not split or any(len(s) != len(split[0]) for s in split):
        return None
    varying = [i for i in range(len(split[0])) if len({s[i] for s in split}) > 1]
    if not varying and len(paths) == 1:
        varying = [i for i in range(len(split[0])) if i % 2][-1:]
    if len(varying) != 1 or varying[0] % 2 == 0:
        return None
    numbers = [int(s[varying[0]]) for s in split]
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    if step <= 0 or numbers != list(range(numbers[0], numbers[0] + step * len(numbers), step)):
        return None
    pattern = numbered(*("".join(part) for part in (split[0][: varying[0]], split[0][varying[0] + 1 :])))
    stop = numbers[-1] + 1
    return pattern, f"range({numbers[0]}, {stop})" if step == 1 else f"range({numbers[0]}, {stop}, {step})"


def _assemble(
    writer: _StageWriter,
    received: Sequence[fx.Node],
    given: dict[fx.Node, str],
    inputs: list[fx.Node],
    sent: Sequence[fx.Node],
    run: tuple[int, int],
) -> StageSource:
    folded, traced, body, sharding = writer.folded, writer.folded.traced, writer.body, writer.sharding
    is_last, counts = run[1] == len(folded.segments) - 1, reads_counts(folded, *run)
    symbols = [str(s) for s in traced.sizes]
    size_lines = _size_lines(writer, inputs)
    if body.uses_device and not inputs:
        _add_input(writer, inputs, next(iter(traced.inputs.values())))
    if body.uses_device:
        size_lines.append(f"device = {body.held[inputs[0], B]}.device")
    functions, updating = LossFunctions(folded, sharding), BufferFunctions(folded, sharding, *run)
    texts = [body.read(n, placement_of(sharding, folded, n), placement_of(sharding, folded, n)) for n in sent]
    summed = sum_placement(sharding.ranks)
    sums = [body.read(n, summed, summed) for n in updating.own]
    returned = (*([folded.loss] if is_last else sent), *updating.own)
    assigned = (*body.assigned, *writer.results)
    last = [*([body.read(folded.loss, B, B)] if is_last else texts), *sums]
    how = writer.layout, sharding, writer.pieces, returned
    body.lines = free_early(*how, body.lines, assigned, last, writer.preludes)
    lines = []
    lines.append(f"    inputs = {value_text(tuple(traced.inputs[n.name] for n in inputs))}")
    for word, wires in (("receives", received), ("sends", sent)):
        if wires:
            lines.append(f"    {word} = (")
            lines += [_wire(w, i, folded, sharding, symbols) for i, w in enumerate(wires)]
            lines.append("    )")
    if is_last:
        lines.append("    is_last = True")
    dropout = body.dropout or any("DropoutKey" in source for source in writer.blocks.values())
    if dropout:
        lines.append("    draws = True")
    where = ", ".join(f"{literal(str(s))}: ({literal(name)}, {dim})" for s, (name, dim) in traced.sizes.items())
    lines.append(f"    sizes = {{{where}}}")
    lines += functions.attributes(is_last) if counts else []
    lines += updating.attributes()
    takes = "".join(f", {axis}: {AXES[axis]} | None = None" for axis in folded.axes)
    hands = "".join(", cp" if axis == "cp" else f", {axis}={axis}" for axis in folded.axes)
    lines += ["", f"    def __init__(self, tp: Axis, dropout: DropoutKey | None = None{takes}) -> None:"]
    lines += [f"        super().__init__(tp, dropout{hands})", *(f"        {line}" for line in writer.setup)]
    arguments = ["self", *(f"{name}: Tensor" for name in (*given.values(), *(traced.inputs[n.name] for n in inputs)))]
    arguments += ["counts: tuple[Tensor, ...]"] if counts else []
    result = "Tensor" if is_last and not updating.own else "tuple[Tensor, ...]"
    lines += ["", f"    def forward({', '.join(arguments)}) -> {result}:"]
    lines += axis_lines(body.lines)
    lines += [f"        {line}".rstrip() for line in [*writer.arguments, *size_lines, *body.lines]]
    if is_last:
        lines += [f"        # {line}" for line in _AVERAGED.get(traced.averaging, ())]
        lines.append(f"        return {', '.join([body.read(folded.loss, B, B), *sums])}")
    else:
        lines.append(f"        return ({', '.join([*texts, *sums])},)")
    lines += updating.method()
    blocks = {**writer.blocks, **(functions.sources(is_last) if counts else {})}
    arrived = [(text, n, placement_of(sharding, folded, n)) for n, text in given.items()]
    made = {**writer.made, "": (*arrived, *body.made)}
    return StageSource("\n".join(lines) + "\n", blocks, dropout, made)


_AVERAGED: Mapping[Averaging, tuple[str, ...]] = {
    "per-microbatch": ("terms that are no sums are computed from this microbatch, and averaged by samples",),
    "per-microbatch-over-dp": (
        "terms that are no sums are computed from the microbatches of all dp ranks, and averaged by samples",
    ),
}


def _wire(node: fx.Node, index: int, folded: Folded, sharding: Sharding, symbols: Sequence[str]) -> str:
    return f"        {wire_line(folded, sharding, node, index, symbols)},"


def _size_lines(writer: _StageWriter, inputs: list[fx.Node]) -> list[str]:
    """Return lines that read sizes from the model inputs, which every stage receives."""
    traced, body = writer.folded.traced, writer.body
    by_name = {traced.inputs[n.name]: n for n in inputs}
    lines = []
    cut = writer.folded.cut if writer.folded.cut is not None and writer.folded.cut.tokens in body.sizes else None
    if cut is not None:
        body.sizes = (body.sizes - {cut.tokens}) | {SEQUENCE}
    for symbol in sorted(body.sizes, key=str):
        source, dim = size_source(traced, symbol, by_name)
        if source not in by_name:
            _add_input(writer, inputs, source)
            by_name = {traced.inputs[n.name]: n for n in inputs}
        lines.append(f"{symbol} = {body.held[by_name[source], B]}.size({dim})")
    if cut is not None:
        lines.append(f"{cut.tokens} = {size_text(SEQUENCE / cut.ranks)}")
    return lines


def _add_input(writer: _StageWriter, inputs: list[fx.Node], source: str) -> None:
    node = input_node(writer.folded.traced, source)
    inputs.append(node)
    _bind_input(writer, node)


__all__ = ["StageSource", "hint", "write_stage"]
