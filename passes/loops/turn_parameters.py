"""Parameters that only turns on rows read: where a step has no such rows, one process gives them no gradient.

    if mask.any(): loss = loss + head(x)[mask].mean()        head: of the rows of `mask`
    if row.numel() == 0: continue                            expert: of its rows

The program takes each turn, so their gradients are zeros there. Which rows a parameter needs is known by the symbols of
their numbers, as far as tensors of these rows read it; traces that leave out turns must agree. The rows of a step are
counted as sums for buffers are: by microbatch, and added up over the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from autoptd.errors import TraceError, UnsupportedOp
from autoptd.passes.graph import COUNTED, output_of, source_line, updated_values
from autoptd.passes.loops.empty_masks import Key, RowTurns, prove_turns
from autoptd.passes.loops.without_rows import masks_without, operand_left, sizes_of_masks, without_rows
from autoptd.passes.rewrites.row_selections import INDICES, symbols_of

aten = torch.ops.aten
Symbols = frozenset[sympy.Symbol]


def trained_without_turns(
    program: ExportedProgram,
    turns: RowTurns,
    trace: Callable[[RowTurns], ExportedProgram],
    functional: Callable[[ExportedProgram], ExportedProgram],
) -> dict[frozenset[Key], set[str]]:
    """Prove a program's turns, and return the parameters with a gradient without some of them, and without all.

    `trace` leaves out turns; `functional` takes writes in place out of a program.
    """
    parts, every = list(prove_turns(program, turns, trace)), frozenset(turns.rows)
    if len(parts) > 1:
        with suppress(TraceError):  # there is no loss without any turn
            parts.append((every, trace(RowTurns(every))))
    return {without: _trained(functional(part)) for without, part in parts}


def _trained(program: Any) -> set[str]:
    """Return the parameters that a gradient of an exported program's result reaches."""
    found = _differentiated(program.graph)
    return {target for target, node in _parameters(program) if node in found}


def parameters_of_turns(
    program: ExportedProgram, turns: RowTurns, trained_without: Mapping[frozenset[Key], Collection[str]]
) -> dict[str, Symbols]:
    """Return the parameters that have no gradient where there are no rows, each with the symbols of its rows' numbers.

    A parameter has a gradient where one of these numbers is not zero. `trained_without`: turns that a trace leaves out
    -> the parameters that it has gradients of. Raises UnsupportedOp for a parameter whose rows are not known.
    """
    sizes = set[sympy.Symbol]().union(*turns.rows.values())
    always = _trained(without_rows(program, sizes, set()))
    trained, rows = _trained(program), _rows_that_read(program.graph, sizes)
    found: dict[str, Symbols] = {}
    taken_in = [(_taken(turns, without), read) for without, read in trained_without.items()]
    for target, node in _parameters(program):
        if target in always or target not in trained:
            continue
        states = [(_any(taken[row] for row in rows[node]), target in read) for taken, read in taken_in]
        if any(taken is False and reads for taken, reads in states):
            continue  # what reads it gives no rows a gradient of zero
        if not rows[node] or any(taken is True and not reads for taken, reads in states):
            raise UnsupportedOp(
                f"a branch depends on whether a mask selects any rows, and whether {target.removeprefix('model.')} has "
                "a gradient then depends on more than this mask",
                where=next(filter(None, map(source_line, node.users)), ""),
                fix="compute the same without the branch: no rows add nothing, by index_add or x[mask] = rows",
            )
        found[target] = rows[node]
    return found


def _taken(turns: RowTurns, without: frozenset[Key]) -> dict[sympy.Symbol, bool | None]:
    """Return whether a trace without some turns takes those on each number of rows; None: some of them."""
    found: dict[sympy.Symbol, set[bool]] = {}
    for key, rows in turns.rows.items():
        is_out = any(key[:n] in without for n in range(1, len(key) + 1))
        for row in rows:
            found.setdefault(row, set()).add(not is_out)
    return {row: states.pop() if len(states) == 1 else None for row, states in found.items()}


def _any(states: Iterable[bool | None]) -> bool | None:
    """Return whether any is true, where None is unknown."""
    some = set(states)
    return True if True in some else None if None in some else False


def count_rows(program: ExportedProgram, found: Mapping[str, Symbols]) -> dict[str, tuple[int, ...]]:
    """Let a program return the masks that select these rows. Returns the places of each parameter's among their counts.

    Counts are in the order of the results; a mask of which dim 0 is kept has one for each entry, as `mask[e]` is read.
    """
    masks, places, count = dict[tuple[fx.Node, int], int](), dict[sympy.Symbol, int](), 0
    wanted = frozenset[sympy.Symbol]().union(*found.values())
    for node in program.graph.nodes:
        for symbol in symbols_of(node) & wanted - places.keys() if node.target in INDICES else ():
            mask, entry = _entry_of(node.args[0])
            if mask not in masks:
                masks[mask] = count
                count += mask[0].meta["val"].shape[0] if mask[1] else 1
            places[symbol] = masks[mask] + entry
    if masks:
        output = output_of(program.graph)
        output.kwargs = {**output.kwargs, COUNTED: tuple(masks)}
    return {target: tuple(sorted({places[symbol] for symbol in of})) for target, of in found.items()}


def _entry_of(mask: fx.Node) -> tuple[tuple[fx.Node, int], int]:
    """Return the mask that one is read from, with how many of its first dims are kept, and the entry there."""
    if mask.target is aten.select.int and mask.args[1] == 0 and isinstance(mask.args[2], int):
        whole: Any = mask.args[0]
        if isinstance(entries := whole.meta["val"].shape[0], int):
            return (whole, 1), mask.args[2] % entries
    return (mask, 0), 0


def _parameters(program: Any) -> Iterator[tuple[str, fx.Node]]:
    """Yield the parameters of an exported program with their nodes."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.PARAMETER:
            yield str(spec.target), nodes[spec.arg.name]


def _differentiated(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes from which floats lead to the loss."""
    output = output_of(graph)
    found = {node for node in output.all_input_nodes if node not in updated_values(graph).values()}
    for node in reversed(graph.nodes):
        passes = node.target is not aten.detach.default and _holds_floats(node)
        if node in found or (passes and not found.isdisjoint(node.users)):
            found.add(node)
    return found


def _holds_floats(node: fx.Node) -> bool:
    value = node.meta.get("val")
    each = value if isinstance(value, (list, tuple)) else [value]
    return any(not isinstance(x, Tensor) or x.is_floating_point() or x.is_complex() for x in each)


def _rows_that_read(graph: fx.Graph, sizes: set[sympy.Symbol]) -> dict[fx.Node, Symbols]:
    """Return the symbols of the rows that alone read each node, for its gradient; empty if others do too."""
    found: dict[fx.Node, Symbols] = {}
    trained, masks = _differentiated(graph), masks_without(graph, sizes)
    selected = sizes_of_masks(graph, sizes, masks)

    def selecting(user: fx.Node, node: fx.Node) -> Symbols:
        """Return the rows for which alone an op reads an operand: those that a mask, or their places, select."""
        kept = operand_left(user, sizes, masks)
        given = () if kept is None or kept is node else user.all_input_nodes
        return frozenset().union(*(selected.get(x, symbols_of(x) & sizes) for x in given))

    for node in reversed(graph.nodes):
        own = symbols_of(node) & sizes
        of = [selecting(user, node) or found[user] for user in node.users if user in trained]
        found[node] = frozenset(own or (frozenset().union(*of) if all(of) else ()))
    return found
