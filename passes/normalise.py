"""Bring a traced graph into the form that every later pass may assume.

After `normalise`, each node is a placeholder (parameter, buffer, constant, input, or a global loss count), a
functional ATen op or an op of `autoptd.runtime.ops`; sizes in arguments are ints or sympy expressions of b, s …;
`meta["info"]` holds global shape, dtype and whether a gradient flows; nothing is computed that does not reach the
loss; views are `reshape` with the whole output shape. `PREPARE`, `EXACT_LOSS` and `FINISH` are read top to bottom.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx, nn

from autoptd.errors import TraceError, UnsupportedOp
from autoptd.passes.batch_counts import take_counts_over_batch
from autoptd.passes.graph import info, infos, is_float, is_getitem, op_name, operands, plain, source_line
from autoptd.passes.loss_form import loss_form
from autoptd.passes.loss_spellings import write_sums_over_samples
from autoptd.passes.masks import name_causal_masks
from autoptd.passes.mixing import refuse_mixed_samples
from autoptd.passes.opcall import TensorInfo
from autoptd.passes.own_calls import write_own_calls
from autoptd.passes.own_ops import OwnFunction
from autoptd.passes.own_proof import prove_own
from autoptd.passes.reduce_loss import average_over_microbatches, check_loss, rewrite_loss
from autoptd.passes.regions import inline_regions as _inline
from autoptd.passes.scalar_types import settle_scalar_types
from autoptd.passes.spellings import (
    merge_reshapes,
    write_addmm_as_linear,
    write_casts_with_their_type,
    write_copy_as_source,
    write_equal_splits_as_chunk,
    write_grouped_mm,
    write_masked_put_as_where,
    write_native_dropout_as_dropout,
    write_views_as_reshape,
)
from autoptd.passes.trace import KEEP_TENSORS, NUMBER_READ, Traced
from autoptd.passes.types import refuse_mixed_types, write_frozen_batch_norm_in_one_type

aten = torch.ops.aten
Pass = Callable[[fx.Graph, Traced], None]


def normalise(traced: Traced) -> Traced:
    """Run every pass over the graph, checking it after each. Changes `traced.graph` in place."""
    _run(PREPARE, traced)
    averaged = traced.averaging == "per-microbatch" and not _is_exact(traced)
    traced.averaged = averaged
    _run(AVERAGED_LOSS if averaged else EXACT_LOSS, traced)
    _run(FINISH, traced)
    _check(traced.graph.graph)
    return traced


def _run(steps: Sequence[Pass], traced: Traced) -> None:
    graph = traced.graph.graph
    for step in steps:
        step(graph, traced)
        _drop_dead(graph)
        graph.lint()


def _is_exact(traced: Traced) -> bool:
    """Whether the loss can be that of the whole batch; tried on a copy of the graph."""
    copied: fx.Graph = fx.Graph()
    made = copied.graph_copy(traced.graph.graph, {})
    copied.output(made)
    trial = replace(traced, graph=fx.GraphModule(nn.Module(), copied))
    try:
        _run(EXACT_LOSS, trial)
    except UnsupportedOp:
        return False
    return not loss_form(trial.graph).refused


def _drop_dead(graph: fx.Graph) -> None:
    """Remove what nobody reads, but what writes; what merely draws random numbers goes as well."""
    for node in reversed(graph.nodes):
        if not node.users and not node.is_impure(impure_random=False):
            graph.erase_node(node)


def inline_regions(graph: fx.Graph, traced: Traced) -> None:
    """Replace `with torch.no_grad()` and disabled-autocast regions by their bodies."""
    _inline(graph, traced.graph)


def write_own(graph: fx.Graph, traced: Traced) -> None:
    """Write calls of the user's own backward passes with the functions themselves as targets."""
    write_own_calls(graph, traced.own)


def fold_sizes(graph: fx.Graph, traced: Traced) -> None:
    """Write sizes into the arguments as sympy expressions of our symbols; size arithmetic leaves the graph."""
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node.op == "output":
            continue
        if (
            isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool))
            and node.op != "placeholder"
        ):
            size = _ours(value, traced, node)
            for user in list(node.users):
                user.args = _replace(user.args, node, size)
                user.kwargs = {k: _replace(v, node, size) for k, v in user.kwargs.items()}
        elif value is not None:
            node.meta["shapes"] = _shapes(value, traced, node)
    for node in graph.nodes:
        if node.op == "call_function":
            node.args = _numbers(node.args, traced, node)
            node.kwargs = {k: _numbers(v, traced, node) for k, v in node.kwargs.items()}


