"""The few things every pass asks of an fx graph: infos, operands, ancestors, where a node came from."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import sympy
import torch
from torch import fx

from autoptd.passes.opcall import OpCall, Size, TensorInfo


def info(node: fx.Node) -> TensorInfo:
    """Shape, dtype and gradient of a node that is one tensor."""
    value = node.meta["info"]
    assert isinstance(value, TensorInfo), f"{node.name} is not one tensor"
    return value


def infos(node: fx.Node) -> tuple[TensorInfo, ...]:
    """Of each output of a node."""
    value = node.meta["info"]
    return (value,) if isinstance(value, TensorInfo) else tuple(value)


def operands(node: fx.Node) -> list[fx.Node]:
    """Tensor operands in order of appearance, lists flattened, repeats kept (the order of `OpCall.operands`)."""
    return list(_nodes((node.args, tuple(node.kwargs.values()))))


def _nodes(value: Any) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _nodes(item)


def op_call(node: fx.Node) -> OpCall:
    """The node as the rules see it."""
    return OpCall(
        target=node.target,  # type: ignore[arg-type]
        args=substitute(node.args, info_of),
        kwargs={k: substitute(v, info_of) for k, v in node.kwargs.items()},
        outputs=infos(node),
    )


def info_of(node: fx.Node) -> Any:
    return node.meta["info"]


def substitute(value: Any, each: Any) -> Any:
    """`value` with every fx node `n` inside replaced by `each(n)`; lists stay lists."""
    if isinstance(value, fx.Node):
        return each(value)
    if isinstance(value, tuple):
        return tuple(substitute(v, each) for v in value)
    if isinstance(value, list):
        return [substitute(v, each) for v in value]
    return value


def concrete(value: Any, sizes: Mapping[sympy.Symbol, int]) -> Any:
    """An op's argument with these sizes, for the CPU; lists stay lists."""
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


WRITTEN_FOR = "written for"  # in a node's meta: the op of the user's that it is a part of


def user_op_name(node: fx.Node) -> str:
    """The name of the op that the user wrote, where a pass has written it otherwise."""
    name = node.meta.get(WRITTEN_FOR) or op_name(node)
    assert isinstance(name, str)
    return name


def op_name(node: fx.Node) -> str:
    """`linear` for `aten.linear.default`, the function's name for any other target."""
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target._schema.name.split("::")[1])
    return getattr(node.target, "__name__", str(node.target))


def is_getitem(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem


def ancestors(nodes: Iterable[fx.Node], through: Callable[[fx.Node], bool] = lambda node: True) -> set[fx.Node]:
    """The nodes and everything they are computed from, as far as it is reached through such nodes alone."""
    seen: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in seen and through(node):
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return seen


def module_path(node: fx.Node) -> str:
    """Dotted path of the innermost module that made the node, without the tracing wrapper's own name."""
    stack = node.meta.get("nn_module_stack")
    return "" if not stack else list(stack.values())[-1][0].removeprefix("model").removeprefix(".")


def module_stack(node: fx.Node) -> list[tuple[str, str]]:
    """(dotted path, class name) from the model down to the innermost module."""
    stack = node.meta.get("nn_module_stack") or {}
    entries = [(path, cls if isinstance(cls, str) else cls.__name__) for path, cls in stack.values()]
    return [(path.removeprefix("model").removeprefix("."), cls.rsplit(".", 1)[-1]) for path, cls in entries if path]


def source_line(node: fx.Node) -> str:
    """`decoder.router (model.py:41)  idx = mask.nonzero()`: module path and the user's own line."""
    trace = (node.meta.get("stack_trace") or "").strip().splitlines()
    place, code = "", ""
    for i, line in enumerate(trace):
        if line.strip().startswith("File "):
            parts = line.strip().split('"')
            number = line.split("line ")[1].split(",")[0] if "line " in line else "?"
            place = f"{parts[1].rsplit('/', 1)[-1]}:{number}"
            code = trace[i + 1].strip() if i + 1 < len(trace) else ""
    path = module_path(node) or "model"
    return f"{path} ({place})  {code}" if place else path


def nbytes(tensor: TensorInfo) -> Size:
    """Size of the whole tensor in bytes, symbolic where its shape is."""
    return numel(tensor.shape) * tensor.dtype.itemsize


def numel(shape: Iterable[Size]) -> Size:
    total: Size = 1
    for size in shape:
        total = total * size
    return total


def plain(size: Any) -> Size:
    """A sympy integer as an int; anything else as it is."""
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
    """A new node at the graph's insert point, from the same place in the model as `like`; `dtype` left out: like its.

    A gradient flows to it where one flows to an operand.
    """
    new = graph.call_function(target, args, dict(kwargs or {}))
    new.meta = {key: value for key, value in like.meta.items() if key in ("nn_module_stack", "stack_trace")}
    kind = infos(like)[0].dtype if dtype is None else dtype
    grad = is_float(kind) and any(t.requires_grad for o in operands(new) for t in infos(o))
    new.meta["info"] = TensorInfo(tuple(map(plain, shape)), kind, grad)
    return new


def is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
