"""Functionalisation: rewrites in-place ops on fresh tensors to functional ones, refuses writes to the model's state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autoptd.errors import UnsupportedOp
from autoptd.passes.graph import source_line, substitute
from autoptd.passes.random.distributions import FUNCTIONAL
from autoptd.passes.trace.traced import Traced

aten = torch.ops.aten
KEEP_STATE = (
    "compute a new tensor instead; forward runs once per microbatch on every rank, so it may change no parameter. It "
    "may update a buffer (register_buffer), by a plain write such as self.seen.add_(…) under no_grad: hold the weights "
    "of a slow copy of an encoder in buffers"
)


def remove_mutation(graph: fx.Graph, traced: Traced) -> None:
    """Rewrite `relu_(x)` on a fresh tensor to `relu(x)`, and let later readers of x read the result.

    Writes through views have one already. Raises UnsupportedOp for writes to parameters, buffers, inputs.
    """
    state = {**traced.buffers, **traced.parameters, **traced.inputs}
    refuse_writes_to_out(graph)
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in _writes(graph):
        written = _written(node)
        constant = written.name not in state and node.target is aten.detach_.default  # of torch.arange, for one
        if written.op == "placeholder" and not constant:
            raise written_state(node, state.get(written.name, "x.data of a tensor"))
        functional = functional_form(node.target)
        if functional is None:
            raise UnsupportedOp(
                f"{node.target} writes in place", where=source_line(node), fix="use its functional form"
            )
        node.target = functional
        later = [user for user in written.users if order[user] > order[node]]
        result = keep_dtype(graph, node, written)
        for user in later:
            user.replace_input_with(written, result)


def refuse_writes_to_out(graph: fx.Graph) -> None:
    """Raise UnsupportedOp for an op that writes to a tensor passed as `out`."""
    for node in _writes(graph):
        if _written(node) is not node.args[0] and _written(node).op != "placeholder":
            raise UnsupportedOp(
                f"{node.target} writes to the tensor passed as out=",
                where=source_line(node),
                fix="use the returned tensor, or pass one tensor of the result's shape",
            )


def refuse_given_memory(graph: fx.Graph) -> None:
    """Raise UnsupportedOp for `y.set_(x)`, which gives y the memory of x: torch's schema does not say that a write to
    one is a write to both.
    """
    for node in _writes(graph):
        if node.target.overloadpacket in (aten.set_, aten.set_data):  # type: ignore[union-attr]
            raise UnsupportedOp(
                f"{node.target} lets a tensor share the memory of another one",
                where=source_line(node),
                fix="assign the tensor, y = x, or a view of it",
            )


def refuse_lost_tangents(graph: fx.Graph) -> None:
    """Raise UnsupportedOp for an op of forward-mode differentiation that would lose the tangent, as if it were zero.

    Graphs with `torch.func.jvp` are traced once more. torch's export then gives composite ops that it keeps (matmul,
    linear, softmax) kernels without a derivative. Dual numbers of `torch.autograd.forward_ad` are not traced at all.
    """
    depth, composite = 0, None
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        depth += (name == "_jvp_increment_nesting") - (name == "_jvp_decrement_nesting")
        if not depth and node.target is torch.ops.aten._make_dual.default:
            raise UnsupportedOp(
                "the model computes with the dual numbers of torch.autograd.forward_ad",
                where=source_line(node),
                fix="use torch.func.jvp, or write the derivative out in forward",
            )
        if not depth or node.op != "call_function" or not isinstance(node.target, torch._ops.OperatorBase):
            continue
        composite = torch.export.default_decompositions() if composite is None else composite
        key = torch._C.DispatchKey.CompositeImplicitAutograd
        kept = node.target in composite and torch._C._dispatch_has_kernel_for_dispatch_key(node.target.name(), key)
        if kept or not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
            raise UnsupportedOp(
                f"{node.target} within torch.func.jvp would lose the tangent",
                where=source_line(node),
                fix="write the derivative out in forward, or use ops there that torch does not compose of others, such "
                "as torch.mm and torch.addmm",
            )


def _writes(graph: fx.Graph) -> list[fx.Node]:
    calls = [n for n in graph.nodes if n.op == "call_function" and isinstance(n.target, torch._ops.OpOverload)]
    return [node for node in calls if node.target._schema.is_mutable]  # type: ignore[union-attr]


def written_state(node: fx.Node, name: str) -> UnsupportedOp:
    """Return the error of a write to a parameter, buffer or input."""
    return UnsupportedOp(f"{node.target} writes to {name}", where=source_line(node), fix=KEEP_STATE)


def _written(node: fx.Node) -> fx.Node:
    """Return the tensor that an op writes to: its first argument, or the one passed as `out`."""
    schema = node.target._schema  # type: ignore[union-attr]
    given = {a.name: x for a, x in zip(schema.arguments, node.args, strict=False)} | dict(node.kwargs)
    found = [given.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    written = next((x for x in found if isinstance(x, fx.Node)), node.args[0])
    assert isinstance(written, fx.Node)
    return written


def keep_dtype(graph: fx.Graph, node: fx.Node, written: fx.Node) -> fx.Node:
    """Cast the result to the dtype of `written`, if needed: `x.add_(y)` has the dtype of x, `x + y` the wider one."""
    value = written.meta["val"]
    wide = _result_dtype(node)
    if wide in (None, value.dtype):
        return node
    with graph.inserting_after(node):
        cast = graph.call_function(aten.to.dtype, (node, value.dtype))
    cast.meta = dict(node.meta)
    node.meta["val"] = value.to(wide)
    if "shapes" in node.meta:
        node.meta["shapes"] = replace(node.meta["shapes"], dtype=wide)
    node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)
    return cast


def _result_dtype(node: fx.Node) -> torch.dtype | None:
    """Return the dtype that an op gives, found by running it on tensors of one element; None if it refuses them."""

    def tiny(operand: fx.Node) -> torch.Tensor | int:
        value = operand.meta["val"]
        if not isinstance(value, torch.Tensor):
            return 1  # a size
        return torch.ones((1,) * value.ndim, dtype=value.dtype, device="cpu")

    try:
        kwargs = {name: substitute(value, tiny) for name, value in node.kwargs.items()}
        made = node.target(*substitute(node.args, tiny), **kwargs)  # type: ignore[operator]
    except (IndexError, RuntimeError, TypeError):
        return None  # such an op moves elements, and has the dtype of its first operand
    return made.dtype if isinstance(made, torch.Tensor) else None


def functional_form(target: Any) -> torch._ops.OpOverload | None:
    """Return `relu` for `relu_`, and `__or__` for `__ior__`, if there is one."""
    if target in FUNCTIONAL:
        return FUNCTIONAL[target]  # type: ignore[no-any-return]
    name = target._schema.name.split("::")[1]
    name = name.replace("__i", "__", 1) if name.endswith("__") else name.removesuffix("_")
    packet = getattr(torch.ops.aten, name, None)
    names = packet.overloads() if packet is not None else []
    for overload in sorted(names, key=lambda n: n != target._overloadname):
        found = getattr(packet, overload)  # `floor_divide.default` for `floor_divide_.Tensor`
        if _argument_types(found) == _argument_types(target):
            return found  # type: ignore[no-any-return]
    return None


def _argument_types(op: torch._ops.OpOverload) -> list[str]:
    return [str(argument.type) for argument in op._schema.arguments]
