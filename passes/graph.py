"""Accessors for fx graphs that every pass uses: tensor infos, operands, ancestors, source locations."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import fx

from autoptd.passes.opcall import OpCall, Size, TensorInfo, target_name

# ops that write running statistics in training, though their schemas do not say so (torch 2.13)
_NORMS = ("batch_norm", "native_batch_norm", "cudnn_batch_norm", "instance_norm")
_OWN = f"{Path(__file__).parent}/"  # the files of these packages


def info(node: fx.Node) -> TensorInfo:
    """Return shape, dtype and gradient of a node that is one tensor."""
    value = node.meta["info"]
    assert isinstance(value, TensorInfo), f"{node.name} is not one tensor"
    return value


def infos(node: fx.Node) -> tuple[TensorInfo, ...]:
    """Return shape, dtype and gradient of each output of a node."""
    value = node.meta["info"]
    return (value,) if isinstance(value, TensorInfo) else tuple(value)


def operands(node: fx.Node) -> list[fx.Node]:
    """Return tensor operands in order of appearance, lists flattened, with repeats (the order of `OpCall.operands`)."""
    return _nodes((*node.args, *node.kwargs.values()))


def _nodes(values: Iterable[Any]) -> list[fx.Node]:
    found: list[fx.Node] = []
    for value in values:
        if isinstance(value, fx.Node):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += _nodes(value)
    return found


def op_call(node: fx.Node) -> OpCall:
    """Return the node as an `OpCall`, the form that the rules read."""
    return OpCall(
        target=node.target,  # type: ignore[arg-type]
        args=substitute(node.args, info_of),
        kwargs={k: substitute(v, info_of) for k, v in node.kwargs.items()},
        outputs=infos(node),
    )


def info_of(node: fx.Node) -> Any:
    return node.meta["info"]


def substitute(value: Any, each: Any) -> Any:
    """Return `value` with every fx node `n` in it replaced by `each(n)`; lists stay lists."""
    if isinstance(value, fx.Node):
        return each(value)
    if isinstance(value, tuple):
        return tuple(substitute(v, each) for v in value)
    if isinstance(value, list):
        return [substitute(v, each) for v in value]
    return value


def concrete(value: Any, sizes: Mapping[sympy.Symbol, int]) -> Any:
    """Return an op's argument with symbols replaced by `sizes` and devices by the CPU; lists stay lists."""
    if isinstance(value, sympy.Basic):
        number = value.subs(sizes)
        return int(number) if number.is_Integer else float(number)
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, tuple):
        return tuple(concrete(v, sizes) for v in value)
    if isinstance(value, list):
        return [concrete(v, sizes) for v in value]
    return value


TRACED = "_export_root."  # how the paths of modules begin while torch.export traces
CALL = "random call"  # key of a node's meta: the number of the random call of forward that it is or was
OF_ROWS = "of rows"  # key of a node's meta, if it draws for all rows where a model draws for those that a mask selects
OR_ZERO = "or zero"  # key of a node's meta, if the mean of rows that it is must be zero where there are none
COUNTED = "turns"  # keyword of a graph's results: the masks whose rows are counted
WRITTEN_FOR = "written for"  # key of a node's meta: the user's op that it is a part of
NAMED = "named"  # key of a node's meta: a name for its variable in emitted programs


def user_op_name(node: fx.Node) -> str:
    """Return the name of the op as the user wrote it, before any pass rewrote it."""
    name = node.meta.get(WRITTEN_FOR) or target_name(node.target)
    assert isinstance(name, str)
    return name


def op_name(node: fx.Node) -> str:
    """Return `linear` for `aten.linear.default`, and the function's name for any other target.

    What is given may have the name of an op: it is `placeholder`.
    """
    return node.op if node.op == "placeholder" else target_name(node.target)


def writes_unread(node: fx.Node) -> bool:
    """Return whether a node does something even if nothing reads it: it writes to a tensor. Draws do not: by keys."""
    of_statistics = op_name(node) in _NORMS and len(node.args) > 5 and node.args[3] is not None and bool(node.args[5])
    return of_statistics or node.is_impure(impure_random=False)


def drop_unread(graph: fx.Graph) -> None:
    """Remove nodes without readers, except those that write."""
    for node in reversed(graph.nodes):
        if not node.users and not writes_unread(node):
            graph.erase_node(node)


def made_since(graph: fx.Graph) -> Callable[[], list[fx.Node]]:
    """Return a function that lists the nodes that a tracer adds after this call, newest first."""
    last = next(iter(reversed(graph.nodes)), None)
    return lambda: list(takewhile(lambda node: node is not last, reversed(graph.nodes)))


