"""The rule table, row by row: every strategy computes what the whole op does, in value and gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from autoptd.layout.mesh import Mesh
from autoptd.ops.tp_axis import Axis
from autoptd.passes.opcall import Sizes
from autoptd.passes.rules.attention import OWN_KEYS
from autoptd.passes.rules.factors import Op, Strategy, expand
from autoptd.passes.rules.prove import RankRun, prove
from autoptd.passes.rules.table import IMPLEMENTATIONS, RULES
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import run_lockstep
from tests.passes.rules.rule_samples import SAMPLES, examples

aten = torch.ops.aten
UNSPECIFIED = {aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default}  # any content is right


def with_axis(args: tuple[Any, ...], tp: Axis) -> list[Any]:
    """Return the tensors of a call, the axis, and the first of its other arguments."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    return [*tensors, tp, *args[len(tensors) : len(tensors) + 1]]


def with_own_keys(args: tuple[Any, ...], tp: Axis) -> list[Any]:
    """Return the arguments of attention with the rank's own of all key heads."""
    heads = args[0].shape[-3] * tp.size
    return [args[0], *(tp.own_keys(x, heads) for x in args[1:3]), *args[3:]]


def together(ranks: int, strategy: Strategy, target: Callable[..., Any], run: RankRun) -> list[Any]:
    """Run the ranks in lockstep, so that a distributed implementation can communicate."""

    def one(communicators: Communicators) -> Any:
        tp = Axis(communicators.tp)
        if strategy.implementation == OWN_KEYS.name:
            return run(tp.rank, lambda *args, **options: target(*with_own_keys(args, tp), **options))
        own = IMPLEMENTATIONS.get((target, strategy.implementation))
        return run(tp.rank, target if own is None else lambda *args: own(*with_axis(args, tp)))

    return run_lockstep(Mesh(tp=ranks), one) if strategy.implementation else [run(r, target) for r in range(ranks)]


def offered(example: Any) -> dict[tuple[int, int], frozenset[int]]:
    """Offer two groups on every dim: more than most ops accept."""
    call = example.call()
    return {(i, d): frozenset({2}) for i, t in enumerate(call.operands + call.outputs) for d in range(t.ndim)}


def test_every_rule_has_a_sample() -> None:
    assert RULES.keys() == SAMPLES.keys()
    assert {target for target in SAMPLES if not SAMPLES[target]} == UNSPECIFIED


def test_rows_are_in_alphabetical_order() -> None:
    names = [str(target) for target in RULES if isinstance(target, torch._ops.OpOverload)]
    assert names == sorted(names)


@pytest.mark.parametrize("target", RULES, ids=lambda t: getattr(t, "__name__", str(t)))
def test_rule_holds(target: Callable[..., Any]) -> None:
    rule = RULES[target]
    for example in examples(target):
        call = example.call()
        for ranks in (2, 4):
            strategies = expand(Op(call, rule), ranks, Sizes(), offered(example))
            assert len({str(s) for s in strategies}) == len(strategies)
            for strategy in strategies:
                wrong = prove(example, rule, strategy, ranks, on_ranks=together)
                assert wrong is None, f"{target} {rule.text(call)} on {ranks} ranks: {wrong}"
