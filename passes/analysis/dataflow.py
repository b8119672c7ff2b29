"""Dataflow of consecutive segments on one rank: storages, and the steps that make, read and save them.

    storage    one allocation, shared by tensors that are views of each other
    step       an op, or a conversion between placements: the storages that it reads, makes and saves for backward

An op's schema says which results are views. `reshape` gives a view unless the order of the dims in memory differs from
that of the shape (after a transpose) or there are more elements than are stored (after an expand); then it copies.
Fused attention writes its result in the order (batch, token, head, channel) (Dao 2023, FlashAttention-2; so does
torch's CPU kernel), so that joining the heads afterwards copies nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import sympy
import torch
from torch import fx

from autoptd.layout.placements import B, O, Placement, Split, conversion
from autoptd.passes.analysis.flops import is_view
from autoptd.passes.analysis.heads import LOSSES, Head, heads_of
from autoptd.passes.analysis.saved_tensors import ATTENTION, is_off, saved_tensors
from autoptd.passes.fold import Segment, owner
from autoptd.passes.graph import infos, is_getitem, op_call, op_name, operands
from autoptd.passes.graph import numel as product
from autoptd.passes.opcall import OpCall, Size, TensorInfo, target_name
from autoptd.passes.rules.lookup import op_of
from autoptd.passes.sharding.sharding import KindSharding, ops_of
from autoptd.passes.trace.traced import SEQUENCE

RANKS = sympy.Symbol("t", integer=True, positive=True)  # size of the tp axis
Number = Callable[[Size], int]

aten = torch.ops.aten
_SHARING = ("", "sum_gradient", "first_gradient")  # conversions whose result is a view of their operand
_COPYING = frozenset({aten.reshape.default, aten.contiguous.default, aten.flatten.using_ints})


def counts_tokens(size: Size) -> bool:
    """Return whether a size depends on the sequence length."""
    return not isinstance(size, int) and SEQUENCE in size.free_symbols


def divides(placement: Placement, shape: Sequence[Size]) -> bool:
    """Return whether each rank has an equal part of a tensor in this placement."""
    return isinstance(placement, Split) or (placement == O and any(map(counts_tokens, shape)))


def is_quadratic(shape: Sequence[Size]) -> bool:
    """Return whether two or more dims count tokens, as those of attention scores do."""
    return sum(map(counts_tokens, shape)) > 1


def base_of(node: fx.Node) -> fx.Node:
    """Return the node that allocated a tensor: of a view, that of its operand."""
    while node.op == "call_function" and not is_getitem(node) and is_view(op_call(node)):
        node = operands(node)[0]
    return owner(node)


GRADIENT_OF = "grad "  # begins the names of gradients
CONVERTED = ":converted"  # ends the name of an operand's copy in another type, which the op of that name makes


@dataclass(frozen=True)
class Storage:
    """One allocation on one rank. `shape` is global; `split`: each of the `t` tp ranks has an equal part."""

    name: str
    shape: tuple[Size, ...]
    dtype: torch.dtype
    split: bool = False
    origin: str = "made"  # or "received", "parameter", "prelude"
    gathered_from: Storage | None = None  # this rank's part before the all-gather that made it
    max_elements: int = 0  # elements that are allocated at once; 0: all

    def __hash__(self) -> int:
        return hash(self.name)  # hashing a shape of expressions takes far longer

    @property
    def elements(self) -> sympy.Expr:
        """Elements on one rank."""
        whole = sympy.sympify(product(self.shape))
        mine = whole / RANKS if self.split else whole
        return sympy.Min(mine, self.max_elements) if self.max_elements else mine

    @property
    def quadratic(self) -> bool:
        """True if two or more dims count tokens."""
        return is_quadratic(self.shape)

    def nbytes(self, number: Number, ranks: int, cp: int = 1) -> int:
        """Return the bytes on one rank at given sizes, those of one of `cp` ranks, which has whole rows of scores."""
        total = self.dtype.itemsize * (cp if self.quadratic else 1)
        for size in self.shape:
            total *= number(size)
        mine = total // ranks if self.split else total
        return min(mine, self.max_elements * self.dtype.itemsize) if self.max_elements else mine


@dataclass(frozen=True)
class Value:
    """A tensor in one placement, and its storage."""

    name: str
    info: TensorInfo
    placement: Placement
    storage: Storage
    order: tuple[int, ...] = ()  # dims of the shape in memory order; empty: in the shape's order
    alone: bool = False  # received from an earlier segment, and no other one reads it

    @property
    def gradient(self) -> Storage:
        """The storage of its gradient: split if the value is split, else whole (for a partial value too)."""
        split = divides(self.placement, self.info.shape)
        limit = self.storage.max_elements  # no kernel writes the gradient of a tensor that none writes
        return Storage(f"{GRADIENT_OF}{self.name}", self.info.shape, self.info.dtype, split, max_elements=limit)


@dataclass(frozen=True)
class DataflowStep:
    """An op, or a conversion if `node` is None."""

    node: fx.Node | None
    name: str
    operands: tuple[Value, ...]
    outputs: tuple[Value, ...]
    saved: tuple[Storage, ...] = ()  # for backward, parameters and prelude included
    view: bool = False
    ranks: bool = False  # whether the op's work is split over the tp ranks
    call: OpCall | None = field(default=None, compare=False)
    collective: str = ""
    compiled: bool = False  # part of a compiled kernel, or called by compiled code

    @cached_property
    def touches_quadratic(self) -> bool:
        return any(v.storage.quadratic for v in (*self.operands, *self.outputs))


@dataclass(frozen=True)
class Flow:
    """Dataflow of consecutive segments: tensors received from earlier ones, steps, and tensors sent to later ones."""

    received: tuple[Value, ...]
    steps: tuple[DataflowStep, ...]
    sent: tuple[Value, ...]
    heads: tuple[Head, ...] = ()
    memo: dict[Any, Any] = field(default_factory=dict, compare=False)  # cache of `liveness.py`: equal for all policies


def flow(segments: Sequence[Segment], kinds: Mapping[str, KindSharding]) -> Flow:
    """Return the dataflow of consecutive segments under the shardings of their kinds."""
    inside = {n for s in segments for n in s.nodes}
    writer = _DataflowWriter(inside)
    for segment in segments:
        writer.segment(segment, kinds[segment.kind])
    sent = [writer.values[n] for s in segments for n in s.sends if any(u not in inside for u in n.users) or not n.users]
    heads = tuple(head for s in segments for head in heads_of(s, kinds[s.kind]))
    return Flow(tuple(writer.received), tuple(writer.steps), tuple(sent), heads)


def join_heads(region: Flow) -> Flow:
    """Return the dataflow in which each head is one op, which saves its operands and a number per row."""
    steps, joined = {step.node: step for step in region.steps if step.node is not None}, list(region.steps)
    for head in region.heads:
        inner = {id(steps[node]) for node in head.inner}
        joined = [_joined(head, steps) if s.node is head.loss else s for s in joined if id(s) not in inner]
    return Flow(region.received, tuple(joined), region.sent)


def _joined(head: Head, steps: Mapping[fx.Node, DataflowStep]) -> DataflowStep:
    product, loss = steps[head.linear], steps[head.loss]
    assert loss.call is not None
    x, weight, *bias = product.operands
    taken, target = (x, weight, loss.operands[1], *bias), LOSSES[head.loss.target]
    call = OpCall(target, tuple(v.info for v in taken), {"dtype": head.computed_in}, loss.call.outputs)
    split = divides(x.placement, x.info.shape)
    rows = loss.operands[0].info.shape[:-1]
    extra = [Storage(f"{loss.name}:norm", rows, head.computed_in, split)]
    if head.slices:  # a copy of these rows
        extra.append(Storage(f"{loss.name}:rows", (*rows, x.info.shape[-1]), x.info.dtype, split))
    saved = tuple(dict.fromkeys((*(v.storage for v in taken), *extra)))
    return DataflowStep(head.loss, target.__name__, taken, loss.outputs, saved, ranks=split, call=call)


class _DataflowWriter:
    """The steps written so far, and each tensor's current value."""

    def __init__(self, inside: Collection[fx.Node]) -> None:
        """`inside`: the ops of all segments."""
        self.inside = inside
        self.values: dict[fx.Node, Value] = {}
        self.converted: dict[tuple[fx.Node, Placement], Value] = {}
        self.received: list[Value] = []
        self.steps: list[DataflowStep] = []

    def segment(self, segment: Segment, decided: KindSharding) -> None:
        self.converted = {}
        for node, placement in zip(segment.parameters, decided.parameters, strict=True):
            self.values[node] = _outside(node, placement, "parameter")
        for node in segment.prelude:
            self.values[node] = _outside(node, B, "prelude")
        for node, placement in zip(segment.receives, decided.receives, strict=True):
            if node not in self.values:
                alone = node.op != "placeholder" and all(user in self.inside for user in node.users)
                self.values[node] = replace(_outside(node, placement, "received"), alone=alone)
                self.received.append(self.values[node])
        strategies = {segment.nodes[i]: decided.strategies[i] for i, _ in ops_of(segment)}
        for node in segment.nodes:
            if node in strategies:
                strategy = strategies[node]
                taken = tuple(self.convert(o, p) for o, p in zip(operands(node), strategy.needs, strict=True))
                step = _step(node, taken, strategy.gives, strategy.ranks > 1)
                self.steps.append(step)
                if not isinstance(node.meta["info"], tuple):
                    self.values[node] = step.outputs[0]
            else:  # a `getitem`
                made = next(s for s in reversed(self.steps) if s.node is node.args[0])
                self.values[node] = made.outputs[node.args[1]]  # type: ignore[index]
        for node, placement in zip(segment.sends, decided.sends, strict=True):
            self.values[node] = self.convert(node, placement)

    def convert(self, node: fx.Node, target: Placement) -> Value:
        """Return the tensor in a placement; each conversion is written once per segment."""
        source = self.values[node]
        if source.placement == target:
            return source
        if (node, target) in self.converted:
            return self.converted[node, target]
        row = conversion(source.placement, target)
        storage = source.storage
        if row.function not in _SHARING:
            part = storage if row.forward == "all_gather" and storage.split else None
            storage = Storage(
                f"{source.name} as {target}",
                source.info.shape,
                source.info.dtype,
                divides(target, source.info.shape),
                gathered_from=part,
            )
        value = Value(source.name, source.info, target, storage, source.order if storage is source.storage else ())
        view = row.function in _SHARING and row.backward is None
        self.steps.append(
            DataflowStep(
                None, f"{row.function} {node.name}", (source,), (value,), view=view, collective=row.forward or ""
            )
        )
        self.converted[node, target] = value
        return value


