"""Everyday losses over data-parallel ranks and ragged microbatches: the gradients of one process, or a refusal."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

import autoptd
from autoptd.errors import AutoptdError, InputsError, RuntimeFault, UnsupportedOp
from autoptd.parallel import Parallel
from autoptd.passes.graph import output_of
from autoptd.passes.losses.loss_form import loss_node
from autoptd.passes.losses.shares import Shares
from autoptd.passes.normalise import normalise
from autoptd.passes.trace.traced import Traced
from autoptd.runtime.batch_counts import LossOfSums
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import run_lockstep
from autoptd.testing.parity import differences, train_alone, train_in_lockstep
from tests.everyday_losses import AT_ONE_LENGTH, EXACT, FUNCTIONS, RATIOS, REFUSED, Loss, Model, model_of, ragged
from tests.parity.parity_check import TOLERANCE

LOSSES = {**EXACT, **RATIOS, **FUNCTIONS}


def made(model: nn.Module, batch: dict[str, Tensor], **options: object) -> Parallel:
    """Parallelize over two data-parallel ranks of three samples: a microbatch of two and one of one."""
    fix = {"dp": 2, "tp": 1, "pp": 1, "micro": 2, **options.pop("fix", {})}  # type: ignore[dict-item]
    world, step = int(fix["dp"]) * int(fix["tp"]) * int(fix["pp"]), int(fix["dp"]) * int(fix["micro"])
    examples = {n: x[:2] for n, x in batch.items()}
    return autoptd.parallelize(
        model, world=world, cluster="dgx-h100", batch=-(-len(batch["x"]) // step) * step, inputs=examples,
        precision="fp64", optimizer="sgd", optimizer_options={"lr": 0.05}, fix=fix, **options,
    )  # fmt: skip


def off(parallel: Parallel, model: nn.Module, batch: dict[str, Tensor]) -> float:
    """Return the largest relative difference of the loss, the norm and any gradient or parameter."""
    found = train_in_lockstep(parallel, [batch])
    alone = train_alone(model, [batch], optimizer="sgd", optimizer_options={"lr": 0.05})
    pairs = [*zip(found.losses, alone.losses, strict=True), *zip(found.norms, alone.norms, strict=True)]
    wrong = [abs(x - y) / max(abs(y), 1e-30) for x, y in pairs]
    wrong += [*differences(found.gradients, alone.gradients).values(), *differences(found.state, alone.state).values()]
    return max(wrong)


@pytest.mark.parametrize("name", [name for name in LOSSES if "float32" not in name])
def test_as_on_one_process(name: str) -> None:
    model, batch = model_of(LOSSES[name]), ragged()
    parallel = made(model, batch)
    assert parallel.plan.schedule.microbatches == 2 and off(parallel, model, batch) <= TOLERANCE
    assert not any(word in note for note in parallel.plan.notes for word in ("differ", "averaged"))


def test_a_log_of_exponentials_too_small_for_float32() -> None:
    """exp(-98) has two digits there, and the gradient of the log of a sum of such is infinite."""
    model, batch = model_of(lambda z, y, m: (z.flatten().float() - 98).logsumexp(0)), ragged()
    assert off(made(model, batch), model, batch) < 1e-5


class Queries(nn.Module):
    """Learned queries that a pipeline stage sends as they are, a view of a parameter, and a loss that needs sums."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.linspace(-1, 1, 8))
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        queries = self.queries.expand(len(x), 8)
        return self.second(self.first(x)).square().mean() + queries.square().mean().sqrt()


def test_a_stage_that_sends_a_view_of_a_parameter() -> None:
    torch.manual_seed(0)
    model, batch = Queries(), {"x": torch.randn(6, 8).double()}
    parallel = made(model, batch, fix={"dp": 1, "pp": 2})
    assert off(parallel, model, batch) <= TOLERANCE


