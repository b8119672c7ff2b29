"""Batch norm in training, written as what it computes: sums over samples, and ops on single elements.

    mean     = Σ x / n                              n: elements of a channel in the whole batch
    centred  = x - mean
    variance = Σ centred² / n                       a second pass over x: Σ x² - (Σ x)² / n would cancel
    y        = centred · weight / √(variance + ε) + bias

In evaluation the running statistics stand in for both (`ops.in_training`). What the mean differs by is then added to
the bias, so that `centred` need not be computed twice; in training it is 0. Statistics are computed in float32 at
least, as torch's kernels do.

    running mean      (1 - momentum) · old + momentum · mean
    running variance  (1 - momentum) · old + momentum · Σ centred² / (n - 1)

are new values of buffers. A momentum of NaN, which `trace` gives to modules with `momentum=None`, means the average
over all steps: 1 / steps.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import dropwhile, takewhile
from typing import Any

import torch
from torch import fx

from autoptd.errors import UnsupportedOp
from autoptd.ops import library as ops
from autoptd.passes.graph import (
    NAMED,
    WRITTEN_FOR,
    info,
    infos,
    numel,
    op_name,
    output_of,
    plain,
    source_line,
    updated_values,
    write_op,
)
from autoptd.passes.losses.statistics_form import IN_EVALUATION
from autoptd.passes.objectives.metrics import Metrics
from autoptd.passes.opcall import TensorInfo
from autoptd.passes.random.skipped_layers import skipping_masks
from autoptd.passes.rules.factor_notation import divide
from autoptd.passes.trace.traced import BATCH, Traced

aten = torch.ops.aten
STEPS, MEAN = "num_batches_tracked", "running_mean"  # names of the buffers of torch's norms
_NORM = aten.batch_norm.default
# the second has new statistics as its last results: of a graph that torch made functional
_NORMS = (_NORM, aten._native_batch_norm_legit_functional.default)
_MOVED = 3  # the index of the first of them
_RUNNING = ("running_mean", "running_var")
_NAMES = ("input", "weight", "bias", *_RUNNING, "training", "momentum", "eps")


def write_batch_norms_as_sums(graph: fx.Graph, traced: Traced) -> None:
    """Rewrite every batch norm that is in training. Raises UnsupportedOp for norms that keep hidden statistics.

    In a graph of metrics, norms take their running statistics, and no buffer is updated.
    """
    if isinstance(traced.objective, Metrics):
        output_of(graph).kwargs = {}
        take_running_statistics(graph)
    skipping = skipping_masks(graph, of_gradients=False)
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in _NORMS and node.args[5]:
            with graph.inserting_before(node):
                _replace(node, _Norm(graph, traced, node, skipping[node]))
        elif "batch_norm" in op_name(node) and len(node.args) > 5 and node.args[5] is True:
            raise _refused(node, "nn.BatchNorm1d, 2d or 3d")
        elif op_name(node) == "instance_norm" and isinstance(node.args[3], fx.Node) and node.args[5]:
            raise _refused(node, "track_running_stats=False, or put it in eval mode")


def take_running_statistics(graph: fx.Graph) -> None:
    """Rewrite every batch norm with running statistics to what it is in eval mode."""
    for node in [n for n in graph.nodes if n.target in _NORMS and n.args[5] and n.args[3] is not None]:
        _evaluate(graph, node)


def _evaluate(graph: fx.Graph, node: fx.Node) -> None:
    """Write a norm with its running statistics."""
    results = {0: node} if node.target is _NORM else {user.args[1]: user for user in node.users}
    with graph.inserting_before(node):
        args = (*node.args[:5], False, *node.args[6:8], False)
        made = write_op(graph, node, _NORM, args, info(results[0]).shape, info(results[0]).dtype)
    given = {0: made, _MOVED: node.args[3], _MOVED + 1: node.args[4]}
    for index, result in results.items():
        if result.users:
            result.replace_all_uses_with(given[index])  # type: ignore[index, arg-type]
        graph.erase_node(result)
    if node not in results.values():
        graph.erase_node(node)


def _replace(node: fx.Node, norm: _Norm) -> None:
    """Replace a norm by what it computes, and its running statistics by what they become."""
    result, moved = norm.write(), norm.moved
    if node.target is _NORM:
        _move_reads(node, moved)
        node.replace_all_uses_with(result)
        output_of(norm.graph).kwargs = {**output_of(norm.graph).kwargs, **moved}
    else:  # has the new statistics as results, and so are its buffers' already
        made = {0: result, **dict(enumerate(moved.values(), _MOVED))}
        for user in list(node.users):
            user.replace_all_uses_with(made[user.args[1]])  # type: ignore[index]
            norm.graph.erase_node(user)
    norm.graph.erase_node(node)


def _move_reads(norm: fx.Node, moved: Mapping[str, fx.Node]) -> None:
    """Let what is computed after a norm read its new running statistics; later norms in training find them."""
    behind = dropwhile(lambda node: node is not norm, list(norm.graph.nodes))
    readers = [n for n in behind if n.op == "call_function" and not (n.target in _NORMS and n.args[5])]
    for buffer in norm.graph.nodes:
        if buffer.op == "placeholder" and buffer.name in moved:
            for reader in readers:
                reader.replace_input_with(buffer, moved[buffer.name])


def _refused(node: fx.Node, use: str) -> UnsupportedOp:
    return UnsupportedOp(
        f"{node.target} updates running statistics in a way that this program cannot follow",
        where=source_line(node),
        fix=f"use {use}",
    )


def _named(name: str, node: fx.Node) -> fx.Node:
    node.meta[NAMED] = name
    return node


@dataclass
class _Norm:
    """Writer of the ops of one batch norm."""

    graph: fx.Graph
    traced: Traced
    node: fx.Node
    masks: frozenset[fx.Node]  # of the layers that alone read it

    def __post_init__(self) -> None:
        self.given: Mapping[str, Any] = dict(zip(_NAMES, self.node.args, strict=False))
        self.x = self.given["input"]
        self.moved: dict[str, fx.Node] = {}  # buffer -> its new value
        shape = info(self.x).shape
        self.dims = [dim for dim in range(len(shape)) if dim != 1]
        self.channels = shape[1]
        self.dtype = torch.promote_types(info(self.x).dtype, torch.float32)

    def write(self) -> fx.Node:
        """Write the norm; return its result."""
        x, count = self._to(self.x), self._count()
        mean = _named("mean", self._op(aten.div.Tensor, self._sum("total", x), count))
        centred = _named("centred", self._op(aten.sub.Tensor, x, self._spread(mean), shape=info(x).shape))
        squares = self._sum("squares", self._op(aten.square.default, centred))
        variance = _named("variance", self._op(aten.div.Tensor, squares, count))
        self._update("running_mean", mean)
        free = self._op(aten.sub.Tensor, self._op(ops.more_than_one, count), 1)
        self._update("running_var", self._op(aten.div.Tensor, squares, free))
        scale = self._scale(variance)
        found = self._op(aten.mul.Tensor, centred, self._spread(scale))
        if (shift := self._shift(mean, scale)) is not None:
            found = self._op(aten.add.Tensor, found, self._spread(shift))
        return self._to(found, infos(self.node)[0].dtype)

    def _scale(self, variance: fx.Node) -> fx.Node:
        """Write what the centred elements of each channel are multiplied by."""
        variance = self._or_running(variance, "running_var")
        scale = self._op(aten.rsqrt.default, self._op(aten.add.Tensor, variance, self.given["eps"]))
        weight = self.given["weight"]
        return _named("scale", scale if weight is None else self._op(aten.mul.Tensor, scale, self._to(weight)))

    def _shift(self, mean: fx.Node, scale: fx.Node) -> fx.Node | None:
        """Write what is added to each channel: the bias, and in evaluation the difference of the means."""
        bias = None if self.given["bias"] is None else self._to(self.given["bias"])
        if self.given["running_mean"] is None:
            return bias
        own = self._detached(mean)
        off = self._op(aten.sub.Tensor, own, self._or_running(own, "running_mean"))
        shift = self._op(aten.mul.Tensor, off, scale)
        return _named("shift", shift if bias is None else self._op(aten.add.Tensor, shift, bias))

    def _or_running(self, value: fx.Node, name: str) -> fx.Node:
        running = self.given[name]
        return value if running is None else self._op(ops.in_training, value, self._to(running))

    def _update(self, name: str, value: fx.Node) -> None:
        """Make the moving average of a statistic the new value of its buffer. Raises UnsupportedOp if it is none."""
        buffer = self.given[name]
        if buffer is None:
            return
        if buffer.name not in self.traced.buffers and self.node.target is _NORM:
            raise _refused(self.node, "running statistics that are buffers of a module")
        old = output_of(self.graph).kwargs.get(buffer.name, buffer) if self.node.target is _NORM else buffer
        momentum = self._momentum()
        kept = self._op(aten.rsub.Scalar, momentum, 1) if isinstance(momentum, fx.Node) else 1 - momentum
        wide = torch.promote_types(info(buffer).dtype, torch.float32)
        value = self._to(self._detached(value), wide)
        parts = (self._op(aten.mul.Tensor, self._to(old, wide), kept), self._op(aten.mul.Tensor, value, momentum))
        self.moved[buffer.name] = self._unless_skipped(
            old, self._to(self._op(aten.add.Tensor, *parts), info(old).dtype)
        )

    def _unless_skipped(self, old: fx.Node, new: fx.Node) -> fx.Node:
        """Return the new value of a buffer, or the old one in steps in which all its layers are skipped.

        New values are functions of sums over samples, so each sample has the masks.
        """
        if not self.masks or self.node.target is not _NORM:  # selected already if the op returns the new value
            return new
        ones = (BATCH,)
        each = [
            self._op(aten.mul.Tensor, self._op(aten.new_ones.default, m, list(ones), shape=ones), m) for m in self.masks
        ]
        totals = [self._op(aten.sum.default, x, shape=()) for x in each]
        total = functools.reduce(lambda a, b: self._op(aten.add.Tensor, a, b), totals)
        skipped = self._op(aten.eq.Scalar, total, 0, dtype=torch.bool)
        return self._op(aten.where.self, skipped, old, new, shape=info(new).shape, dtype=info(new).dtype)

    def _momentum(self) -> fx.Node | float:
        """Return the weight of this step's statistics: a number, or 1 / steps as a node."""
        momentum = float(self.given["momentum"])
        if not math.isnan(momentum):
            return momentum
        names = {name: arg for arg, name in self.traced.buffers.items()}
        own = self.traced.buffers.get(self.given["running_mean"].name, "").removesuffix(MEAN)
        steps = updated_values(self.graph).get(names.get(own + STEPS, ""))
        earlier = set(takewhile(lambda node: node is not self.node, self.graph.nodes))
        while isinstance(steps, fx.Node) and steps not in earlier:  # of a later call of the same norm
            steps = steps.args[0]  # type: ignore[assignment]
        if not isinstance(steps, fx.Node):
            raise _refused(self.node, "momentum=0.1, or another number")
        return self._op(aten.reciprocal.default, self._to(steps, torch.float64))

    # ---- ops ----

    def _op(self, target: Any, *args: Any, shape: Any = None, dtype: Any = None) -> fx.Node:
        """Write an op whose result has the shape and dtype of its first operand, unless they are given."""
        first = args[0]
        size = info(first).shape if shape is None else shape
        made = write_op(self.graph, self.node, target, args, size, info(first).dtype if dtype is None else dtype)
        made.meta[WRITTEN_FOR] = op_name(self.node)
        return made

    def _to(self, x: fx.Node, dtype: torch.dtype | None = None) -> fx.Node:
        dtype = self.dtype if dtype is None else dtype
        return x if info(x).dtype == dtype else self._op(aten.to.dtype, x, dtype, dtype=dtype)

    def _detached(self, x: fx.Node) -> fx.Node:
        if not info(x).requires_grad:
            return x
        made = self._op(aten.detach.default, x)
        made.meta["info"] = TensorInfo(info(x).shape, info(x).dtype, False)
        return made

    def _sum(self, name: str, x: fx.Node) -> fx.Node:
        made = self._op(aten.sum.dim_IntList, x, self.dims, shape=(self.channels,))
        made.meta[IN_EVALUATION] = "batch" if self.given["running_mean"] is None else "running"
        return _named(name, made)

    def _count(self) -> fx.Node:
        size = plain(divide(numel(info(self.x).shape), self.channels))
        return write_op(self.graph, self.node, ops.element_count, (size,), (), torch.float64)

    def _spread(self, x: fx.Node) -> fx.Node:
        """Write a tensor per channel with the dims that broadcast it."""
        shape = [self.channels, *[1] * (info(self.x).ndim - 2)]
        return x if len(shape) == 1 else self._op(aten.reshape.default, x, shape, shape=tuple(shape))
