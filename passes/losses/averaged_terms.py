"""Terms of a loss that are no sums, computed from a microbatch instead of the batch, as `loss_averaging` asks.

    loss = Σ l / N + c · f(S_1, S_2 / N)        global       S_i, N: of the whole batch

    loss = Σ l / N + c · Σ_k w_k f(S_1^k, S_2^k / N^k)       averaged over microbatches k, weighted by samples w_k

The second form leaves sums, and their counts N, as they are. The counts N^k of a term are those of the microbatch: the
nodes that were counted are still in the graph, and a copy of the term reads them. A microbatch is what one dp rank
computes at a time, or what all of them do; then sums and counts are summed over dp ranks in the forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from autoptd.errors import UnsupportedOp
from autoptd.ops import library as ops
from autoptd.passes.batch.batch_dims import is_whole
from autoptd.passes.graph import (
    ancestors,
    info,
    is_float,
    op_call,
    operands,
    output_of,
    source_line,
    substitute,
    user_op_name,
    write_op,
)
from autoptd.passes.losses.batch_sums import Over, State
from autoptd.passes.losses.loss_form import LossForm, count_index, is_count
from autoptd.passes.rules.lookup import resolve

aten = torch.ops.aten
ADDITIONS = frozenset({aten.add.Scalar, aten.add.Tensor, aten.rsub.Scalar, aten.sub.Scalar, aten.sub.Tensor})
_NO_SUM = (Over.OUTER, Over.MIXED)


@dataclass(frozen=True)
class Terms:
    """The maximal terms of a loss that are no sums, and the ops that add them up with others, in graph order."""

    terms: tuple[fx.Node, ...]
    adding: tuple[fx.Node, ...]


def terms_of(graph: fx.Graph, loss: fx.Node, states: Mapping[fx.Node, State]) -> Terms:
    """Follow a loss that is no sum back through ops that are linear in what is none."""
    terms: set[fx.Node] = set()
    adding: set[fx.Node] = set()
    stack = [loss]
    while stack:
        node = stack.pop()
        if node in adding or states[node] not in _NO_SUM:
            continue
        plain = node.target in ADDITIONS and not node.kwargs
        if (plain or _is_linear(node, states)) and not _reads_count(node, states):
            adding.add(node)
            stack += operands(node)
        else:
            terms.add(node)
    return Terms(tuple(n for n in graph.nodes if n in terms), tuple(n for n in graph.nodes if n in adding))


def _is_linear(node: fx.Node, states: Mapping[fx.Node, State]) -> bool:
    """Return whether an op is linear in all operands that differ between microbatches, jointly."""
    call, rule = op_call(node), resolve(op_call(node)).rule
    varying = frozenset(i for i, o in enumerate(operands(node)) if states[o] is not Over.SAME)
    floats = all(is_float(t.dtype) for t in (*call.outputs, *(call.operands[i] for i in varying)))
    return rule is not None and floats and any(varying == each for each in rule.linear(call))


def _reads_count(node: fx.Node, states: Mapping[fx.Node, State]) -> bool:
    """Return whether an op combines a term with a count, or a function of counts, which is that of the microbatch."""
    return any(map(is_count, ancestors([o for o in operands(node) if states[o] is Over.SAME])))


@dataclass
class OwnTerms:
    """Writer of copies of terms that read the counts of a microbatch, and are functions of its sums."""

    graph: fx.Graph
    form: LossForm
    states: Mapping[fx.Node, State]
    over_dp: bool
    copies: dict[tuple[fx.Node, bool], fx.Node] = field(default_factory=dict)
    counting: dict[fx.Node, bool] = field(default_factory=dict)  # whether a node depends on a count

    def write(self, term: fx.Node) -> fx.Node:
        """Return the term as a function of the microbatch alone."""
        with self.graph.inserting_before(term.next):
            return self._value(term, inside=True)

    def _value(self, node: fx.Node, inside: bool) -> fx.Node:
        """Return a node of the microbatch's own counts. `inside`: it is read by a function of sums, not within one."""
        summed = inside and self.over_dp and self.states.get(node) is Over.ADDED
        inside = inside and not summed
        made, key = node, (node, inside)
        if self._changes(node, inside):
            if key not in self.copies:
                self.copies[key] = self._count(node) if is_count(node) else self._copy(node, inside)
            made = self.copies[key]
        return self._over_dp(made) if summed else made

    def _changes(self, node: fx.Node, inside: bool) -> bool:
        """Return whether a node reads a count, or is itself a function of sums that are summed over dp ranks."""
        if node not in self.counting:
            self.counting[node] = is_count(node) or any(self._changes(o, False) for o in node.all_input_nodes)
        return self.counting[node] or (inside and self.over_dp and self.states.get(node) in _NO_SUM)

    def _copy(self, node: fx.Node, inside: bool) -> fx.Node:
        if self.over_dp and (self.states.get(node) is Over.MIXED or is_whole(node)):
            raise UnsupportedOp(
                f"{user_op_name(node)} needs all samples of a microbatch at once, which is on several dp ranks",
                where=source_line(node),
                fix='write it as a function of sums, or use loss_averaging="per-microbatch": samples of one dp rank',
            )
        args = substitute(node.args, lambda n: self._value(n, inside))
        kwargs = {name: substitute(value, lambda n: self._value(n, inside)) for name, value in node.kwargs.items()}
        made = self.graph.create_node(node.op, node.target, args, kwargs)  # type: ignore[arg-type]
        made.meta = dict(node.meta)
        return made

    def _count(self, node: fx.Node) -> fx.Node:
        """Return the microbatch's contribution to a count."""
        output = output_of(self.graph)
        index = count_index(node)
        own = output.args[1 + index]
        assert isinstance(own, fx.Node)
        if self.over_dp and self.form.combines[index] != "sum":
            raise UnsupportedOp(
                f"{user_op_name(own)} is the largest or smallest number of a microbatch, which is on several dp ranks",
                where=source_line(own),
                fix='use loss_averaging="per-microbatch": samples of one dp rank',
            )
        wide = own
        if info(own).dtype != torch.float64:
            wide = write_op(self.graph, own, aten.to.dtype, (own, torch.float64), info(own).shape, torch.float64)
        return self._over_dp(wide) if self.over_dp else wide

    def _over_dp(self, node: fx.Node) -> fx.Node:
        if (node, True) not in self.copies:
            self.copies[node, True] = write_op(
                self.graph, node, ops.sum_over_dp, (node,), info(node).shape, info(node).dtype
            )
        return self.copies[node, True]
