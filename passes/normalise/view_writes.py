"""Functional forms of writes to buffers and through slices and transposes: `y[:, 0] = x` becomes a `slice_scatter`, and
later readers of y read that. The last value of a buffer becomes a result of the graph.

torch functionalises any write through a view, but only by tracing the whole graph again, layer by layer. The writes
that models contain (a key filled half by half, a class token, one column) need no more than the inverse of each view.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import takewhile
from typing import Any

import torch
from torch import fx

from autoptd.errors import UnsupportedOp
from autoptd.passes.graph import op_name, output_of, source_line
from autoptd.passes.normalise.functionalize import functional_form, keep_dtype, written_state
from autoptd.passes.recognise.returned_operands import returned_operand

aten = torch.ops.aten

Inverse = tuple[Any, tuple[Any, ...]] | None


def _slice(view: fx.Node) -> Inverse:
    given: tuple[Any, ...] = view.args[1:]
    dim, start, end, step = given + (0, None, None, 1)[len(given) :]
    whole = start in (0, None) and (end is None or end == sys.maxsize) and step == 1
    return None if whole else (aten.slice_scatter.default, (dim, start, end, step))


def _inverse_order(view: fx.Node) -> list[int]:
    order: Any = view.args[1]
    places = {d % len(order): i for i, d in enumerate(order)}
    return [places[d] for d in range(len(order))]


# view -> op that puts a new value of the view back into its source, given (source, value, *rest); None: it is the value
_INVERSES: dict[Any, Callable[[fx.Node], Inverse]] = {
    aten.slice.Tensor: _slice,
    aten.select.int: lambda view: (aten.select_scatter.default, view.args[1:]),
    aten.permute.default: lambda view: (aten.permute.default, (_inverse_order(view),)),
    aten.transpose.int: lambda view: (aten.transpose.int, view.args[1:]),
    **dict.fromkeys((aten.contiguous.default, aten.type_as.default), lambda view: None),
}
# of buffers, which have no gradient to lose; a cast to the type that a tensor has already is the tensor
_INVERSES_IN_BUFFERS = {**_INVERSES, **dict.fromkeys((aten.detach.default, aten.to.dtype), lambda view: None)}
# inverses that make a view's source from its value alone
_WITHOUT_SOURCE = (aten.permute.default, aten.transpose.int)


def write_views_functionally(graph: fx.Graph, buffers: Collection[str] = ()) -> None:
    """Rewrite all writes through views and to `buffers`, placeholders, whose new values become keyword results.

    Leaves the graph as it is if any of these writes is not known here.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    writes = [n for n in graph.nodes if writes_through_view(n) or (is_write(n) and _root(n).name in buffers)]
    groups = [_Group(graph, root, order, root.name in buffers) for root in dict.fromkeys(map(_root, writes))]
    if all(group.is_known() for group in groups):
        for group in groups:
            group.rewrite()
        output_of(graph).kwargs = {group.root.name: group.now[group.root] for group in groups if group.is_buffer}


def copy_written_inputs(graph: fx.Graph, inputs: Collection[str]) -> set[str]:
    """Let forward write to copies of `inputs`, placeholders, and return those that it writes to.

    All readers read the copy, as views of it if they read views, so that they see what is written, when it is written.
    """
    written = set[str]()
    for node in [n for n in graph.nodes if n.op == "placeholder" and n.name in inputs]:
        if any(is_write(n) and n.target is not aten.detach_.default for n in sharing(node)):
            with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
                copy = graph.call_function(aten.clone.default, (node,))
            copy.meta = dict(node.meta)
            node.replace_all_uses_with(copy, lambda user, copy=copy: user is not copy)  # type: ignore[misc]
            written.add(node.name)
    return written


def write_to_operands(graph: fx.Graph) -> None:
    """Put the operand in place of the tensor that an op returns, if that is the operand itself though torch's schema
    does not say so, as of a dropout that drops nothing: a write to one is a write to both.
    """
    if any(map(is_write, graph.nodes)):
        for node in graph.nodes:
            operand = returned_operand(node)
            if operand is not None and not is_view(node):
                node.replace_all_uses_with(operand)