class Deep(Model):
    """Losses behind layers that can be cut into pipeline stages, with a term from an early layer."""

    def __init__(self, loss: Loss) -> None:
        super().__init__(loss)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(16))

    def forward(self, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        h = self.inner(x).tanh()
        early = (h.square().mean(-1) * mask).sum() / (mask.sum() + 1e-3)
        for layer in self.layers:
            h = h + 0.3 * layer(h).tanh()
        return self.loss(self.head(h), labels, mask) + 0.1 * early


SCHEDULES: dict[str, dict[str, int]] = {
    "1f1b": {},
    "gpipe": {},
    "interleaved": {"virtual": 2, "micro": 1},
    "zero-bubble": {},
    "zero-bubble-v": {"micro": 1},
}


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_over_schedules_and_zero(schedule: str, zero: int) -> None:
    torch.manual_seed(0)
    loss = [FUNCTIONS["term_beside"], FUNCTIONS["switch"], FUNCTIONS["dice"], RATIOS["class_weights"]][zero]
    model, batch = Deep(loss).double(), {n: torch.cat((x, x.flip(0)[:2])) for n, x in ragged().items()}
    fix = {"dp": 2, "tp": 2 if zero == 1 else 1, "pp": 2, "zero": zero, "schedule": schedule, **SCHEDULES[schedule]}
    parallel = made(model, batch, fix=fix)
    assert parallel.plan.method.sums == ("none" if zero == 3 else "held" if schedule == "gpipe" else "ahead")
    assert off(parallel, model, batch) <= TOLERANCE


def dice_of_tokens(out: CausalLMOutputWithPast, inputs: dict[str, Tensor]) -> Tensor:
    p, y = out.logits.softmax(-1), F.one_hot(inputs["input_ids"], 64).to(out.logits.dtype)
    overlap = (2 * (p * y).sum((0, 1)) / (p.sum((0, 1)) + y.sum((0, 1)) + 1e-3)).mean()
    return 1 - overlap + p[..., 0].square().mean().sqrt()


def test_over_tokens_that_are_cut() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=32, **sizes)).double()
    batch = {"input_ids": torch.randint(0, 64, (6, 16))}
    parallel = autoptd.parallelize(
        model, world=8, cluster="dgx-h100", batch=6, seq=16, inputs={n: x[:2] for n, x in batch.items()},
        loss=dice_of_tokens, precision="fp64", optimizer="sgd", optimizer_options={"lr": 0.05},
        fix={"dp": 1, "tp": 2, "pp": 2, "cp": 2, "micro": 2, "schedule": "1f1b"},
    )  # fmt: skip
    found = train_in_lockstep(parallel, [batch])
    alone = train_alone(model, [batch], loss=dice_of_tokens, optimizer="sgd", optimizer_options={"lr": 0.05})
    assert found.losses[0] == pytest.approx(alone.losses[0], rel=TOLERANCE)
    assert max(differences(found.gradients, alone.gradients).values()) <= TOLERANCE


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputed(recompute: str) -> None:
    torch.manual_seed(0)
    model, batch = Deep(FUNCTIONS["dice"]).double(), ragged()
    assert off(made(model, batch, fix={"recompute": recompute}), model, batch) <= TOLERANCE


def test_the_search_weighs_gpipe_against_forward_passes_ahead() -> None:
    torch.manual_seed(0)
    model, batch = Deep(FUNCTIONS["root"]).double(), ragged()
    chosen, ahead = (
        autoptd.plan(
            model, world=2, cluster="dgx-h100", batch=64, inputs={n: x[:2] for n, x in batch.items()},
            precision="fp64", fix={"dp": 1, "tp": 1, "pp": 2, "micro": 4, **fix},
        )
        for fix in ({}, {"schedule": "1f1b"})
    )  # fmt: skip
    assert (chosen.method.sums, chosen.schedule.kind, ahead.method.sums) == ("held", "gpipe", "ahead")
    assert chosen.predicted.step_time_s < ahead.predicted.step_time_s
    forward = ahead.predicted.time_s["loss_sums"]
    assert 0.2 * ahead.predicted.step_time_s < forward < 0.4 * ahead.predicted.step_time_s


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    loss, says = REFUSED[name]
    with pytest.raises(UnsupportedOp, match=says) as caught:
        made(model_of(loss), ragged())
    assert "everyday_losses.py" in caught.value.where and caught.value.fix


@pytest.mark.parametrize("name", AT_ONE_LENGTH)
def test_at_the_length_of_the_example(name: str) -> None:
    model, batch = model_of(AT_ONE_LENGTH[name]), ragged()
    parallel = made(model, batch)
    assert parallel.plan.schedule.microbatches == 2 and off(parallel, model, batch) <= TOLERANCE
    with pytest.raises(RuntimeFault, match="instead of 5"):
        train_in_lockstep(parallel, [{n: x[:, :-1] for n, x in batch.items()}])


def test_no_other_length_is_planned_for() -> None:
    with pytest.raises(InputsError, match="seq is 12, but the model runs at the length of the example"):
        made(model_of(AT_ONE_LENGTH["pairs_of_tokens"]), ragged(), seq=12)


ONE_MICROBATCH = ("max", "median", "first_sample", "product")


