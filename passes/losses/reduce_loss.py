"""Make the loss independent of how the batch is divided.

The mean of microbatch means is not the mean of the batch. Earlier passes have written every reduction over samples as a
sum (`loss_spellings.py`), and reductions of inputs as counts of the whole batch (`batch_counts.py`). The remaining loss
has one of three forms, determined by `batch_sums.py`:

    linear in sums    Σ c_i S_i / N_i        each microbatch computes its share; the shares add up to the loss
    other function    f(S_1, S_2, …)         f is moved out of the graph, which ends with the partial sums;
                                             their gradients are the derivatives of f at the sums over the batch
    neither           max, median, sort …    refused, with the op and possible fixes

The last two may instead be averaged over microbatches, if the user names how (`averaged_terms.py`).

Gradients are summed, never averaged: only the division by a count scales them. A value that is the same for every
microbatch must count once: each microbatch has a share of it in proportion to its samples, b / Σ b.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from math import prod

import sympy
import torch
from torch import fx

from autoptd.errors import InputsError, TraceError, UnsupportedOp
from autoptd.passes.batch.batch_dims import counts_samples, is_whole, mark_whole
from autoptd.passes.graph import (
    ancestors,
    info,
    infos,
    is_float,
    operands,
    output_of,
    source_line,
    user_op_name,
    write_op,
)
from autoptd.passes.losses.averaged_terms import ADDITIONS, OwnTerms, terms_of
from autoptd.passes.losses.batch_sums import Mixes, Over, States, over_batch, placeholder_state
from autoptd.passes.losses.loss_form import PARTIAL, is_count, loss_form, loss_node
from autoptd.passes.losses.outer_function import OuterFunction
from autoptd.passes.losses.shares import Shares
from autoptd.passes.objectives.metrics import Metrics
from autoptd.passes.opcall import Size
from autoptd.passes.trace.traced import BATCH, Traced

aten = torch.ops.aten


def check_loss(graph: fx.Graph, traced: Traced) -> None:
    """Raise TraceError if the loss depends on no trainable parameter."""
    if not isinstance(traced.objective, Metrics) and not info(loss_node(graph)).requires_grad:
        raise TraceError("no trainable parameter reaches the loss", fix="return a loss that depends on the parameters")


def rewrite_loss(graph: fx.Graph, traced: Traced) -> None:
    """Replace the loss by a microbatch's share of it, or by the partial sums that it is a function of."""
    _Rewriter(graph, traced).run()
    graph.lint()


