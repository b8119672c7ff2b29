"""New values of buffers that forward writes to, as functions of sums over the batch.

    bias += γ sign(mean(c) - c),  c = Σ_tokens one_hot(chosen)

    graph     a microbatch's sums, c: results of the graph beside the loss
    values    bias + γ sign(mean(c) - c), in a graph of its own, which reads buffers, counts and sums

A step computes what one forward pass over the whole batch does: all its forward passes read the old value; sums are
added up over microbatches and ranks, in float64; then each rank that holds the buffer computes the new value, once.

A sum is taken as soon as its samples are gone, though a linear op follows: whole numbers stay whole, so a comparison
of counts has the result that it has in one process. Sums of a size that varies from batch to batch are reduced further.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from autoptd.errors import UnsupportedOp
from autoptd.ops import library as ops
from autoptd.passes.batch.batch_dims import counts_samples
from autoptd.passes.graph import (
    ancestors,
    descendants,
    info,
    infos,
    masks_counted,
    op_name,
    operands,
    output_of,
    source_line,
    updated_values,
    user_op_name,
    write_op,
)
from autoptd.passes.losses.averaged_terms import ADDITIONS
from autoptd.passes.losses.batch_sums import Mixes, Over, State, States, over_batch, placeholder_state
from autoptd.passes.losses.outer_function import SUMMING, OuterFunction
from autoptd.passes.losses.shares import Shares
from autoptd.passes.losses.update_form import SUM, BufferUpdates, store, sums_of
from autoptd.passes.trace.traced import Traced

aten = torch.ops.aten
_WAY_OUT = "or update the buffer outside forward, between steps"
_FIX = (
    "write the new value as a function of the buffers and of sums over samples, such as counts; use fewer of them, "
    + _WAY_OUT
)


def refuse_reads_of_updates(graph: fx.Graph, traced: Traced) -> None:
    """Raise UnsupportedOp if samples read a value that forward computed for a buffer from sums over samples."""
    sampled = {n for n in graph.nodes if n.op != "output" and any(counts_samples(t) for t in infos(n))}
    for name, value in updated_values(graph).items():
        if value in sampled or sampled.isdisjoint(ancestors([value])):
            continue
        read = descendants([value])
        after = next((n for n in graph.nodes if n in sampled and n in read), None)
        if after is not None:
            raise UnsupportedOp(
                f"forward reads the buffer {traced.buffers[name]} after updating it from the samples of the batch, of "
                "which each microbatch and data-parallel rank has a part",
                where=source_line(after),
                fix="read it before the update: the new value is then that of the next step",
            )


def rewrite_updates(graph: fx.Graph, traced: Traced) -> None:
    """Move the new values of buffers into a graph of their own; the sums that they need become results of the graph.

    Raises UnsupportedOp for a value that is no function of sums over samples, or that requires a gradient.
    """
    values, masks = updated_values(graph), masks_counted(graph)
    if not values and not masks:
        return
    counts = [_count_rows(graph, *mask) for mask in masks]
    states = _States(graph, traced, [*values.values(), *counts])
    for name, value in values.items():
        states.check(traced.buffers[name], value)
    subject = "forward updates a buffer by"
    shares = Shares(graph, traced, states.found)
    outer = OuterFunction(graph, traced, states.found, shares, subject, SUM, _FIX)
    for count, (mask, _) in zip(counts, masks, strict=True):  # the first of all sums, as their places say
        if states.found[count] not in (Over.ADDED, Over.SAME):
            raise UnsupportedOp(
                "a branch depends on whether a mask selects any rows, and the mask on sums over the batch",
                where=source_line(mask),
                fix="compute the same without the branch: no rows add nothing, by index_add or x[mask] = rows",
            )
        outer.take(count)
    new = outer.write(list(values.values()))
    moved = {name: outer.new[value] for name, value in values.items()}
    output_of(graph).kwargs = {"sums": tuple(outer.sums)}
    store(traced.graph, BufferUpdates(new, moved, tuple(outer.placeholders)))


def _count_rows(graph: fx.Graph, mask: fx.Node, kept: int) -> fx.Node:
    """Write the number of elements of a mask that are not zero, for each entry of its first `kept` dims."""
    shape = info(mask).shape
    with graph.inserting_after(mask):
        some = write_op(graph, mask, aten.ne.Scalar, (mask, 0), shape, torch.bool)
    with graph.inserting_after(some):
        some = write_op(graph, mask, aten.to.dtype, (some, torch.float64), shape, torch.float64)
    with graph.inserting_after(some):
        dims = list(range(kept, len(shape)))
        return write_op(graph, mask, aten.sum.dim_IntList, (some, dims), shape[:kept], torch.float64)


def separate_sums(graph: fx.Graph, traced: Traced) -> None:
    """Give each sum a node that nothing else reads: between ops it may be placed otherwise than as a result."""
    done: list[fx.Node] = []
    for node in sums_of(graph):
        if node in done or any(user.op != "output" for user in node.users):
            with graph.inserting_after(node):
                node = write_op(graph, node, aten.to.dtype, (node, torch.float64), info(node).shape, torch.float64)
        done.append(node)
    if done:
        output_of(graph).kwargs = {"sums": tuple(done)}


class _States:
    """Relations of nodes to the whole batch, and why some have none."""

    def __init__(self, graph: fx.Graph, traced: Traced, values: Sequence[fx.Node]) -> None:
        self.found: States = {}
        self.reasons: dict[fx.Node, Mixes] = {}
        wanted = ancestors(values)
        for node in graph.nodes:
            if node in wanted:
                state = _state(node, traced, self.found)
                if isinstance(state, Mixes):
                    self.reasons[node], state = state, Over.MIXED
                self.found[node] = state

    def check(self, buffer: str, value: fx.Node) -> None:
        """Raise UnsupportedOp unless a value is a function of sums, without a gradient."""
        if self.found[value] is Over.MIXED:
            before = ancestors([value], lambda n: self.found[n] is Over.MIXED)
            wrong = next(n for n in self.reasons if n in before)
            raise _refused(buffer, wrong, self.reasons[wrong].reason)
        if self.found[value] is Over.APART:
            raise _refused(buffer, value, "holds a value per sample")
        if info(value).requires_grad:
            raise UnsupportedOp(
                f"forward updates the buffer {buffer} with a tensor that requires a gradient, so that the next step "
                "would be differentiated through this one",
                where=source_line(value),
                fix="compute it under torch.no_grad(), or detach it",
            )


def _state(node: fx.Node, traced: Traced, states: States) -> State:
    """Return the state of a node: that of `over_batch`, with every function of sums that need not be a sum as outer."""
    if node.op == "placeholder":
        return placeholder_state(node, traced)
    if any(counts_samples(t) for t in infos(node)):  # samples are independent: `batch_independence.py` proved it
        return Over.APART
    if node.target is ops.sum_over_batch:  # its operand is taken, whose sum over the batch the new value is made from
        return Over.OUTER
    state = over_batch(node, states)
    sums = [o for o in operands(node) if states[o] is Over.ADDED]
    if state is not Over.ADDED or not sums or op_name(node) in SUMMING:
        return state
    fixed = all(isinstance(n, int) for o in sums for n in info(o).shape)
    return Over.OUTER if fixed or node.target in ADDITIONS else state


def _refused(buffer: str, node: fx.Node, reason: str) -> UnsupportedOp:
    return UnsupportedOp(
        f"forward updates the buffer {buffer} with a value that is no function of sums over samples: "
        f"{user_op_name(node)} {reason}",
        where=source_line(node),
        fix=f"write it as a function of sums over all samples, such as counts or means, {_WAY_OUT}",
    )
