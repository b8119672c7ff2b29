"""Proof that ops with a user-defined backward pass treat samples independently, in value and gradient.

    x [b, h] -> y [b, h]       each sample's value and gradient depend on it alone: found by running single samples
    x [b, h] -> 0-dim          a sum over samples: the values of parts of the batch add up
    w [n, h] -> y [n, h]       no samples: every microbatch's gradient is a partial value, so backward must be linear

Samples must be independent in any plan, since data-parallel ranks and microbatches split the batch, even if the op's
tensors are split in no other way. An op that cannot be run on small random CPU tensors cannot be proved and is refused.
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
from autoptd.passes.trace.trace_errors import PADDED
from autoptd.passes.trace.traced import BATCH, Traced

ADDS = "adds_samples"  # in a node's meta: a scalar whose values over microbatches add up


def prove_own(graph: fx.Graph, traced: Traced) -> None:
    """Raise UnsupportedOp for the first op whose user-defined forward or backward pass no plan can run."""
    fp16 = any(n.name in traced.parameters and info(n).dtype == torch.float16 for n in _placeholders(graph))
    for node in graph.nodes:
        if node.op != "call_function" or not is_own(node.target):
            continue
        counting = any(counts_samples(t) for t in (*op_call(node).operands, *infos(node)))
        flows = any(t.requires_grad for t in infos(node))
        if not (counting or flows):
            continue
        found = discover(op_call(node))
        reason, fix = _reason(node, found, traced, fp16 and flows)
        if reason:
            raise UnsupportedOp(f"{op_name(node)} {reason}", where=source_line(node), fix=fix)


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.op == "placeholder"]


def _reason(node: fx.Node, found: Discovery, traced: Traced, scaled: bool) -> tuple[str, str]:
    """Return why an op is refused and the fix, or empty strings. `scaled`: gradients are scaled for fp16."""
    if op_name(node) == "_varlen_attn":
        return "takes sequences of several lengths in one row, which no plan can cut into samples", PADDED
    if not found.tried:
        return (
            f"cannot be proved to treat samples independently: {found.reason}",
            "make it run, forward and backward, on CPU tensors of any size (torch.library: register_kernel('cpu') and "
            "register_autograd); the CPU kernel is used for the proof only",
        )
    if _has_batch((node.args, tuple(node.kwargs.values()))):
        return "is given the number of samples, which differs for a microbatch", "read it inside the function"
    if scaled and not found.linear:
        return (
            "has a backward pass that is not linear in the gradient, and fp16 training scales gradients",
            "use precision='bf16'",
        )
    if _mixes(node, found, traced):
        return (
            "mixes samples: on small random tensors, the value or the gradient of one sample depends on others of the "
            "batch, but each microbatch and data-parallel rank has only a part of the batch",
            "compute values and gradients for each sample separately, along the first dim; a loss may be summed over "
            "samples, not averaged",
        )
    apart = any(counts_samples(t) for t in infos(node)) or node.meta.get(ADDS)
    if not apart and not found.linear:
        return (
            "has a backward pass that is not linear in the gradient, on a tensor without samples: its gradient is a "
            "sum of partial values, one for each microbatch and data-parallel rank",
            "apply it to a tensor that is computed per sample; clip gradients of parameters with clip_norm",
        )
    return "", ""


def _mixes(node: fx.Node, found: Discovery, traced: Traced) -> bool:
    """Return whether the samples are not one factor that reaches every output. Sets `ADDS` if they sum to a scalar."""
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
