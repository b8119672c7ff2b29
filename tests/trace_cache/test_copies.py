"""Copies of graphs: exact, or refused; the comparison sees every difference."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import sympy
import torch
from torch import fx, nn

import autoptd
from autoptd.compile.traced import TracedModel
from autoptd.errors import UnsupportedOp
from autoptd.layout.size_conditions import SizeCondition
from autoptd.models.nanogpt import GPTSizes, NanoGPT
from autoptd.passes.fold import Folded, fold
from autoptd.passes.losses.loss_form import loss_form
from autoptd.passes.opcall import TensorInfo
from autoptd.passes.trace.traced import BATCH
from autoptd.trace_cache.equal import equal
from autoptd.trace_cache.to_bytes import LEFT_OUT, CannotKeep, from_bytes, to_bytes

aten = torch.ops.aten


def traced() -> TracedModel:
    with torch.device("meta"):
        model = NanoGPT(GPTSizes(vocab=64, max_seq=16, width=32, layers=2, heads=2))
    return autoptd.trace(model, seq=16)


@cache
def known() -> TracedModel:
    return traced()


def copy(value: Any) -> Any:
    return from_bytes(to_bytes(value))


def test_a_copy_is_exact():
    folded = known().folded
    copied = copy(folded)
    assert equal(folded, copied)
    graph, other = folded.traced.graph.graph, copied.traced.graph.graph
    assert str(graph) == str(other)
    assert [list(map(str, n.users)) for n in graph.nodes] == [list(map(str, n.users)) for n in other.nodes]
    assert [n.target for n in graph.nodes] == [n.target for n in other.nodes]
    assert [set(n.meta) for n in other.nodes] == [set(n.meta) - LEFT_OUT for n in graph.nodes]
    assert fold(copied.traced) == copied  # segments name the nodes of the copied graph


def test_the_order_of_readers_is_kept():
    """A pass may make the first reader of a value last."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    late = graph.call_function(aten.relu.default, (x,))
    with graph.inserting_before(late):
        early = graph.call_function(aten.neg.default, (x,))
    graph.output((early, late))
    copied = copy(graph)
    first = next(iter(copied.nodes))
    assert [n.name for n in copied.nodes] == ["x", "neg_default", "relu_default", "output"]
    assert [n.name for n in first.users] == ["relu_default", "neg_default"]


def test_names_that_were_taken_stay_taken():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.erase_node(graph.call_function(aten.relu.default, (x,)))
    graph.output(x)
    copied = copy(graph)
    assert copied.call_function(aten.relu.default, (x,)).name == graph.call_function(aten.relu.default, (x,)).name


def test_shared_objects_are_shared():
    info, nodes = TensorInfo((BATCH, 4)), []
    graph = fx.Graph()
    for _ in range(2):
        nodes.append(graph.placeholder("x"))
        nodes[-1].meta["info"] = info
    first, second = (n.meta["info"] for n in copy(graph).nodes)
    assert first is second and first == info
    nodes[1].meta["info"] = replace(info)
    first, second = (n.meta["info"] for n in copy(graph).nodes)
    assert first is not second


def test_a_deep_chain_is_no_deep_recursion():
    graph = fx.Graph()
    x = graph.placeholder("x")
    for _ in range(20_000):
        x = graph.call_function(aten.relu.default, (x,))
    graph.output(x)
    assert equal(graph, copy(graph))


@pytest.mark.parametrize("value", [math.nan, -0.0, math.inf, 1 << 70, "µ", None, torch.bfloat16, torch.device("meta")])
def test_values(value: Any):
    assert equal(value, copy(value))


def test_constants_keep_every_bit():
    for x in (torch.tensor([0.0, -0.0, math.nan]), torch.arange(6).view(2, 3), torch.ones(2).bfloat16(), torch.ones(0)):
        assert equal(x, copy(x))
        assert not equal(x, copy(x).reshape(-1, 1))
    assert not equal(torch.zeros(1), -torch.zeros(1))