def reshape_functionally(graph: fx.Graph) -> None:
    """Put a view in place of a tensor that `unsqueeze_`, `t_` and the like give another shape.

    They write no numbers: what reads the tensor later reads the view, and earlier views of it keep their shapes.
    """
    names: dict[fx.Node, fx.Node] = {}  # result of a write -> the tensor that it is
    for node in list(graph.nodes):
        if not is_write(node):
            continue
        tensor = names.get(node.args[0], node.args[0])
        form = functional_form(node.target) if torch.Tag.inplace_view in node.target.tags else None
        if form is None or tensor.op == "placeholder" or node.target is aten.detach_.default:
            names[node] = tensor
            continue
        before, after = takewhile(lambda n, node=node: n is not node, graph.nodes), set(graph.nodes)  # type: ignore[misc]
        after -= {node, *before}
        node.target = form
        for same in [tensor, *(n for n, named in names.items() if named is tensor)]:
            same.replace_all_uses_with(node, lambda user, after=after: user in after)  # type: ignore[misc]


def copy_detached(graph: fx.Graph) -> None:
    """Copy detached tensors that are written to, as in `y = x.detach(); y += p`, where y has the gradient of p.

    torch's functional form of such a write has no gradient. Raises UnsupportedOp where x is read after the write and a
    gradient is involved: x would have the new numbers and its old gradient.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in [n for n in graph.nodes if n.target is aten.detach.default and _root(n).op == "call_function"]:
        mine = {node, *sharing(node)}
        writes = [n for n in mine if is_write(n)]
        others = {_root(node), *sharing(_root(node))} - mine
        if not writes or any(is_write(n) and order[n] > order[node] for n in others):
            continue
        first = min(order[n] for n in writes)
        if not any(order[user] > first for n in others for user in n.users if user not in mine):
            with graph.inserting_after(node):
                copy = graph.call_function(aten.clone.default, (node,))
            copy.meta = dict(node.meta)
            node.replace_all_uses_with(copy, lambda user, copy=copy: user is not copy)  # type: ignore[misc]
        elif not with_gradient(graph).isdisjoint((*others, *(n for w in writes for n in w.all_input_nodes))):
            raise UnsupportedOp(
                "forward writes to a detached tensor whose original is read afterwards",
                where=source_line(min(writes, key=order.__getitem__)),
                fix="compute a new tensor instead: y = x.detach() + …",
            )


def with_gradient(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that a parameter reaches other than through a detached tensor or an op without gradient."""
    found = set[fx.Node]()
    for node in graph.nodes:
        value = node.meta.get("val")
        given = node.op == "placeholder" and isinstance(value, torch.Tensor) and value.requires_grad
        if given or (not _has_no_gradient(node) and not found.isdisjoint(node.all_input_nodes)):
            found.add(node)
    return found


def _has_no_gradient(node: fx.Node) -> bool:
    """Return whether a tensor is detached, new (`zeros_like`, `new_zeros`), or neither real nor complex."""
    value, name = node.meta.get("val"), op_name(node)
    dtype = value.dtype if isinstance(value, torch.Tensor) else torch.float32
    numbers = dtype.is_floating_point or dtype.is_complex
    return node.target is aten.detach.default or not numbers or name.startswith("new_") or name.endswith("_like")


def refuse_writes_to_state(graph: fx.Graph, changed: Mapping[str, str]) -> None:
    """Raise UnsupportedOp for a write through a view to `changed`: placeholder -> parameter, buffer or input."""
    for node in filter(writes_through_view, graph.nodes):
        if name := changed.get(_root(node).name):
            raise written_state(node, name)


def writes_through_view(node: fx.Node) -> bool:
    """Return whether an in-place op writes to a view or to a tensor with views."""
    return is_write(node) and any(map(is_view, (node.args[0], *node.args[0].users)))  # type: ignore[arg-type,union-attr]


def writes_to(node: fx.Node) -> list[fx.Node]:
    """Return the writes to the memory of a tensor, those before it is made among them."""
    root = _root(node)
    return list(filter(is_write, (root, *sharing(root))))


