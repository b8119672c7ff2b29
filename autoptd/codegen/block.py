"""Source of a block class: its parameters under the names of the original module, and its forward.

The class of a block that stages of the plan cut has neither of its own: it calls the classes of its parts in turn, and
holds their parameters. A stage that begins or ends within such a block calls the class of its part.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import sympy
import torch
from torch import fx

from autoptd.codegen.blocks import BlockNames, BlockSegments
from autoptd.codegen.body import Body, Made, local_shape_text
from autoptd.codegen.expressions import size_text
from autoptd.codegen.freeing import free_early
from autoptd.codegen.names import Names, hint, variable
from autoptd.codegen.quoting import code_of, in_docstring, is_name, literal
from autoptd.codegen.recompute import in_place_of, recomputation_of
from autoptd.layout.placements import B, Placement, Split
from autoptd.passes.fold import Folded
from autoptd.passes.graph import info
from autoptd.passes.losses.loss_form import is_count
from autoptd.passes.sharding.sharding import Sharding
from autoptd.passes.trace.traced import SEQUENCE

DTYPES = {torch.bfloat16: "BF16", torch.float16: "FP16", torch.float32: "FP32", torch.float64: "FP64"}


@dataclass(frozen=True)
class BlockClass:
    """Source of a class, and what a stage must know to call it."""

    name: str
    source: str
    sizes: tuple[sympy.Symbol, ...]  # passed last, by name
    dropout: bool
    axes: tuple[str, ...] = ()  # of `AXES`: those that the constructor takes
    made: tuple[Made, ...] = ()  # tensors held by its arguments and lines, for the unit's first instance
    parts: tuple[BlockClass, ...] = ()  # classes that it calls

    def all(self) -> tuple[BlockClass, ...]:
        """Return the classes of its parts, and itself."""
        return (*self.parts, self)


def block_arguments(layout: BlockNames, piece: BlockSegments) -> tuple[fx.Node, ...]:
    """Return the arguments of a block call: receives, prelude, parameters that the block does not own."""
    own = set(owned_by(layout, piece))
    return (*piece.receives, *piece.prelude, *(p for p in piece.parameters if p not in own))


def placement_of(sharding: Sharding, folded: Folded, node: fx.Node) -> Placement:
    """Return the placement in which a tensor crosses between segments."""
    for segment in folded.segments:
        if node in segment.sends:
            return sharding.kinds[segment.kind].sends[segment.sends.index(node)]
    raise AssertionError(f"no segment sends {node.name}")


def parameter_placement(sharding: Sharding, piece: BlockSegments, node: fx.Node) -> Placement:
    """Return the placement in which a parameter is stored."""
    for segment in piece.segments:
        if node in segment.parameters:
            return sharding.kinds[segment.kind].parameters[segment.parameters.index(node)]
    raise AssertionError(node.name)


def parameter_line(name: str, node: fx.Node, placement: Placement, ranks: int, frozen: bool) -> str:
    """Return `parameter(self, "mlp.c_fc.weight", (768, 384), BF16)  # S1`."""
    tensor = info(node)
    shape = local_shape_text(tensor, placement, ranks)
    grad = ", requires_grad=False" if frozen else ""
    return f"parameter(self, {literal(name)}, {shape}, {dtype_text(tensor.dtype)}{grad})  # {placement}"


def dtype_text(dtype: torch.dtype) -> str:
    return DTYPES.get(dtype, str(dtype))


def attribute(name: str, getter: str = "get_parameter") -> str:
    """Return `self.mlp.c_fc.weight`, or a call of `getter` if a part of the name is not a Python name."""
    if all(map(is_name, name.split("."))):
        return f"self.{name}"
    return f"self.{getter}({literal(name)})"


def argument_hint(folded: Folded, node: fx.Node) -> str:
    """Return a name for an argument: of a parameter or buffer the last words of its name (`lm_head_weight`)."""
    name = folded.traced.parameters.get(node.name) or folded.traced.buffers.get(node.name)
    return "_".join(name.split(".")[-2:]) if name else "count" if is_count(node) else hint(node)


def passed_on(folded: Folded, piece: BlockSegments) -> str:
    """Return the name of the only tensor that a block receives, which is that of the one it returns; else ""."""
    sends = piece.sends(folded)
    return variable(sends[0]) if piece.block and len(piece.receives) == len(sends) == 1 else ""


def arguments_of(layout: BlockNames, sharding: Sharding, body: Body, piece: BlockSegments, block: BlockClass) -> str:
    """Return the arguments of a block call among the lines of `body`."""
    texts = []
    for node in block_arguments(layout, piece):
        placement: Placement = B
        if node in piece.receives:
            placement = placement_of(sharding, layout.folded, node)
        elif node in piece.parameters:
            placement = parameter_placement(sharding, piece, node)
        texts.append(body.read(node, placement, placement))
    body.sizes |= set(block.sizes)
    return ", ".join([*texts, *(f"{s}" for s in block.sizes)])


def results_of(
    layout: BlockNames, sharding: Sharding, body: Body, piece: BlockSegments, needed: Collection[fx.Node]
) -> str:
    """Choose names for a block's results: those of operands not `needed` later, so that equal calls look alike."""
    folded = layout.folded
    free = [
        body.held[n, placement_of(sharding, folded, n)]
        for n in piece.receives
        if n not in needed and n.op == "call_function"
    ]
    free = [text for text in free if text.isidentifier()]
    names = []
    for node in piece.sends(folded):
        summed = node in folded.sums
        name = free.pop(0) if free and not summed else body.names.fresh("summed" if summed else variable(node))
        placement = placement_of(sharding, folded, node)
        for key in [k for k, text in body.held.items() if text == name]:
            del body.held[key]
        body.bind(node, placement, name)
        names.append(name)
    return ", ".join(names)


