"""Losses that may overwrite their logits: what an op shares with its operands, and the other readers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoptd.ops import library as ops
from autoptd.passes.analysis.dataflow import Flow, flow
from autoptd.passes.analysis.overwriting import losses_in_place, writes_anew
from autoptd.passes.fold import fold
from autoptd.passes.normalise.normalise import normalise
from autoptd.passes.opcall import OpCall
from autoptd.passes.rules.prove import as_list
from autoptd.passes.trace.trace import trace
from tests.passes.gpt_layer import solved
from tests.passes.rules.rule_samples import SAMPLES, examples


def spelled(target: Callable[..., Any]) -> str:
    return getattr(target, "__name__", str(target)) if target in vars(ops).values() else str(target)


@pytest.mark.parametrize("target", SAMPLES, ids=spelled)
def test_what_writes_anew_shares_no_memory(target: Callable[..., Any]) -> None:
    for example in examples(target):
        if not writes_anew(OpCall(target, tuple(example.args), dict(example.kwargs), ())):
            continue
        given = [x for x in (*example.args, *example.kwargs.values()) if isinstance(x, Tensor)]
        given += [x for a in example.args if isinstance(a, (list, tuple)) for x in a if isinstance(x, Tensor)]
        mine = {x.untyped_storage()._cdata for x in given}
        assert all(y.untyped_storage()._cdata not in mine for y in as_list(target(*example.args, **example.kwargs)))


def test_what_a_schema_does_not_vouch_for_may_be_a_view() -> None:
    aten, x = torch.ops.aten, torch.randn(4, 4)
    for target, args in (
        (aten.dropout.default, (x, 0.1, True)),
        (aten.type_as.default, (x, x)),
        (aten.reshape.default, (x, [16])),
        (aten.split.Tensor, (x, 2)),
        (aten.to.dtype, (x, torch.float64)),
        (aten.einsum.default, ("ij->ji", [x])),
        (aten.broadcast_tensors.default, ([x],)),
        (torch.relu, (x,)),  # an unknown op
    ):
        assert not writes_anew(OpCall(target, args, {}, ()))  # type: ignore[arg-type]


class Head(nn.Module):
    """Logits read once before the loss, by an op that does not save them."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(64, 16), nn.Linear(16, 64, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.table(ids))
        mean = logits.mean()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + mean


@cache
def region() -> Flow:
    with torch.device("meta"):
        model = Head()
    batch = {n: torch.empty(2, 8, dtype=torch.long, device="meta") for n in ("ids", "labels")}
    folded = fold(normalise(trace(model, batch, precision="fp64")))
    return flow(folded.segments, solved(folded, 1)[1].sharding.kinds)


def may(found: Flow, policy: str = "none") -> bool:
    (answer,) = losses_in_place(found, policy).values()
    return answer


def test_who_else_may_read_decides() -> None:
    found = region()
    at = next(i for i, step in enumerate(found.steps) if step.name == "cross_entropy")
    logits = found.steps[at].operands[0]
    (maker,) = (step for step in found.steps if logits in step.outputs)
    (reader,) = (step for step in found.steps if logits in step.operands and step.name == "sum")
    rest = [step for step in found.steps if step is not reader]
    assert may(found) and may(found, "full")
    assert not may(found, "ops")  # the op that makes the logits is recomputed
    assert not may(replace(found, sent=(*found.sent, logits)))  # another stage reads them
    assert not may(replace(found, steps=tuple(step for step in found.steps if step is not maker)))  # not made here
    assert not may(replace(found, steps=(*rest, reader)))  # read after the loss
    narrow = replace(logits, info=replace(logits.info, dtype=torch.bfloat16))
    loss = replace(found.steps[at], operands=(narrow, *found.steps[at].operands[1:]))
    assert not may(replace(found, steps=(*found.steps[:at], loss, *found.steps[at + 1 :])))  # copied in any case
