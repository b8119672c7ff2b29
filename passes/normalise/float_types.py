"""Checks of mixed float dtypes: torch's fake tensors accept mixtures that its kernels refuse at the first step.

An op with operands of several float dtypes is run on small tensors of these dtypes. The operands of frozen batch norms,
whose statistics are not converted to `precision`, are cast to one dtype.
"""

from __future__ import annotations

import torch
from torch import fx

from autoptd.errors import InputsError
from autoptd.passes.graph import ancestors, info, infos, is_float, op_call, op_name, operands, source_line
from autoptd.passes.opcall import TensorInfo
from autoptd.passes.rules.discover import takes_its_types
from autoptd.passes.trace.traced import Traced

aten = torch.ops.aten


def write_frozen_batch_norm_in_one_type(graph: fx.Graph, traced: Traced) -> None:
    """Cast weights and statistics of a frozen batch norm to one dtype: that of its input, at least float32."""
    for node in graph.nodes:
        if node.op != "call_function" or node.target is not aten.batch_norm.default:
            continue
        x = info(node.args[0])  # type: ignore[arg-type]
        dtype = torch.promote_types(x.dtype, torch.float32)
        own = [a for a in node.args[1:5] if isinstance(a, fx.Node)]
        if {info(a).dtype for a in own} <= {x.dtype}:
            continue
        with graph.inserting_before(node):
            for a in own:
                if info(a).dtype != dtype:
                    cast = graph.call_function(aten.to.dtype, (a, dtype))
                    cast.meta = {**node.meta, "info": TensorInfo(info(a).shape, dtype, info(a).requires_grad)}
                    node.args = tuple(cast if b is a else b for b in node.args)


def refuse_mixed_types(graph: fx.Graph, traced: Traced) -> None:
    """Raise InputsError for an op whose kernel does not accept the float dtypes of its operands."""
    computed = {info(n).dtype for n in graph.nodes if n.name in traced.parameters and is_float(info(n).dtype)}
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        given = {t.dtype for o in operands(node) for t in infos(o) if is_float(t.dtype)}
        if len(given) > 1 and not takes_its_types(op_call(node)):
            types = " and ".join(sorted(map(str, given)))
            raise InputsError(
                f"{op_name(node)} gets operands of {types}, which torch does not mix",
                where=source_line(node),
                fix=_fix(node, traced, computed),
            )


def _fix(node: fx.Node, traced: Traced, computed: set[torch.dtype]) -> str:
    """Return the fix: to convert an input whose dtype is not the model's, if the op depends on one; else a cast."""
    types = " or ".join(sorted(map(str, computed)))
    for n in ancestors([node]):
        if n.name in traced.inputs and is_float(info(n).dtype) and info(n).dtype not in computed:
            name = traced.inputs[n.name]
            return (
                f"pass {name!r} as {types}, the parameters' dtype under precision=, here and in every batch; or "
                f"cast it in forward; or choose precision= to suit {info(n).dtype}"
            )
    return (
        f"cast one of them (.to(x.dtype)): precision= converts parameters to {types}, but no buffers and constants; or "
        "plan in the type that the model is written for, such as precision='fp32'"
    )