def _ours(value: object, traced: Traced, node: fx.Node) -> object:
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value
    expr = sympy.sympify(value.node.expr)
    if expr in traced.resolved:
        return traced.resolved[expr]
    unknown = [s for s in expr.free_symbols if s not in traced.symbol]
    if unknown:
        reads = op_name(node) in ("item", "_local_scalar_dense")
        raise UnsupportedOp(
            NUMBER_READ if reads else f"{node.target} has a size that depends on data ({', '.join(map(str, unknown))})",
            where=source_line(node),
            fix=KEEP_TENSORS if reads else "use a fixed-capacity form such as torch.topk, or a mask with torch.where",
        )
    return traced.resolved.setdefault(expr, plain(_clean(expr.subs(traced.symbol))))


def _clean(expr: sympy.Expr) -> sympy.Expr:
    """torch's own FloorDiv and the like as sympy's, for positive integers."""
    return expr.replace(lambda e: type(e).__name__ in ("FloorDiv", "CleanDiv"), lambda e: _divide(e.args[0], e.args[1]))


def _divide(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
    exact = sympy.simplify(a / b)
    return exact if exact.is_integer else sympy.floor(a / b)


def _shapes(value: object, traced: Traced, node: fx.Node) -> object:
    if isinstance(value, torch.Tensor):
        return TensorInfo(tuple(_ours(s, traced, node) for s in value.shape), value.dtype, False)  # type: ignore[misc]
    if isinstance(value, (tuple, list)):
        return tuple(_shapes(v, traced, node) for v in value)
    return None


def _replace(value: object, node: fx.Node, size: object) -> object:
    if value is node:
        return size
    if isinstance(value, (tuple, list)):
        return type(value)(_replace(v, node, size) for v in value)
    return value


def _numbers(value: object, traced: Traced, node: fx.Node) -> object:
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return _ours(value, traced, node)
    if isinstance(value, tuple):
        return tuple(_numbers(v, traced, node) for v in value)
    if isinstance(value, list):
        return [_numbers(v, traced, node) for v in value]
    return value


def drop_asserts(graph: fx.Graph, traced: Traced) -> None:
    """Remove run-time assertions of the tracer: shapes are proved by the plan, not on every step."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and op_name(node) in _ASSERTS:
            graph.erase_node(node)


_ASSERTS = frozenset(
    [
        "_assert_tensor_metadata",
        "_assert_scalar",
        "_assert_async",
        "sym_constrain_range",
        "sym_constrain_range_for_size",
    ]
)


def remove_mutation(graph: fx.Graph, traced: Traced) -> None:
    """`relu_(x)` on a fresh tensor becomes `relu(x)`, and later readers of x read the result.

    Writes through views were functionalised by the tracer; a buffer that the model writes to is refused.
    """
    _refuse_running_statistics(graph)
    state = {**traced.buffers, **traced.parameters, **traced.inputs}
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if not node.target._schema.is_mutable:
            continue
        written = _written(node)
        if written.name in state:
            raise UnsupportedOp(
                f"{node.target} writes to {state[written.name]}",
                where=source_line(node),
                fix="compute a new tensor instead",
            )
        if written is not node.args[0]:
            raise UnsupportedOp(
                f"{node.target} writes to the tensor given as out=",
                where=source_line(node),
                fix="take what it returns; a module that updates buffers so in training, such as a spectral norm, can "
                "be put in eval mode",
            )
        functional = _functional(node.target)
        if functional is None:
            raise UnsupportedOp(
                f"{node.target} writes in place", where=source_line(node), fix="use its functional form"
            )
        node.target = functional
        later = [user for user in written.users if order[user] > order[node]]
        result = _keep_dtype(graph, node, written)
        for user in later:
            user.replace_input_with(written, result)


def _written(node: fx.Node) -> fx.Node:
    """The tensor that an op writes to: its first one, or the one given as `out`."""
    schema = node.target._schema  # type: ignore[union-attr]
    given = {a.name: x for a, x in zip(schema.arguments, node.args, strict=False)} | dict(node.kwargs)
    found = [given.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    written = next((x for x in found if isinstance(x, fx.Node)), node.args[0])
    assert isinstance(written, fx.Node)
    return written


def _keep_dtype(graph: fx.Graph, node: fx.Node, written: fx.Node) -> fx.Node:
    """`x.add_(y)` keeps the type of x, where `x + y` takes the wider one."""
    dtype = written.meta["val"].dtype
    if all(o.meta["val"].dtype == dtype for o in node.all_input_nodes):
        return node
    with graph.inserting_after(node):
        cast = graph.call_function(aten.to.dtype, (node, dtype))
    cast.meta = dict(node.meta)
    node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)
    return cast


def _refuse_running_statistics(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.op == "call_function" and "batch_norm" in op_name(node) and len(node.args) > 5 and node.args[5] is True:
            raise UnsupportedOp(
                f"{node.target} computes statistics over this batch, which no split of the batch can reproduce",
                where=source_line(node),
                fix="use GroupNorm or LayerNorm; or put it in eval mode, where it takes its running statistics",
            )


def _functional(target: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    packet = getattr(torch.ops.aten, target._schema.name.split("::")[1].removesuffix("_"), None)
    name = target._overloadname
    return getattr(packet, name, None) if packet is not None and name in packet.overloads() else None


def annotate(graph: fx.Graph, traced: Traced) -> None:
    """Set `meta["info"]`: shapes, and whether a gradient flows (from a trainable parameter, not past a detach)."""
    for node in graph.nodes:
        if node.op == "output":
            continue
        grad = node.name in traced.parameters and traced.parameters[node.name] not in traced.frozen
        if node.op == "call_function" and op_name(node) != "detach":
            grad = any(t.requires_grad for o in operands(node) for t in infos(o))
        if is_getitem(node) and isinstance(node.args[0].target, OwnFunction):  # type: ignore[union-attr]
            grad = infos(node.args[0])[node.args[1]].requires_grad  # type: ignore[arg-type, index]
        node.meta["info"] = _with_grad(node.meta["shapes"], grad)
        if isinstance(node.target, OwnFunction):
            node.meta["info"] = _where_differentiable(node.meta["info"], node.target.differentiable)


def _with_grad(shapes: object, grad: bool) -> object:
    if isinstance(shapes, TensorInfo):
        return TensorInfo(shapes.shape, shapes.dtype, grad and is_float(shapes.dtype))
    assert isinstance(shapes, tuple)
    return tuple(_with_grad(s, grad) for s in shapes if s is not None)


def _where_differentiable(found: object, differentiable: Sequence[bool]) -> object:
    """Infos of outputs, without a gradient where none can flow."""
    if isinstance(found, TensorInfo):
        return found if differentiable[0] else replace(found, requires_grad=False)
    assert isinstance(found, tuple)
    return tuple(map(_where_differentiable, found, ([flows] for flows in differentiable)))


def drop_identities(graph: fx.Graph, traced: Traced) -> None:
    """Remove what returns its operand: casts to the same type, whole slices, views to the same shape, `+ 0` …"""
    for node in list(graph.nodes):
        if node.op != "call_function" or isinstance(node.meta["info"], tuple):
            continue
        source = _identity(node)
        if source is not None:
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _identity(node: fx.Node) -> fx.Node | None:
    """The operand that the node equals, or None."""
    name, args = op_name(node), node.args
    if name == "cat":
        return _only_part(node)
    first = args[0] if args and isinstance(args[0], fx.Node) else None
    if first is None or isinstance(first.meta["info"], tuple):
        return None
    before, after = info(first), info(node)
    same = before.shape == after.shape and before.dtype == after.dtype
    match name:
        case "alias" | "lift_fresh_copy" | "lift_fresh" | "clone" | "contiguous":
            return first
        case "detach":
            return first if not before.requires_grad else None
        case "to" | "_to_copy" | "type_as" | "view" | "reshape" | "_unsafe_view" | "flatten" | "unflatten":
            return first if same else None
        case "slice" | "expand" | "expand_as" | "squeeze" | "unsqueeze":
            return first if same else None
        case "add" | "sub":
            return first if same and args[1] in (0, 0.0) and not isinstance(args[1], fx.Node) else None
        case "mul" | "div":
            return first if same and not isinstance(args[1], fx.Node) and args[1] in (1, 1.0) else None
        case "dropout" | "feature_dropout" | "alpha_dropout":
            return first if args[1] == 0 or args[2] is False else None
        case _:
            return None


def _only_part(node: fx.Node) -> fx.Node | None:
    """Drop the empty tensors of a `cat`; the one that is left, if it is one."""
    parts = operands(node)
    full = [x for x in parts if 0 not in info(x).shape]
    if len(full) == 1:
        return full[0]
    if len(full) < len(parts):
        node.args = (full, *node.args[1:])
    return None


def share_repeated(graph: fx.Graph, traced: Traced) -> None:
    """Compute once what layers each compute alike without gradient: position ids, rotary tables, masks."""
    seen: dict[tuple[object, ...], fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or any(t.requires_grad for t in infos(node)) or _is_random(node):
            continue
        key = (node.target, _key(node.args), _key(tuple(sorted(node.kwargs.items()))))
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _key(value: object) -> object:
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *map(_key, value))
    return value if isinstance(value, (fx.Node, sympy.Basic)) else (type(value).__name__, str(value))


def _is_random(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def refuse_random(graph: fx.Graph, traced: Traced) -> None:
    """Only dropout may be random: its numbers are drawn by place in the model, the same under any plan."""
    for node in graph.nodes:
        if node.op == "call_function" and _is_random(node) and _draws(node) and op_name(node) not in _KEYED:
            raise UnsupportedOp(
                f"{node.target} draws random numbers",
                where=source_line(node),
                fix="draw them outside the model and pass them as an input; nn.Dropout is supported, and may take the "
                "place of a dropout= between the layers of an LSTM or GRU",
            )


_DRAWS_NOTHING = {"dropout": 0, "p": 0, "train": False, "training": False, "num_layers": 1}  # dropout is between layers


def _draws(node: fx.Node) -> bool:
    """Whether a call of a random op draws: an LSTM without dropout has the op of one with dropout."""
    given = _given(node)
    return not any(name in given and given[name] == value for name, value in _DRAWS_NOTHING.items())


_KEYED = ("dropout", "scaled_dot_product_attention")  # their numbers are keyed by place


def refuse_sparse(graph: fx.Graph, traced: Traced) -> None:
    """Flat buffers, their reduction and the global norm are of dense gradients."""
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload) and _given(node).get("sparse"):
            raise UnsupportedOp(
                f"{node.target} with sparse=True gives its weight a sparse gradient",
                where=source_line(node),
                fix="leave out sparse=True: the same values, as a dense gradient",
            )


def _given(node: fx.Node) -> dict[str, Any]:
    """The arguments of an op's call by name, defaults included."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    names = [a.name for a in schema]
    return {a.name: a.default_value for a in schema} | dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def _check(graph: fx.Graph) -> None:
    """What later passes assume."""
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.op != "call_function":
            raise TraceError(f"{node.op} {node.target} is left in the graph", where=source_line(node))
        assert "info" in node.meta, node.name


PREPARE: list[Pass] = [
    inline_regions,
    write_own,
    drop_asserts,
    fold_sizes,
    drop_asserts,
    remove_mutation,
    annotate,
    write_native_dropout_as_dropout,
    write_copy_as_source,
    write_masked_put_as_where,
    write_casts_with_their_type,
    drop_identities,
    write_views_as_reshape,
    write_equal_splits_as_chunk,
    write_addmm_as_linear,
    write_grouped_mm,
    merge_reshapes,
    drop_identities,
    write_frozen_batch_norm_in_one_type,
    refuse_mixed_types,
    name_causal_masks,
    prove_own,
    check_loss,
    refuse_sparse,
]
EXACT_LOSS: list[Pass] = [
    write_sums_over_samples,
    take_counts_over_batch,
    refuse_mixed_samples,
    rewrite_loss,
]
AVERAGED_LOSS: list[Pass] = [refuse_mixed_samples, average_over_microbatches]
FINISH: list[Pass] = [
    settle_scalar_types,
    share_repeated,
    refuse_random,
]
