"""The first place where what a model computes in eval mode parts from what an evaluation step runs.

    model in training ──trace──► graph ──switch_off──► graph of an evaluation step ─┐
                                                                                    ├─► equal, or the first difference
    model.eval(), no_grad ─────────────trace──────────► graph of the plain model ───┘

Values are equal if the same op gives them from equal values and numbers; parameters, buffers and inputs are by their
names. So neither the order of ops counts, nor what no loss reads, such as new values of buffers, nor gradients. The
n-th draw of the one graph is the n-th alike draw of the other. If the losses are not equal, the first value that only
one of the graphs computes is where they part.

A program for any number of samples is compared in the same way with a trace of one sample, at b = 1.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from autoptd.layout.size_conditions import Conditions, SizeCondition
from autoptd.passes.custom_grad.ops import OwnFunction, OwnHook
from autoptd.passes.evaluation.switched_off import switch_off
from autoptd.passes.graph import ancestors, info, op_name, output_of, plain, source_line
from autoptd.passes.normalise.annotate import annotate
from autoptd.passes.normalise.drop import drop_identities
from autoptd.passes.normalise.normalise import PREPARE, run_passes
from autoptd.passes.opcall import TensorInfo, is_random
from autoptd.passes.random.draws import draws, given_of
from autoptd.passes.recognise.returned_operands import returned_operand
from autoptd.passes.trace.traced import BATCH, Traced

_BEGIN = PREPARE[: PREPARE.index(annotate) + 1]
_SAME = frozenset({"detach", "alias", "clone", "contiguous", "lift_fresh", "lift_fresh_copy"})  # return their operand
_VIEWS = frozenset({"expand", "expand_as", "broadcast_to", "view", "view_as", "_unsafe_view", "reshape", "flatten"})
_SLICES = ("slice", "slice_scatter")  # x[1:] is traced with an end, or with none if the length of x is a number
_OPEN = {"start": 0, "end": sys.maxsize}
_NOT_READ = frozenset({"momentum", "cudnn_enabled"})  # arguments that no result of a norm in eval mode depends on
_OF_DROPOUT = frozenset({"dropout", "dropout_p", "train", "training"})  # of a recurrent net or attention, if it is off


@dataclass(frozen=True)
class Difference:
    """Places of the first ops that only one of two computations has; "" if all ops of the one are in the other."""

    step: str  # of the evaluation step, which runs the program of training
    model: str  # of the model in eval mode


def first_difference(training: Traced, evaluation: Traced) -> Difference | Conditions:
    """Return where two traces of a model part, in training and in eval mode; or if an evaluation step is exact, the
    conditions beside those of training under which it is, in the symbols of the training.

    Changes both graphs. Raises UnsupportedOp.
    """
    run_passes(training, [*_BEGIN, switch_off, drop_identities])
    run_passes(evaluation, [*_BEGIN, drop_identities])
    known: dict[object, int] = {}
    step, model = _ValueNumbers(training, known), _ValueNumbers(evaluation, known)
    if step.result != model.result:
        return Difference(step.first_without(model), model.first_without(step))
    held, shared = set(_conditions(training)), {name: size for size, name in _names(training).items()}
    others = [condition for text, condition in _conditions(evaluation).items() if text not in held]
    found = [replace(c, relation=c.relation.xreplace(_names(evaluation)).xreplace(shared)) for c in others]
    apart = [c for c in found if not c.relation.free_symbols <= {BATCH, *training.sizes}]
    return Difference("", apart[0].where) if apart else tuple(found)


def differ_for_one(traced: Traced, single: Traced) -> bool:
    """Return whether a trace for any number of samples computes otherwise for one than a trace for one sample alone.

    Changes both graphs. Raises UnsupportedOp.
    """
    known: dict[object, int] = {}
    for each in (traced, single):
        run_passes(each, [*_BEGIN, drop_identities])
    found, wanted = (_ValueNumbers(each, known, {BATCH: 1}) for each in (traced, single))
    return found.result != wanted.result or not _conditions(single).keys() <= _conditions(traced).keys()


class _ValueNumbers:
    """Numbers of a graph's values: equal values of two graphs, which share `known`, have the same number."""

    def __init__(self, traced: Traced, known: dict[object, int], at: Mapping[sympy.Symbol, int] | None = None) -> None:
        self._traced, self._known, self._draws = traced, known, dict[object, int]()
        self._of: dict[fx.Node, int] = {}
        loss = output_of(traced.graph.graph).args
        read = ancestors(n for n in output_of(traced.graph.graph).all_input_nodes if n in _within(loss))
        self._names: Mapping[sympy.Symbol, Any] = {**_names(traced), **(at or {})}
        for node in traced.graph.graph.nodes:
            if node in read:
                self._of[node] = self._number(node)
        self.result = self._key(loss)

    def first_without(self, other: _ValueNumbers) -> str:
        """Return the place of the first value that another graph does not compute; "" if there is none."""
        theirs = set(other._of.values())
        called = ((node, number) for node, number in self._of.items() if node.op == "call_function")
        return next((source_line(node) for node, number in called if number not in theirs), "")

    def _number(self, node: fx.Node) -> int:
        if node.op == "placeholder":
            return self._known.setdefault(self._given(node), len(self._known))
        if op_name(node) in _SAME or isinstance(node.target, OwnHook) or self._keeps_shape(node):
            return self._of[node.args[0]]  # type: ignore[index]
        operand = returned_operand(node)  # which writes of the one graph alone leave out there
        if operand is not None:
            return self._of[operand]
        called = self._called(node)
        if draws(node.target, node.args, node.kwargs):
            self._draws[called] = turn = self._draws.get(called, 0) + 1
            called = turn, called
        return self._known.setdefault(called, len(self._known))

    def _keeps_shape(self, node: fx.Node) -> bool:
        """Return whether a node is a view of all of its operand in the same shape, at the given sizes."""
        source = node.args[0] if op_name(node) in _VIEWS else None
        if not isinstance(source, fx.Node) or info(source).dtype != info(node).dtype:
            return False
        return self._key(info(source).shape) == self._key(info(node).shape)

    def _called(self, node: fx.Node) -> object:
        target: Any = node.target
        if isinstance(target, torch._ops.OpOverload):
            given = given_of(target, node.args, node.kwargs)
            off = is_random(target) and not draws(target, node.args, node.kwargs)
            if op_name(node) in _SLICES:
                given |= {name: x for name, x in _OPEN.items() if given[name] is None}
            unread = _NOT_READ | _OF_DROPOUT if off else _NOT_READ
            return str(target), self._key({name: x for name, x in given.items() if name not in unread})
        what = target.function if isinstance(target, OwnFunction) else target
        return what, self._key(node.args), self._key(node.kwargs)

    def _given(self, node: fx.Node) -> object:
        """Return what a placeholder is: a tensor of the model, an input and its sizes, or a constant's values."""
        traced, name = self._traced, node.name
        for kind, names in (("parameter", traced.parameters), ("buffer", traced.buffers)):
            if name in names:
                return kind, names[name]
        if name in traced.inputs:
            found = node.meta["info"]
            assert isinstance(found, TensorInfo)
            return "input", traced.inputs[name], self._key(found.shape)
        value = traced.constants[name]
        return "constant", tuple(value.shape), str(value.dtype), _bytes(value)

    def _key(self, value: object) -> object:
        if isinstance(value, fx.Node):
            return "value", self._of[value]
        if isinstance(value, (tuple, list)):
            return "list", *map(self._key, value)
        if isinstance(value, Mapping):
            return "named", *((name, self._key(value[name])) for name in sorted(value))
        if isinstance(value, sympy.Basic):
            value = plain(sympy.expand(value.xreplace(self._names)))
        return type(value).__name__, str(value)


def _within(value: object) -> set[fx.Node]:
    if isinstance(value, fx.Node):
        return {value}
    return set().union(*map(_within, value)) if isinstance(value, (tuple, list)) else set()


def _names(traced: Traced) -> dict[sympy.Symbol, sympy.Symbol]:
    """Return a name for each size that two traces share: the input and the dim that it is read from."""
    return {
        size: BATCH if size == BATCH else sympy.Symbol(f"{name}.{dim}") for size, (name, dim) in traced.sizes.items()
    }


def _conditions(traced: Traced) -> dict[str, SizeCondition]:
    """Return the branches on sizes that a trace took, by their text in the names that two traces share."""
    names = _names(traced)
    return {str(sympy.expand(condition.relation.xreplace(names))): condition for condition in traced.conditions}


def _bytes(x: Tensor) -> object:
    return None if x.is_meta else x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
