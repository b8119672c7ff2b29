"""Rewrite a projection that is cut into unequal parts to one product per part, each with its own rows of the weight.

    in_proj [z | x | B | C | dt] ─► causal convolution of [x | B | C] ─► split   (Mamba-2; a delta net's [q | k | v])

tp splits a dim into equal slices, so nothing behind such a cut would be split. Cut before the product, each part is
split by its own heads, and those that all heads share stay whole. The cut moves up through ops that compute every
position of its dim by itself, as their rules say: casts, activations, transposes, depthwise convolutions.

A projection is cut only if a part of it becomes heads, by a view that makes several dims of its own: DeepSeek's to its
latents feeds all heads alike. Sizes play no part in this, so that a narrower model has the same ops. Parts that were
joined by a `cat` are those that were joined.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autoptd.passes.graph import info, infos, is_getitem, op_call, operands, substitute
from autoptd.passes.opcall import OpCall, Size, TensorInfo, is_random
from autoptd.passes.rules.factors import Rule
from autoptd.passes.rules.lookup import resolve
from autoptd.passes.rules.table import RULES
from autoptd.passes.trace.traced import Traced

aten = torch.ops.aten
CUTS = (aten.split_with_sizes.default, aten.split.sizes)
CONVOLUTIONS: Mapping[Any, int] = {aten.conv1d.default: 6}  # position of the number of groups


def cut_projections(graph: fx.Graph, traced: Traced) -> None:
    """Move cuts into unequal parts up to the weights of the projections, or to the joints, that they cut."""
    for node in reversed(list(graph.nodes)):
        if _is_cut(node) and _reaches_end(node.args[0], _dim(node), node.args[1], _becomes_heads(node)):
            _replace_cut(graph, node)


def _is_cut(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in CUTS and isinstance(node.args[1], (list, tuple))


def _dim(node: fx.Node) -> int:
    """Return the dim of a cut."""
    given: Any = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
    return int(given % infos(node)[0].ndim)


def _joins(node: fx.Node, dim: int, sizes: Sequence[Size]) -> bool:
    """Return whether a tensor is joined from parts of these sizes."""
    given: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    if node.target is not aten.cat.default or given % info(node).ndim != dim:
        return False
    return [info(x).shape[dim] for x in operands(node)] == list(sizes)


def _becomes_heads(cut: fx.Node) -> bool:
    """Return whether a view makes several dims of the cut dim of a part."""
    ahead = [(user, reader, _dim(cut)) for user in cut.users for reader in user.users]
    seen = set[fx.Node]()
    while ahead:
        node, reader, dim = ahead.pop()
        if reader in seen or reader.op != "call_function":
            continue
        seen.add(reader)
        if _is_cut(reader) and _dim(reader) == dim:
            dims = {dim}
            readers = [(part, user) for part in reader.users for user in part.users]
        else:
            dims = _result_dims(node, reader, dim)
            readers = [(reader, user) for user in reader.users]
        if len(dims) > 1:
            return True
        ahead += [(made, user, d) for d in dims for made, user in readers]
    return False


def _result_dims(node: fx.Node, reader: fx.Node, dim: int) -> set[int]:
    """Return the dims of an op's result that are made of a dim of one of its operands, but those of size 1."""
    if isinstance(reader.meta["info"], tuple) or reader.target not in RULES:
        return set()
    loops, shape = resolve(op_call(reader)).loops, info(reader).shape
    at = operands(reader).index(node)
    places = loops.places.values() if loops is not None else ()
    pairs = ((each[at], each[-1]) for each in places)
    return {b.dim for a, b in pairs if a is not None and b is not None and a.dim == dim and shape[b.dim] != 1}


def _reaches_end(node: fx.Node, dim: int, sizes: Sequence[Size], heads: bool) -> bool:
    """Return whether the cut dim of a tensor, which nothing else reads, is joined, or the rows of a product to heads.

    Only the first operand is followed: the others of an op are cut where they are.
    """
    if len(node.users) != 1 or node.op != "call_function":
        return False
    if is_getitem(node):
        cut = node.args[0]
        assert isinstance(cut, fx.Node)
        return _is_cut(cut) and _dim(cut) == dim and _reaches_end(cut.args[0], dim, (), heads)  # type: ignore[arg-type]
    if _joins(node, dim, sizes):
        return True
    at = _operand_dims(node, dim)
    if node.target is aten.linear.default:
        return heads and 1 in at and operands(node)[1].op == "placeholder"
    return 0 in at and _reaches_end(operands(node)[0], at[0], sizes, heads)


