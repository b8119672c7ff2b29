"""Kernels of ops, seconds of ops and conversions, and bytes of tensors, on one rank of a tp axis."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import sympy
from torch import fx

from autoptd.cost_models.cluster import Cluster
from autoptd.cost_models.collectives import collective_s
from autoptd.cost_models.op_time import OpWork, memory_s, op_s
from autoptd.layout.placements import CONVERSIONS, B, Conversion, O, Placement
from autoptd.layout.placements import kind as kind_of
from autoptd.ops.linear_cross_entropy import chunks
from autoptd.passes.analysis.attention import AttentionForm, form_of
from autoptd.passes.analysis.dataflow import divides, is_quadratic
from autoptd.passes.analysis.flops import GROUPED, gradient_products
from autoptd.passes.analysis.heads import Head
from autoptd.passes.graph import info
from autoptd.passes.opcall import Size, Sizes, TensorInfo
from autoptd.passes.rules.factors import Strategy, local_shape, of_own_tokens
from autoptd.passes.trace.traced import BATCH
from autoptd.search.permutation import adds_up, gradient_adds, is_adding, of_own_rows, permuting
from autoptd.search.sharding.attention_cost import Shape, attention_works
from autoptd.search.sharding.expert_work import LAUNCHES
from autoptd.search.sharding.fp8 import conversion as converted
from autoptd.search.sharding.op_table import OpFacts, Workbook

Passes = tuple[float, float]  # seconds of forward, of backward
Kernels = tuple[tuple[OpWork, ...], tuple[OpWork, ...]]  # forward, backward
LocalBytes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # of operands, outputs, and others that are saved
NewWork = partial[OpWork]  # makes the kernels of one op


class Prices:
    """Costs of ops and conversions on `ranks` tp ranks of `cluster`, for given sizes.

    `cp`: ranks that share a sample's tokens; sizes are those of one rank, but attention reads the keys of all.
    `context`: "ring" or "ulysses". `world`: ranks of all tp groups, given if these lie unevenly over nodes.
    """

    def __init__(
        self,
        workbook: Workbook,
        cluster: Cluster,
        ranks: int,
        values: Mapping[sympy.Symbol, int],
        cp: int = 1,
        world: int = 0,
        context: str = "ring",
        like: Prices | None = None,
    ) -> None:
        """`like`: other prices for the same arguments, whose results are shared."""
        self.workbook, self.cluster, self.ranks, self.cp, self.world = workbook, cluster, ranks, cp, world
        self.context = context
        self.values = dict(values)
        self.sizes = Sizes(self.values, BATCH)
        self._numbers: dict[Size, int] = like._numbers if like else {}
        self._nbytes: dict[TensorInfo, int] = like._nbytes if like else {}
        self._kernels: dict[tuple[fx.Node, str | LocalBytes], Kernels] = like._kernels if like else {}
        self._op_s: dict[tuple[fx.Node, str], Passes] = like._op_s if like else {}
        self._conversion_s: dict[TensorInfo, Mapping[tuple[str, str], Passes]] = like._conversion_s if like else {}

    # ---- sizes ----

    def number(self, size: Size) -> int:
        if isinstance(size, int):
            return size
        if size not in self._numbers:
            self._numbers[size] = self.sizes(size)
        return self._numbers[size]

    def nbytes(self, tensor: TensorInfo, placement: Placement = B) -> int:
        """Return the local bytes of a tensor in a placement."""
        if tensor not in self._nbytes:
            total = tensor.dtype.itemsize * (self.cp if is_quadratic(tensor.shape) else 1)
            for size in tensor.shape:
                total *= self.number(size)
            self._nbytes[tensor] = total
        whole = self._nbytes[tensor]
        return whole // self.ranks if divides(placement, tensor.shape) else whole

    # ---- kernels ----

    def kernels(self, node: fx.Node, strategy: Strategy) -> Kernels:
        """Return the kernels of one op on one rank, (forward, backward)."""
        key = node, str(strategy)
        if key not in self._kernels:
            self._kernels[key] = self._work_out(node, strategy)
        return self._kernels[key]

    def _work_out(self, node: fx.Node, strategy: Strategy) -> Kernels:
        op, places = self.workbook.ops[node], self.workbook.facts.places
        if op.work.kind == "view":
            return (), ()
        local = self._local(op, strategy)
        if op.work.kind == "memory" and (node, local) in self._kernels:  # equal for all splits into equal parts
            return self._kernels[node, local]
        work = partial(OpWork, place=places.get(node, ""), origin=node.name)
        forward = tuple(self._forward(op, strategy, local, work))
        found = forward, tuple(self._backward(op, strategy, local, forward, work))
        if node in places and op.is_lookup and adds_up(self.workbook.permutation):
            found = self._permuting(op, places[node], found)
        if op.work.kind == "memory":
            self._kernels[node, local] = found
        return found

    def _permuting(self, op: OpFacts, place: str, found: Kernels) -> Kernels:
        """Return the kernels of a lookup of rows of experts, under the workbook's permutation."""
        how, rows = self.workbook.permutation, op.call.outputs[0]
        nbytes = self.nbytes(rows) / (self.ranks if of_own_rows(how) else 1)
        sizes = how, place, nbytes, nbytes / rows.dtype.itemsize
        return tuple(permuting(found[0], *sizes)), tuple(permuting(found[1], *sizes, backward=True))

    def _added(self, nbytes: int, tensor: TensorInfo) -> float:
        """Return the elements of a tensor that an op adds up by index, if the graph decides how."""
        return 0.0 if self.workbook.permutation else nbytes / tensor.dtype.itemsize

    def _forward(self, op: OpFacts, strategy: Strategy, local: LocalBytes, work: NewWork) -> Iterator[OpWork]:
        operands, outputs, extra = local
        moves = op.traffic
        nbytes = sum(outputs[i] for i in moves.writes)
        if op.is_lookup:  # reads only the rows of its table that it returns
            nbytes += sum(outputs) + sum(operands[i] for i in moves.reads if i > 0)
        else:
            nbytes += sum(operands[i] for i in moves.reads)
        if op.trained:
            nbytes += sum(extra[i] for i in moves.kept_extra)
        if op.work.kind == "memory":
            if nbytes:
                kind = "rows" if moves.rows else "memory"
                added = self._added(operands[-1], op.call.operands[-1]) if is_adding(op.call) else 0.0
                yield work(kind, 0, nbytes, op.dtype, launches=moves.launches, added=added)
            return
        if op.work.kind == "attention":
            yield from named(self._attention(op, strategy, nbytes), work)
            return
        flops = self.number(op.work.flops) / strategy.ranks
        if op.recipe:
            yield from named([converted(operands[0] / 2, op.recipe)], work)
            nbytes -= sum(operands[i] for i in moves.reads) // 2
        yield self._product(op, strategy, flops, nbytes, work)

    def fused_attention(self, node: fx.Node, strategy: Strategy) -> Kernels:
        """Return the kernels that an attention would have without its mask and dropout, each tensor moved once."""
        op = self.workbook.ops[node]
        operands, outputs, _ = self._local(op, strategy)
        moved = sum(operands[:3]) + sum(outputs)
        plain = replace(self._form(op), mask=None, dropped=False)
        forward, backward = (tuple(self._attention(op, strategy, (1 + b) * moved, b, plain)) for b in (False, True))
        return forward, backward

    def _form(self, op: OpFacts) -> AttentionForm:
        return form_of(op.call, ring=self.cp > 1 and self.context == "ring")

    def _attention(
        self,
        op: OpFacts,
        strategy: Strategy,
        nbytes: int,
        backward: bool = False,
        form: AttentionForm | None = None,
    ) -> Iterator[OpWork]:
        query, key = op.call.operands[:2]
        queries, keys, width = (self.number(n) for n in (query.shape[-2], key.shape[-2], query.shape[-1]))
        flops = self.number(op.work.flops) / strategy.ranks
        heads = max(1, round(flops / (4 * queries * keys * width)))
        yield from attention_works(
            form or self._form(op),
            Shape(heads, queries, keys * self.cp, width, self.cp),
            nbytes,
            op.dtype,
            self.cluster.device,
            self.workbook.attention,
            backward,
            self.workbook.kernels == "fused",
        )

    def _product(self, op: OpFacts, strategy: Strategy, flops: float, nbytes: int, work: NewWork) -> OpWork:
        if op.call.target in GROUPED:  # assumes that every matrix gets the same number of rows
            rows, matrices = (
                [self.number(n) for n in local_shape(t, p, self.ranks)]
                for t, p in zip(op.call.operands[:2], strategy.needs[:2], strict=True)
            )
            count, k, n = matrices
            flops = 2 * rows[0] * k * n * count / self.number(op.call.operands[1].shape[0])
            groups = self.number(op.call.operands[1].shape[0])
            # by hand: a product for each expert (Transformer Engine, GroupedLinear); torch has one kernel for all
            launches = max(1, round(LAUNCHES * count)) if self.workbook.kernels == "fused" else 1
            m = -(-rows[0] // groups)
            return work("matmul", flops, nbytes, op.dtype, m, n, k, count, groups="m", launches=launches)
        if op.loops is None:
            return work("matmul", flops, nbytes, op.dtype)
        extents = {"m": 1, "n": 1, "k": 1, "batch": 1}
        split = op.split_factor(strategy)
        for name, role in op.roles.items():
            size = op.loops.sizes[name]
            size = self.number(of_own_tokens(size, self.ranks) if O in strategy.needs else size)
            extents[role] *= size // strategy.ranks if name == split else size
        if op.keys:  # a rank's queries attend to the keys of all cp ranks
            extents[op.keys], flops = extents[op.keys] * self.cp, flops * self.cp
        m, n, k, batch = (extents[role] for role in ("m", "n", "k", "batch"))
        odd = self.workbook.kernels != "compiled" and (n % 2 == 1 < n or k % 2 == 1 < k)  # inductor pads
        return work("matmul", flops, nbytes, op.dtype, m, n, k, batch, odd=odd)

    def _backward(
        self, op: OpFacts, strategy: Strategy, local: LocalBytes, forward: Sequence[OpWork], work: NewWork
    ) -> Iterator[OpWork]:
        if not op.trained:
            return
        (operands, outputs, extra), moves = local, op.traffic
        if op.work.kind == "matmul":
            yield from _gradient_products(op, forward[-1])
            if op.recipe:
                yield from named([converted(outputs[0] / 2, op.recipe, backward=True)], work)
        else:
            nbytes = sum(outputs[i] for i in (*moves.gradients_read, *moves.kept_outputs))
            nbytes += sum(extra[i] for i in moves.kept_extra)
            read = moves.kept_operands + (() if op.is_lookup else moves.gradients_written)
            nbytes += sum(operands[i] for i in read)
            if op.is_lookup:  # adds its rows into the gradient of the table
                nbytes += 2 * sum(outputs)
            if op.work.kind == "attention":
                yield from named(self._attention(op, strategy, nbytes, backward=True), work)
            elif nbytes:
                kind, launches = "rows" if moves.rows else "memory", moves.backward_launches
                adds = op.is_lookup and gradient_adds(op.call)
                added = self._added(outputs[0], op.call.outputs[0]) if adds else 0.0
                yield work(kind, 0, nbytes, op.dtype, backward=True, launches=launches, added=added)
        for i, times in moves.sums.items():
            yield work("memory", 0, 3 * operands[i] * times, op.dtype, backward=True, launches=times)

    def _local(self, op: OpFacts, strategy: Strategy) -> LocalBytes:
        operands = [self.nbytes(t, p) for t, p in zip(op.call.operands, strategy.needs, strict=True)]
        outputs = [self.nbytes(t, p) for t, p in zip(op.call.outputs, strategy.gives, strict=True)]
        extra = [self.nbytes(t) // strategy.ranks for t in op.saved.extra]
        return tuple(operands), tuple(outputs), tuple(extra)

    # ---- seconds ----

    def op_seconds(self, node: fx.Node, strategy: Strategy) -> Passes:
        """Return seconds (forward, backward) of one op on one rank, with the collectives inside its implementation."""
        key = node, str(strategy)
        if key not in self._op_s:
            self._op_s[key] = self._price_op(node, strategy)
        return self._op_s[key]

    def _price_op(self, node: fx.Node, strategy: Strategy) -> Passes:
        device = self.cluster.device
        forward, backward = (sum(op_s(device, work) for work in each) for each in self.kernels(node, strategy))
        for name, elements in strategy.collectives:
            forward += self.collective(name, self.number(elements) * 4)
        return forward, backward

    def collective(self, name: str, nbytes: float) -> float:
        return collective_s(name, nbytes, self.cluster, self.ranks, 1, self.world)

    def conversion_seconds(self, tensor: TensorInfo, source: Placement, target: Placement) -> Passes:
        """Return seconds (forward, backward) of one conversion."""
        if source == target or target == O:
            return 0.0, 0.0
        return self.conversions_of(tensor)[kind_of(source), kind_of(target)]

    def conversions_of(self, tensor: TensorInfo) -> Mapping[tuple[str, str], Passes]:
        """Return seconds (forward, backward) of a tensor's conversions between different placements, by their kinds."""
        if tensor not in self._conversion_s:
            self._conversion_s[tensor] = {k: self._price_conversion(tensor, row) for k, row in CONVERSIONS.items()}
        return self._conversion_s[tensor]

    def _price_conversion(self, tensor: TensorInfo, row: Conversion) -> Passes:
        if not row.function:
            return 0.0, 0.0
        whole = self.nbytes(tensor)
        move = memory_s(self.cluster.device, whole / self.ranks) + self.cluster.device.launch_s
        forward = self.collective(row.forward, whole) if row.forward else move
        backward = 0.0
        if tensor.requires_grad:
            backward = self.collective(row.backward, whole) if row.backward else move
        return forward, backward


# of a head in chunks, counted in ops/linear_cross_entropy.py: times that kernels move an element of the loss's type, in
# forward (maximum 1, difference 2, exponential 2, sum 1) and backward (difference 2, exponential 2); kernels of a chunk
_CHUNK_MOVES, _CHUNK_KERNELS = 10, 24


def chunked_works(prices: Prices, head: Head, placed: Mapping[fx.Node, Strategy]) -> Iterator[OpWork]:
    """Yield the memory traffic and launches of a head in chunks, less those of its ops on whole logits.

    Each chunk takes kernels of its own, whatever fuses the rest of the program. Logits narrower than the loss are cast
    in both passes, and so is their gradient. The second product of a chunk is counted apart, as of any recomputed op.
    """
    logits, width = info(head.linear), head.computed_in.itemsize
    nbytes = prices.nbytes(logits, placed[head.linear].gives[0])
    elements = nbytes // logits.dtype.itemsize
    columns = max(1, prices.number(logits.shape[-1]) * nbytes // max(1, prices.nbytes(logits)))
    casts = 3 * (nbytes + elements * width) if logits.dtype.itemsize < width else 0
    whole = [w for n in (*head.between, head.loss) for works in prices.kernels(n, placed[n]) for w in works]
    moved = _CHUNK_MOVES * elements * width + casts - sum(w.nbytes for w in whole)
    launches = _CHUNK_KERNELS * len([*chunks(elements // columns, columns)])
    yield OpWork("memory", 0, max(0, moved), "fp32", launches=launches, part="head", origin=head.loss.name)


def named(works: Iterable[OpWork], work: NewWork) -> Iterator[OpWork]:
    """Yield kernels with the origin and the place of those of an op."""
    return (replace(each, **work.keywords) for each in works)


def _gradient_products(op: OpFacts, forward: OpWork) -> Iterator[OpWork]:
    """Yield two products of the forward's size: the first operand's gradient sums over n, the second's over m."""
    first, second = gradient_products(op.call)
    m, n, k = forward.m, forward.n, forward.k
    shapes = [(m, k, n, forward.groups)] * first + [(k, n, m, forward.groups and "k")] * second
    for rows, columns, inner, groups in shapes:
        yield replace(forward, m=rows, n=columns, k=inner, groups=groups, backward=True)
