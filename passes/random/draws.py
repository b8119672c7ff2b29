"""Write random ops as draws of `autoptd.ops.random`, whose numbers are keyed by sample and element, and ops on these.

A draw has a shape and no operand, so that every rank draws what it holds. Which of its elements belong to which sample
is seen from its shape, `rand(b, 1, 1)`; or from the tensor that it is like, as in `randn_like(x)` of x [(b s), e]. Such
a tensor is an operand until samples are proved to stay apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoptd.ops import library as ops
from autoptd.passes.batch.batch_dims import counts_samples, makes_new, place_by_shape, sample_place
from autoptd.passes.graph import CALL, WRITTEN_FOR, info, module_path, operands, user_op_name, write_op
from autoptd.passes.opcall import TensorInfo, is_random
from autoptd.passes.random.distributions import DISTRIBUTIONS, Shape
from autoptd.passes.rules.views import same
from autoptd.passes.trace.traced import Traced

aten = torch.ops.aten
LIKE = "like"  # keyword of a draw: the tensor that shows which rows belong to which sample


def number_calls(graph: fx.Graph, traced: Traced) -> None:
    """Number the random calls of a forward pass, also those whose results nothing reads: they are dropped later."""
    for node in graph.nodes:
        if node.op == "call_function" and draws(node.target, node.args, node.kwargs):
            node.meta[CALL] = len(traced.random_calls)
            traced.random_calls.append(module_path(node))


def write_random_as_draws(graph: fx.Graph, traced: Traced) -> None:
    """Rewrite every op of `DISTRIBUTIONS`."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in DISTRIBUTIONS:
            with graph.inserting_before(node):
                made = DISTRIBUTIONS[node.target](
                    GraphWriter(graph, node), given_of(node.target, node.args, node.kwargs), *_result(node)
                )
            node.replace_all_uses_with(made)
            graph.erase_node(node)


def forget_likes(graph: fx.Graph, traced: Traced) -> None:
    """Take away the tensor that a draw is like, after noting where it has the samples."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in ops.DRAWS and LIKE in node.kwargs:
            sample_place(node)
            node.kwargs = {k: v for k, v in node.kwargs.items() if k != LIKE}


def given_of(target: Any, args: Sequence[Any], kwargs: Any) -> dict[str, Any]:
    """Return the arguments of an op's call by name, defaults included."""
    schema = target._schema.arguments
    names = [a.name for a in schema]
    return {a.name: a.default_value for a in schema} | dict(zip(names, args, strict=False)) | dict(kwargs)


_DRAWS_NOTHING = {
    "dropout": 0,
    "dropout_p": 0,
    "p": 0,
    "train": False,
    "training": False,
    "num_layers": 1,
}  # LSTM: between layers only


def draws(target: Any, args: Sequence[Any], kwargs: Any) -> bool:
    """Return whether a call draws random numbers: an LSTM without dropout is the same op as one with it."""
    if not is_random(target):
        return False
    given = given_of(target, args, kwargs) if isinstance(target, torch._ops.OpOverload) else {}
    return not any(name in given and given[name] == value for name, value in _DRAWS_NOTHING.items())


def _result(node: fx.Node) -> tuple[Shape, torch.dtype]:
    return info(node).shape, info(node).dtype


@dataclass(frozen=True)
class GraphWriter:
    """The `Writer` of nodes at the graph's insert point, for one random op."""

    graph: fx.Graph
    node: fx.Node

    def draw(self, target: Callable[..., Any], shape: Shape, *options: Any, dtype: torch.dtype) -> fx.Node:
        like = like_of(self.node, shape)
        kwargs = {} if like is None else {LIKE: like}
        made = self.op(target, (list(shape), *options, dtype), shape, dtype, kwargs)
        made.meta["info"] = TensorInfo(info(made).shape, dtype, False)
        return made

    def op(
        self, target: Any, args: Sequence[Any], shape: Shape, dtype: torch.dtype, kwargs: dict[str, Any] | None = None
    ) -> fx.Node:
        made = write_op(self.graph, self.node, target, tuple(args), shape, dtype, kwargs)
        made.meta[WRITTEN_FOR] = user_op_name(self.node)
        return made

    def shape(self, x: Any) -> Shape | None:
        return info(x).shape if isinstance(x, fx.Node) else None

    def dtype(self, x: fx.Node) -> torch.dtype:
        return info(x).dtype

    def fixed(self, x: Any) -> Any:
        if not isinstance(x, fx.Node) or not info(x).requires_grad:
            return x
        made = self.op(aten.detach.default, (x,), info(x).shape, info(x).dtype)
        made.meta["info"] = TensorInfo(info(x).shape, info(x).dtype, False)
        return made


def like_of(node: fx.Node, shape: Shape) -> fx.Node | None:
    """Return the operand of a random op that a draw of this shape is like, if the shape alone does not say which of its
    elements belong to which sample."""
    whole = TensorInfo(tuple(shape))
    if not counts_samples(whole) or place_by_shape(whole) is not None:
        return None
    return next((x for o in operands(node) if (x := _origin(o, shape)) is not None), None)


def _origin(x: fx.Node, shape: Shape) -> fx.Node | None:
    """Return the tensor of this shape that x is, or that x was made like, as by `empty_like`; None if there is none."""
    while makes_new(x):
        if not x.all_input_nodes:
            return None
        x = x.all_input_nodes[0]
    found = x.meta["info"]
    alike = isinstance(found, TensorInfo) and found.ndim == len(shape) and all(map(same, found.shape, shape))
    return x if alike else None
