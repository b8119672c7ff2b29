"""Functions of sums over the batch, moved out of the graph of a microbatch into a graph of their own.

main graph     sums S_1, S_2 … of a microbatch       added up over microbatches and ranks
               rows of a microbatch's samples        put beside those of the others
own graph      f(S_1, S_2, …, rows, counts, buffers) computed once per step
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import sympy
import torch
from torch import fx

from autoptd.errors import UnsupportedOp
from autoptd.layout.sample_rows import SHARED
from autoptd.ops import library as ops
from autoptd.passes.batch.batch_dims import sample_place, symbols_in
from autoptd.passes.graph import (
    ancestors,
    info,
    is_float,
    op_name,
    operands,
    output_of,
    source_line,
    substitute,
    user_op_name,
    write_op,
)
from autoptd.passes.losses.batch_counts import take_count
from autoptd.passes.losses.batch_sums import Over, States
from autoptd.passes.losses.loss_form import ROWS, SIZE
from autoptd.passes.losses.shares import Shares
from autoptd.passes.opcall import Size, TensorInfo, is_random
from autoptd.passes.trace.traced import BATCH, Traced

aten = torch.ops.aten
SUMMING = ("sum", "reshape", "squeeze", "unsqueeze", "permute", "transpose")  # ops that add up or move elements
_HALF = 1 << 32  # a whole number of 64 bits is the sum of a multiple of this one and a rest, exact in float64 each
LARGEST = 1 << 20  # elements of all sums that an outer function reads


class OuterFunction:
    """A function of sums, copied into its own graph.

    `prefix`: of the placeholders of sums. `subject`, such as "the loss is", and `fix` are for errors.
    """

    def __init__(
        self, graph: fx.Graph, traced: Traced, states: States, shares: Shares, subject: str, prefix: str, fix: str
    ) -> None:
        self.main, self.traced, self.states, self.shares = graph, traced, states, shares
        self.subject, self.prefix, self.fix = subject, prefix, fix
        self.graph = fx.Graph()
        self.new: dict[fx.Node, fx.Node] = {}
        self.sums: list[fx.Node] = []  # in the main graph
        self.placeholders: list[fx.Node] = []  # of the sums, here
        self.rows: list[fx.Node] = []  # in the main graph, [b, …]: values of a microbatch's samples
        self.row_placeholders: list[fx.Node] = []  # of the rows of all samples, here
        self.sizes: set[sympy.Symbol] = {BATCH, *_shared_sizes(graph, traced)}  # those that are known here

    def write(self, values: Sequence[fx.Node]) -> fx.Graph:
        """Return the graph whose outputs are `values`. Raises UnsupportedOp."""
        inside = ancestors(values, lambda n: self.states.get(n) is Over.OUTER)
        read = dict.fromkeys(o for n in self.main.nodes if n in inside for o in operands(n) if o not in inside)
        read |= dict.fromkeys(n for n in values if n not in inside)
        for node in read:
            if self.states[node] is Over.APART:
                self._take_rows(node)
            elif self.states[node] is Over.ADDED:
                self._take(node, self._cast(self._wide(node)))
            elif info(node).requires_grad or self._from_parameters(node):
                self._take(node, self._shared(node))
        for node in read:
            if node not in self.new:
                self._copy_known(node)
        for node in self.main.nodes:
            if node in inside:
                self._copy(node)
        self.graph.output(self.new[values[0]] if len(values) == 1 else tuple(self.new[n] for n in values))
        self.graph.lint()
        if sum(prod(map(int, info(n).shape)) for n in self.sums) > LARGEST:
            raise UnsupportedOp(
                f"{self.subject} a function of sums of more than {LARGEST:,} numbers over the batch",
                where=source_line(self.sums[0]),
                fix=self.fix,
            )
        return self.graph

    def take(self, node: fx.Node) -> None:
        """Read a sum over samples, or a value that is the same for all."""
        whole = self.states[node] is not Over.ADDED
        self._take(node, self._shared(node) if whole else self._cast(self._wide(node)))

    def _take(self, node: fx.Node, partial: fx.Node) -> None:
        shape = info(partial).shape
        if not all(isinstance(n, int) for n in shape):
            self.traced.as_numbers |= symbols_in(shape)
            raise UnsupportedOp(
                f"{self.subject} a function of sums over the batch whose size varies from batch to batch, "
                f"{tuple(shape)}",
                where=source_line(node),
                fix=self.fix,
            )
        made = self.graph.placeholder(f"{self.prefix}_{len(self.sums)}")
        made.meta["info"] = TensorInfo(shape, info(node).dtype, info(partial).requires_grad)
        self.new[node] = made
        self.sums.append(partial)
        self.placeholders.append(made)

    def _take_rows(self, node: fx.Node) -> None:
        """Read a value per sample. Samples come first; whole numbers, of up to 64 bits, as two of float64."""
        place = sample_place(node)
        assert place is not None, node
        order = [place.dim, *(d for d in range(info(node).ndim) if d != place.dim)]
        with self.main.inserting_before(output_of(self.main)):
            first = self._permuted(self.main, node, order)
        self.new[node] = self._permuted(self.graph, self._row(first, node), [order.index(d) for d in range(len(order))])

    def _row(self, rows: fx.Node, like: fx.Node) -> fx.Node:
        shape, dtype = info(rows).shape, info(rows).dtype
        if dtype != torch.int64:
            return self._row_placeholder(self._cast(rows), shape, dtype)
        with self.main.inserting_before(output_of(self.main)):
            low = write_op(self.main, like, aten.remainder.Scalar, (rows, _HALF), shape, dtype)
            rest = write_op(self.main, like, aten.sub.Tensor, (rows, low), shape, dtype)
        parts = [self._row_placeholder(self._cast(part), shape, dtype) for part in (rest, low)]
        return write_op(self.graph, parts[0], aten.add.Tensor, tuple(parts), shape, dtype)

    def _row_placeholder(self, rows: fx.Node, shape: tuple[Size, ...], dtype: torch.dtype) -> fx.Node:
        made = self.graph.placeholder(f"{ROWS}_{len(self.rows)}")
        made.meta["info"] = TensorInfo(shape, dtype, info(rows).requires_grad)
        self.rows.append(rows)
        self.row_placeholders.append(made)
        return made

    def _permuted(self, graph: fx.Graph, node: fx.Node, order: list[int]) -> fx.Node:
        if order == sorted(order):
            return node
        shape = tuple(info(node).shape[d] for d in order)
        return write_op(graph, node, aten.permute.default, (node, order), shape, info(node).dtype)

    def _cast(self, node: fx.Node) -> fx.Node:
        if is_float(info(node).dtype):
            return node
        with self.main.inserting_before(output_of(self.main)):
            return write_op(self.main, node, aten.to.dtype, (node, torch.float64), info(node).shape, torch.float64)

    def _wide(self, node: fx.Node) -> fx.Node:
        """Return a sum of whole numbers as one of float64, of which a rank may have a part; other sums as they are."""
        if is_float(info(node).dtype) or op_name(node) not in SUMMING or len(operands(node)) != 1:
            return node
        (source,) = operands(node)
        with self.main.inserting_before(node):
            if self.states[source] is not Over.ADDED:
                wide = write_op(
                    self.main, node, aten.to.dtype, (source, torch.float64), info(source).shape, torch.float64
                )
            elif (wide := self._wide(source)) is source:
                return node
            args = substitute(node.args, lambda n: wide)
            kwargs = {name: value for name, value in node.kwargs.items() if name != "dtype"}
            return write_op(self.main, node, node.target, args, info(node).shape, torch.float64, kwargs)  # type: ignore[arg-type]

    def _shared(self, node: fx.Node) -> fx.Node:
        if not is_float(info(node).dtype):
            raise UnsupportedOp(
                f"{self.subject} a function of what {op_name(node)} gives: numbers that are no floats and cannot be "
                "summed over the batch",
                where=source_line(node),
                fix=self.fix,
            )
        return self.shares.of(node)

    def _from_parameters(self, node: fx.Node) -> bool:
        """Return whether a node is computed from parameters, or from sums over the batch, within the forward pass."""
        return any(
            n.target is ops.sum_over_batch or (n.op == "placeholder" and n.name in self.traced.parameters)
            for n in ancestors([node])
        )

    def _copy_known(self, node: fx.Node) -> None:
        """Copy a node that depends on counts, buffers and constants only, with its ancestors."""
        wanted = ancestors([node])
        for n in self.main.nodes:
            if n in wanted and n not in self.new:
                self._copy(n)

    def _copy(self, node: fx.Node) -> None:
        if node.target is ops.sum_over_batch:  # sums are of the whole batch here
            self.new[node] = self.new[operands(node)[0]]
            return
        if is_random(node.target):
            raise UnsupportedOp(
                f"{user_op_name(node)} draws random numbers for the whole batch, but each rank would draw its own",
                where=source_line(node),
                fix="draw them for every sample, or pass them as an input",
            )
        if node.op == "placeholder":
            made = self.graph.placeholder(node.name)
        else:
            self._take_sizes(node)
            args = substitute(node.args, self.new.__getitem__)
            kwargs = {k: substitute(v, self.new.__getitem__) for k, v in node.kwargs.items()}
            made = self.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        made.meta = dict(node.meta)
        self.new[node] = made

    def _take_sizes(self, node: fx.Node) -> None:
        """Make counts of the sizes that an op computes with, such as a number of tokens: one of all microbatches."""
        for symbol in sorted(symbols_in((node.args, tuple(node.kwargs.values()))) - self.sizes, key=str):
            self.sizes.add(symbol)
            with self.main.inserting_before(next(n for n in self.main.nodes if n.op == "call_function")):
                own = write_op(self.main, node, ops.element_count, (symbol,), (), torch.float64)
            count = take_count(self.main, self.traced, own, "max")
            made = self.graph.placeholder(count.name)
            made.meta = {**count.meta, SIZE: symbol}


def _shared_sizes(graph: fx.Graph, traced: Traced) -> set[sympy.Symbol]:
    """Return the sizes of the inputs that all samples share."""
    shared = (
        n for n in graph.nodes if n.op == "placeholder" and traced.rows.get(traced.inputs.get(n.name, "")) == SHARED
    )
    return {symbol for n in shared for symbol in symbols_in(info(n).shape)}
