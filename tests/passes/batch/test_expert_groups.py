"""A mixture of experts: the ops it becomes, their costs, and that they compute the right values."""

from __future__ import annotations

from functools import cache

import pytest
import sympy
import torch
from torch import Tensor

from autoptd.layout.mesh import Mesh
from autoptd.layout.placements import P
from autoptd.ops import library as ops
from autoptd.ops.tp_axis import Axis
from autoptd.passes.analysis.flops import work
from autoptd.passes.fold import fold
from autoptd.passes.graph import op_call
from autoptd.passes.normalise.normalise import normalise
from autoptd.passes.opcall import Sizes
from autoptd.passes.rules.discover import discover
from autoptd.passes.rules.table import RULES
from autoptd.passes.sharding.sharding import expand_kind
from autoptd.passes.trace.trace import trace
from autoptd.passes.trace.traced import BATCH, SEQUENCE, Traced
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import run_lockstep
from tests.passes.interpret import names_of

WIDTH, INNER, EXPERTS, CHOSEN = 16, 24, 8, 2
TOKENS = BATCH * SEQUENCE


@cache
def mixture(precision: str) -> Traced:
    """Trace and normalise two layers."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=32,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
    )
    with torch.device("meta"):
        model = MixtralForCausalLM(config).train()
    ids = {name: torch.empty(2, 6, dtype=torch.int64, device="meta") for name in ("input_ids", "labels")}
    return normalise(trace(model, ids, precision=precision))


@pytest.mark.parametrize("precision", ["bf16", "fp64"])
def test_every_op_of_a_mixture_has_a_row(precision: str) -> None:
    """Whichever kernel transformers chose for the dtype, experts are multiplied by one op."""
    found = names_of(mixture(precision))
    assert found.count("grouped_mm") == 4
    assert not {"_grouped_mm", "grouped_mm_fallback"} & set(found)
    calls = [op_call(n) for n in mixture(precision).graph.graph.nodes if n.op == "call_function"]
    assert not {str(discover(c)) for c in calls if c.target not in RULES and "getitem" not in str(c.target)}


def test_work_of_the_chosen_experts_only() -> None:
    nodes = [n for n in mixture("bf16").graph.graph.nodes if n.target is ops.grouped_mm]
    up, down = (work(op_call(n)) for n in nodes[:2])
    assert sympy.expand(up.flops) == 2 * CHOSEN * TOKENS * WIDTH * 2 * INNER
    assert sympy.expand(down.flops) == 2 * CHOSEN * TOKENS * INNER * WIDTH
    weights = EXPERTS * WIDTH * 2 * INNER  # all are read, whichever experts are chosen
    assert sympy.expand(up.bytes_in) == 2 * (CHOSEN * TOKENS * WIDTH + weights) + 4 * EXPERTS
    assert up.kind == down.kind == "matmul"


def test_experts_split_by_their_inner_width_or_by_expert() -> None:
    folded = fold(mixture("bf16"))
    (kind,) = (s for s in folded.representatives.values() if "mlp" in s.name and len(s.nodes) > 20)
    options = expand_kind(kind, 2, Sizes({BATCH: 4, SEQUENCE: 8}, BATCH))
    up, down = ([str(s) for s in options[i]] for i, n in enumerate(kind.nodes) if n.target is ops.grouped_mm)
    assert {"Bp, S2/2, B -> S1/2", "Bp, S0, B -> P [expert_parallel]"} <= set(up)
    assert {"S1, S1, B -> P", "Bp, S0, B -> P [expert_parallel]"} <= set(down)
    back = [options[i] for i, n in enumerate(kind.nodes) if n.target is torch.ops.aten.index.Tensor][-1]
    assert any(
        s.needs[0] == P == s.gives[0] for s in back
    )  # partial values are summed after the rows are back in place


def rows(count: int = 11) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, weights and ends, with an empty group, and rows beyond the last end."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(count, 6, generator=rng, dtype=torch.float64).requires_grad_()
    weight = torch.randn(4, 6, 5, generator=rng, dtype=torch.float64).requires_grad_()
    return x, weight, torch.tensor([3, 3, 7, 9], dtype=torch.int32)


def by_hand(x: Tensor, weight: Tensor, group: list[int]) -> Tensor:
    """Multiply row by row; rows with -1 belong to no expert."""
    zero = torch.zeros(weight.shape[2], dtype=x.dtype)
    return torch.stack([zero if e < 0 else row @ weight[e] for row, e in zip(x, group, strict=True)])


def test_grouped_products_row_by_row() -> None:
    x, weight, ends = rows()
    wanted = by_hand(x, weight, [0, 0, 0, 2, 2, 2, 2, 3, 3, -1, -1])
    found = ops.grouped_mm(x, weight, ends)
    torch.testing.assert_close(found, wanted)
    upstream = torch.randn(wanted.shape, dtype=torch.float64)
    for mine, theirs in zip(
        torch.autograd.grad(found, (x, weight), upstream),
        torch.autograd.grad(wanted, (x, weight), upstream),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


def test_experts_of_two_ranks_add_up() -> None:
    x, weight, ends = rows()

    def one(communicators: Communicators) -> Tensor:
        tp = Axis(communicators.tp)
        return ops.expert_mm(x.detach(), weight.detach().chunk(2)[tp.rank], ends, tp)

    parts = run_lockstep(Mesh(tp=2), one)
    torch.testing.assert_close(parts[0] + parts[1], ops.grouped_mm(x, weight, ends).detach())
    assert not parts[0][3:].any() and not parts[1][:3].any()
