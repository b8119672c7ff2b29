"""What has a backward pass of the user's own is proved to treat samples apart, in value and gradient, or refused.

    x [b, h] -> y [b, h]       each sample's rows and gradients by themselves: found by running single samples
    x [b, h] -> 0-dim          a sum over samples: the values of parts add up
    w [n, h] -> y [n, h]       no samples: every microbatch's gradient is a partial value, so backward must be linear

An op that splits tensors in no other way still keeps samples apart: data-parallel ranks and microbatches split them in
any plan. What cannot be run on small random CPU tensors cannot be proved.
"""

from __future__ import annotations

import sympy
import torch
from torch import fx

from autoptd.errors import UnsupportedOp
from autoptd.passes.batch.batch_dims import SamplePlace, counts_samples, sample_place
from autoptd.passes.custom_grad.ops import is_own
from autoptd.passes.graph import ancestors, info, infos, op_call, op_name, operands, source_line
from autoptd.passes.rules.discover import Discovery, discover
from autoptd.passes.rules.factor_notation import bind
from autoptd.passes.trace.traced import BATCH, Traced

ADDS = "adds_samples"  # in a node's meta: a scalar whose values over microbatches add up


def prove_own(graph: fx.Graph, traced: Traced) -> None:
    """Raise UnsupportedOp at the first op whose own backward pass, or forward, cannot be part of any plan."""
    halves = any(n.name in traced.parameters and info(n).dtype == torch.float16 for n in _placeholders(graph))
    for node in graph.nodes:
        if node.op != "call_function" or not is_own(node.target):
            continue
        counting = any(counts_samples(t) for t in (*op_call(node).operands, *infos(node)))
        flows = any(t.requires_grad for t in infos(node))
        if not (counting or flows):
            continue
        found = discover(op_call(node))
        reason, fix = _reason(node, found, traced, halves and flows)
        if reason:
            raise UnsupportedOp(f"{op_name(node)} {reason}", where=source_line(node), fix=fix)


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.op == "placeholder"]


def _reason(node: fx.Node, found: Discovery, traced: Traced, halves: bool) -> tuple[str, str]:
    """(why an op is refused, the way out), or nothing."""
    if not found.tried:
        return (
            f"cannot be proved to keep samples apart: {found.reason}",
            "let it run, forward and backward, on CPU tensors of any size (torch.library: register_kernel('cpu') and "
            "register_autograd); no plan uses that for anything but the proof",
        )
    if _has_batch((node.args, tuple(node.kwargs.values()))):
        return "is given the number of samples, of which each microbatch has its own", "read it inside the function"
    if halves and not found.linear:
        return (
            "has a backward pass that is not linear in the gradient, and fp16 training scales gradients",
            "use precision='bf16'",
        )
    if _mixes(node, found, traced):
        return (
            "mixes samples: on small random tensors, the value or the gradient of one depends on the others of its "
            "batch, of which each microbatch and data-parallel rank has its own share",
            "compute values and gradients for every sample by itself, along the first dim; a loss may be summed over "
            "samples, not averaged",
        )
    apart = any(counts_samples(t) for t in infos(node)) or node.meta.get(ADDS)
    if not apart and not found.linear:
        return (
            "has a backward pass that is not linear in the gradient, on a tensor without samples: its gradient comes "
            "in parts, one for each microbatch and data-parallel rank",
            "change gradients of what is computed for each sample; clip those of parameters with clip_norm",
        )
    return "", ""


def _mixes(node: fx.Node, found: Discovery, traced: Traced) -> bool:
    """Whether the samples of the operands are not one factor that goes on into every output."""
    call, given = op_call(node), operands(node)
    places = {i: sample_place(o) for i, o in enumerate(given) if counts_samples(info(o))}
    varying = [o for o in given if any(n.name in traced.inputs and counts_samples(info(n)) for n in _inputs(o))]
    if any(not counts_samples(info(o)) for o in varying) or None in places.values():
        return True
    if not places:
        return any(counts_samples(t) for t in call.outputs)
    if found.text is None:
        return True
    loops = bind(found.text, call)
    outputs = range(len(call.operands), len(call.operands) + len(call.outputs))
    for where in loops.places.values():
        if all(_is_at(where[i], place) for i, place in places.items()):
            there = [where[i] for i in outputs]
            if all(place is not None for place in there):
                return False
            node.meta[ADDS] = [t.ndim for t in call.outputs] == [0]
            return not node.meta[ADDS]
    return True


def _has_batch(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_has_batch, value))
    return isinstance(value, sympy.Basic) and BATCH in value.free_symbols


def _is_at(where: object, place: SamplePlace | None) -> bool:
    return where is not None and place is not None and where.dim == place.dim  # type: ignore[attr-defined]


def _inputs(node: fx.Node) -> list[fx.Node]:
    return [n for n in ancestors([node]) if n.op == "placeholder"]