def is_getitem(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem


def output_of(graph: fx.Graph) -> fx.Node:
    """Return the node of a graph's results: its args, and by keyword those that are no part of the loss."""
    return next(n for n in graph.nodes if n.op == "output")


def updated_values(graph: fx.Graph) -> dict[str, fx.Node]:
    """Return the new values of buffers that forward updates, by placeholder, before they are moved out of the graph."""
    return {name: value for name, value in output_of(graph).kwargs.items() if isinstance(value, fx.Node)}


def masks_counted(graph: fx.Graph) -> tuple[tuple[fx.Node, int], ...]:
    """Return the masks whose rows are counted over the batch, each with how many of its first dims are kept."""
    return output_of(graph).kwargs.get(COUNTED, ())  # type: ignore[return-value]


def ancestors(nodes: Iterable[fx.Node], through: Callable[[fx.Node], bool] = lambda node: True) -> set[fx.Node]:
    """Return the nodes and all that they are computed from, following only nodes that satisfy `through`."""
    seen: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in seen and through(node):
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return seen


def descendants(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes that are computed from any of these, without the output."""
    seen: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        for user in stack.pop().users:
            if user not in seen and user.op != "output":
                seen.add(user)
                stack.append(user)
    return seen


def module_path(node: fx.Node) -> str:
    """Return the dotted path of the innermost module that made the node, without the name of the tracing wrapper."""
    stack = node.meta.get("nn_module_stack")
    path = "" if not stack else list(stack.values())[-1][0].removeprefix(TRACED)
    return path.removeprefix("model").removeprefix(".")


def module_stack(node: fx.Node) -> list[tuple[str, str]]:
    """Return (dotted path, class name) of each module from the model down to the innermost one."""
    stack = node.meta.get("nn_module_stack") or {}
    entries = [(path, cls if isinstance(cls, str) else cls.__name__) for path, cls in stack.values()]
    return [(path.removeprefix("model").removeprefix("."), cls.rsplit(".", 1)[-1]) for path, cls in entries if path]


def source_line(node: fx.Node) -> str:
    """Return module path and source line, as in `decoder.router (model.py:41)  idx = mask.nonzero()`.

    torch keeps no frames of functions, so that of a loss function is "the loss".
    """
    trace = (node.meta.get("stack_trace") or "").strip().splitlines()
    place, code, root = "", "", "model"
    for i, line in enumerate(trace):
        if line.strip().startswith("File "):
            parts = line.strip().split('"')
            if parts[1].startswith(_OWN):
                root = "the loss"
                continue
            number = line.split("line ")[1].split(",")[0] if "line " in line else "?"
            place = f"{parts[1].rsplit('/', 1)[-1]}:{number}"
            code = trace[i + 1].strip() if i + 1 < len(trace) else ""
    path = module_path(node) or (root if not place else "model")
    return f"{path} ({place})  {code}" if place else path


def nbytes(tensor: TensorInfo) -> Size:
    """Return the bytes of the whole tensor, symbolic if its shape is."""
    return numel(tensor.shape) * tensor.dtype.itemsize


def numel(shape: Iterable[Size]) -> Size:
    total: Size = 1
    for size in shape:
        total = total * size
    return total


def plain(size: Any) -> Size:
    """Return a sympy integer as an int, and any other size unchanged."""
    if isinstance(size, sympy.Basic) and size.is_Integer:
        return int(size)
    return size


def write_op(
    graph: fx.Graph,
    like: fx.Node,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    shape: tuple[Size, ...],
    dtype: torch.dtype | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> fx.Node:
    """Insert an op at the graph's insert point and return its node.

    It takes its module and source line from `like`, and its dtype too unless one is given. It requires a gradient if
    any of its operands does. A tensor made from sizes alone gets a device, as traced ones have: programs make it on
    their own. Numbers may stay on the host.
    """
    new = graph.call_function(target, args, dict(kwargs or {}))
    if shape and not operands(new) and isinstance(target, torch._ops.OpOverload) and _makes(target):
        new.kwargs = {"device": torch.device("cpu"), **new.kwargs}
    new.meta = {key: value for key, value in like.meta.items() if key in ("nn_module_stack", "stack_trace", CALL)}
    kind = infos(like)[0].dtype if dtype is None else dtype
    grad = is_float(kind) and any(t.requires_grad for o in operands(new) for t in infos(o))
    new.meta["info"] = TensorInfo(tuple(map(plain, shape)), kind, grad)
    return new


def _makes(op: torch._ops.OpOverload) -> bool:
    return any(argument.name == "device" for argument in op._schema.arguments)


def is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