@pytest.mark.parametrize("name", ONE_MICROBATCH)
def test_one_microbatch_is_a_way_out(name: str) -> None:
    model, batch = model_of(REFUSED[name][0]), ragged()
    parallel = made(model, batch, fix={"dp": 1, "micro": 6})
    assert off(parallel, model, batch) <= TOLERANCE

    def evaluated(communicators: Communicators) -> float:
        mine = copy.copy(parallel)
        mine.start(communicators, parallel.initial_values())
        return float(mine.eval_step({n: torch.cat((x, x)) for n, x in batch.items()}))

    with pytest.raises(AutoptdError, match="12 samples is 2 microbatches"):
        run_lockstep(parallel.layout.mesh, evaluated)


@pytest.mark.parametrize("name", ONE_MICROBATCH)
def test_averaged_over_microbatches_where_asked_for(name: str) -> None:
    model, batch = model_of(REFUSED[name][0]), ragged()
    parallel = made(model, batch, loss_averaging="per-microbatch")
    (note,) = [note for note in parallel.plan.notes if "are averaged" in note]
    assert "per-microbatch" in note and parallel.plan.loss_averaging == "per-microbatch"
    found = train_in_lockstep(parallel, [batch]).losses[0]
    parts = [{n: x[a:b] for n, x in batch.items()} for a, b in ((0, 2), (2, 3), (3, 5), (5, 6))]
    wanted = sum(float(model(**part).detach()) * len(part["x"]) / 6 for part in parts)
    assert found == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("averaging", ["per-microbatch", "per-microbatch-over-dp"])
def test_an_averaging_without_effect_is_refused(averaging: str) -> None:
    with pytest.raises(InputsError, match="has no effect") as caught:
        made(model_of(EXACT["cross_entropy"]), ragged(), loss_averaging=averaging)
    assert caught.value.where == "loss_averaging"


def test_what_no_sums_give_cannot_be_averaged_over_dp() -> None:
    with pytest.raises(UnsupportedOp, match="max needs all samples of a microbatch at once") as caught:
        made(model_of(REFUSED["max"][0]), ragged(), loss_averaging="per-microbatch-over-dp")
    assert "per-microbatch" in caught.value.fix


def test_an_unknown_averaging_is_refused() -> None:
    with pytest.raises(InputsError, match="loss_averaging is 'per-token'") as caught:
        made(model_of(EXACT["mean"]), ragged(), loss_averaging="per-token")
    assert "per-microbatch" in caught.value.fix


def test_no_valid_label_is_no_number_as_in_torch() -> None:
    model, batch = model_of(EXACT["cross_entropy"]), ragged()
    batch["labels"][:] = -100
    with pytest.raises(AutoptdError, match="step 0"):
        train_in_lockstep(made(model, batch), [batch])


@pytest.mark.fault("ratio by samples")
@pytest.mark.parametrize("name", ["class_weights", "eps", "mean_over_mean", "weights_by_label", "root", "dice", "norm"])
def test_losses_weighed_by_samples_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = model_of(LOSSES[name]), ragged()
    monkeypatch.setattr(normalise, "LOSS", [normalise.refuse_mixed_samples, weigh_by_samples])
    assert off(made(model, batch), model, batch) > 1e-3


def weigh_by_samples(graph: fx.Graph, traced: Traced) -> None:
    """Make the loss the mean of what microbatches give, weighted by their samples."""
    output = output_of(graph)
    output.args = (loss_node(graph),)
    average = Shares(graph, traced, {}).of(loss_node(graph))
    output.args = (average, *output.args[1:])


@pytest.mark.fault("sums of a rank")
@pytest.mark.parametrize("name", ["root", "dice", "switch", "exp_of_mean"])
def test_derivatives_at_a_rank_s_own_sums_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = model_of(FUNCTIONS[name]), ragged()
    parallel = made(model, batch)
    monkeypatch.setattr(LossOfSums, "take", own_sums)
    assert off(parallel, model, batch) > 1e-3


def own_sums(self: LossOfSums, own: Tensor) -> None:
    sums = (own * self._communicators.data.size).requires_grad_()
    with torch.enable_grad():
        loss = self._stage.loss_of(sums, self._counts())
        (self._gradient,) = torch.autograd.grad(loss, sums)
    self.loss = loss.detach()


@pytest.mark.fault("sums of a rank")
def test_sums_of_the_microbatches_so_far_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the extra forward passes that complete the sums first."""
    model, batch = model_of(FUNCTIONS["root"]), ragged()
    parallel = made(model, batch, fix={"schedule": "1f1b"})
    monkeypatch.setattr(parallel, "layout", replace(parallel.layout, sums_ahead=False))
    assert off(parallel, model, batch) > 1e-3