class _Rewriter:
    def __init__(self, graph: fx.Graph, traced: Traced) -> None:
        self.graph, self.traced, self.form = graph, traced, loss_form(traced.graph)
        self.output = output_of(graph)
        self.states: States = {}
        self.shares = Shares(graph, traced, self.states)
        self.mixed: dict[fx.Node, UnsupportedOp] = {}  # ops that need the whole batch in one microbatch

    def run(self) -> None:
        loss = loss_node(self.graph)
        wanted = ancestors([loss])
        for node in list(self.graph.nodes):
            if node in wanted:
                self._decide(node)
        loss = loss_node(self.graph)
        if isinstance(self.traced.objective, Metrics):
            self.output.args = (self._rows(loss), *self.output.args[1:])
            return
        if self.traced.averaging != "global":
            loss = self._averaged(loss)
        match self.states[loss]:
            case Over.ADDED:
                pass
            case Over.SAME:
                loss = self.shares.of(loss)
            case Over.OUTER:
                self.form.refused += self._mixed_before(loss)
                loss = self._partial_sums(loss)
            case Over.MIXED:
                self.form.refused += self._mixed_before(loss)
            case Over.APART:
                raise _refused(loss, "returns a value per sample")
        self.output.args = (loss, *self.output.args[1:])

    def _decide(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self.states[node] = placeholder_state(node, self.traced)
            return
        if node.op != "call_function":
            return
        if is_whole(node):
            self.states[node] = Over.OUTER
            return
        if any(counts_samples(t) for t in infos(node)):  # samples are independent: `batch_independence.py` proved it
            self.states[node] = Over.APART
            return
        if node.target in ADDITIONS and self._adds_number(node):
            return
        state = over_batch(node, self.states)
        if state is Over.OUTER and (as_sum := self._as_sum(node)) is not None:
            state = as_sum
        if isinstance(state, Mixes):
            self.mixed[node] = _refused(node, state.reason)
            state = Over.MIXED
        self.states[node] = state

    def _mixed_before(self, loss: fx.Node) -> list[UnsupportedOp]:
        """Return the errors of the ops for which the loss needs the whole batch in one microbatch, in graph order."""
        through = Over.MIXED, Over.OUTER
        needed = ancestors([loss], lambda node: self.states.get(node) in through)
        return [error for node, error in self.mixed.items() if node in needed]

    def _rows(self, rows: fx.Node) -> fx.Node:
        """Return the rows of metrics as one vector. Raises UnsupportedOp unless each is computed from its sample."""
        read = ancestors([rows])
        for node in (n for n in self.graph.nodes if n in read):
            if is_count(node):
                raise _reads_others(node)
        if self.states[rows] is not Over.APART or info(rows).shape[0] != BATCH:
            raise _reads_others(rows)
        with self.graph.inserting_before(self.output):
            return self._reshaped(rows, (BATCH * info(rows).shape[1],))

    # ---- values that count once ----

    def _adds_number(self, node: fx.Node) -> bool:
        """Rewrite `Σ l + c` so that each microbatch adds its share of c. Return False if `node` has another form."""
        tensors = operands(node)
        if len(tensors) != 1 or self.states[tensors[0]] is not Over.ADDED or node.args[2:] or node.kwargs:
            return False
        if not is_float(info(node).dtype):  # shares of a whole number are no whole numbers
            return False
        (total,), number = tensors, next(a for a in node.args if not isinstance(a, fx.Node))
        if isinstance(number, sympy.Basic) and BATCH in number.free_symbols:
            return False
        with self.graph.inserting_before(node):
            share = self.shares.of_samples(node)
            part = write_op(self.graph, node, aten.mul.Tensor, (share, number), (), torch.float64)
        target = aten.add.Tensor if "add" in str(node.target) else aten.sub.Tensor
        node.args = (part, total) if node.target is aten.rsub.Scalar or node.args[0] is not total else (total, part)
        node.target = target
        self.states[part] = self.states[node] = Over.ADDED
        return True

    def _as_sum(self, node: fx.Node) -> Over | None:
        """Make `added + same` a sum over microbatches by sharing out the second term; None for other ops."""
        if node.target not in (aten.add.Tensor, aten.sub.Tensor):
            return None
        found = [self.states[o] for o in operands(node)]
        if len(found) != 2 or set(found) != {Over.ADDED, Over.SAME} or not is_float(info(node).dtype):
            return None
        same = next(o for o in operands(node) if self.states[o] is Over.SAME)
        with self.graph.inserting_before(node):
            part = self.shares.of(same, node)
        node.replace_input_with(same, part)
        return Over.ADDED

    # ---- terms that are averaged ----

    def _averaged(self, loss: fx.Node) -> fx.Node:
        """Average the terms that are no sums over microbatches. Raises InputsError if there is none."""
        averaging = self.traced.averaging
        found = terms_of(self.graph, loss, self.states)
        if not found.terms:
            raise InputsError(
                f"loss_averaging={averaging!r} has no effect: this loss is a sum over samples, which is the same "
                "however a batch is divided",
                where="loss_averaging",
                fix="leave it out",
            )
        own = OwnTerms(self.graph, self.form, self.states, averaging == "per-microbatch-over-dp")
        for term in found.terms:
            value = own.write(term)
            average = self.shares.of(value, value.next)
            for node in found.adding:
                node.replace_input_with(term, average)
            loss = average if term is loss else loss
        for node in found.adding:
            mark_whole(node, False)
            self._decide(node)
        assert self.states[loss] is Over.ADDED, loss
        part = "of all dp ranks together" if own.over_dp else "of one dp rank, whichever tp, cp and ep ranks hold it"
        places = ", ".join(dict.fromkeys(map(source_line, found.terms)))
        self.form.notes.append(
            f"terms of the loss that are no sums over samples are averaged, as loss_averaging={averaging!r} requests: "
            f"each is computed from a microbatch {part}, and weighted by its samples, so the result depends on how a "
            f"batch is divided ({places})"
        )
        return loss

    # ---- functions of sums ----

    def _partial_sums(self, loss: fx.Node) -> fx.Node:
        """Move the outer function into its own graph; return its arguments, the partial sums, concatenated."""
        outer = OuterFunction(self.graph, self.traced, self.states, self.shares, "the loss is", PARTIAL, _FIX)
        self.form.outer = outer.write([loss])
        self.form.partial_sums, self.form.rows = tuple(outer.placeholders), tuple(outer.row_placeholders)
        if outer.rows:
            self.form.notes.append(
                f"the loss compares all samples of the batch: {self.form.row_width:,} numbers of each are gathered, "
                "and every rank with the last stage computes the end of the loss from all of them"
            )
        reached = ancestors([loss_node(self.form.outer)], lambda n: any(t.requires_grad for t in infos(n)))
        with self.graph.inserting_before(self.output):
            sums, rows = (
                [n if own in reached else self._detached(n) for n, own in zip(nodes, placeholders, strict=True)]
                for nodes, placeholders in ((outer.sums, self.form.partial_sums), (outer.rows, self.form.rows))
            )
            flat = [self._reshaped(n, (prod(map(int, info(n).shape)),)) for n in sums]
            if rows:
                table = self._joined(loss, [self._reshaped(n, (BATCH, self._width(n))) for n in rows])
                flat.append(self._reshaped(table, (BATCH * info(table).shape[1],)))
            return self._joined(loss, flat)

    def _detached(self, node: fx.Node) -> fx.Node:
        """Return what only comparisons read: parameters before it have no gradient in one process, rather than 0."""
        if not info(node).requires_grad:
            return node
        made = write_op(self.graph, node, aten.detach.default, (node,), info(node).shape)
        made.meta["info"] = replace(info(node), requires_grad=False)
        return made

    def _width(self, rows: fx.Node) -> int:
        return prod(map(int, info(rows).shape[1:]))

    def _joined(self, loss: fx.Node, parts: Sequence[fx.Node]) -> fx.Node:
        """Return tensors concatenated along their last dim, in a type that has the values of all."""
        if len(parts) == 1:
            return parts[0]
        dtype = reduce(torch.promote_types, [info(n).dtype for n in parts])
        alike = [
            n if info(n).dtype == dtype else write_op(self.graph, n, aten.to.dtype, (n, dtype), info(n).shape, dtype)
            for n in parts
        ]
        shape = (*info(parts[0]).shape[:-1], sum(info(n).shape[-1] for n in parts))
        return write_op(self.graph, loss, aten.cat.default, (alike, -1), shape, dtype)

    def _reshaped(self, node: fx.Node, shape: tuple[Size, ...]) -> fx.Node:
        return write_op(self.graph, node, aten.reshape.default, (node, list(shape)), shape, info(node).dtype)


_FIX = (
    "write the loss as a sum over the samples ÷ a count, or as a function of a few such sums; or use one microbatch "
    'per step, fix={"dp": 1, "micro": batch}; or train with loss_averaging="per-microbatch", if you want the mean of '
    "what each microbatch gives"
)


def _reads_others(node: fx.Node) -> UnsupportedOp:
    return UnsupportedOp(
        f"a metric is no value of each sample by itself: {user_op_name(node)} combines several samples",
        where=source_line(node),
        fix="return a value of each sample, [samples, …], computed from that sample alone; combine the values that "
        "`predict` returns",
    )


def _refused(node: fx.Node, reason: str) -> UnsupportedOp:
    return UnsupportedOp(
        f"{user_op_name(node)} {reason}: the loss of a batch cannot be computed from those of its microbatches",
        where=source_line(node),
        fix=_FIX,
    )
