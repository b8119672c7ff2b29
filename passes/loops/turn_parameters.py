"""Parameters that only turns on rows read: in a step without such rows one process gives them no gradient.

    if mask.any(): loss = loss + head(x)[mask].mean()        head: of the rows of `mask`
    if row.numel() == 0: continue                            expert: of its rows

The program takes each turn, so their gradients are zeros there. Which rows a parameter needs is known by the symbols of
their numbers, as far as tensors of these rows read it.
"""

from __future__ import annotations

from collections.abc import Collection

import sympy
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from autoptd.passes.loops.without_rows import rows_of, without_rows


def parameters_of_turns(program: ExportedProgram, sizes: Collection[sympy.Symbol]) -> dict[str, str]:
    """Return the parameters that are not read where there are none of these rows, each with a name of its rows.

    sizes: symbols of the numbers of rows that turns depend on. Parameters of equal rows have equal names.
    """
    left = without_rows(program, set(sizes), set()).graph
    read = {node.name for node in left.nodes if node.op == "placeholder" and node.users}
    rows = _rows_that_read(program.graph, set(sizes))
    found: dict[str, str] = {}
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    for spec in program.graph_signature.input_specs:
        node = nodes[spec.arg.name]
        if spec.kind is InputKind.PARAMETER and node.users and node.name not in read:
            assert spec.target is not None
            of = rows[node]
            found[spec.target] = " ".join(sorted(map(str, of))) if of else spec.target
    return found


def _rows_that_read(graph: fx.Graph, sizes: set[sympy.Symbol]) -> dict[fx.Node, frozenset[sympy.Symbol]]:
    """Return the symbols of the rows that alone read each node; empty if others do too."""
    found: dict[fx.Node, frozenset[sympy.Symbol] | None] = {}  # None: read by nothing
    for node in reversed(graph.nodes):
        of = [found[user] for user in node.users]
        some = [each for each in of if each is not None]
        found[node] = (frozenset().union(*some) if all(some) else frozenset()) if some else None
        if own := rows_of(node) & sizes:
            found[node] = frozenset(own)
        elif node.op == "output":
            found[node] = frozenset()
    return {node: of or frozenset() for node, of in found.items()}
