"""The whole search against trying every candidate, and its error when nothing fits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import autoptd
from autoptd.cost_models.cluster import Cluster
from autoptd.errors import DoesNotFit
from autoptd.models.nanogpt import GPTSizes as NanoSizes
from autoptd.models.nanogpt import NanoGPT
from autoptd.progress import Silent
from autoptd.search.constraints.options import DIMENSIONS, read_constraints
from autoptd.search.infeasible import InfeasibleSplit
from autoptd.search.memory_prices import MemoryPrices
from autoptd.search.meshes import Candidate
from autoptd.search.pipeline.evaluate import Staged, simulated
from autoptd.search.pipeline.stages import Stages, StagesDoNotFit
from autoptd.search.planner import Planner, Task
from autoptd.search.sharding.tensors import Sharded
from autoptd.search.visit import visit


def small_gpt(width: int = 512, layers: int = 4) -> nn.Module:
    with torch.device("meta"):
        return NanoGPT(NanoSizes(vocab=1024, max_seq=256, layers=layers, heads=8, width=width))


def roomy(gib: float, inter: float = 50e9, device: str = "H100-SXM5-80GB", intra: float = 450e9) -> Cluster:
    base = Cluster.of(device, 4, intra, inter)
    memory = base.device.model_copy(update={"memory_bytes": int(gib * 2**30)})
    return base.model_copy(update={"device": memory})


@pytest.fixture(scope="module")
def gpt() -> autoptd.TracedModel:
    return autoptd.trace(small_gpt(), seq=256)


def planner(model: autoptd.TracedModel, cluster: Cluster, world: int = 8, batch: int = 32, **changes: Any) -> Planner:
    dimensions, fix, assume = (changes.pop(name, {}) for name in ("dimensions", "fix", "assume"))
    constraints = read_constraints({"headroom": 0, **fix}, assume).searching(*dimensions)
    task = Task(model.folded, cluster, world, batch, model.sizes, "bf16", "adamw", constraints, **changes)
    return Planner(task, Silent(), model.known)


def every_candidate(search: Planner) -> list[Staged]:
    found = []
    for candidate in search.space():
        try:
            found.append(search.predict(candidate))
        except (DoesNotFit, InfeasibleSplit):
            continue
    return found


@pytest.mark.parametrize("inter", [2e9, 50e9])
@pytest.mark.parametrize("memory_gib", [3.0, 80.0])
def test_no_candidate_is_better_or_below_its_bounds(gpt: autoptd.TracedModel, inter: float, memory_gib: float) -> None:
    cluster = roomy(memory_gib, inter)
    answer, other = planner(gpt, cluster).answer(), planner(gpt, cluster)
    everything = every_candidate(other)
    assert len(everything) > 4
    assert answer.staged.seconds <= min(s.seconds for s in everything)
    for staged in everything:
        c = staged.candidate
        solved, stages, outlook = other.costs.solved(c), other.costs.stages(c), other.costs.bounds
        assert isinstance(solved, Sharded)
        for bound in (
            outlook.floor_s(c),
            outlook.bound_s(c, solved),
            outlook.with_end_s(c, stages.least(measured=False).seconds),
            outlook.with_end_s(c, stages.memory_bound([(c.schedule, c.virtual)], MemoryPrices(), math.inf).seconds),
            outlook.with_end_s(c, stages.least(measured=True).seconds),
            outlook.with_end_s(c, stages.relaxed_bound.seconds),
        ):
            assert bound <= staged.seconds * (1 + 1e-9)
        assert staged.least_s <= staged.seconds * (1 + 1e-9), c
    assert answer.visited < len(everything) <= len(other.space()), "most are left out by their bounds"


def test_bounds_know_products_in_fp8() -> None:
    """They take half the time, and less than that of the compute type's best rate."""
    model = autoptd.trace(small_gpt(width=16384, layers=2), seq=256)
    search = planner(model, roomy(512.0, device="L4"), batch=2048, assume={"fp8": "tensor"})
    ratios = {}
    for c in search.candidates():
        if c.pp == 1 and c.micro == 4:
            ratios[c] = search.costs.bounds.floor_s(c) / search.predict(c).seconds
    assert 0.5 < max(ratios.values()) <= 1 + 1e-9, ratios


