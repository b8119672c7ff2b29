"""Rewrite `einsum` to products of two operands: of one operand it is a permutation and a sum, of several a chain.

Left as it is: an equation with a letter that occurs twice in a term.
"""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_letters

import torch
from torch import fx

from autoptd.passes.graph import info, op_name, write_op
from autoptd.passes.opcall import Size
from autoptd.passes.trace.traced import Traced

aten = torch.ops.aten


def write_einsums_as_products(graph: fx.Graph, traced: Traced) -> None:
    """Rewrite every `einsum` of one operand, and those of more than two."""
    for node in list(graph.nodes):
        if node.op != "call_function" or op_name(node) != "einsum" or len(node.args[1]) == 2:
            continue
        equation, operands = node.args[:2]
        terms, result = _read(equation, [info(x).ndim for x in operands])
        if any(len(set(t)) < len(t) for t in terms):
            continue
        with graph.inserting_before(node):
            made = _chain(graph, node, terms, result, operands) if len(terms) > 1 else operands[0]
            if len(terms) == 1:
                made = _rearranged(graph, node, terms[0], result, made)
        node.replace_all_uses_with(made)


def _read(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """Return the terms and the result of an equation, with letters for `...`.

    Without an arrow, the result is the dims of `...` and the letters that occur once, sorted.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    if not arrow:
        right = "..." * ("..." in left) + "".join(sorted(c for c in set(left) - {",", "."} if left.count(c) == 1))
    spare = [c for c in ascii_letters if c not in equation]
    dims = [rank - len(term) + 3 for term, rank in zip(left.split(","), ranks, strict=True) if "..." in term]
    names = "".join(spare[: max(dims, default=0)])
    counts = iter(dims)
    terms = [t.replace("...", names[len(names) - next(counts) :]) if "..." in t else t for t in left.split(",")]
    return terms, right.replace("...", names)


def _rearranged(graph: fx.Graph, node: fx.Node, term: str, result: str, x: fx.Node) -> fx.Node:
    """Write the sum over the letters that the result lacks, and the order of the others."""
    summed = [i for i, letter in enumerate(term) if letter not in result]
    if summed:
        term = "".join(letter for letter in term if letter in result)
        shape = [size for i, size in enumerate(info(x).shape) if i not in summed]
        x = write_op(graph, node, aten.sum.dim_IntList, (x, summed), tuple(shape))
    if term == result:
        return x
    order = [term.index(letter) for letter in result]
    return write_op(graph, node, aten.permute.default, (x, order), tuple(info(x).shape[i] for i in order))


def _chain(graph: fx.Graph, node: fx.Node, terms: Sequence[str], result: str, operands: Sequence[fx.Node]) -> fx.Node:
    """Write products of two, from the left: each keeps the letters that the result or a later term has."""
    made, term = operands[0], terms[0]
    for i in range(1, len(terms)):
        later = {*result, *"".join(terms[i + 1 :])}
        kept = "".join(dict.fromkeys(c for c in term + terms[i] if c in later)) if i + 1 < len(terms) else result
        sizes = _sizes((term, terms[i]), (made, operands[i]))
        equation = f"{term},{terms[i]}->{kept}"
        shape = tuple(sizes[c] for c in kept)
        made, term = write_op(graph, node, aten.einsum.default, (equation, [made, operands[i]]), shape), kept
    return made


def _sizes(terms: Sequence[str], operands: Sequence[fx.Node]) -> dict[str, Size]:
    """Return the size of each letter; one of size 1 broadcasts."""
    found: dict[str, Size] = {}
    for term, x in zip(terms, operands, strict=True):
        for letter, size in zip(term, info(x).shape, strict=True):
            found[letter] = size if found.get(letter, 1) == 1 else found[letter]
    return found
