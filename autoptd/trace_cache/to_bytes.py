"""Graphs as bytes and back, exactly: names, order of nodes and of their readers, shared objects.

`fx.GraphModule` pickles itself as Python code that is traced again, and a pickled chain of nodes exceeds the recursion
limit. Here a graph is a flat list, and each node is made by `Graph.create_node` once its arguments exist:

    graph     () -> a graph without nodes, then (its nodes, meta of each, readers of each, names that are taken)
    node      (graph, op, name, target, args, kwargs, type); args name earlier nodes of the list alone

What planning never reads is left out: torch's fake tensors, and the op of a node, which is looked up again.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module  # private; seen in 2.13.0

# keys of a node's meta that no pass reads after the graph was normalised, and the cache of its op
LEFT_OUT = frozenset({"val", "tensor_meta", "shapes", "torch_fn", "op"})
KEPT_OF_MODULE = ("loss_form", "buffer_updates", "batch_statistics")  # of the meta of a module; the rest is torch's


class CannotKeep(Exception):
    """An object that has no exact copy on disk."""


def to_bytes(value: Any) -> bytes:
    """Return an object that may hold graphs as bytes. Raises CannotKeep, and what pickle raises."""
    written = io.BytesIO()
    _TraceWriter(written, pickle.HIGHEST_PROTOCOL).dump(value)
    return written.getvalue()


def from_bytes(data: bytes) -> Any:
    """Return the object of `to_bytes`. Runs code that the bytes name: they must be this user's own."""
    return pickle.loads(data)


def kept_meta(node: fx.Node) -> dict[str, Any]:
    return {key: value for key, value in node.meta.items() if key not in LEFT_OUT}


def kept_module_meta(module: fx.GraphModule) -> dict[str, Any]:
    return {key: module.meta[key] for key in KEPT_OF_MODULE if key in module.meta}


class _TraceWriter(pickle.Pickler):
    """A pickler that knows graphs, ops and the plain constants of a trace."""

    def reducer_override(self, x: Any) -> Any:
        match x:
            case fx.Node():
                return _node, (x.graph, x.op, x.name, x.target, x.args, dict(x.kwargs), x.type)
            case fx.Graph():
                nodes = tuple(x.nodes)
                taken = x._graph_namespace
                names = sorted(taken._used_names), dict(taken._base_count)
                state = nodes, [kept_meta(n) for n in nodes], [tuple(n.users) for n in nodes], names
                return fx.Graph, (), state, None, None, _fill
            case fx.GraphModule():
                return _module, (x.graph,), kept_module_meta(x), None, None, _set_meta
            case torch._ops.OpOverload():
                return _op, (*x._schema.name.split("::"), x._overloadname)
            case torch.memory_format() | torch.layout():
                return getattr, (torch, str(x).removeprefix("torch."))
            case Tensor():
                return _tensor, _constant(x)
        return NotImplemented


def _node(graph: fx.Graph, op: str, name: str, target: Any, args: Any, kwargs: dict[str, Any], kind: Any) -> fx.Node:
    node = graph.create_node(op, target, args, kwargs, name, kind)
    if node.name != name:
        raise CannotKeep(f"{name} became {node.name}")
    return node


def _fill(graph: fx.Graph, state: tuple[Sequence[fx.Node], Sequence[Any], Sequence[Any], Any]) -> None:
    """Set what nodes have besides arguments; readers in their order, which is that in which passes made them."""
    nodes, metas, readers, (used, counts) = state
    if tuple(graph.nodes) != nodes:
        raise CannotKeep("a node depends on a later one")
    for node, meta, users in zip(nodes, metas, readers, strict=True):
        node.meta = meta
        node.users.clear()
        node.users.update(dict.fromkeys(users))
    graph._graph_namespace._used_names = set(used)
    graph._graph_namespace._base_count = counts


def _module(graph: fx.Graph) -> fx.GraphModule:
    with _use_lazy_graph_module(True):  # its Python code, which no plan needs, takes longer than all else
        made: fx.GraphModule = _make_graph_module(nn.Module(), graph)
    return made


def _set_meta(module: fx.GraphModule, meta: dict[str, Any]) -> None:
    module.meta = meta


def _op(namespace: str, name: str, overload: str) -> Any:
    return getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")


def _constant(x: Tensor) -> tuple[bytes, torch.dtype, tuple[int, ...]]:
    plain = type(x) is Tensor and x.device.type == "cpu" and x.layout is torch.strided and x.is_contiguous()
    if not plain or x.requires_grad or vars(x) or x.is_conj() or x.is_neg():
        raise CannotKeep(f"a constant of type {type(x).__name__}")
    return x.reshape(-1).view(torch.uint8).numpy().tobytes(), x.dtype, tuple(x.shape)


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