def write_block(layout: BlockNames, sharding: Sharding, piece: BlockSegments) -> BlockClass:
    """Write the class of a piece, and those of its parts, from the first instance of its unit."""
    piece = piece.first_instance(layout)
    folded = layout.folded
    names = folded.traced.parameters
    own = owned_by(layout, piece)
    foreign = [p for p in piece.parameters if p not in own]
    recomputed = recomputation_of(piece.segments, sharding, piece.policy, layout.regather, layout.rings)
    body = Body(sharding, Names(sizes=map(str, folded.traced.sizes)), first=piece.first, recomputation=recomputed)
    body.fast_dropout = layout.fast_dropout
    if layout.loss_in_place:
        body.in_place = in_place_of(piece.segments, sharding, piece.policy, layout.regather)
    body.joins_heads = piece.policy == "logits"
    name = passed_on(folded, piece)
    given = {n: body.names.fresh(name or variable(n)) for n in piece.receives}
    given |= {n: body.names.fresh(argument_hint(folded, n)) for n in (*piece.prelude, *foreign)}
    for node in piece.receives:
        body.bind(node, placement_of(sharding, folded, node), given[node])
    for node in piece.prelude:
        body.bind(node, B, given[node])
    for node in foreign:
        body.bind(node, parameter_placement(sharding, piece, node), given[node])
    for node in own:
        relative = layout.owned[names[node.name]]
        body.bind(node, parameter_placement(sharding, piece, node), attribute(relative))
    parts = tuple(write_block(layout, sharding, part) for part in piece.parts)
    if parts:
        setup = _call_parts(layout, sharding, body, piece, parts)
    else:
        for segment in piece.segments:
            body.segment(segment)
        setup = _own_setup(layout, sharding, piece, body, own)
    results = piece.sends(folded)
    returned = [body.read(n, placement_of(sharding, folded, n), placement_of(sharding, folded, n)) for n in results]
    if not parts:
        body.lines = free_early(
            layout, sharding, (replace(piece, block=""),), results, body.lines, body.assigned, returned
        )
    size_lines, passed = size_reads(body, given)
    axes = tuple(axis for axis in AXES if _uses_axis(body.lines, axis) or any(axis in part.axes for part in parts))
    source = _source(piece, body, axes, setup, given, size_lines, passed, returned)
    received = [(given[n], n, placement_of(sharding, folded, n)) for n in piece.receives]
    made = (*received, *body.made)
    return BlockClass(piece.block, source, passed, body.dropout, axes, made, parts)


def _call_parts(
    layout: BlockNames, sharding: Sharding, body: Body, piece: BlockSegments, parts: Sequence[BlockClass]
) -> list[str]:
    """Write the calls of a piece's parts; return the lines that construct them."""
    names = [body.names.fresh(part.called) for part in piece.parts]
    body.lines.append(f"{', '.join(names)} = self._parts")
    for i, (part, block) in enumerate(zip(piece.parts, parts, strict=True)):
        needed = {n for later in piece.parts[i + 1 :] for n in later.receives} | set(piece.sends(layout.folded))
        arguments = arguments_of(layout, sharding, body, part, block)
        results = results_of(layout, sharding, body, part, needed)
        body.lines.append(f"{results} = {names[i]}({arguments})")
    body.dropout = any(block.dropout for block in parts)
    made = []
    for part, block in zip(piece.parts, parts, strict=True):
        after = part.first - piece.first
        given = ["tp", *block.axes, *(["dropout", f"first + {after}" if after else "first"] if block.dropout else [])]
        made.append(f"{block.name}({', '.join(given)})")
    return [f"self._parts = compose(self, {', '.join(made)})"]


