"""Rewrite the `autoptd_own` ops that tracing recorded to nodes with the user's functions as targets."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

import torch
from torch import fx

from autoptd.passes.custom_grad.ops import OwnFunction
from autoptd.passes.custom_grad.trace_calls import CALL, HOOK, OwnCalls
from autoptd.passes.graph import is_getitem

aten = torch.ops.aten


def write_own_calls(graph: fx.Graph, calls: OwnCalls) -> None:
    """Replace `call(key, …)` by a node of the function, and `hook(key, x)` by a node between x and its readers.

    Autograd runs hooks in the order of registration, so a later hook is placed closer to x.
    """
    for node in list(graph.nodes):
        if node.target is HOOK:
            key, x = node.args
            _put_after(graph, x, node, calls.calls[key].target)
        elif node.target is CALL:
            _write(graph, node, calls)


def _put_after(graph: fx.Graph, x: fx.Node, mark: fx.Node, target: object) -> None:
    place = x
    if x.op == "placeholder":
        place = [n for n in graph.nodes if n.op == "placeholder"][-1]
    elif is_getitem(x):  # after all getitem nodes of its op
        while is_getitem(place.next):
            place = place.next
    with graph.inserting_after(place):
        made = graph.call_function(target, (x,))  # type: ignore[arg-type]
    made.meta = dict(mark.meta) | {"val": x.meta["val"]}
    graph.erase_node(mark)
    x.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made and user.target is not HOOK)


def _detached(graph: fx.Graph, node: fx.Node, given: Sequence[fx.Node]) -> Iterator[fx.Node]:
    """Yield the tensors of a call, detached where its backward pass returns None instead of a gradient.

    autograd hands a None on, and the next function written in Python makes zeros of it: a gradient where there is none.
    """
    assert isinstance(node.target, OwnFunction)
    for x, reached in zip(given, node.target.reached, strict=True):
        if reached:
            yield x
            continue
        with graph.inserting_before(node):
            made = graph.call_function(aten.detach.default, (x,))
        made.meta = dict(node.meta) | {"val": x.meta["val"]}
        yield made


def _write(graph: fx.Graph, node: fx.Node, calls: OwnCalls) -> None:
    key, given, sizes = node.args
    call = calls.calls[key]  # type: ignore[index]
    node.target = call.target
    node.args, node.kwargs = call.filled([*_detached(graph, node, given)], sizes)  # type: ignore[arg-type]
    if call.several:
        return
    (value,) = node.meta["val"]
    for user in list(node.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with(node)
        graph.erase_node(user)
    node.meta["val"] = value
