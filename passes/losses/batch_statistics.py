"""Sums over the batch that samples read within forward, as batch norm does: `ops.sum_over_batch`.

    Σ x                    of a microbatch          what samples would read
    sum_over_batch(Σ x)    of the whole batch       what they read instead; its gradient is summed over the batch too

Every rank has the samples of one microbatch, so such a sum is an all-reduce over dp in the forward pass, and one in the
backward pass. Samples of later microbatches are not there yet: a model with such sums has one microbatch per step.

In evaluation, running statistics stand in for those of the batch (`ops.in_training`) where a model has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from autoptd.ops import library as ops
from autoptd.passes.batch.batch_dims import counts_samples
from autoptd.passes.batch.batch_independence import READ_BY_SAMPLES, refusal
from autoptd.passes.graph import NAMED, ancestors, info, infos, source_line, user_op_name, write_op
from autoptd.passes.losses.batch_sums import Mixes, Over, States, over_batch, placeholder_state
from autoptd.passes.losses.statistics_form import IN_EVALUATION, ORDER, BatchStatistics, store
from autoptd.passes.trace.traced import Traced


def sum_statistics_over_batch(graph: fx.Graph, traced: Traced) -> None:
    """Sum over the batch what samples read of it. Raises UnsupportedOp for what is no sum over samples."""
    marked = [n for n in graph.nodes if READ_BY_SAMPLES in n.meta]
    replaced = any(n.target is ops.in_training for n in graph.nodes)
    if not marked:
        store(traced.graph, BatchStatistics(replaced=replaced))
        return
    wanted = ancestors(marked)
    states: States = {}
    for node in list(graph.nodes):
        if node in wanted:
            states[node] = _state(node, traced, states)
            if (mixed := node.meta.pop(READ_BY_SAMPLES, None)) is not None:
                if states[node] is not Over.ADDED:
                    raise refusal(mixed)
                states[_summed(graph, node)] = Over.SAME
    store(traced.graph, replace(_described(marked), replaced=replaced))


def _state(node: fx.Node, traced: Traced, states: States) -> Over:
    if node.op == "placeholder":
        return placeholder_state(node, traced)
    if any(counts_samples(t) for t in infos(node)):  # samples are independent: `batch_independence.py` proved it
        return Over.APART
    state = over_batch(node, states)
    return Over.MIXED if isinstance(state, Mixes) else state


def _summed(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Let the readers of a microbatch's sum read that of the batch."""
    with graph.inserting_after(node):
        whole = write_op(graph, node, ops.sum_over_batch, (node,), info(node).shape)
    whole.meta[NAMED] = f"{node.meta[NAMED]}_of_batch" if NAMED in node.meta else "sum_of_batch"
    node.replace_all_uses_with(whole, delete_user_cb=lambda user: user is not whole)
    return whole


def _described(sums: Sequence[fx.Node]) -> BatchStatistics:
    kinds = [n.meta.get(IN_EVALUATION, ORDER[-1]) for n in sums]
    return BatchStatistics(len(sums), user_op_name(sums[0]), source_line(sums[0]), max(kinds, key=ORDER.index))