def is_view(node: fx.Node) -> bool:
    """Return whether the result of a node may share memory with an argument that the node does not write to."""
    if node.target in (aten.contiguous.default, aten.type_as.default):
        return _is_its_operand(node)
    if node.target is operator.getitem:  # of the parts that `chunk` or `unbind` gives
        return isinstance(node.args[0], fx.Node) and is_view(node.args[0])
    return isinstance(node.target, torch._ops.OpOverload) and any(
        a.alias_info is not None and not a.alias_info.is_write for a in node.target._schema.arguments
    )


def _is_its_operand(node: fx.Node) -> bool:
    """Return whether `contiguous` or `type_as` returns its operand, which it does if nothing is to be changed."""
    source: Any = node.args[0]
    before, after = source.meta.get("val"), node.meta.get("val")
    if before is None or after is None or (len(node.args) > 1 and node.target is aten.contiguous.default):
        return True
    return bool(before.dtype == after.dtype and (node.target is aten.type_as.default or before.is_contiguous()))


def is_write(node: fx.Node) -> bool:
    """Return whether an op writes to its first argument."""
    schema = node.target._schema if isinstance(node.target, torch._ops.OpOverload) else None
    if schema is None or not schema.is_mutable or not isinstance(node.args[0], fx.Node):
        return False
    return schema.arguments[0].alias_info is not None and bool(schema.arguments[0].alias_info.is_write)


def written_views(node: fx.Node, *, detached: bool = True) -> list[fx.Node]:
    """Return a view or write, the view that it is of, and so on to the tensor that they begin with, or to a detach."""
    chain = [node]
    while (is_view(node) or is_write(node)) and node.args and isinstance(node.args[0], fx.Node):
        if node.target is aten.detach.default and not detached:
            break
        node = node.args[0]
        chain.append(node)
    return chain


def _root(node: fx.Node) -> fx.Node:
    return written_views(node)[-1]


class _Group:
    """A tensor with everything that shares its memory."""

    def __init__(self, graph: fx.Graph, root: fx.Node, order: dict[fx.Node, int], is_buffer: bool) -> None:
        self.graph, self.root, self.order, self.is_buffer = graph, root, order, is_buffer
        self.inverses = _INVERSES_IN_BUFFERS if is_buffer else _INVERSES
        self.members = {root: root}  # node -> the view that it is: a write's result is the view written to
        self.sources: dict[fx.Node, fx.Node] = {}  # view -> the view it is taken of
        for node in _sorted(order, sharing(root)):
            source = node.args[0]
            assert isinstance(source, fx.Node)
            self.members[node] = self.members[source] if is_write(node) else node
            self.sources.setdefault(self.members[node], self.members[source])
        self.writes = [node for node in self.members if is_write(node)]
        self.now: dict[fx.Node, fx.Node] = {}  # view -> a node with its present value

    def is_known(self) -> bool:
        """Return whether each write has a functional form, and each view made before the last one an inverse, unless
        it is only read before the first: what may be a copy, such as a cast, does not matter then."""
        first, last = (extreme(self.order[node] for node in self.writes) for extreme in (min, max))
        late = (n for n in self.members if n in self.writes or any(self.order[u] > first for u in n.users))
        changing = {view for n in late for view in self._chain(self.members[n])}
        early = [n for n in self.members if n in changing - {self.root} and self.order[n] < last]
        return (
            (self.root.op == "call_function" or self.is_buffer)
            and all(_writes_first(node) and functional_form(node.target) is not None for node in self.writes)
            and all(node.target in self.inverses and not _copies(node) for node in early)
            and not any(isinstance(u.target, torch._ops.HigherOrderOperator) for n in self.members for u in n.users)
        )

    def rewrite(self) -> None:
        """Replace writes by functional ops, and views that they change by views of the new value."""
        self.now = {self.root: self.root}
        for node in _sorted(self.order, {user for member in self.members for user in member.users}):
            for source in [n for n in node.all_input_nodes if n in self.members]:
                node.replace_input_with(source, self._value(self.members[source], node))
            if node in self.writes:
                self._write(node)
            elif node in self.members:
                self.now[node] = node

    def _value(self, view: fx.Node, reader: fx.Node) -> fx.Node:
        """Return a node with the present value of a view, made before its reader if need be."""
        if view not in self.now:
            source = self._value(self.sources[view], reader)
            with self.graph.inserting_before(reader):
                self.now[view] = self.graph.call_function(view.target, (source, *view.args[1:]), view.kwargs)  # type: ignore[arg-type]
            self.now[view].meta = dict(view.meta)
        return self.now[view]

    def _chain(self, view: fx.Node) -> list[fx.Node]:
        """Return a view, the view that it is taken of, and so on to the root."""
        chain = [view]
        while chain[-1] is not self.root:
            chain.append(self.sources[chain[-1]])
        return chain

    def _write(self, node: fx.Node) -> None:
        view = self.members[node]
        chain = self._chain(view)
        olds = [self._value(v, node) for v in chain]
        node.target = functional_form(node.target)  # type: ignore[assignment]
        new = keep_dtype(self.graph, node, olds[0])
        self.members[new] = view
        self.now = {view: new}
        for inner, source, old in zip(chain, chain[1:], olds[1:], strict=False):
            if inverse := self.inverses[inner.target](inner):
                new = self._put_back(node, new, old, *inverse)
            self.now[source] = new

    def _put_back(self, node: fx.Node, new: fx.Node, old: fx.Node, op: Any, rest: tuple[Any, ...]) -> fx.Node:
        """Return a source with a new value of its view; complex numbers, which scatters cannot differentiate, as pairs
        of real ones."""
        value = old.meta["val"]
        if op in _WITHOUT_SOURCE:
            return self._after(new, node, op, (new, *rest), value)
        if not value.is_complex():
            return self._after(new, node, op, (old, new, *rest), value)
        pairs = [torch.view_as_real(x.meta["val"]) for x in (old, new)]
        olds = self._after(new, node, aten.view_as_real.default, (old,), pairs[0])
        news = self._after(olds, node, aten.view_as_real.default, (new,), pairs[1])
        dim = rest[0] % value.ndim  # before that of the pairs
        made = self._after(news, node, op, (olds, news, dim, *rest[1:]), pairs[0])
        return self._after(made, node, aten.view_as_complex.default, (made,), value)

    def _after(self, place: fx.Node, node: fx.Node, op: Any, args: tuple[Any, ...], value: torch.Tensor) -> fx.Node:
        with self.graph.inserting_after(place):
            made = self.graph.call_function(op, args)
        made.meta = {**node.meta, "val": value}
        return made


