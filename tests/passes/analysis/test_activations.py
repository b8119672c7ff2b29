"""Activations saved by a block: the published formulas from a traced layer, views, policies, and a real run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import sympy
import torch
from torch import fx

from autoptd.passes.analysis.activations import (
    POLICIES,
    block_segments,
    nbytes,
    repeated_steps,
    resymbolise,
    saved_activations,
    split_by_order,
    symbolic_bytes,
)
from autoptd.passes.analysis.dataflow import RANKS as t
from autoptd.passes.analysis.dataflow import DataflowStep, Number, flow
from autoptd.passes.fold import Folded, Segment
from autoptd.passes.graph import op_name
from autoptd.passes.opcall import Size
from autoptd.passes.sharding.sharding import KindSharding
from autoptd.passes.trace.traced import BATCH as b
from autoptd.passes.trace.traced import SEQUENCE as s
from tests.passes.gpt_layer import A, H, block, solved, traced

h, a = sympy.symbols("h a", integer=True, positive=True)
NAMES = {H: h, A: a, H // A: h / a}


@cache
def layer(tp: int, sequence_parallel: bool, fused: bool = False) -> tuple[Folded, dict[str, KindSharding]]:
    folded = traced(fused)
    return folded, dict(solved(folded, tp, sequence_parallel)[1].sharding.kinds)


def recomputed(
    segments: Sequence[Segment], kinds: dict[str, KindSharding], policy: str, *, early_stop: bool = True
) -> list[fx.Node]:
    """Return the ops that a block's second run executes, without views."""
    found = repeated_steps(flow(segments, kinds).steps, policy, early_stop=early_stop)
    return [step.node for step in found if step.node is not None and not step.view]


def formula(tp: int, sequence_parallel: bool, policy: str, fused: bool = False, regather: bool = True) -> sympy.Expr:
    """Return (main terms, terms below s b h) of a layer."""
    folded, kinds = layer(tp, sequence_parallel, fused)
    found = saved_activations(block(folded), kinds, policy, regather=regather)
    return split_by_order(symbolic_bytes(found, NAMES), h, s)


STATISTICS = 16 * b * s  # mean and reciprocal deviation of two norms, in float32


@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "policy", "expected", "small"),
    [
        # Korthikanti et al. 2022, table 2 and equations 1 to 4
        (1, True, "none", s * b * h * (34 + 5 * a * s / h), STATISTICS),
        (8, False, "none", s * b * h * (10 + 24 / t + 5 * a * s / (h * t)), STATISTICS),
        (8, True, "none", s * b * h / t * (34 + 5 * a * s / h), STATISTICS / t),
        (1, True, "selective", 34 * s * b * h, STATISTICS),
        (8, False, "selective", s * b * h * (10 + 24 / t), STATISTICS),
        (8, True, "selective", 34 * s * b * h / t, STATISTICS / t),
        (1, True, "full", 2 * s * b * h, 0),
        (8, False, "full", 2 * s * b * h, 0),
        (8, True, "full", 2 * s * b * h / t, 0),
    ],
)
def test_korthikanti(tp: int, sequence_parallel: bool, policy: str, expected: sympy.Expr, small: sympy.Expr) -> None:
    main, rest = formula(tp, sequence_parallel, policy)
    assert sympy.expand(main - expected) == 0
    assert sympy.expand(rest - small) == 0


def test_what_is_gathered_stays_where_it_is_not_gathered_again() -> None:
    # the inputs of the query-key-value and of the up projection, 2 bytes each, whole instead of a part
    main, _ = formula(8, True, "none", regather=False)
    assert sympy.expand(main - s * b * h * (4 + 30 / t + 5 * a * s / (h * t))) == 0


def test_fused_attention_keeps_its_result_once() -> None:
    # without the scores' dropout and softmax: 34 s b h, and the log-sum-exp of each query in float32
    main, rest = formula(1, True, "none", fused=True)
    assert (main, rest) == (34 * b * h * s, STATISTICS + 4 * a * b * s)
    assert formula(1, True, "selective", fused=True) == (34 * b * h * s, STATISTICS)


def test_ops_keeps_every_second_product() -> None:
    # input 2, query-key-value 6, up 8; the projection and down are recomputed
    assert formula(1, True, "ops") == (16 * b * h * s, 0)
    assert formula(1, True, "ops", fused=True) == (18 * b * h * s, 4 * a * b * s)


def names(nodes: list[fx.Node]) -> list[str]:
    return [op_name(n) for n in nodes]