@pytest.mark.parametrize("overlap", [("p2p",), ("dp", "p2p")])
@pytest.mark.parametrize("inter", [2e9, 50e9])
def test_a_dominated_candidate_is_no_faster(gpt: autoptd.TracedModel, inter: float, overlap: tuple[str, ...]) -> None:
    """A candidate that is left out, since the same mesh with ZeRO 1 over all ranks needs less, takes no less time."""
    search = planner(gpt, roomy(80.0, inter), dimensions=["shards"], fix={"overlap": overlap})
    search.answer()
    dominated = [e.candidate for e in search.visit.queue.entries if search.visit._is_dominated(e)]
    assert bool(dominated) == ("dp" not in overlap)
    for c in dominated:
        lighter = search.visit._lighter(c)
        assert lighter is not None
        assert search.predict(c).seconds >= search.predict(lighter.candidate).seconds * (1 - 1e-6), str(c)


@pytest.mark.parametrize("overlap", [("p2p",), ("dp", "p2p")])
def test_what_passes_hide_is_bounded(gpt: autoptd.TracedModel, overlap: tuple[str, ...]) -> None:
    """Bounds of ZeRO 2 and 3 count gathers and reductions of every pass, and are above no step."""
    search = planner(gpt, roomy(80.0, 2e9), dimensions=["zero"], fix={"overlap": overlap})
    ratios = []
    for c in search.candidates():
        if c.zero > 1 and c.pp == 1 and isinstance(solved := search.costs.solved(c), Sharded):
            ratios.append(search.costs.bounds.bound_s(c, solved) / search.predict(c).seconds)
    assert 0.8 < max(ratios) <= 1 + 1e-9 and min(ratios) > 0.4


def test_the_answer_is_of_its_own_prediction(gpt: autoptd.TracedModel) -> None:
    answer = planner(gpt, roomy(80.0)).answer()
    staged = answer.staged
    assert 0 <= answer.gap < 1
    # the cut may differ from the first one of this candidate
    assert staged.seconds <= planner(gpt, roomy(80.0)).predict(staged.candidate).seconds
    assert staged.seconds == simulated(staged).seconds
    assert all(memory.needed <= 80 * 2**30 for memory in staged.memory)


def test_a_search_that_is_cut_short_says_so(gpt: autoptd.TracedModel) -> None:
    """A search without any time still returns a plan, whose gap covers what it may lack."""
    cluster = roomy(4.0, 2e9)
    best = planner(gpt, cluster, effort=None).answer()
    assert best.gap == pytest.approx(0.0, abs=1e-9)
    short = planner(gpt, cluster, time_limit_s=0.0).answer()
    assert short.visited < best.visited and short.staged.seconds >= best.staged.seconds
    assert short.staged.seconds * (1 - short.gap) <= best.staged.seconds * (1 + 1e-9)
    assert short.gap > 0


def test_what_is_not_asked_for_is_not_searched(gpt: autoptd.TracedModel) -> None:
    cluster = roomy(4.0, 2e9)
    plain = planner(gpt, cluster).candidates()
    assert {(c.cp, c.virtual, c.shards, c.schedule) for c in plain} == {(1, 1, 0, "1f1b")}
    assert {c.zero for c in plain} == {0, 1}
    wide = planner(gpt, cluster, dimensions=DIMENSIONS).candidates()
    assert {c.zero for c in wide} == {0, 1, 2, 3} and {c.cp for c in wide} == {1, 2, 4, 8}
    assert {c.schedule for c in wide} == {"1f1b", "interleaved", "zero-bubble", "zero-bubble-v"}
    assert set(plain) < set(wide)


def test_a_fixed_dimension_is_not_searched(gpt: autoptd.TracedModel) -> None:
    fix = {"cp": 2, "shards": 2, "zero": 3, "virtual": 2, "schedule": "interleaved"}
    found = planner(gpt, roomy(80.0), dimensions=DIMENSIONS, fix=fix).candidates()
    assert {(c.cp, c.shards, c.zero, c.virtual, c.schedule) for c in found if c.dp * c.cp > 2} == {
        (2, 2, 3, 2, "interleaved")
    }


def test_more_dimensions_never_make_it_slower() -> None:
    model = autoptd.trace(small_gpt(width=128, layers=2), seq=256)
    cluster = roomy(3.0, 2e9)
    plain = planner(model, cluster, 4, 16, effort=None).answer().staged.seconds
    for name in DIMENSIONS:
        assert planner(model, cluster, 4, 16, effort=None, dimensions=(name,)).answer().staged.seconds <= plain, name


