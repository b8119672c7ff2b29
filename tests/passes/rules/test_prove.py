"""The prover detects wrong rules, and discovery finds right ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch

from autoptd.layout.placements import parse_placement
from autoptd.passes.opcall import OpCall, Sizes, TensorInfo
from autoptd.passes.rules.discover import discover
from autoptd.passes.rules.factors import Implementation, Op, Rule, Strategy, expand
from autoptd.passes.rules.prove import Counterexample, Example, RankRun, prove
from autoptd.passes.rules.table import RULES, first
from tests.passes.rules.rule_samples import examples, fixed, flags, real, whole

aten = torch.ops.aten


def strategy(text: str) -> Strategy:
    needs, gives = ([parse_placement(p.strip()) for p in side.split(",")] for side in text.split("->"))
    return Strategy(tuple(needs), tuple(gives))


def refute(example: Example, text: str, rule: Rule | None = None) -> Counterexample | None:
    return prove(example, rule, strategy(text), 2)


def attention(q: int = 4, k: int = 4) -> Example:
    return Example(aten.scaled_dot_product_attention.default, (real(2, 2, q, 4), real(2, 2, k, 4), real(2, 2, k, 4)))


WRONG: dict[str, tuple[Example, str, str]] = {
    "a result that ranks do not divide": (
        Example(aten.upsample_linear1d.vec, (real(2, 4, 14), [27], False, None)),
        "S2 -> S2",
        "output 0",
    ),
    "softmax split along its dim": (Example(aten.softmax.int, (real(4, 8), -1)), "S1 -> S1", "output 0"),
    "bias added by every rank": (
        Example(aten.linear.default, (real(4, 8), real(6, 8), real(6))),
        "S1, S1, Bp -> P",
        "output 0",
    ),
    "relu of partial values": (Example(aten.relu.default, (real(4, 8),)), "P -> P", "output 0"),
    "mean as a sum": (Example(aten.mean.dim, (real(4, 8), [1])), "S1 -> P", "output 0"),
    "view without groups": (Example(aten.view.default, (real(4, 24), [4, 3, 8])), "S1 -> S2", "RuntimeError on a rank"),
    "unflatten without groups": (Example(aten.unflatten.int, (real(4, 24), 1, [3, -1])), "S1 -> S2", "output 0"),
    "split without groups": (Example(aten.chunk.default, (real(4, 24), 3, 1)), "S1 -> S1, S1, S1", "output 0"),
    "attention over split keys": (attention(), "Bp, S2, S2 -> P", "output 0"),
    "causal attention over split queries": (
        Example(aten.scaled_dot_product_attention.default, (*attention().args, None, 0.0, True)),
        "S2, Bp, Bp -> S2",
        "output 0",
    ),
    "layer_norm over a split dim": (
        Example(aten.layer_norm.default, (real(4, 8), [8], real(8), real(8))),
        "S1, S0, S0 -> S1",
        "RuntimeError on a rank",
    ),
    "embedding without a mask": (Example(aten.embedding.default, (real(8, 4), whole(8, 6))), "S0, B -> P", "on a rank"),
    "missing Bp of a weight": (
        Example(aten.linear.default, (real(4, 8), real(6, 8))),
        "S0, B -> S0",
        "gradient of operand 1",
    ),
    "missing Bp of an input": (
        Example(aten.linear.default, (real(4, 8), real(6, 8))),
        "B, S0 -> S1",
        "gradient of operand 0",
    ),
    "Bp where every rank has it all": (Example(aten.gelu.default, (real(4, 8),)), "Bp -> B", "gradient of operand 0"),
    "whole gradient from partial ones": (Example(aten.gelu.default, (real(4, 8),)), "B -> Bp", "gradient of operand 0"),
    "product of two partial values": (Example(aten.mul.Tensor, (real(4), real(4))), "P, P -> P", "output 0"),
    "number added to a partial value": (Example(aten.add.Tensor, (real(4), 1.0)), "P -> P", "output 0"),
    "sum given as whole": (Example(aten.sum.dim_IntList, (real(4, 8), [1])), "S1 -> B", "output 0"),
    "squeeze of a dim that a split makes 1": (Example(aten.squeeze.default, (fixed(2, 1, 8),)), "S0 -> S0", "output 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_strategies_are_caught(name: str) -> None:
    example, text, where = WRONG[name]
    wrong = refute(example, text)
    assert wrong is not None and where in wrong.what, wrong


@pytest.mark.parametrize(
    ("target", "notation"),
    [
        (aten.softmax.int, "d0 d1 -> d0 d1"),
        (aten.layer_norm.default, "a b c, ., . -> a b c"),
        (aten.mean.dim, "a b c -> a c"),
        (aten.cumsum.default, "a b -> a b"),
        (aten.triu.default, "a b c -> a b c"),
    ],
)
def test_wrong_rows_are_caught(target: Callable[..., Any], notation: str) -> None:
    example, rule = examples(target)[0], Rule(notation)
    found = [prove(example, rule, s, 2) for s in expand(Op(example.call(), rule), 2, Sizes())]
    assert any(found)


def test_a_bias_without_its_mark_is_caught() -> None:
    rule = Rule("... k, o k, o -> ... o")
    example = examples(aten.linear.default)[0]
    found = {str(s): prove(example, rule, s, 2) for s in expand(Op(example.call(), rule), 2, Sizes())}
    assert [text for text, wrong in found.items() if wrong] == ["S2, S1, Bp -> P"]


def test_linear_marks_are_caught() -> None:
    rule = Rule("... -> ...", first)
    for op in (aten.relu.default, aten.gelu.default, aten.abs.default):
        example = examples(op)[0]
        found = {str(s): prove(example, rule, s, 2) for s in expand(Op(example.call(), rule), 2, Sizes())}
        assert [text for text, wrong in found.items() if wrong] == ["P -> P"]


def test_an_implementation_needs_ranks_that_talk() -> None:
    rule = Rule("v d, ... -> ... d", implementations=(Implementation("vocab_parallel", "v"),))
    example = examples(aten.embedding.default)[0]
    own = next(s for s in expand(Op(example.call(), rule), 2, Sizes()) if s.implementation)
    with pytest.raises(AssertionError, match="run its ranks together"):
        prove(example, rule, own, 2)


def test_a_vocabulary_split_without_a_mask_is_caught() -> None:
    def unmasked(ranks: int, _: Strategy, target: Any, run: RankRun) -> list[Any]:
        return [run(r, lambda weight, indices, *rest: target(weight, indices % len(weight))) for r in range(ranks)]

    example = examples(aten.embedding.default)[0]
    wrong = prove(example, None, strategy("S0, B -> P"), 2, on_ranks=unmasked)
    assert wrong is not None and wrong.what == "output 0"


def call(target: Any, *args: Any, out: Any, **kwargs: Any) -> OpCall:
    return OpCall(target, args, kwargs, out if isinstance(out, tuple) else (out,))


def info(*shape: Any, dtype: torch.dtype = torch.float32) -> TensorInfo:
    return TensorInfo(shape, dtype, dtype.is_floating_point)


S = sympy.Symbol("s", integer=True, positive=True)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (call(aten.erfc.default, info(3, S, 64), out=info(3, S, 64)), "f0 f1 f2 -> f0 f1 f2"),
        (call(aten.lerp.Scalar, info(S, 64), info(S, 64), 0.5, out=info(S, 64)), "f0 f1, f0 f1 -> f0 f1"),
        (call(aten.addcmul.default, info(S, 64), info(64), info(S, 1), out=info(S, 64)), "f0 f1, f1, f0 . -> f0 f1"),
        (call(aten.outer.default, info(S), info(64), out=info(S, 64)), "f0, f1 -> f0 f1"),
        (call(aten.dot.default, info(64), info(64), out=info()), "f0, f0 -> "),
        (call(aten.logcumsumexp.default, info(S, 64), 1, out=info(S, 64)), "f0 . -> f0 ."),
        (call(aten.matrix_exp.default, info(5, 64, 64), out=info(5, 64, 64)), "f0 . . -> f0 . ."),
        (call(aten.trace.default, info(64, 64), out=info()), None),
        (call(aten.kthvalue.default, info(S, 64), 2, 1, out=(info(S), info(S, dtype=torch.int64))), "f0 . -> f0, f0"),
        (call(aten.bernoulli.default, info(S, 64), out=info(S, 64)), None),
        (call(aten.mul_.Tensor, info(S, 64), info(S, 64), out=info(S, 64)), None),
    ],
    ids=lambda x: getattr(getattr(x, "target", None), "__name__", ""),
)
def test_discovery(found: OpCall, expected: str | None) -> None:
    discovery = discover(found)
    assert discovery.text == expected, str(discovery)
    assert discovery.rule is None or discovery.rule.notation == expected
    assert (expected is None) == bool(discovery.reason)


def test_discovery_agrees_with_the_table() -> None:
    """Discovery finds no factor for an op with a row that the row lacks."""
    for target in (aten.softmax.int, aten.linear.default, aten.layer_norm.default, aten.mean.dim, aten.transpose.int):
        example = examples(target)[0]
        rule, seen = discover(example.call()).rule, example.call()
        known = {str(s) for s in expand(Op(seen, RULES[target]), 2, Sizes())}
        assert rule is not None
        found = {str(s) for s in expand(Op(seen, rule), 2, Sizes())}
        assert found - known <= {"S1, S1, Bp -> P"} and len(found) > 2, (target, rule.notation)


def test_discovery_never_trusts_a_random_function() -> None:
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2) if not x.requires_grad else x * 2

    x = TensorInfo((4, 8), torch.float32, False)
    assert discover(call(noisy, x, out=x)).text is None
    assert discover(call(doubled, x, out=x)).text is None
    assert flags(2).dtype is torch.bool and fixed(2).requires_grad is False