def _outside(node: fx.Node, placement: Placement, origin: str) -> Value:
    return Value(node.name, infos(node)[0], placement, stored_outside(node, placement, origin))


def stored_outside(node: fx.Node, placement: Placement, origin: str) -> Storage:
    """Return the storage of a tensor that a segment reads and does not make."""
    tensor = infos(node)[0]
    return Storage(node.name, tensor.shape, tensor.dtype, divides(placement, tensor.shape), origin)


def _step(node: fx.Node, taken: tuple[Value, ...], gives: tuple[Placement, ...], shared: bool) -> DataflowStep:
    call = op_of(node).call
    outputs = tuple(_outputs(node, call, taken, gives))
    saved: list[Storage] = []
    if any(t.requires_grad for t in call.outputs):
        keeps = saved_tensors(call)
        saved += [taken[i].storage for i in keeps.operands]
        saved += [outputs[i].storage for i in keeps.outputs]
        saved += [Storage(f"{node.name}:{i}", e.shape, e.dtype, shared) for i, e in enumerate(keeps.extra)]
        saved += [_copy(f"{node.name}{CONVERTED}", taken[i], dtype) for i, dtype in keeps.converted]
    view = bool(taken) and outputs[0].storage is taken[0].storage
    return DataflowStep(node, op_name(node), taken, outputs, tuple(dict.fromkeys(saved)), view, shared, call)


