"""Losses of all samples of the batch together (pairs, shuffles, statistics): the gradients of one process."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

import autoptd
from autoptd.errors import AutoptdError
from autoptd.passes.losses import reduce_loss, whole_batch
from autoptd.runtime.batch_counts import LossTotal
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import run_lockstep
from autoptd.testing.parity import differences, train_alone, train_in_lockstep
from autoptd.verification.verdict import verify_plan
from tests.everyday_losses import PICKED, WHOLE, by_sample, clip, model_of, ragged, two_views
from tests.parity.parity_check import TOLERANCE
from tests.parity.test_parity_losses import SCHEDULES, Deep, made, off


@pytest.mark.parametrize("name", WHOLE)
def test_as_on_one_process(name: str) -> None:
    model, batch = model_of(WHOLE[name]), ragged()
    parallel = made(model, batch)
    assert parallel.plan.schedule.microbatches == 2 and off(parallel, model, batch) <= TOLERANCE
    assert any("compares all samples" in note for note in parallel.plan.notes)


@pytest.mark.parametrize("name", PICKED)
def test_one_number_of_all_samples_beside_sums(name: str) -> None:
    model, batch = model_of(lambda z, y, m: by_sample(z).mean() * PICKED[name](by_sample(z))), ragged()
    assert off(made(model, batch), model, batch) <= TOLERANCE


@pytest.mark.parametrize("name", ["two_largest", "first", "maximum"])
def test_a_loss_that_is_one_number_of_all_samples(name: str) -> None:
    model, batch = model_of(lambda z, y, m: PICKED[name](by_sample(z))), ragged()
    assert off(made(model, batch), model, batch) <= TOLERANCE


@pytest.mark.fault("one number of a microbatch")
def test_a_number_of_a_microbatch_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out of the end what has no samples: the median of each microbatch would be averaged."""
    monkeypatch.setattr(whole_batch, "_no_sums", lambda graph, traced: set())
    with pytest.raises(AutoptdError, match="needs all samples of the batch at once"):
        made(model_of(WHOLE["median"]), ragged())
    monkeypatch.setattr(reduce_loss._Rewriter, "_mixed_before", lambda self, loss: [])
    model, batch = model_of(WHOLE["median"]), ragged()
    assert off(made(model, batch), model, batch) > 1e-3


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_over_schedules_and_zero(schedule: str, zero: int) -> None:
    torch.manual_seed(0)
    loss = WHOLE[["clip_beside_cross_entropy", "two_views", "same_class", "standardised"][zero]]
    model, batch = Deep(loss).double(), {n: torch.cat((x, x.flip(0)[:2])) for n, x in ragged().items()}
    fix = {"dp": 2, "tp": 2 if zero == 1 else 1, "pp": 2, "zero": zero, "schedule": schedule, **SCHEDULES[schedule]}
    parallel = made(model, batch, fix=fix)
    assert parallel.plan.method.sums == ("held" if schedule == "gpipe" else "ahead")
    assert off(parallel, model, batch) <= TOLERANCE


def pairs_of_texts(out: CausalLMOutputWithPast) -> Tensor:
    """Compare the first and the last token's logits of every text with those of all others."""
    return clip(F.normalize(out.logits[:, 0], dim=-1), F.normalize(out.logits[:, -1], dim=-1), out.logits.mean())


@pytest.mark.parametrize(
    "mesh", [{"tp": 2, "cp": 2}, {"tp": 2, "pp": 2, "recompute": "full"}, {"cp": 2, "dp": 2}], ids=str
)
def test_over_tokens_and_widths_that_are_cut(mesh: dict[str, int]) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=32, **sizes)).double()
    batch = {"input_ids": torch.randint(0, 64, (8, 16))}
    parallel = autoptd.parallelize(
        model, world=4, cluster="dgx-h100", batch=8, seq=16, inputs={n: x[:2] for n, x in batch.items()},
        loss=pairs_of_texts, precision="fp64", optimizer="sgd", optimizer_options={"lr": 0.05},
        fix={"dp": 1, "tp": 1, "cp": 1, "micro": 2, **mesh},
    )  # fmt: skip
    found = train_in_lockstep(parallel, [batch])
    alone = train_alone(model, [batch], loss=pairs_of_texts, optimizer="sgd", optimizer_options={"lr": 0.05})
    assert found.losses[0] == pytest.approx(alone.losses[0], rel=TOLERANCE)
    assert max(differences(found.gradients, alone.gradients).values()) <= TOLERANCE


