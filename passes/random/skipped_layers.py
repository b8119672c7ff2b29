"""Layers that are skipped at random (LayerDrop, Fan et al. 2020), by a Python branch on a drawn number.

    for layer in self.layers:                          h1 = layer(h)
        if torch.rand(()) >= self.layerdrop:    ->     h = where(mask == 0, h, h1)
            h = layer(h)

The mask is 0 with the rate as probability. A trace takes one way through a branch. The model is traced with every
layer, then without those of every second branch, then without the others. All three graphs are alike but for what the
branches leave out: whatever reads a value v of a layer reads another one, u, where it is skipped. That is what the
program selects, so that it computes what the model does for each layer that is skipped. A model whose graphs differ
otherwise is refused.

A parameter that only skipped layers read has no gradient in that step, and no optimizer changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec

from autoptd.errors import UnsupportedOp
from autoptd.ops import library as ops
from autoptd.passes.graph import info, infos, output_of, source_line, substitute

aten = torch.ops.aten


@dataclass(frozen=True)
class Skips:
    """Branches on a drawn number, numbered as `torch.rand(())` was called. `without`: those whose layer is left out.
    `rates`: number of a branch -> its probability, filled in while the model is traced."""

    without: frozenset[int] = frozenset()
    rates: dict[int, float] = field(default_factory=dict)


def refusal(where: str = "") -> UnsupportedOp:
    """Return the error of a branch that cannot be written as a selection."""
    return UnsupportedOp(
        "a branch depends on a drawn number, as where layers are skipped at random (LayerDrop): the program would "
        "repeat the branch of the trace",
        where=where,
        fix="compute both and select: torch.where(torch.rand(()) < p, a, b), with tensors a and b; or set this rate "
        "(layerdrop) to 0, or multiply what the branch adds by a drawn mask (stochastic depth)",
    )


def select_layers(trace: Callable[[frozenset[int]], ExportedProgram], rates: Mapping[int, float]) -> ExportedProgram:
    """Return a program that selects, after each layer, what the model reads. `trace` leaves out the layers of some
    branches. Raises UnsupportedOp if the branches do more than leave out layers."""
    full, every = trace(frozenset()), sorted(rates)
    found: dict[fx.Node, tuple[int, fx.Node]] = {}  # value of a layer -> its branch, and what is read instead
    for part in (every[::2], every[1::2]):
        if part:
            found |= _Alignment(full, trace(frozenset(part)), frozenset(part)).replaced()
    _write(full, found, rates)
    return full


def equal_programs(a: Any, b: Any) -> bool:
    """Return whether two programs of one model compute the same by the same calls."""
    try:
        return not _Alignment(a, b, frozenset()).replaced()
    except (UnsupportedOp, ValueError):
        return False


def skipping_masks(graph: fx.Graph, *, of_gradients: bool) -> dict[fx.Node, frozenset[fx.Node]]:
    """Return the masks of the layers that alone read each node, empty for what is read elsewhere too.

    of_gradients: follow only what a gradient comes back through.
    """
    found: dict[fx.Node, frozenset[fx.Node] | None] = {}  # None: read by nothing
    for node in reversed(graph.nodes):
        given = list[frozenset[fx.Node]]()
        for user in node.users:
            if of_gradients and not _carries_gradient(user, node):
                continue
            mask = _mask_of(user)
            selected = frozenset({mask}) if mask and node not in user.args[:2] else found[user]
            given += [] if selected is None else [selected]
        found[node] = (frozenset().union(*given) if all(given) else frozenset()) if given else None
        if node.op == "output":
            found[node] = frozenset()
    return {node: masks or frozenset() for node, masks in found.items()}


def _carries_gradient(user: fx.Node, node: fx.Node) -> bool:
    """Return whether a gradient comes back to a node from one that reads it; none comes from results but the loss."""
    if user.op == "output":
        return user.args[0] is node or (isinstance(user.args[0], (tuple, list)) and node in user.args[0])
    return any(t.requires_grad for t in infos(user))


def _mask_of(node: fx.Node) -> fx.Node | None:
    """Return the mask of the layer whose value a node selects; None for any other node."""
    skipped = node.args[0] if node.target is aten.where.self else None
    if not isinstance(skipped, fx.Node) or skipped.target is not aten.eq.Scalar or skipped.args[1] != 0:
        return None
    mask = skipped.args[0]
    assert isinstance(mask, fx.Node)
    return mask if mask.target is ops.dropout_mask and not info(mask).shape else None


def _draws(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes of `torch.rand(())`, in the order of the calls."""
    return [n for n in graph.nodes if n.target is aten.rand.default and not n.args[0]]