def _copy(name: str, value: Value, dtype: torch.dtype) -> Storage:
    return Storage(name, value.info.shape, dtype, divides(value.placement, value.info.shape))


def _outputs(node: fx.Node, call: OpCall, taken: Sequence[Value], gives: Sequence[Placement]) -> Iterator[Value]:
    several = isinstance(node.meta["info"], tuple)
    for i, (tensor, placement) in enumerate(zip(call.outputs, gives, strict=True)):
        name = f"{node.name}[{i}]" if several else node.name
        order = _order(call, taken)
        if order is not None:
            yield Value(name, tensor, placement, taken[0].storage, order)
            continue
        storage = Storage(name, tensor.shape, tensor.dtype, divides(placement, tensor.shape))
        fused = call.target in ATTENTION and tensor.ndim >= 3
        dims = (*range(tensor.ndim - 3), tensor.ndim - 2, tensor.ndim - 3, tensor.ndim - 1)
        yield Value(name, tensor, placement, storage, dims if fused else ())


def _order(call: OpCall, taken: Sequence[Value]) -> tuple[int, ...] | None:
    """Return the memory order of a result that is a view of the first operand; None if the op writes a new tensor."""
    if not taken or not (is_view(call) or is_off(call)):
        return None
    source, before = taken[0], call.operands[0]
    order = source.order or tuple(range(before.ndim))
    if call.target in _COPYING:
        straight = order == tuple(range(before.ndim))
        same = call.target is aten.contiguous.default
        if not (straight or (not same and _outer_only(order, call))):
            return None
        grown = sympy.sympify(product(call.outputs[0].shape) - product(source.storage.shape)).is_positive
        return None if grown else ()
    moved = _permutation(call, before.ndim)
    if moved is None:
        return order if call.outputs[0].ndim == before.ndim else ()
    where = {old: new for new, old in enumerate(moved)}
    order = tuple(where[d] for d in order)
    return () if order == tuple(range(before.ndim)) else order


def _outer_only(order: tuple[int, ...], call: OpCall) -> bool:
    """Return whether a reshape changes only dims to one side of those that were moved."""
    before, after = call.operands[0].shape, call.outputs[0].shape
    moved = [i for i, d in enumerate(order) if i != d]
    first, last = moved[0], moved[-1] + 1
    return before[:last] == after[:last] or before[first:] == after[len(after) - len(before) + first :]


def _permutation(call: OpCall, ndim: int) -> tuple[int, ...] | None:
    """Return p such that output dim i is input dim p[i], or None if the op is no permutation."""
    match target_name(call.target):
        case "transpose":
            a, b = (int(d) % ndim for d in call.args[1:3])
            dims = list(range(ndim))
            dims[a], dims[b] = b, a
            return tuple(dims)
        case "t":
            return tuple(range(ndim))[::-1]
        case "permute":
            return tuple(int(d) % ndim for d in call.args[1])
    return None
