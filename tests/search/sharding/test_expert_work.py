"""The work of a rank that has a part of a mixture's experts, and products in fp8."""

from __future__ import annotations

from functools import cache

import pytest

import autoptd
from autoptd.cost_models.op_time import OpWork
from autoptd.errors import PlanError
from autoptd.plans.model import Plan
from autoptd.search.sharding.expert_work import LAUNCHES, places, spread
from autoptd.search.sharding.fp8 import fp8_products
from autoptd.search.sharding.kind_cost import KindWork
from benchmarks.published.shapes import build, shape_of
from tests.benchmarks.sample_runs import tiny

SIZES = {"n_experts": 8, "moe_top_k": 2, "moe_ffn_hidden_size": 32, "n_shared_experts": 1, "gated_mlp": True}


@cache
def mixture() -> object:
    return autoptd.trace(build(shape_of(tiny(arch="moe", **SIZES))), seq=16, precision="bf16")


def planned(assume: dict | None = None, **fix: object) -> Plan:
    chosen = {"dp": 8, "tp": 1, "pp": 1, "micro": 1, "ep": 8, "recompute": "none", **fix}
    return autoptd.plan(mixture(), world=8, batch=8, seq=16, cluster="dgx-h100", fix=chosen, assume=assume)


def test_fewer_experts_have_more_rows_each() -> None:
    """Numbers by hand: of 8 matrices of 4 × 6 in bf16 one of 4 ranks reads 2; its experts have 4 × 5 rows each."""
    nbytes = 2 * (8 * 4 * 6 + 40 * 4 + 40 * 6)
    forward = OpWork("matmul", 100.0, nbytes, "bf16", 5, 6, 4, 8, groups="m", launches=8)
    weight = OpWork("matmul", 100.0, nbytes, "bf16", 4, 6, 5, 8, groups="k", launches=8, backward=True)
    other = OpWork("memory", 0.0, 10.0, "bf16", place="experts")
    found = spread(KindWork((forward, other), (weight,)), 4)
    (own, same), (own_weight,) = found.forward, found.backward
    assert (own.m, own.n, own.k, own.batch) == (20, 6, 4, 2)
    assert (own_weight.m, own_weight.k, own_weight.batch) == (4, 20, 2)
    assert own.nbytes == nbytes - 6 * 4 * 6 * 2
    assert own.launches == max(1, round(2 * LAUNCHES)) and same == other
    fuller = spread(KindWork((forward, other), ()), 4, fullest=1.5).forward
    assert (fuller[0].m, fuller[0].flops, fuller[1].nbytes) == (30, 150.0, 15.0)
    behind = OpWork("memory", 0.0, 10.0, "bf16", place="behind")
    assert spread(KindWork((forward, behind), ()), 4, merged=True).forward == (own,)
    assert spread(KindWork((forward, behind), ()), 1, merged=True).forward == (forward, behind)


def test_places_and_products_of_a_graph() -> None:
    folded = mixture().folded  # type: ignore[attr-defined]
    found = places(folded)
    by_place = {
        place: {n.name.rstrip("_0123456789") for n, p in found.items() if p == place} for place in found.values()
    }
    assert by_place["behind"] == {"index", "sum"} and by_place["ahead"] == {"index"}
    assert {"_grouped_mm", "silu", "mul"} <= by_place["experts"] and "linear" not in by_place["experts"]
    products = fp8_products(folded)
    outputs = {tuple(n.meta["info"].shape)[-1] for n in products}
    assert 8 not in outputs and 256 not in outputs, "a router or the head in fp8"
    assert len(products) >= 5


@pytest.mark.parametrize(
    ("assume", "word"),
    [
        ({"dispatch": "merged"}, "merged"),
        ({"fp8": "mxfp8"}, "fp8"),
        ({"overlap": ["p2p", "ep"]}, "overlap of ep, p2p"),
        ({"permutation": "twice"}, "permuted by other kernels (twice)"),
    ],
)
def test_choices_that_are_predictions_only(assume: dict, word: str) -> None:
    usual, found = planned(), planned(assume)
    assert not usual.not_runnable and word in found.not_runnable[0]
    assert found.predicted.step_time_s != usual.predicted.step_time_s
    assert Plan.from_json(found.to_json()) == found


def test_fp8_that_is_not_possible_is_refused() -> None:
    fix = {"dp": 8, "tp": 1, "pp": 1}
    with pytest.raises(PlanError, match="A100-SXM4-80GB has no rate of products in fp8"):
        autoptd.plan(mixture(), world=8, batch=8, seq=16, cluster="dgx-a100-80gb", fix=fix, assume={"fp8": "block"})
    with pytest.raises(PlanError, match=r"no program computes in fp8 yet(.|\n)*assume=\{'fp8'"):
        autoptd.plan(build(shape_of(tiny(arch="moe", **SIZES))), world=8, batch=8, precision="fp8")
    with pytest.raises(PlanError, match="can only be predicted"):
        planned(fp8="mxfp8")


def test_products_in_fp8_save_less() -> None:
    usual, found = planned(), planned({"fp8": "mxfp8"})
    assert found.predicted.memory[0]["activations"] < usual.predicted.memory[0]["activations"]
    assert found.predicted.memory[0]["parameters"] == usual.predicted.memory[0]["parameters"]


def test_natural_routing_takes_more_time_and_memory() -> None:
    balanced, natural = planned(), planned(routing="natural")
    assert natural.method.routing == "natural" and not natural.not_runnable
    assert natural.predicted.step_time_s > balanced.predicted.step_time_s
    assert natural.predicted.memory[0]["activations"] > balanced.predicted.memory[0]["activations"]
    assert any("routing is assumed to be natural" in note for note in natural.notes)
    assert any("routing is assumed to be balanced" in note for note in balanced.notes)


def test_groups_of_experts_have_buffers() -> None:
    apart, together = planned(ep=4), planned(ep=1)
    per_group = 24 * 2 * 10 * 2**20
    assert apart.predicted.memory[0]["communication"] - together.predicted.memory[0]["communication"] == 2 * per_group