def _write(program: ExportedProgram, found: Mapping[fx.Node, tuple[int, fx.Node]], rates: Mapping[int, float]) -> None:
    graph = program.graph
    order = {node: i for i, node in enumerate(graph.nodes)}
    draws, now, masks = _draws(graph), dict[fx.Node, fx.Node](), dict[int, _LayerMask]()
    results, samples = output_of(graph), _samples(program)
    for value in sorted(found, key=order.__getitem__):
        branch, other = found[value]
        if branch not in masks:
            masks[branch] = _LayerMask.inserted(graph, draws[branch], rates[branch])
        last = max((n for n, (b, _) in found.items() if b == branch), key=order.__getitem__)
        outside = [u for u in value.users if order.get(u, -1) > order[last] and u.op != "output"]
        other = now.get(other, other)
        with graph.inserting_after(now.get(last, last)):
            made = graph.call_function(aten.where.self, (masks[branch].zero, other, value))
        made.meta = dict(value.meta)
        now[value] = made
        for user in outside:
            user.replace_input_with(value, made)
        if value in results.kwargs.values():
            with graph.inserting_before(results):
                kept = graph.call_function(aten.where.self, (masks[branch].of_batch(graph, samples), other, value))
            kept.meta = dict(value.meta)
            results.kwargs = {name: kept if x is value else x for name, x in results.kwargs.items()}
        results.args = substitute(results.args, lambda n, old=value, new=made: new if n is old else n)
    for branch, layer in masks.items():
        draws[branch].replace_all_uses_with(layer.mask)
        graph.erase_node(draws[branch])


def _samples(program: ExportedProgram) -> fx.Node:
    """Return an input that has a dim of samples."""
    inputs = [n for s, n in _arguments(program) if s.kind is InputKind.USER_INPUT]
    return next(n for n in inputs if n.meta["val"].ndim and not isinstance(n.meta["val"].shape[0], int))


@dataclass(frozen=True)
class _LayerMask:
    """The mask of a layer, drawn as dropout, which an `eval_step` does not drop, and whether it is 0."""

    mask: fx.Node
    zero: fx.Node

    @classmethod
    def inserted(cls, graph: fx.Graph, draw: fx.Node, rate: float) -> _LayerMask:
        """Insert the nodes behind the draw that they replace."""
        dtype = draw.meta["val"].dtype
        with graph.inserting_after(draw):
            mask = _call(graph, draw, ops.dropout_mask, ([], rate, dtype), (), dtype)
        with graph.inserting_after(mask):
            return cls(mask, _call(graph, draw, aten.eq.Scalar, (mask, 0), (), torch.bool))

    def of_batch(self, graph: fx.Graph, samples: fx.Node) -> fx.Node:
        """Insert whether the mask is 0 as a function of its sum over samples, as new values of buffers are."""
        n, dtype = samples.meta["val"].shape[0], self.mask.meta["val"].dtype
        count = graph.call_function(aten.sym_size.int, (samples, 0))
        count.meta = {"val": n}
        each = _call(graph, self.mask, aten.new_ones.default, (self.mask, [count]), (n,), dtype)
        each = _call(graph, self.mask, aten.mul.Tensor, (each, self.mask), (n,), dtype)
        total = _call(graph, self.mask, aten.sum.default, (each,), (), dtype)
        return _call(graph, self.mask, aten.eq.Scalar, (total, 0), (), torch.bool)