def _operand_dims(node: fx.Node, dim: int) -> dict[int, int]:
    """Return the operands that have the cut dim, by position, with its place; none if the op cannot be cut there."""
    rule = RULES.get(node.target)  # type: ignore[arg-type]
    if rule is None or isinstance(node.meta["info"], tuple) or is_random(node.target):
        return {}  # the numbers of a random op are those of its whole result
    call = op_call(node)
    if rule.local is not Rule.local and not _is_depthwise(call):
        return {}  # it has sizes as arguments
    loops = resolve(call).loops
    for places in loops.places.values() if loops is not None else ():
        if (place := places[-1]) is not None and place.dim == dim:
            tensors = zip(places, (*call.operands, *call.outputs), strict=True)
            if all(p is None or t.shape[p.dim] == call.outputs[0].shape[dim] for p, t in tensors):
                return {i: p.dim for i, p in enumerate(places[:-1]) if p is not None}
    return {}


def _is_depthwise(call: OpCall) -> bool:
    at = CONVOLUTIONS.get(call.target)
    return at is not None and call.arg(at, "groups", 1) == call.operands[1].shape[0] == call.outputs[0].shape[1]


def _replace_cut(graph: fx.Graph, cut: fx.Node) -> None:
    whole = operands(cut)[0]
    with graph.inserting_before(cut):
        parts = _parts(graph, whole, _dim(cut), cut.args[1])  # type: ignore[arg-type]
    for reader in list(cut.users):
        reader.replace_all_uses_with(parts[reader.args[1]])  # type: ignore[index]
        graph.erase_node(reader)
    _erase(graph, cut)


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a node that nothing reads, and what only it read."""
    sources = node.all_input_nodes
    graph.erase_node(node)
    for source in sources:
        if not source._erased and not source.users and source.op == "call_function":
            _erase(graph, source)


def _parts(graph: fx.Graph, node: fx.Node, dim: int, sizes: Sequence[Size]) -> list[fx.Node]:
    """Return the parts of a tensor: of a cut's part as parts of the cut, else computed from parts of the operands."""
    if is_getitem(node) and len(node.users) == 1:
        return _finer(graph, node, sizes)
    if len(node.users) == 1 and _joins(node, dim, sizes):
        return operands(node)
    at = _operand_dims(node, dim)
    if not at or len(node.users) != 1:
        return _cut(graph, node, dim, sizes)
    found = {i: _parts(graph, x, at[i], sizes) for i, x in enumerate(operands(node)) if i in at}
    return [_part(graph, node, dim, size, {i: each[k] for i, each in found.items()}) for k, size in enumerate(sizes)]


def _part(graph: fx.Graph, node: fx.Node, dim: int, size: Size, given: Mapping[int, fx.Node]) -> fx.Node:
    """Return the op on parts of its operands."""
    numbers = iter(range(len(operands(node))))

    def chosen(x: fx.Node) -> fx.Node:
        return given.get(next(numbers), x)

    args = substitute(node.args, chosen)
    kwargs = {k: substitute(v, chosen) for k, v in node.kwargs.items()}
    made = graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
    if node.target in CONVOLUTIONS:
        at = CONVOLUTIONS[node.target]
        made.args = tuple(size if i == at else a for i, a in enumerate(made.args))
        made.kwargs = {k: size if k == "groups" else v for k, v in made.kwargs.items()}
    made.meta = {**node.meta, "info": _resized(info(node), dim, size)}
    return made


def _cut(graph: fx.Graph, node: fx.Node, dim: int, sizes: Sequence[Size]) -> list[fx.Node]:
    """Return the parts of a weight or another tensor, by one new cut."""
    made = graph.call_function(aten.split_with_sizes.default, (node, list(sizes), dim))
    made.meta = {**node.meta, "info": tuple(_resized(info(node), dim, size) for size in sizes)}
    return [_item(graph, made, i) for i in range(len(sizes))]


def _finer(graph: fx.Graph, node: fx.Node, sizes: Sequence[Size]) -> list[fx.Node]:
    """Return the parts of a cut's part. The cut becomes finer, and is moved up when it is its turn."""
    cut, index = node.args
    assert isinstance(cut, fx.Node) and isinstance(index, int)
    before, dim = list(cut.args[1]), _dim(cut)  # type: ignore[arg-type]
    finer = [*before[:index], *sizes, *before[index + 1 :]]
    cut.args = (cut.args[0], finer, dim)
    cut.kwargs = {}
    cut.meta["info"] = tuple(_resized(infos(cut)[0], dim, size) for size in finer)
    for reader in list(cut.users):
        if reader.args[1] > index:  # type: ignore[operator]
            reader.args = (cut, reader.args[1] + len(sizes) - 1)  # type: ignore[operator]
    with graph.inserting_after(cut):
        return [_item(graph, cut, index + i) for i in reversed(range(len(sizes)))][::-1]


def _item(graph: fx.Graph, cut: fx.Node, index: int) -> fx.Node:
    made = graph.call_function(operator.getitem, (cut, index))
    made.meta = {**cut.meta, "info": infos(cut)[index]}
    return made


def _resized(tensor: TensorInfo, dim: int, size: Size) -> TensorInfo:
    shape = tuple(size if i == dim else n for i, n in enumerate(tensor.shape))
    return TensorInfo(shape, tensor.dtype, tensor.requires_grad)
