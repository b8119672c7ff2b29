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

from math import prod

import sympy
import torch
from torch import fx

from autoptd.errors import InputsError, TraceError, UnsupportedOp
from autoptd.ops import library as ops
from autoptd.passes.batch.batch_dims import counts_samples
from autoptd.passes.graph import (
    ancestors,
    info,
    infos,
    is_float,
    op_name,
    operands,
    source_line,
    substitute,
    user_op_name,
    write_op,
)
from autoptd.passes.losses.averaged_terms import ADDITIONS, OwnTerms, terms_of
from autoptd.passes.losses.batch_counts import take_count
from autoptd.passes.losses.batch_sums import Mixes, Over, States, over_batch, placeholder_state
from autoptd.passes.losses.loss_form import PARTIAL, loss_form, loss_node
from autoptd.passes.opcall import TensorInfo
from autoptd.passes.trace.traced import BATCH, Traced

aten = torch.ops.aten
LARGEST = 1 << 20  # elements of all sums that an outer function reads


def check_loss(graph: fx.Graph, traced: Traced) -> None:
    """Raise TraceError if the loss depends on no trainable parameter."""
    if not info(loss_node(graph)).requires_grad:
        raise TraceError("no trainable parameter reaches the loss", fix="return a loss that depends on the parameters")


def rewrite_loss(graph: fx.Graph, traced: Traced) -> None:
    """Replace the loss by a microbatch's share of it, or by the partial sums that it is a function of."""
    _Rewriter(graph, traced).run()
    graph.lint()


class _Rewriter:
    def __init__(self, graph: fx.Graph, traced: Traced) -> None:
        self.graph, self.traced, self.form = graph, traced, loss_form(traced.graph)
        self.output = next(n for n in graph.nodes if n.op == "output")
        self.states: States = {}
        self.share: fx.Node | None = None  # a microbatch's share of the batch's samples, b / Σ b
        self.mixed: dict[fx.Node, UnsupportedOp] = {}  # ops that need the whole batch in one microbatch

    def run(self) -> None:
        loss = loss_node(self.graph)
        wanted = ancestors([loss])
        for node in list(self.graph.nodes):
            if node in wanted:
                self._decide(node)
        loss = loss_node(self.graph)
        if self.traced.averaging != "global":
            loss = self._averaged(loss)
        match self.states[loss]:
            case Over.ADDED:
                pass
            case Over.SAME:
                loss = self._share_of(loss)
            case Over.OUTER:
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
        needed = ancestors([loss], lambda node: self.states.get(node) is Over.MIXED)
        return [error for node, error in self.mixed.items() if node in needed]

    # ---- values that count once ----

    def _adds_number(self, node: fx.Node) -> bool:
        """Rewrite `Σ l + c` so that each microbatch adds its share of c. Return False if `node` has another form."""
        tensors = operands(node)
        if len(tensors) != 1 or self.states[tensors[0]] is not Over.ADDED or node.args[2:] or node.kwargs:
            return False
        (total,), number = tensors, next(a for a in node.args if not isinstance(a, fx.Node))
        if isinstance(number, sympy.Basic) and BATCH in number.free_symbols:
            return False
        with self.graph.inserting_before(node):
            share = self._sample_share(node)
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
            part = self._share_of(same, node)
        node.replace_input_with(same, part)
        return Over.ADDED

    def _share_of(self, value: fx.Node, before: fx.Node | None = None) -> fx.Node:
        """Write a microbatch's share of a value that is the same for all."""
        with self.graph.inserting_before(before or self.output):
            share = self._sample_share(value)
            part = write_op(self.graph, value, aten.mul.Tensor, (value, share), info(value).shape, info(value).dtype)
        self.states[part] = Over.ADDED
        return part

    def _sample_share(self, like: fx.Node) -> fx.Node:
        """Write b / Σ b, once, before the first op of the graph."""
        if self.share is None:
            first = next(n for n in self.graph.nodes if n.op == "call_function")
            with self.graph.inserting_before(first):
                own = write_op(self.graph, like, ops.element_count, (BATCH,), (), torch.float64)
            whole = take_count(self.graph, self.traced, own)
            with self.graph.inserting_after(own):
                self.share = write_op(self.graph, like, aten.div.Tensor, (own, whole), (), torch.float64)
            self.states |= {own: Over.ADDED, whole: Over.SAME, self.share: Over.ADDED}
        return self.share

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
            average = self._share_of(value, value.next)
            for node in found.adding:
                node.replace_input_with(term, average)
            loss = average if term is loss else loss
        for node in found.adding:
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
        outer = _Outer(self, loss)
        outer.write()
        too_many = sum(prod(map(int, info(n).shape)) for n in outer.sums) > LARGEST
        if too_many:
            raise UnsupportedOp(
                f"the loss is a function of sums of more than {LARGEST:,} numbers over the batch",
                where=source_line(loss),
                fix=_FIX,
            )
        self.form.outer, self.form.partial_sums = outer.graph, tuple(outer.partial_sums)
        with self.graph.inserting_before(self.output):
            flat = [self._flat(n) for n in outer.sums]
            dtype = info(flat[0]).dtype
            for n in flat:
                dtype = torch.promote_types(dtype, info(n).dtype)
            width = sum(int(info(n).shape[0]) for n in flat)
            if len(flat) == 1:
                return flat[0]
            alike = [
                n
                if info(n).dtype == dtype
                else write_op(self.graph, n, aten.to.dtype, (n, dtype), info(n).shape, dtype)
                for n in flat
            ]
            return write_op(self.graph, loss, aten.cat.default, (alike,), (width,), dtype)

    def _flat(self, node: fx.Node) -> fx.Node:
        size = prod(map(int, info(node).shape))
        dtype = info(node).dtype
        if not is_float(dtype):  # a count that depends on the model's outputs
            node = write_op(self.graph, node, aten.to.dtype, (node, torch.float64), info(node).shape, torch.float64)
        return write_op(self.graph, node, aten.reshape.default, (node, [size]), (size,), info(node).dtype)


