"""Plans of V-shaped schedules: fixed ones are planned with the lists that run, and found where they are quickest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import autoptd
from autoptd.cost_models.cluster import Cluster
from autoptd.cost_models.memory import alive
from autoptd.explain.timeline import simulate_plan
from autoptd.models.nanogpt import GPTSizes, NanoGPT
from autoptd.plans.model import Plan
from autoptd.schedule import Alive, UncountedActivations
from autoptd.search.pipeline import evaluate

NODE = Cluster.of("H100-SXM5-80GB", 4, 450e9, 50e9)
ASKED = {"world": 4, "cluster": NODE, "batch": 16}
PIPELINE = {"pp": 4, "micro": 1}


@pytest.fixture(scope="module")
def traced() -> autoptd.TracedModel:
    with torch.device("meta"):
        model = NanoGPT(GPTSizes(vocab=1024, max_seq=256, layers=8, heads=8, width=512))
    return autoptd.trace(model, seq=256)


def test_what_is_asked_for_is_planned(traced: autoptd.TracedModel, tmp_path: Path) -> None:
    plan = autoptd.plan(traced, **ASKED, fix={"schedule": "zero-bubble-v", **PIPELINE})
    assert plan.schedule.virtual == 2 and len(plan.stages) == 8 and plan.not_runnable == ()
    assert "2 chunks per rank as a V" in " ".join(plan.explain().split())
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    # the first rank has the embedding and the head
    first, *_ = (plan.route.of(plan.stages, rank) for rank in range(4))
    assert (first[0].first, first[1].last) == (0, plan.stages[-1].last)
    # the reported time is that of its own action lists
    schedule, timeline = simulate_plan(plan)
    assert timeline.makespan_s == pytest.approx(plan.predicted.step_time_s, rel=1e-9)
    assert len(schedule) == 4
    other = autoptd.plan(traced, **ASKED, fix={"schedule": "zero-bubble", **PIPELINE})
    assert plan.predicted.step_time_s < other.predicted.step_time_s


def test_the_first_rank_holds_most_of_its_first_chunk(traced: autoptd.TracedModel) -> None:
    """The rank holds 7 + 1 or 8 + 0 microbatches of its two chunks, of which the second saves the logits.

    Of a layer, a microbatch holds for its W the gradients of 11 times as many numbers as the layer receives. On the
    other ranks 8 microbatches are held and one waits, or at the end of a step 6 and 5 of them, or 7 and all of them.
    """
    fix = {"schedule": "zero-bubble-v", "recompute": "none", "stages": "even", **PIPELINE}
    first, *others = (row["activations"] for row in autoptd.plan(traced, **ASKED, fix=fix).predicted.memory)
    assert alive(0, 4, 16, "zero-bubble-v", 2).rows == ((7, 1), (8, 0))
    waiting = 11 * 256 * 512 * 2
    kept, left = divmod(others[0] - waiting, 8)  # one layer a chunk
    assert left == 0 and others[1:] == [6 * kept + 5 * waiting, 7 * kept + 7 * waiting]
    # of one microbatch: logits in bf16, their log-softmax in fp32, labels, and the gradients of the logits and of the
    # last norm, which wait; of eight, the numbers of positions
    assert first - others[0] == 256 * (1024 * (2 + 4) + 8) + 256 * (1024 + 512) * 2 + 8 * 256 * 8


def test_a_search_weighs_every_schedule(traced: autoptd.TracedModel) -> None:
    alone = PIPELINE | {"kernels": "eager", "cp": 1, "zero": 1, "shards": 0}
    found = autoptd.plan(traced, **ASKED, fix=alone, exact=True).predicted.step_time_s
    each = {
        kind: autoptd.plan(traced, **ASKED, fix=alone | {"schedule": kind}).predicted.step_time_s
        for kind in ("1f1b", "interleaved", "zero-bubble", "zero-bubble-v")
    }
    assert found == min(each.values()) < each["1f1b"]
    assert each["zero-bubble-v"] < each["zero-bubble"]


class Transposed(nn.Linear):
    """Linear with its weight stored [in, out], as in GPT-2's Conv1D."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(x.shape)


class Line(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(kind(64) if kind is Transposed else kind(64, 64) for _ in range(2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def test_weights_may_be_put_off_however_they_are_stored() -> None:
    def weight_s(kind: type[nn.Module]) -> float:
        inputs = {"x": torch.ones(4, 8, 64)}
        (times,) = autoptd.plan(Line(kind), world=1, cluster=NODE, batch=4, inputs=inputs).predicted.times
        return times["weight_s"]

    assert weight_s(Transposed) == pytest.approx(weight_s(nn.Linear)) and weight_s(Transposed) > 0


# ---- planted bugs ----


def test_memory_predicted_for_too_few_is_refused(traced: autoptd.TracedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count only one microbatch of the head's chunk, and none of the rank's other chunk beside it."""
    evaluate.prove_schedule.cache_clear()
    monkeypatch.setattr(evaluate, "alive", lambda rank, p, m, *_: Alive(((2 * p - rank - 1, rank),)))
    with pytest.raises(UncountedActivations, match="rank 0 holds activations of 7"):
        autoptd.plan(traced, **ASKED, fix={"schedule": "zero-bubble-v", **PIPELINE})
    evaluate.prove_schedule.cache_clear()