class Views(nn.Module):
    """Two views of each picture, through a network with batch norm (Chen et al. 2020, SimCLR)."""

    def __init__(self) -> None:
        super().__init__()
        self.see = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.project = nn.Sequential(nn.Flatten(), nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 7))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return two_views(torch.stack((self.project(self.see(x)), self.project(self.see(y))), 1))


@pytest.mark.parametrize("mesh", [{"dp": 2, "pp": 2, "micro": 4}, {"dp": 2, "tp": 2}], ids=str)
def test_behind_statistics_of_the_batch(mesh: dict[str, int]) -> None:
    torch.manual_seed(0)
    model, batch = Views().double(), {n: torch.randn(8, 3, 6, 6, dtype=torch.float64) for n in "xy"}
    assert off(made(model, batch, fix={"micro": 4, **mesh}), model, batch) <= TOLERANCE


def test_verified_and_evaluated_on_any_number_of_samples() -> None:
    model, batch = model_of(WHOLE["clip_beside_cross_entropy"]), ragged()
    parallel = made(model, batch)
    verdict = verify_plan(parallel.plan, model, inputs={n: x[:2] for n, x in batch.items()})
    assert verdict.agrees and verdict.difference <= TOLERANCE
    share = {n: torch.cat((x, x))[:5] for n, x in batch.items()}

    def evaluated(communicators: Communicators) -> float:
        mine = copy.copy(parallel)
        mine.start(communicators, parallel.initial_values())
        return float(mine.eval_step({n: x[: 5 - communicators.dp.rank] for n, x in share.items()}))

    whole = {n: torch.cat((x, x[:4])) for n, x in share.items()}
    for loss in run_lockstep(parallel.layout.mesh, evaluated):
        assert loss == pytest.approx(float(model(**whole).detach()), rel=TOLERANCE)


def test_averaged_over_microbatches_where_asked_for() -> None:
    model, batch = model_of(WHOLE["two_views"]), ragged()
    parallel = made(model, batch, loss_averaging="per-microbatch")
    found = train_in_lockstep(parallel, [batch]).losses[0]
    parts = [{n: x[a:b] for n, x in batch.items()} for a, b in ((0, 2), (2, 3), (3, 5), (5, 6))]
    wanted = sum(float(model(**part).detach()) * len(part["x"]) / 6 for part in parts)
    assert found == pytest.approx(wanted, rel=1e-12)


def _of_the_first_rank(self: LossTotal, share: Tensor, sample: int) -> slice:
    start = self.sums + sample * self.width
    return slice(start, start + share.numel() - self.sums)


def _of_the_first_microbatch(self: LossTotal, share: Tensor, sample: int) -> slice:
    start = self.sums + self.first * self.width
    return slice(start, start + share.numel() - self.sums)


@pytest.mark.fault("samples misplaced")
@pytest.mark.parametrize("rows", [_of_the_first_rank, _of_the_first_microbatch])
def test_rows_at_other_samples_places_are_seen(rows: object, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = model_of(WHOLE["clip"]), ragged()
    parallel = made(model, batch)
    monkeypatch.setattr(LossTotal, "_rows", rows)
    assert off(parallel, model, batch) > 1e-3


@pytest.mark.fault("samples of a rank")
def test_pairs_within_a_rank_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare each sample with those of its own microbatch only, as a loss written for one process would."""
    model, batch = model_of(WHOLE["clip"]), ragged()
    parallel = made(model, batch, loss_averaging="per-microbatch")
    assert off(parallel, model, batch) > 1e-3