def test_recorded_errors_are_raised_alike():
    """A loss that cannot be split holds the error for a plan that would."""
    error = UnsupportedOp("it mixes samples", where="loss", fix="use one microbatch")
    copied = copy(error)
    assert equal(error, copied) and str(copied) == str(error) and type(copied) is UnsupportedOp


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2, requires_grad=True),
        torch.ones(2, 3).t(),
        torch.ones(2, device="meta"),
        nn.Parameter(torch.ones(2)),
        torch.ones(2).to_sparse(),
    ],
    ids=["grad", "transposed", "meta", "parameter", "sparse"],
)
def test_no_copy_of_other_tensors(value: torch.Tensor):
    with pytest.raises(CannotKeep):
        to_bytes(value)


def test_unknown_objects_are_never_equal():
    for value in (object(), nn.Linear(1, 1), slice(1), range(3), {object()}, torch.Size([1])):
        assert not equal(value, value)


def test_a_node_that_reads_a_later_one_is_refused():
    graph = fx.Graph()
    x = graph.placeholder("x")
    a, b = graph.call_function(aten.relu.default, (x,)), graph.call_function(aten.neg.default, (x,))
    a.args = (b,)
    with pytest.raises(CannotKeep):
        copy(graph)


# --- the comparison -----------------------------------------------------------------------------------------------


def node(folded: Folded, op: str) -> fx.Node:
    return next(n for n in folded.traced.graph.graph.nodes if op in n.name and n.op == "call_function")


def reorder_readers(folded: Folded) -> None:
    shared = next(n for n in folded.traced.graph.graph.nodes if len(n.users) > 1)
    readers = list(shared.users)
    shared.users.clear()
    shared.users.update(dict.fromkeys(reversed(readers)))


def rename(folded: Folded) -> None:
    node(folded, "linear").name = "renamed"


def change_target(folded: Folded) -> None:
    node(folded, "gelu").target = aten.relu.default


def change_argument(folded: Folded) -> None:
    found = node(folded, "layer_norm")
    found.args = (*found.args[:-2], 1e-3, *found.args[-1:])


def change_operand(folded: Folded) -> None:
    found = node(folded, "gelu")
    found.args = (next(iter(folded.traced.graph.graph.nodes)),)


def change_shape(folded: Folded) -> None:
    found = node(folded, "gelu")
    found.meta["info"] = replace(found.meta["info"], shape=(BATCH, sympy.Integer(3)))


def change_origin(folded: Folded) -> None:
    node(folded, "gelu").meta["stack_trace"] = "elsewhere"


def drop_mark(folded: Folded) -> None:
    next(n for n in folded.traced.graph.graph.nodes if "written for" in n.meta).meta.pop("written for")


def add_node(folded: Folded) -> None:
    graph = folded.traced.graph.graph
    graph.call_function(operator.add, (1, 2))


def swap_segments(folded: Folded) -> None:
    folded.segments = (*folded.segments[1:], folded.segments[0])


def swap_kind(folded: Folded) -> None:
    folded.segments = (replace(folded.segments[0], kind="another"), *folded.segments[1:])


def change_parameter(folded: Folded) -> None:
    first = next(iter(folded.traced.parameters))
    folded.traced.parameters[first] += "x"


def change_symbol(folded: Folded) -> None:
    folded.traced.example[BATCH] += 1


def refuse_loss(folded: Folded) -> None:
    loss_form(folded.traced.graph).refused.append(UnsupportedOp("it mixes samples"))


def change_condition(folded: Folded) -> None:
    condition = SizeCondition(sympy.Gt(BATCH, 4), "model.py:1")
    folded.traced.conditions = (*folded.traced.conditions, condition)


CHANGES = [
    reorder_readers,
    rename,
    change_target,
    change_argument,
    change_operand,
    change_shape,
    change_origin,
    drop_mark,
    add_node,
    swap_segments,
    swap_kind,
    change_parameter,
    change_symbol,
    refuse_loss,
    change_condition,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_every_difference_is_seen(change: Callable[[Folded], None]):
    original = known().folded
    copied = copy(original)
    assert equal(original, copied)
    change(copied)
    assert not equal(original, copied)
    assert not equal(copied, original)