class _Outer:
    """The outer function of a loss, copied into its own graph."""

    def __init__(self, rewriter: _Rewriter, loss: fx.Node) -> None:
        self.rewriter, self.loss = rewriter, loss
        self.graph = fx.Graph()
        self.new: dict[fx.Node, fx.Node] = {}
        self.sums: list[fx.Node] = []  # in the main graph
        self.partial_sums: list[fx.Node] = []  # their placeholders here

    def write(self) -> None:
        states = self.rewriter.states
        inside = {n for n in ancestors([self.loss]) if states.get(n) is Over.OUTER}
        read = dict.fromkeys(
            o for n in self.rewriter.graph.nodes if n in inside for o in operands(n) if o not in inside
        )
        for node in read:
            if states[node] is Over.ADDED:
                self._take(node, node)
            elif info(node).requires_grad or self._from_parameters(node):
                self._take(node, self._shared(node))
        for node in read:
            if node not in self.new:
                self._copy_known(node)
        for node in self.rewriter.graph.nodes:
            if node in inside:
                self._copy(node)
        self.graph.output(self.new[self.loss])
        self.graph.lint()

    def _take(self, node: fx.Node, partial: fx.Node) -> None:
        shape = info(partial).shape
        if not all(isinstance(n, int) for n in shape):
            raise UnsupportedOp(
                f"the loss is a function of sums over the batch whose size varies from batch to batch, {tuple(shape)}",
                where=source_line(node),
                fix=_FIX,
            )
        made = self.graph.placeholder(f"{PARTIAL}_{len(self.sums)}")
        made.meta["info"] = TensorInfo(shape, info(node).dtype, True)
        self.new[node] = made
        self.sums.append(partial)
        self.partial_sums.append(made)

    def _shared(self, node: fx.Node) -> fx.Node:
        if not is_float(info(node).dtype):
            raise UnsupportedOp(
                f"{op_name(node)} gives the loss numbers that are no floats and cannot be summed over the batch",
                where=source_line(node),
                fix=_FIX,
            )
        return self.rewriter._share_of(node)

    def _from_parameters(self, node: fx.Node) -> bool:
        parameters = self.rewriter.traced.parameters
        return any(n.op == "placeholder" and n.name in parameters for n in ancestors([node]))

    def _copy_known(self, node: fx.Node) -> None:
        """Copy a node that depends on counts, buffers and constants only, with its ancestors."""
        wanted = ancestors([node])
        for n in self.rewriter.graph.nodes:
            if n in wanted and n not in self.new:
                self._copy(n)

    def _copy(self, node: fx.Node) -> None:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise UnsupportedOp(
                f"{user_op_name(node)} draws random numbers for the whole batch, but each rank would draw its own",
                where=source_line(node),
                fix="draw them for every sample, or pass them as an input",
            )
        if node.op == "placeholder":
            made = self.graph.placeholder(node.name)
        else:
            args = substitute(node.args, self.new.__getitem__)
            kwargs = {k: substitute(v, self.new.__getitem__) for k, v in node.kwargs.items()}
            made = self.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        made.meta = dict(node.meta)
        self.new[node] = made


_FIX = (
    "write the loss as a sum over the samples ÷ a count, or as a function of a few such sums; or use one microbatch "
    'per step, fix={"dp": 1, "micro": batch}; or train with loss_averaging="per-microbatch", if you want the mean of '
    "what each microbatch gives"
)


def _refused(node: fx.Node, reason: str) -> UnsupportedOp:
    return UnsupportedOp(
        f"{user_op_name(node)} {reason}: the loss of a batch cannot be computed from those of its microbatches",
        where=source_line(node),
        fix=_FIX,
    )
