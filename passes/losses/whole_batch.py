"""End of a loss that needs all samples of the batch together: pairs of samples, shuffled samples, batch statistics.

    x_1 … x_b ──► f_1 … f_b             features, each of one sample; a microbatch has some of them
                  └────┬───┘
              L(f_1 … f_b, Σ, t)        the end, computed once per step from those of all microbatches and ranks

A microbatch continues with its rows of dL/df (GradCache; Gao et al. 2021, Scaling Deep Contrastive Learning Batch Size
under Memory Limited Setup). `mark_whole_batch` finds the end before other passes see the loss: every op that mixes
samples other than by a sum, all that depends on it, and what these read that counts samples but is no row of each
(`arange(b)`, or features that were put behind others) or is computed from all samples but is no sum (a median). The end
is marked only if it

    reads samples in batch order, a fixed number of elements of each, which may be several rows far apart, as of
        torch.cat([x_1, x_2]) over all samples: the samples get a dim of their own for the end to read;
    reads no parameter with two dims or more: a layer behind the mixing would run on all ranks for the whole batch;
    draws no random numbers, calls no backward pass of the user's own and updates no buffer.

Sums that samples read are part of the end where that is possible, else statistics of the batch
(`batch_statistics.py`). If there is no such end, nothing is marked, and `refuse_mixed_samples` names the op that mixes
samples.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

import sympy
import torch
from torch import fx

from autoptd.ops import library as ops
from autoptd.passes.batch.batch_dims import SamplePlace, counts_samples, mark_whole, symbols_in
from autoptd.passes.batch.batch_independence import States, follow_samples
from autoptd.passes.batch.rows import BATCH_ORDER, Across, Rows
from autoptd.passes.graph import ancestors, descendants, info, infos, is_getitem, operands, updated_values, write_op
from autoptd.passes.losses.batch_sums import Mixes, Over, over_batch, placeholder_state
from autoptd.passes.losses.loss_spellings import SPELLINGS
from autoptd.passes.objectives.metrics import Metrics
from autoptd.passes.opcall import is_random
from autoptd.passes.trace.traced import BATCH, Traced

aten = torch.ops.aten


def mark_whole_batch(graph: fx.Graph, traced: Traced) -> None:
    """Mark the nodes at the end of a loss that are computed from all samples of the batch together."""
    if isinstance(traced.objective, Metrics):
        return
    sources = _Sources.of(graph, traced)
    known = (n for n in graph.nodes if n.op == "call_function" and n not in sources.of_parameters)
    counts = {n for n in known if not any(counts_samples(t) for t in infos(n))}
    no_sums = _no_sums(graph, traced)
    picked = {n for n in no_sums if any(counts_samples(t) for o in operands(n) for t in infos(o))}
    for statistics in (False, True):
        mixed: dict[fx.Node, Across] = {}
        states, _ = follow_samples(graph, traced, mixed.__setitem__, counts, statistics)
        if not mixed and not picked:
            return
        end = _back_to_rows({*mixed, *picked, *descendants({*mixed, *picked})}, states, no_sums)
        if not _is_end(end, sources, graph):
            continue
        if sizes := _sizes_beside_samples(end):
            traced.as_numbers |= sizes
            continue
        for node in end:
            mark_whole(node)
        read = {o for n in end for o in operands(n) if o not in end and o not in sources.of_parameters}
        given = read | ancestors(read)
        traced.read_whole = frozenset(traced.inputs[n.name] for n in given if n.name in traced.inputs)
        _take_samples_apart(graph, end, states)
        return


@dataclass(frozen=True)
class _Sources:
    """Nodes that depend on parameters, and those that depend on parameters with two dims or more but on no sample."""

    of_parameters: set[fx.Node]
    of_matrices: set[fx.Node]

    @staticmethod
    def of(graph: fx.Graph, traced: Traced) -> _Sources:
        given = [n for n in graph.nodes if n.op == "placeholder"]
        inputs = {n for n in given if n.name in traced.inputs and any(counts_samples(t) for t in infos(n))}
        parameters = {n for n in given if n.name in traced.parameters}
        matrices = {n for n in parameters if infos(n)[0].ndim >= 2}
        sampled = inputs | descendants(inputs)
        return _Sources(parameters | descendants(parameters), (matrices | descendants(matrices)) - sampled)


def _no_sums(graph: fx.Graph, traced: Traced) -> set[fx.Node]:
    """Return the nodes without samples that are no functions of sums over them: a maximum, a median, one sample."""
    states: dict[fx.Node, Over] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            states[node] = placeholder_state(node, traced)
        elif node.op == "call_function":
            if any(counts_samples(t) for t in infos(node)):
                states[node] = Over.APART
            elif node.target in SPELLINGS and Over.MIXED not in {states[o] for o in operands(node)}:
                states[node] = Over.OUTER
            else:
                state = over_batch(node, states)
                states[node] = Over.MIXED if isinstance(state, Mixes) else state
    return {node for node, state in states.items() if state is Over.MIXED}


def _back_to_rows(end: set[fx.Node], states: Mapping[fx.Node, States], no_sums: Container[fx.Node]) -> set[fx.Node]:
    """Return the end with all that it reads which is computed from samples and is no sum, back to rows of samples."""
    stack = list(end)
    while stack:
        for node in stack.pop().all_input_nodes:
            counts = any(counts_samples(t) for t in infos(node)) and not _is_row(states.get(node, ()), node)
            if node not in end and (counts or node in no_sums):
                end.add(node)
                stack.append(node)
    return end


def _is_end(end: set[fx.Node], sources: _Sources, graph: fx.Graph) -> bool:
    read = {o for n in end for o in operands(n) if o not in end}
    return (
        end.isdisjoint(ancestors(updated_values(graph).values()))
        and read.isdisjoint(sources.of_matrices)
        and all(map(_runs_once, end))
    )


def _runs_once(node: fx.Node) -> bool:
    """Return whether an op may be computed once per step."""
    plain = is_getitem(node) or isinstance(node.target, torch._ops.OpOverload) or node.target is ops.marked_columns
    return plain and not is_random(node.target)


def _sizes_beside_samples(end: set[fx.Node]) -> set[sympy.Symbol]:
    """Return the sizes other than the number of samples that ops compute with, or what they read has."""
    read = {o for n in end for o in operands(n)} | end
    arguments = [value for n in end for value in (*n.args, *n.kwargs.values())]
    return symbols_in((*arguments, *(t.shape for n in read for t in infos(n)))) - {BATCH}


def _is_row(found: States, node: fx.Node) -> bool:
    """Return whether a tensor has a fixed number of rows per sample, in batch order, that are no row indices."""
    state = found[0] if len(found) == 1 else None
    if not isinstance(state, Rows):
        return False
    in_order = state.order == BATCH_ORDER and state.points is None
    return in_order and all(isinstance(n, int) for n in (state.place.outer, state.place.inner))


def _take_samples_apart(graph: fx.Graph, end: set[fx.Node], states: Mapping[fx.Node, States]) -> None:
    """Let the end read rows (outer b inner) as (outer, b, inner), which it merges again."""
    for node in dict.fromkeys(o for n in graph.nodes if n in end for o in operands(n) if o not in end):
        (state,) = states.get(node, (None,))
        if not isinstance(state, Rows) or state.place == SamplePlace(state.place.dim):
            continue
        dim, shape, dtype = state.place.dim, info(node).shape, info(node).dtype
        apart = (*shape[:dim], state.place.outer, BATCH, state.place.inner, *shape[dim + 1 :])
        with graph.inserting_after(node):
            rows = write_op(graph, node, aten.reshape.default, (node, list(apart)), apart, dtype)
        with graph.inserting_after(rows):
            merged = write_op(graph, node, aten.reshape.default, (rows, list(shape)), shape, dtype)
        mark_whole(merged)
        for user in [n for n in node.users if n in end]:
            user.replace_input_with(node, merged)