def _call(graph: fx.Graph, like: fx.Node, target: Any, args: Any, shape: Any, dtype: torch.dtype) -> fx.Node:
    made = graph.call_function(target, args)
    with like.meta["val"].fake_mode:
        value = torch.empty(shape, dtype=dtype)
    made.meta = {k: v for k, v in like.meta.items() if k in ("nn_module_stack", "stack_trace")} | {"val": value}
    return made


class _Alignment:
    """The nodes of a graph without some layers, beside those of the graph with all of them."""

    def __init__(self, full: ExportedProgram, part: ExportedProgram, without: frozenset[int]) -> None:
        self.without = without
        self.same: dict[fx.Node, fx.Node] = {}  # node of the part -> node of the full graph
        self.layer: dict[fx.Node, int] = {}  # node of the full graph that the part leaves out -> its branch
        self.found: dict[fx.Node, tuple[int, fx.Node]] = {}
        self.first: dict[fx.Node, fx.Node | None] = {}  # constant of the full graph -> the first one that equals it
        self.symbols: dict[sympy.Basic, sympy.Basic] = {}  # size of the part -> size of the full graph
        self.full, self.part = full, part

    def replaced(self) -> dict[fx.Node, tuple[int, fx.Node]]:
        """Return the values of layers that others read, each with its branch and with what these read instead."""
        self._match_arguments()
        theirs, mine = _chunks(self.full.graph), _chunks(self.part.graph)
        if len(theirs) != len(mine):
            raise self._refusal()
        for branch, (a, b) in enumerate(zip(theirs, mine, strict=True), -1):
            self._match(a, b, branch)
        results, kept = output_of(self.full.graph), output_of(self.part.graph)
        updated = {n: kept.kwargs.get(n, self._placeholder(n)) for n in results.kwargs}
        alike = self._alike(results.args, kept.args, exactly=False) and kept.kwargs.keys() <= updated.keys()
        if not alike or not self._alike(results.kwargs, updated, exactly=False):
            raise self._refusal()
        return self.found

    def _refusal(self) -> UnsupportedOp:
        """Return the error, at the first branch whose layer is left out."""
        return refusal(source_line(_draws(self.full.graph)[min(self.without)]))

    def _placeholder(self, name: str) -> fx.Node | None:
        """Return the part's placeholder of a buffer that the full graph updates."""
        return next((n for n in self.part.graph.nodes if n.op == "placeholder" and n.name == name), None)

    def _match_arguments(self) -> None:
        """Match placeholders: parameters, buffers and inputs by name, constants by value."""
        given = list(_arguments(self.full))
        known = {_name(spec): node for spec, node in given}
        constants = [(node, self.full.constants[spec.target]) for spec, node in given if _is_constant(spec)]
        self.first = {node: _first_equal(constants, value) for node, value in constants}
        for spec, node in _arguments(self.part):
            match = known.get(_name(spec))
            if _is_constant(spec):
                match = _first_equal(constants, self.part.constants[spec.target])
            if match is None and not node.users:
                continue
            if match is None:
                raise self._refusal()
            self.same[node] = match
            self.symbols |= _symbols(node, match)

    def _match(self, theirs: list[fx.Node], mine: list[fx.Node], branch: int) -> None:
        """Match what is between two draws: equal nodes, then what the part leaves out, then equal nodes again."""
        more = len(theirs) - len(mine)
        if more < 0 or (more and branch not in self.without):
            raise refusal(source_line(mine[0]) if mine else "")
        first = 0
        while first < len(mine) and self._equal(theirs[first], mine[first], exactly=more > 0):
            self.same[mine[first]] = theirs[first]
            self.symbols |= _symbols(mine[first], theirs[first])
            first += 1
        if not more and first < len(mine):
            raise refusal(source_line(theirs[first]))
        self.layer |= dict.fromkeys(theirs[first : first + more], branch)
        for a, b in zip(theirs[first + more :], mine[first:], strict=True):
            if not self._equal(a, b):
                raise refusal(source_line(a))
            self.same[b] = a
            self.symbols |= _symbols(b, a)

    def _equal(self, a: fx.Node, b: fx.Node, exactly: bool = False) -> bool:
        """Return whether two nodes are equal calls. `b` may read other values than those of a layer."""
        if (a.op, a.op == "call_function" and a.target) != (b.op, b.op == "call_function" and b.target):
            return False
        return self._alike(a.args, b.args, exactly) and self._alike(a.kwargs, b.kwargs, exactly)

    def _alike(self, a: object, b: object, exactly: bool) -> bool:
        if isinstance(a, fx.Node) and isinstance(b, fx.Node):
            if _is_size(a) or _is_size(b):
                return _size(a, {}) == _size(b, self.symbols)
            return self.same.get(b) is self.first.get(a, a) or (not exactly and self._instead(a, b))
        if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
            return len(a) == len(b) and all(self._alike(x, y, exactly) for x, y in zip(a, b, strict=True))
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            return a.keys() == b.keys() and all(self._alike(a[k], b[k], exactly) for k in a)
        return type(a) is type(b) and a == b

    def _instead(self, a: fx.Node, b: fx.Node) -> bool:
        """Note that `b` is read instead of the value `a` of a layer."""
        if a not in self.layer or b not in self.same:
            return False
        x, y = a.meta["val"], self.same[b].meta["val"]
        if not isinstance(x, Tensor) or not isinstance(y, Tensor) or (x.shape, x.dtype) != (y.shape, y.dtype):
            return False
        return self.found.setdefault(a, (self.layer[a], self.same[b])) == (self.layer[a], self.same[b])