def test_recomputed_ops() -> None:
    folded, kinds = layer(1, True)
    core = ["matmul", "mul", "masked_fill", "softmax", "dropout", "matmul"]
    assert recomputed(block(folded), kinds, "none") == []
    assert names(recomputed(block(folded), kinds, "selective")) == core
    every = ["layer_norm", "linear", *core, "reshape", "linear", "dropout", "add"]
    every += ["layer_norm", "linear", "gelu", "linear", "dropout", "add"]
    assert names(recomputed(block(folded), kinds, "full", early_stop=False)) == every
    assert names(recomputed(block(folded), kinds, "full")) == every[:-1]  # the last addition saves nothing
    again = every.copy()
    for product in (1, 13):  # query-key-value, up
        assert again[product] == "linear"
    del again[13], again[1]
    assert names(recomputed(block(folded), kinds, "ops", early_stop=False)) == again
    assert names(recomputed(block(folded), kinds, "ops")) == again[:-1]
    folded, kinds = layer(1, True, True)
    assert names(recomputed(block(folded), kinds, "selective")) == ["scaled_dot_product_attention"]


@pytest.mark.parametrize("fused", [False, True])
def test_a_stop_leaves_out_a_product_whose_operands_are_enough(fused: bool) -> None:
    folded, kinds = layer(1, True, fused)
    segment = block(folded)[1]
    whole = names(recomputed([segment], kinds, "full", early_stop=False))
    assert whole == ["layer_norm", "linear", "gelu", "linear", "dropout", "add"]
    assert names(recomputed([segment], kinds, "full")) == whole[:-1]


def test_unknown_policy() -> None:
    folded, kinds = layer(1, True)
    with pytest.raises(ValueError, match="known: none, selective, ops, full"):
        saved_activations(block(folded), kinds, "most")


@pytest.mark.parametrize("policy", POLICIES)
def test_numbers_are_the_formula(policy: str) -> None:
    folded, kinds = layer(8, True)
    tensors, _ = solved(folded, 8)
    found = saved_activations(block_segments(folded), kinds, policy)
    assert nbytes(found, tensors.number, 8) == symbolic_bytes(found).subs({b: 1, s: 2048, t: 8})


@pytest.mark.parametrize("fused", [False, True])
def test_a_run_saves_as_much(fused: bool) -> None:
    """Run the block's ops on the CPU under torch's hooks, without dropout, whose masks are larger there."""
    folded = traced(fused, p=0.0)
    kinds = dict(solved(folded, 1)[1].sharding.kinds)
    segments, values = block(folded), {b: 2, s: 8}

    def number(n: Size) -> int:
        return n if isinstance(n, int) else int(n.subs(values))

    saved = run(segments, number)
    # matmul copies its transposed operands: three parts of the projection's result instead of the whole, as many bytes
    splits_backward = 4 * 16 * 2  # statistics of two norms for 16 tokens: bf16 on the CPU, float32 on an accelerator
    assert sum(saved) + splits_backward == nbytes(saved_activations(segments, kinds), number, 1)
    assert len(saved) == len(saved_activations(segments, kinds)) + (0 if fused else 2)


def run(segments: Sequence[Segment], number: Number) -> list[int]:
    """Return the bytes of distinct storages that autograd saves for a block on the CPU, less parameters and prelude."""
    env: dict[fx.Node, torch.Tensor] = {}
    outside: set[int] = set()
    for segment in segments:
        for node in (*segment.parameters, *segment.prelude, *segment.receives):
            if node not in env:
                info = node.meta["info"]
                made = torch.ones([number(n) for n in info.shape], dtype=info.dtype)
                env[node] = made.requires_grad_(info.requires_grad)
                if node not in segment.receives:
                    outside.add(made.untyped_storage()._cdata)
    stores: dict[int, torch.Tensor] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        stores.setdefault(x.untyped_storage()._cdata, x)
        return x

    def put(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [put(v) for v in value]
        return env[value] if isinstance(value, fx.Node) else number(value) if isinstance(value, sympy.Expr) else value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        for node in (n for segment in segments for n in segment.nodes):
            env[node] = node.target(*put(node.args), **{k: put(v) for k, v in node.kwargs.items()})  # type: ignore[operator]
    return [x.untyped_storage().nbytes() for i, x in stores.items() if i not in outside and x.numel() > 1]


def test_resymbolise() -> None:
    assert resymbolise((b, s, 3 * H), NAMES) == 3 * h * b * s
    assert resymbolise((b, A, s, s), NAMES) == a * b * s**2
    assert resymbolise((b, A, s, H // A), NAMES) == h * b * s
    assert resymbolise((4 * H, H, 7), NAMES) == 28 * h**2


def test_views_share_a_storage_and_copies_do_not() -> None:
    folded, kinds = layer(1, True, True)
    by_op: dict[str, list[DataflowStep]] = {}
    for step in flow(block(folded), kinds).steps:
        by_op.setdefault(step.name, []).append(step)
    qkv = by_op["linear"][0].outputs[0].storage
    attention = by_op["scaled_dot_product_attention"][0]
    assert all(v.storage is qkv for v in attention.operands[:3])  # chunk, reshape and transpose are views
    assert by_op["linear"][1].operands[0].storage is attention.outputs[0].storage  # heads are joined without a copy
    copy = next(
        s for s in flow(block(layer(1, True)[0]), layer(1, True)[1]).steps if s.name == "reshape" and not s.view
    )
    assert copy.outputs[0].storage is not copy.operands[0].storage  # matmul's result is transposed