def test_stages_of_a_plan_fit_the_device() -> None:
    plan = autoptd.plan(small_gpt(), world=8, cluster="dgx-a100-40gb", batch=64, seq=256)
    assert plan.predicted.memory_bytes <= plan.cluster.device.memory_bytes
    assert plan.mesh.dp * plan.mesh.tp * plan.mesh.pp == 8
    assert sum(plan.predicted.time_s.values()) == pytest.approx(plan.predicted.step_time_s, rel=0.02)


def test_what_is_fixed_holds() -> None:
    fix = {"dp": 2, "tp": 2, "pp": 2, "micro": 4, "recompute": "full", "zero": 0}
    plan = autoptd.plan(small_gpt(), world=8, cluster="dgx-h100", batch=64, seq=256, fix=fix)
    assert (plan.mesh.dp, plan.mesh.tp, plan.mesh.pp, plan.micro, plan.zero) == (2, 2, 2, 4, 0)
    assert plan.schedule.microbatches == 8
    blocks = [i for i, name in enumerate(plan.segments) if "layers." in name or "blocks." in name]
    assert len(blocks) >= 4 and [i for s in plan.stages for i in s.recompute] == blocks


def test_nothing_fits_says_what_is_missing() -> None:
    base = Cluster.load("dgx-h100")
    device = base.device.model_copy(update={"memory_bytes": 2**31})
    tiny = base.model_copy(update={"device": device})
    with pytest.raises(DoesNotFit) as caught:
        autoptd.plan(small_gpt(width=4096, layers=8), world=2, cluster=tiny, batch=16, seq=256)
    text = str(caught.value)
    assert "lacks" in text and "stage 0" in text and "GiB" in text and "fix" in text


def test_more_memory_or_faster_links_never_make_it_slower(gpt: autoptd.TracedModel) -> None:
    steps = []
    for memory, link in ((3, 1e9), (4, 1e9), (4, 10e9), (80, 100e9)):
        cluster = roomy(memory, link, "A100-SXM4-80GB", 300e9)
        steps.append(planner(gpt, cluster).answer().staged.seconds)
    assert steps == sorted(steps, reverse=True)


def test_candidates_are_what_the_constraints_leave(gpt: autoptd.TracedModel) -> None:
    found = planner(gpt, Cluster.load("dgx-h100"), 16, fix={"pp": 2}).candidates()
    assert {c.pp for c in found} == {2} and {c.tp for c in found} == {1, 2, 4, 8}
    assert all(isinstance(c, Candidate) and c.dp * c.tp * c.pp == 16 for c in found)


def test_a_search_without_a_plan_ends(gpt: autoptd.TracedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fractions of segments fit, whole ones do not: after some of these the rest is left out, and the error says so."""
    tried = []

    def refuse(stages: Stages, limit_s: float) -> list[Staged]:
        tried.append(stages.candidate)
        raise StagesDoNotFit("these stages do not fit", every_cut=False)

    monkeypatch.setattr(Stages, "solutions", refuse)
    monkeypatch.setattr(visit, "refine", lambda *_: (None, False))
    monkeypatch.setattr(visit, "_REFUSALS", 5)
    with pytest.raises(DoesNotFit, match=r"no plan that fits was found(.|\n)*exact=True"):
        planner(gpt, roomy(80.0), fix={"pp": 4}).answer()
    few = len(tried)
    with pytest.raises(DoesNotFit, match="no plan fits"):
        planner(gpt, roomy(80.0), fix={"pp": 4}, effort=None).answer()
    assert 5 <= few <= 10 < len(tried) - few


@pytest.mark.parametrize("world, batch", [(8, 24), (16, 32)])
def test_the_choices_of_a_plan_fixed_find_no_faster_one(gpt: autoptd.TracedModel, world: int, batch: int) -> None:
    """Other candidates may take all effort, or end the turn of the best one, before its other cuts are simulated."""
    cluster = roomy(40, inter=1e8, intra=2e8)
    free = autoptd.plan(gpt, world=world, cluster=cluster, batch=batch)
    mesh, run = free.mesh, free.schedule
    fix = {"dp": mesh.dp, "tp": mesh.tp, "pp": mesh.pp, "cp": mesh.cp, "micro": free.micro, "zero": free.zero}
    fix |= {"schedule": run.kind, "virtual": run.virtual, "shards": free.method.shards}
    fixed = autoptd.plan(gpt, world=world, cluster=cluster, batch=batch, fix=fix)
    assert mesh.pp > 1 and fixed.stages == free.stages
    assert fixed.predicted.step_time_s == free.predicted.step_time_s
