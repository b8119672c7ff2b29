"""Notation, strategies, local arguments and group propagation, compared as text."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch

from autoptd.ops import library as ops
from autoptd.passes.opcall import OpCall, Sizes, TensorInfo
from autoptd.passes.rules.factor_notation import bind
from autoptd.passes.rules.factors import Op, Strategy, Wired, expand, groups_of, local_args, propagate_groups
from autoptd.passes.rules.table import RULES

aten = torch.ops.aten
b, s = sympy.symbols("b s", integer=True, positive=True)
SIZES = Sizes({b: 2, s: 16}, b)


def real(*shape: Any) -> TensorInfo:
    return TensorInfo(shape)


def whole(*shape: Any) -> TensorInfo:
    return TensorInfo(shape, torch.int64, False)


def call(target: Any, *args: Any, out: TensorInfo | tuple[TensorInfo, ...], **kwargs: Any) -> OpCall:
    return OpCall(target, args, kwargs, out if isinstance(out, tuple) else (out,))


LINEAR = call(aten.linear.default, real(b, s, 8), real(24, 8), real(24), out=real(b, s, 24))


def op(c: OpCall) -> Op:
    return Op(c, RULES.get(c.target))


def text(c: OpCall, ranks: int = 2) -> list[str]:
    return [str(x) for x in expand(op(c), ranks, SIZES)]


def find(c: OpCall, wanted: str, ranks: int = 2, groups: Any = None) -> Strategy:
    return next(x for x in expand(op(c), ranks, SIZES, groups) if str(x) == wanted)


def test_linear() -> None:
    assert text(LINEAR) == [
        "B, B, B -> B",
        "Bp, Bp, Bp -> Bp",
        "S1, Bp, Bp -> S1",  # sequence; the batch symbol is data parallelism's
        "S2, S1, P -> P",  # a partial value: the bias is added once
        "Bp, S0, S0 -> S2",
        "P, Bp, P -> P",
        "Bp, P, P -> P",
    ]
    assert [str(x.share) for x in expand(op(LINEAR), 2, SIZES)] == ["1", "1", "1/2", "1/2", "1/2", "1", "1"]


def test_sizes_that_do_not_divide_are_not_split() -> None:
    assert text(LINEAR, 3)[2:] == ["Bp, S0, S0 -> S2", "P, Bp, P -> P", "Bp, P, P -> P"]
    assert text(LINEAR, 1) == ["B, B, B -> B", "Bp, Bp, Bp -> Bp"]


def test_operands_without_gradient_are_never_partial() -> None:
    embedding = call(aten.embedding.default, real(100, 8), whole(b, s), out=real(b, s, 8))
    assert text(embedding) == [
        "B, B -> B",
        "Bp, B -> Bp",
        "S0, B -> P [vocab_parallel]",
        "S1, B -> S2",
        "Bp, S1 -> S1",
        "P, B -> P",
    ]


def test_cross_entropy() -> None:
    loss = call(ops.cross_entropy, real(b, s, 8), whole(b, s), out=real())
    assert text(loss) == ["B, B -> B", "Bp, B -> Bp", "S1, S1 -> P", "S2, B -> B [vocab_parallel]"]
    assert find(loss, "S2, B -> B [vocab_parallel]").collectives == (("all_reduce", b * s), ("all_reduce", 2 * b * s))
    smoothed = call(ops.cross_entropy, real(b, s, 8), whole(b, s), -100, 0.1, out=real())
    assert text(smoothed) == ["B, B -> B", "Bp, B -> Bp", "S1, S1 -> P"]


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ((b, s, 24), (b, s, 3, 4, 2), "d0 d1 (d2 d3 d4) -> d0 d1 d2 d3 d4"),
        ((b * s, 24), (b, s, 24), "(d0 d1) d2 -> d0 d1 d2"),
        ((b, s, 4, 6), (b * s, 24), "d0 d1 d2 d3 -> (d0 d1) (d2 d3)"),
        ((b, 1, s, 8), (b, s, 2, 4, 1), "d0 1 d1 (d2 d3) -> d0 d1 d2 d3 1"),
        ((6, 6), (4, 9), "(d0 3) 6 -> (d0 2) 9"),
        ((2, 3), (3, 2), "2 3 -> 3 2"),
        ((b, 2 * s), (b, 2, s), "d0 (d1 d2) -> d0 d1 d2"),
        ((b, 3, 14, 14), (b, 3, 196), "d0 d1 d2 d3 -> d0 d1 (d2 d3)"),
    ],
)
def test_view_is_the_common_refinement(source: Any, target: Any, expected: str) -> None:
    view = call(aten.view.default, real(*source), list(target), out=real(*target))
    assert RULES[aten.view.default].text(view) == expected
    bind(expected, view)


def test_inner_factors_split_in_groups() -> None:
    view = call(aten.view.default, real(b, s, 24), [b, s, 3, 4, 2], out=real(b, s, 3, 4, 2))
    assert text(view)[2:] == ["S1 -> S1", "S2/3 -> S3", "P -> P"]
    merged = call(aten.view.default, real(b, s, 8), [-1, 8], out=real(b * s, 8))
    assert text(merged)[2:] == ["S2 -> S1", "P -> P"]  # s is inner to b of unknown size


def test_grouped_query_attention_splits_by_key_value_head() -> None:
    q, kv = real(b, 8, s, 4), real(b, 2, s, 4)
    attention = call(aten.scaled_dot_product_attention.default, q, kv, kv, None, 0.0, True, enable_gqa=True, out=q)
    assert text(attention) == ["B, B, B -> B", "Bp, Bp, Bp -> Bp", "S1, S1, S1 -> S1", "S1/2, Bp, Bp -> S1/2"]
    four = text(attention, 4)[2:]  # ranks, for 2 key-value heads
    assert four == ["S1/2, Bp, Bp -> S1/2", "S1, Bp, Bp -> S1 [own_keys]"]
    assert text(attention, 8)[2:] == ["S1, Bp, Bp -> S1 [own_keys]"]


def test_fused_parts() -> None:
    chunk = call(aten.split.Tensor, real(b, s, 24), 8, -1, out=(real(b, s, 8),) * 3)
    assert text(chunk)[2:] == ["S1 -> S1, S1, S1", "S2/3 -> S2, S2, S2", "P -> P, P, P"]
    assert local_args(op(chunk), find(chunk, "S2/3 -> S2, S2, S2"), 2)[0][1:] == (4, -1)


def test_masks_broadcast() -> None:
    q = real(b, 4, s, 8)
    mask = TensorInfo((b, 1, s, s), torch.bool, False)
    attention = call(aten.scaled_dot_product_attention.default, q, q, q, mask, out=q)
    assert text(attention)[2:] == ["S1, S1, S1, B -> S1", "S2, Bp, Bp, S2 -> S2"]


def test_linear_ops_carry_partial_values_and_others_do_not() -> None:
    x, n = real(4, 8), whole(4, 8)
    assert "P, P -> P" in text(call(aten.add.Tensor, x, x, out=x))
    assert "P -> P" not in text(call(aten.add.Tensor, x, 1.0, out=x))
    assert "P -> P" in text(call(aten.mul.Tensor, x, 2.0, out=x))
    assert "P, P -> P" not in text(call(aten.mul.Tensor, x, x, out=x))
    assert "P -> P" not in text(call(aten.relu.default, x, out=x))
    assert "P -> P" not in text(call(aten.clone.default, n, out=n))  # integers
    assert "P -> P" not in text(call(aten.to.dtype, x, torch.int64, out=n))
    assert "P -> P" in text(call(aten.to.dtype, x, torch.bfloat16, out=TensorInfo((4, 8), torch.bfloat16)))
    assert "P, B -> P" in text(call(aten.masked_fill.Scalar, x, n, 0.0, out=x))
    assert "P, B -> P" not in text(call(aten.masked_fill.Scalar, x, n, 1.0, out=x))


def test_local_sizes() -> None:
    view = call(aten.view.default, real(b, s, 24), [b, s, 4, -1], out=real(b, s, 4, 6))
    assert local_args(op(view), find(view, "S2 -> S2"), 2)[0][1] == [b, s, 2, -1]
    assert local_args(op(view), find(view, "S1 -> S1"), 2)[0][1] == [b, s / 2, 4, -1]
    expand_ = call(aten.expand.default, real(b, 2, 1, s, 4), [b, 2, 4, s, 4], out=real(b, 2, 4, s, 4))
    assert local_args(op(expand_), find(expand_, "Bp -> S2"), 2)[0][1] == [b, 2, 2, s, 4]
    parts = call(aten.unflatten.int, real(b, s, 24), -1, [4, 6], out=real(b, s, 4, 6))
    assert local_args(op(parts), find(parts, "S2 -> S2"), 2)[0][2] == [2, 6]
    weight = local_args(op(LINEAR), find(LINEAR, "Bp, S0, S0 -> S2"), 2)[0][1]
    assert weight.shape == (12, 8)


def wired(c: OpCall, *tensors: str) -> Wired:
    return Wired(op(c), tensors)


def test_groups_reach_the_weight_of_a_fused_projection() -> None:
    split = call(aten.split.Tensor, real(b, s, 24), 8, 2, out=(real(b, s, 8),) * 3)
    linear = wired(LINEAR, "x", "w", "bias", "y")
    found = propagate_groups([linear, wired(split, "y", "q", "k", "v")])
    three = frozenset({1, 3})
    assert found == {("y", 2): three, ("w", 0): three, ("bias", 0): three}
    offered = groups_of(linear, found)
    assert offered == {(1, 0): three, (2, 0): three, (3, 2): three}
    assert str(find(LINEAR, "Bp, S0/3, S0/3 -> S2/3", groups=offered)) == "Bp, S0/3, S0/3 -> S2/3"


def test_groups_cross_a_view_between_projection_and_heads() -> None:
    flat = call(aten.view.default, real(b * s, 24), [b, s, 24], out=real(b, s, 24))
    heads = call(aten.view.default, real(b, s, 24), [b, s, 3, 4, 2], out=real(b, s, 3, 4, 2))
    found = propagate_groups([wired(flat, "y", "z"), wired(heads, "z", "h")])
    assert found["y", 1] == frozenset({1, 3})
    assert all(len(counts) <= 4 for counts in found.values())


def test_without_a_rule_the_op_is_done_in_full() -> None:
    x = real(4, 8)
    assert [str(t) for t in expand(Op(call(print, x, out=x), None), 2, SIZES)] == ["B -> B", "Bp -> Bp"]
