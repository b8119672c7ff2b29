"""Global counts: reductions over the batch that depend on inputs only, known before the first forward pass.

    mask.sum()        sum over the batch's microbatches            a placeholder, loss_count_0
    labels.max()      maximum over them                            loss_count_1
    functions of counts (a clamp, a ratio, a weight)               computed from the placeholders by each reader

Every rank has the same counts, so everything computed from them equals the single-process value, even if it is
broadcast back to samples. A count that is computed from another one is known one round later.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from autoptd.errors import UnsupportedOp
from autoptd.ops import library as ops
from autoptd.passes.batch.batch_dims import counts_samples, is_whole, symbols_in
from autoptd.passes.graph import (
    ancestors,
    info,
    infos,
    is_float,
    is_getitem,
    operands,
    output_of,
    source_line,
    user_op_name,
    write_op,
)
from autoptd.passes.losses.batch_sums import Mixes, Over, States, over_batch, placeholder_state
from autoptd.passes.losses.loss_form import COUNT, Combine, LossForm, count_index, is_count, loss_form, loss_node
from autoptd.passes.losses.update_form import buffer_updates
from autoptd.passes.opcall import TensorInfo, is_random
from autoptd.passes.trace.traced import Traced

aten = torch.ops.aten
_EXTREMES: Mapping[object, Combine] = {
    aten.all.default: "min",
    aten.all.dim: "min",
    aten.amax.default: "max",
    aten.amin.default: "min",
    aten.any.default: "max",
    aten.any.dim: "max",
    aten.max.default: "max",
    aten.min.default: "min",
}


def take_counts_over_batch(graph: fx.Graph, traced: Traced) -> None:
    """Replace every reduction over samples that depends on inputs only by a placeholder for its global value."""
    output = output_of(graph)
    output.args = (loss_node(graph),)
    states: States = {}
    seen: dict[object, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op == "placeholder" and node.name not in traced.parameters:
            states[node] = placeholder_state(node, traced)
        if node.op != "call_function" or any(o not in states for o in operands(node)) or is_random(node.target):
            continue
        if is_whole(node):
            states[node] = Over.OUTER
            continue
        if node.target is ops.in_training:  # in evaluation, what depends on it is no function of inputs
            continue
        state = over_batch(node, states)
        states[node] = Over.MIXED if isinstance(state, Mixes) else state
        combine = _combine(node, states)
        if combine is None or is_getitem(node) or (traced.averaging != "global" and not _is_fixed(node)):
            continue
        key = (node.target, str(node.args), str(node.kwargs))
        if key not in seen:
            seen[key] = take_count(graph, traced, node, combine)
        whole = _typed(graph, node, seen[key])
        for user in list(node.users):
            if user is not whole and user is not output:
                user.replace_input_with(node, whole)
        output.kwargs = {name: whole if value is node else value for name, value in output.kwargs.items()}
        states[seen[key]] = states[whole] = Over.SAME


def take_count(graph: fx.Graph, traced: Traced, node: fx.Node, combine: Combine = "sum") -> fx.Node:
    """Return a placeholder for the value of `node` over the batch, and make `node` an output of the graph."""
    form, output = loss_form(traced.graph), output_of(graph)
    found = _placeholder(graph, traced, node, len(form.combines))
    form.rounds.append(_round(node, form))
    form.combines.append(combine)
    output.args = (*output.args, node)
    return found


def _combine(node: fx.Node, states: States) -> Combine | None:
    """Return how the values of microbatches combine to that of the batch; None for ops that do not reduce samples."""
    if states[node] is Over.ADDED:
        return "sum"
    reduces = any(states[o] is Over.APART for o in operands(node)) and not any(counts_samples(t) for t in infos(node))
    return _EXTREMES.get(node.target) if reduces else None


def _placeholder(graph: fx.Graph, traced: Traced, node: fx.Node, index: int) -> fx.Node:
    shape = info(node).shape
    if not _is_fixed(node):
        traced.as_numbers |= symbols_in(shape)
        raise UnsupportedOp(
            f"{user_op_name(node)} sums over samples to a shape that varies from batch to batch, {tuple(shape)}",
            where=source_line(node),
            fix="sum over that dim as well, or give it a fixed size",
        )
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    with graph.inserting_after(last):
        found = graph.placeholder(f"{COUNT}_{index}")
    found.meta["info"] = TensorInfo(shape, torch.float64, False)
    return found


def _is_fixed(node: fx.Node) -> bool:
    return all(isinstance(n, int) for n in info(node).shape)


def drop_unread_counts(graph: fx.Graph, traced: Traced) -> None:
    """Remove counts that nothing reads, since the terms that did are averaged, and number the others anew."""
    form, output = loss_form(traced.graph), output_of(graph)
    if form.outer is not None or any(map(is_count, buffer_updates(traced.graph).graph.nodes)):
        return
    read = {count_index(n): n for n in graph.nodes if is_count(n) and n.users}
    for node in [n for n in graph.nodes if is_count(n) and not n.users]:
        graph.erase_node(node)
    loss, *counted = output.args
    for new, old in enumerate(sorted(read)):
        read[old].name = read[old].target = f"{COUNT}_{new}"
    form.combines, form.rounds = ([values[i] for i in sorted(read)] for values in (form.combines, form.rounds))  # type: ignore[assignment]
    output.args = (loss, *(counted[i] for i in sorted(read)))


def _typed(graph: fx.Graph, node: fx.Node, count: fx.Node) -> fx.Node:
    """Return a count in the dtype of `node`. A single floating-point number needs no cast from float64."""
    dtype = info(node).dtype
    if dtype == torch.float64 or (is_float(dtype) and not info(node).shape):
        return count
    with graph.inserting_after(node):
        return write_op(graph, node, aten.to.dtype, (count, dtype), info(node).shape, dtype)


def _round(node: fx.Node, form: LossForm) -> int:
    return max((1 + form.rounds[count_index(n)] for n in ancestors([node]) if is_count(n)), default=0)