def _chunks(graph: fx.Graph) -> list[list[fx.Node]]:
    """Return the calls of a graph, without those that compute sizes, cut before each draw."""
    draws, found = set(_draws(graph)), [list[fx.Node]()]
    for node in graph.nodes:
        if node in draws:
            found.append([])
        if node.op == "call_function" and not _is_size(node):
            found[-1].append(node)
    return found


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool))


def _size(node: fx.Node, symbols: Mapping[sympy.Basic, sympy.Basic]) -> object:
    """Return the size that a node computes, in the symbols of the full graph; the node if it is a tensor."""
    value: Any = node.meta.get("val") if _is_size(node) else node
    return value.node.expr.xreplace(symbols) if hasattr(value, "node") else value


def _symbols(part: fx.Node, full: fx.Node) -> dict[sympy.Basic, sympy.Basic]:
    """Return the symbols of an input's sizes in both graphs."""
    a, b = part.meta.get("val"), full.meta.get("val")
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return {}
    sizes: Iterator[tuple[Any, Any]] = zip(a.shape, b.shape, strict=True)
    return {x.node.expr: y.node.expr for x, y in sizes if isinstance(x, torch.SymInt) and isinstance(y, torch.SymInt)}


def _first_equal(constants: Sequence[tuple[fx.Node, Tensor]], value: Tensor) -> fx.Node | None:
    return next((node for node, x in constants if x.dtype == value.dtype and torch.equal(x, value)), None)


def _arguments(program: ExportedProgram) -> Iterator[tuple[InputSpec, fx.Node]]:
    yield from zip(
        program.graph_signature.input_specs, (n for n in program.graph.nodes if n.op == "placeholder"), strict=True
    )


def _is_constant(spec: InputSpec) -> bool:
    return spec.kind is InputKind.CONSTANT_TENSOR


def _name(spec: InputSpec) -> tuple[str, str]:
    return spec.kind.name, spec.target or spec.arg.name
