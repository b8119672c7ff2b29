"""Float types that meet in one op: torch's fake tensors take mixtures that its kernels refuse, on every rank and late.

Where an op is given several, it is run on small tensors of these types. Frozen batch norms, whose statistics keep the
type that they have, get all of them in one.
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
    """Weights and statistics of a batch norm in one type: that of its input, or float32 beside a narrower one."""
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
    """Raise InputsError at an op whose kernel does not take the float types that it is given."""
    computed = {info(n).dtype for n in graph.nodes if n.name in traced.parameters and is_float(info(n).dtype)}
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        given = {t.dtype for o in operands(node) for t in infos(o) if is_float(t.dtype)}
        if len(given) > 1 and not takes_its_types(op_call(node)):
            types = " and ".join(sorted(map(str, given)))
            raise InputsError(
                f"{op_name(node)} is given {types}, which torch does not mix",
                where=source_line(node),
                fix=_way_out(node, traced, computed),
            )


def _way_out(node: fx.Node, traced: Traced, computed: set[torch.dtype]) -> str:
    """An input of another type than the model computes in, if one leads there; else a cast."""
    types = " or ".join(sorted(map(str, computed)))
    for n in ancestors([node]):
        if n.name in traced.inputs and is_float(info(n).dtype) and info(n).dtype not in computed:
            name = traced.inputs[n.name]
            return (
                f"give {name!r} as {types}, which precision= makes of the parameters, here and in every batch; or "
                f"cast it in forward; or choose precision= to suit {info(n).dtype}"
            )
    return f"cast one of them; precision= makes parameters {types} and leaves buffers and constants as they are"
