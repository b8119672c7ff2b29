"""The whole search against trying everything, and what it says when nothing fits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autoptd
from autoptd.cost_models.cluster import Cluster
from autoptd.errors import DoesNotFit
from autoptd.models.nanogpt import NanoGPT
from autoptd.models.nanogpt import Sizes as NanoSizes
from autoptd.passes.fold import fold
from autoptd.passes.normalise import normalise
from autoptd.passes.trace import SEQUENCE, trace
from autoptd.progress import Silent
from autoptd.search.meshes import Candidate
from autoptd.search.planner import Planner, Task
from autoptd.search.staged import simulated
from autoptd.search.stages import Stages
from autoptd.search.tensors import Sharded
from autoptd.search.wishes import Method, read_wishes


def small_gpt(width: int = 512, layers: int = 4) -> nn.Module:
    with torch.device("meta"):
        return NanoGPT(NanoSizes(vocab=1024, max_seq=256, layers=layers, heads=8, width=width))


def task(model: nn.Module, cluster: Cluster, world: int, batch: int, fix: dict | None = None) -> Task:
    x = torch.empty(2, 256, dtype=torch.long, device="meta")
    names = list(model.example_inputs(2, 256))  # type: ignore[operator]
    graph = fold(normalise(trace(model, {n: x.clone() for n in names}, precision="bf16")))
    return Task(graph, cluster, world, batch, {SEQUENCE: 256}, "bf16", "adamw", read_wishes(fix))


@pytest.mark.parametrize("inter", [2e9, 50e9])
@pytest.mark.parametrize("memory_gib", [3.0, 80.0])
def test_the_search_misses_nothing(inter: float, memory_gib: float) -> None:
    base = Cluster.of("H100-SXM5-80GB", 4, 450e9, inter)
    device = base.device.model_copy(update={"memory_bytes": int(memory_gib * 2**30)})
    planner = Planner(task(small_gpt(), base.model_copy(update={"device": device}), 8, 32), Silent())
    answer = planner.answer()
    everything = []
    for candidate in planner.candidates():
        sharded = planner._sharded[candidate.tp, candidate.micro]
        assert isinstance(sharded, Sharded)
        try:
            staged = Stages(
                planner._tensors[candidate.tp, candidate.micro], sharded, candidate, Method(), "bf16", "adamw"
            ).solve()
        except DoesNotFit:
            continue
        assert staged.seconds >= planner._lower_bound(candidate) * (1 - 1e-9)
        everything.append(simulated(staged))
    assert len(everything) > 4
    best = min(s.seconds for s in everything)
    assert answer.staged.seconds <= best * 1.02  # candidates within 2 % by their bound are simulated, the best four


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


def test_more_memory_or_faster_links_never_make_it_slower() -> None:
    model = small_gpt()
    steps = []
    for memory, link in ((3, 1e9), (4, 1e9), (4, 10e9), (80, 100e9)):
        base = Cluster.of("A100-SXM4-80GB", 4, 300e9, link)
        device = base.device.model_copy(update={"memory_bytes": memory * 2**30})
        cluster = base.model_copy(update={"device": device})
        steps.append(Planner(task(model, cluster, 8, 32), Silent()).answer().staged.seconds)
    assert steps == sorted(steps, reverse=True)


def test_candidates_are_what_the_wishes_leave() -> None:
    planner = Planner(task(small_gpt(), Cluster.load("dgx-h100"), 16, 32, {"pp": 2}), Silent())
    found = planner.candidates()
    assert {c.pp for c in found} == {2} and {c.tp for c in found} == {1, 2, 4, 8}
    assert all(isinstance(c, Candidate) and c.dp * c.tp * c.pp == 16 for c in found)
