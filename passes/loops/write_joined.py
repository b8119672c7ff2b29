"""Write loops over samples as one pass over all of them.

    p0, p1, … = x[0], x[1], …         turns that are equal but for the piece they read
    join(f(p0), f(p1), …)             f written for all pieces at once, with the turns in a dim of their own

A piece is a part of a tensor at a place that grows by a fixed step from turn to turn, and the pieces of all turns are
the whole tensor. The trace shows as many turns as its example has samples; a trace with another number of samples must
give the same program (`same_program`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from autoptd.errors import UnsupportedOp
from autoptd.passes.graph import info, is_getitem, op_name, operands, plain, source_line, substitute, write_op
from autoptd.passes.loops.join import JOIN
from autoptd.passes.loops.turn_rules import TurnRules, Turns, UnlikeTurnsError, UnwrittenTurnsError
from autoptd.passes.opcall import Size
from autoptd.passes.rules.views import same
from autoptd.passes.trace.traced import BATCH, Traced

aten = torch.ops.aten
_ADD = aten.add.Tensor
_READS = ("select", "slice", "narrow")


def write_joined_pieces(graph: fx.Graph, traced: Traced) -> None:
    """Replace every `join` and every sum of a loop's turns by one pass over them.

    Raises UnsupportedOp for turns that are joined and not alike. Sums of such stay as they are.
    """
    if traced.loops:
        _share_constants(graph, traced)
        _write_sums(graph, traced.example[BATCH])
    for node in list(graph.nodes):
        if node.target is not JOIN:
            continue
        pieces, count, dim = node.args
        samples = traced.example[BATCH]
        each = len(pieces) // samples
        with graph.inserting_before(node):
            try:
                made = _one_pass(graph, pieces, count, dim)
            except UnlikeTurnsError as error:
                try:
                    if each == 1:
                        raise
                    made = _of_each(graph, [pieces[i::each] for i in range(each)], plain(count / each), dim)
                except UnlikeTurnsError:
                    raise _refusal(node, error) from None
        node.replace_all_uses_with(made)


def _share_constants(graph: fx.Graph, traced: Traced) -> None:
    """Let all turns read the constant of the first, where each has an equal one of its own."""
    seen: list[tuple[fx.Node, Tensor]] = []
    for node in graph.nodes:
        if node.op != "placeholder" or node.name not in traced.constants.keys() - traced.buffers.keys():
            continue
        value = traced.constants[node.name]
        alike = (n for n, x in seen if x.dtype == value.dtype and x.shape == value.shape and torch.equal(x, value))
        if (first := next(alike, None)) is not None:
            node.replace_all_uses_with(first)
        else:
            seen.append((node, value))


def _write_sums(graph: fx.Graph, samples: int) -> None:
    """Replace sums to which every turn of a loop adds by the sum of all turns: `loss = loss + f(x[i])`."""
    for node in reversed(list(graph.nodes)):
        if node.target is not _ADD or any(user.target is _ADD and user.args[0] is node for user in node.users):
            continue
        terms, first = _terms(node), 0
        while first + samples <= len(terms):
            with graph.inserting_before(node):
                found = _turns_in(graph, terms[first:], samples)
            if found is not None:
                whole, turns = found
                terms[first : first + turns * samples] = [whole]
            first += 1
        if len(terms) < len(_terms(node)):
            with graph.inserting_before(node):
                made = terms[0]
                for term in terms[1:]:
                    made = write_op(graph, node, _ADD, (made, term), info(node).shape, info(node).dtype)
            node.replace_all_uses_with(made)


def _terms(node: fx.Node) -> list[fx.Node]:
    """Return what was added, one after another; all have the shape and dtype of the sum."""
    terms: list[fx.Node] = []
    while node.target is _ADD and not node.kwargs and len(node.args) == 2:
        one, other = node.args
        if not isinstance(one, fx.Node) or info(one) not in (info(node), replace(info(node), requires_grad=False)):
            break
        if isinstance(other, fx.Node) and (info(other).shape, info(other).dtype) == (
            info(node).shape,
            info(node).dtype,
        ):
            terms.append(other)
        elif isinstance(other, fx.Node) or other != 0:
            break
        node = one
    return [node, *reversed(terms)]


def _turns_in(graph: fx.Graph, terms: Sequence[fx.Node], samples: int) -> tuple[fx.Node, int] | None:
    """Return the sum of the turns that these terms begin with, and how many terms each turn adds; None if none do.

    Raises UnsupportedOp for turns that are alike, but for an op of them that has no rule.
    """
    unwritten: UnwrittenTurnsError | None = None
    for each in range(1, len(terms) // samples + 1):
        groups = [tuple(terms[i : each * samples : each]) for i in range(each)]
        if any(len({n.target for n in group}) > 1 or len(set(group)) < samples for group in groups):
            continue
        loop = _Loop(graph, BATCH)
        try:
            parts = [loop.turns(group) for group in groups]
        except UnlikeTurnsError as error:
            unwritten = error if isinstance(error, UnwrittenTurnsError) else unwritten
            continue
        made: fx.Node | None = None
        for part, like in zip(parts, terms, strict=False):
            x, shape = loop.rules.spread(part), info(like).shape
            total = write_op(graph, like, aten.sum.dim_IntList, (x, [0]), shape, info(like).dtype)
            made = total if made is None else write_op(graph, like, _ADD, (made, total), shape, info(like).dtype)
        assert made is not None
        return made, each
    if unwritten is not None:
        raise _refusal(terms[samples - 1], unwritten)
    return None


def _refusal(node: fx.Node, error: UnlikeTurnsError) -> UnsupportedOp:
    return UnsupportedOp(
        f"a loop over samples cannot be computed in one pass: {error.why}",
        where=source_line(error.node),
        fix="give all samples pictures of one size, or write the loop as ops on the tensor of all samples; it ends at "
        + source_line(node),
    )


def _one_pass(graph: fx.Graph, pieces: Sequence[fx.Node], count: Size, dim: int) -> fx.Node:
    """Return the pieces of all turns, one after another in `dim`."""
    return _flat(graph, _Loop(graph, count).turns(tuple(pieces)), count, dim)


def _of_each(graph: fx.Graph, groups: Sequence[Sequence[fx.Node]], count: Size, dim: int) -> fx.Node:
    """Return the pieces of all samples, of which each has one from every group."""
    loop = _Loop(graph, count)
    parts = [loop.rules.spread(loop.turns(tuple(group))) for group in groups]
    shape = list(info(parts[0]).shape)
    shape[dim + 1] = sum((info(x).shape[dim + 1] for x in parts), sympy.Integer(0))
    whole = write_op(graph, parts[0], aten.cat.default, (parts, dim + 1), tuple(shape))
    return _flat(graph, Turns(whole, True), count, dim)


def _flat(graph: fx.Graph, found: Turns, count: Size, dim: int) -> fx.Node:
    rules = TurnRules(graph, count)
    x = rules.spread(found)
    ndim = info(x).ndim - 1
    if dim:
        x = rules.permute(x, [*range(1, dim + 1), 0, *range(dim + 1, ndim + 1)])
    shape = list(info(x).shape)
    return rules.reshape(x, [*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :]])


class _Loop:
    """The turns of one loop, from the pieces that it makes back to those that it reads."""

    def __init__(self, graph: fx.Graph, count: Size) -> None:
        self.count, self.rules = count, TurnRules(graph, count)
        self.known: dict[tuple[fx.Node, ...], Turns] = {}

    def turns(self, nodes: tuple[fx.Node, ...]) -> Turns:
        """Return one node for these of all turns. Raises UnlikeTurnsError if they differ in more than their piece."""
        if nodes not in self.known:
            self.known[nodes] = self._made(nodes)
        return self.known[nodes]

    def _made(self, nodes: tuple[fx.Node, ...]) -> Turns:
        first = nodes[0]
        if all(node is first for node in nodes):
            return Turns(first, False)
        if any(node.op != "call_function" or node.target is not first.target for node in nodes):
            raise UnlikeTurnsError(first, "its turns compute different things")
        if any(n.meta["info"] != first.meta["info"] for n in nodes):
            raise UnlikeTurnsError(first, "its turns have different sizes")
        if op_name(first) in _READS and all(n.args[0] is first.args[0] for n in nodes) and nodes[1].args != first.args:
            return Turns(self._piece(nodes), True)
        structures = [substitute((n.args, tuple(n.kwargs.items())), lambda x: None) for n in nodes]
        if any(structure != structures[0] for structure in structures):
            raise UnlikeTurnsError(first, "its turns compute with different numbers")
        if is_getitem(first):
            owner: Any = self.turns(tuple(n.args[0] for n in nodes))  # type: ignore[misc]
            return (
                Turns(self.rules.again(first, (owner.node, first.args[1])), True)
                if owner.differs
                else Turns(first, False)
            )
        given: dict[fx.Node, Turns] = {}
        for xs in zip(*map(operands, nodes), strict=True):
            found = self.turns(xs)
            if given.setdefault(xs[0], found) != found:
                raise UnlikeTurnsError(first, "its turns read different pieces")
        return self.rules.write(first, given)

    def _piece(self, nodes: Sequence[fx.Node]) -> fx.Node:
        """Return the part of a tensor that each turn reads, of all turns."""
        first: Any = nodes[0]
        x, name = first.args[0], op_name(first)
        dim = (first.args[1] if len(first.args) > 1 else 0) % info(x).ndim
        starts = [_start(node) for node in nodes]
        length = 1 if name == "select" else info(first).shape[dim]
        step = starts[1] - starts[0]
        shape = info(x).shape
        even = all(start == starts[0] + i * step for i, start in enumerate(starts))
        if not even or step <= 0 or not isinstance(length, int) or not same(shape[dim], self.count * step):
            raise UnlikeTurnsError(first, "its turns do not read equal parts of a tensor, one after another")
        if starts[0] + length > step or any(n.args[1:2] != first.args[1:2] or len(n.args) > 4 for n in nodes):
            raise UnlikeTurnsError(first, "its turns read parts that overlap")
        rules = self.rules
        cut = rules.reshape(x, (*shape[:dim], self.count, step, *shape[dim + 1 :]))
        if length != step:
            part = (*shape[:dim], self.count, length, *shape[dim + 1 :])
            cut = write_op(rules.graph, first, aten.slice.Tensor, (cut, dim + 1, starts[0], starts[0] + length), part)
        if dim:
            cut = rules.permute(cut, [dim, *range(dim), *range(dim + 1, len(shape) + 1)])
        return rules.reshape(cut, rules.shape(first)) if name == "select" else cut


def _start(node: fx.Node) -> int:
    start = node.args[2] if len(node.args) > 2 else 0
    if not isinstance(start, int) or start < 0:
        raise UnlikeTurnsError(node, "its turns read parts at places that are no numbers")
    return start