def _copies(view: fx.Node) -> bool:
    """Return whether an op that may return its operand makes a copy."""
    if view.target is not aten.to.dtype:
        return False
    source = view.args[0]
    assert isinstance(source, fx.Node)
    return bool(view.args[3:4] == (True,) or view.kwargs.get("copy") or view.args[1] != source.meta["val"].dtype)


def sharing(root: fx.Node) -> set[fx.Node]:
    """Return all nodes that may share memory with `root`, without it."""
    found: set[fx.Node] = set()
    ahead = [root]
    while ahead:
        node = ahead.pop()
        for user in node.users:
            shares = user.target is operator.getitem or is_view(user) or is_write(user)
            if shares and user.args[0] is node and user not in found:
                found.add(user)
                ahead.append(user)
    return found


def _sorted(order: dict[fx.Node, int], nodes: Iterable[fx.Node]) -> list[fx.Node]:
    return sorted(nodes, key=order.__getitem__)


def _writes_first(node: fx.Node) -> bool:
    """Return whether an op writes to its first argument only."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    return [a.alias_info is not None and a.alias_info.is_write for a in schema] == [True] + [False] * (len(schema) - 1)


def write_functionally(program: torch.export.ExportedProgram) -> None:
    """Rewrite writes in place whose functional form torch does not know, or gets wrong."""
    copy_detached(program.graph)
    if not _has_transforms(program.graph):
        write_views_functionally(program.graph, program.graph_signature.inputs_to_buffers)


def to_decompose(graph: fx.Graph) -> bool:
    """Return whether torch must decompose a graph: it writes through views, or uses transforms of torch.func."""
    return any(map(writes_through_view, graph.nodes)) or _has_transforms(graph)


def _has_transforms(graph: fx.Graph) -> bool:
    return any(getattr(n.target, "__module__", "") == "torch._functorch.predispatch" for n in graph.nodes)