def _own_setup(
    layout: BlockNames, sharding: Sharding, piece: BlockSegments, body: Body, own: Sequence[fx.Node]
) -> list[str]:
    """Return the lines that set a block's attributes and declare its parameters."""
    names, frozen = layout.folded.traced.parameters, layout.folded.traced.frozen
    lines = [f"self.{axis} = {axis}" for axis in ("tp", *axes_in(body.lines))]
    if body.dropout:
        lines += [
            "self.dropout = dropout",
            "self._first = first  # its first segment, part of the keys of its random numbers",
        ]
    for node in own:
        name = names[node.name]
        placement = parameter_placement(sharding, piece, node)
        lines.append(parameter_line(layout.owned[name], node, placement, sharding.ranks, name in frozen))
    return lines


def size_reads(body: Body, given: dict[fx.Node, str]) -> tuple[list[str], tuple[sympy.Symbol, ...]]:
    """Return lines that read the body's symbols from its arguments, and the symbols that must be passed."""
    held = {n: p for (n, p), text in body.held.items() if given.get(n) == text}
    lines, passed = [], []
    for symbol in sorted(body.sizes, key=str):
        for node, text in given.items():
            placement = held.get(node)
            if placement is None or symbol not in info(node).shape:
                continue
            dim = info(node).shape.index(symbol)
            split = isinstance(placement, Split) and placement.dim == dim
            lines.append(f"{symbol} = {text}.size({dim})" + (f" * {body.ranks}" if split else ""))
            break
        else:
            passed.append(symbol)
    return lines, tuple(passed)


def _source(
    piece: BlockSegments,
    body: Body,
    axes: Sequence[str],
    setup: Sequence[str],
    given: dict[fx.Node, str],
    size_lines: Sequence[str],
    passed: Sequence[sympy.Symbol],
    returned: Sequence[str],
) -> str:
    arguments = ", ".join(["self", *(f"{text}: Tensor" for text in given.values()), *(f"{s}: int" for s in passed)])
    extra = "".join(f", {axis}: {AXES[axis]}" for axis in axes)
    extra += ", dropout: DropoutKey | None, first: int" if body.dropout else ""
    kinds = _joined([in_docstring(kind) for kind in dict.fromkeys(s.kind for s in piece.segments)])
    lines = [f"class {piece.block}(nn.Module):", f'    """{kinds}."""', ""]
    lines += [f"    def __init__(self, tp: Axis{extra}) -> None:", "        super().__init__()"]
    lines += [f"        {line}" for line in setup]
    result = "Tensor" if len(returned) == 1 else f"tuple[{', '.join(['Tensor'] * len(returned))}]"
    lines += ["", f"    def forward({arguments}) -> {result}:"]
    lines += axis_lines(body.lines)
    lines += [f"        {line}".rstrip() for line in [*size_lines, *body.lines]]
    lines.append(f"        return {', '.join(returned)}")
    return "\n".join(lines) + "\n"


def _joined(kinds: list[str]) -> str:
    line = " + ".join(kinds)
    return line if len(line) < 100 else " +\n    ".join(kinds)


AXES = {"cp": "Tokens", "ep": "Experts", "dp": "Replicas"}  # axes besides tp that a class may take -> their types


def axes_in(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the axes of `AXES` that any line uses."""
    return tuple(axis for axis in AXES if _uses_axis(lines, axis))


def axis_lines(lines: Sequence[str]) -> list[str]:
    """Return the lines at the start of a forward method that name the axes it uses."""
    return [f"        {axis} = self.{axis}" for axis in ("tp", *AXES) if _uses_axis(lines, axis)]


def _uses_axis(lines: Sequence[str], axis: str) -> bool:
    return any(re.search(rf"(?<![\w.]){axis}\b", code_of(line)) for line in lines)


def owned_by(layout: BlockNames, piece: BlockSegments) -> list[fx.Node]:
    """Return the parameters that a block instance declares itself."""
    names = layout.folded.traced.parameters
    return [p for p in piece.parameters if piece.block and piece.prefix and names[p.name] in layout.owned]


def wire_line(folded: Folded, sharding: Sharding, node: fx.Node, index: int, symbols: Sequence[str]) -> str:
    """Return `Wire("x0", BF16, lambda b, s: (b, s // 8, 4096), True, "S1")`."""
    tensor = info(node)
    if folded.cut is not None:  # sizes are passed at full length
        whole = {folded.cut.tokens: SEQUENCE / folded.cut.ranks}
        tensor = replace(tensor, shape=tuple(n if isinstance(n, int) else n.subs(whole) for n in tensor.shape))
    placement = placement_of(sharding, folded, node)
    shape = local_shape_text(tensor, placement, sharding.ranks)
    takes = ", ".join(symbols)
    first = f'Wire("x{index}", {dtype_text(tensor.dtype)}, lambda {takes}: {shape}'
    return f"{first}, {tensor.requires_grad}, {literal(str(placement))})"


__all__ = [
    "AXES",
    "BlockClass",
    "argument_hint",
    "arguments_of",
    "attribute",
    "axis_lines",
    "dtype_text",
    "owned_by",
    "parameter_line",
    "parameter_placement",
    "passed_on",
    "placement_of",
    "results_of",
    "size_reads",
    "size_text",
    "wire_line",
    "write_block",
]
