"""Losses that balance experts: exact over the batch, or averaged as the user names, on any mesh; and kept routes."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.api import Parallel
from autoptd.codegen import recompute as recompute_source
from autoptd.compile.traced import TracedModel
from autoptd.explain.plan import method
from autoptd.ops import recompute
from autoptd.ops.cp_axis import Tokens
from autoptd.ops.dp_axis import Replicas
from autoptd.passes.analysis import activations
from autoptd.passes.losses.shares import Shares
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import run_lockstep
from autoptd.runtime.trainer import Trainer
from autoptd.testing.parity import differences, train_alone, train_in_lockstep
from tests.parity.parity_check import OPTIONS, TOLERANCE
from tests.parity.parity_models import VOCAB, mixture, randomised

EXPERTS, CHOSEN, WIDTH, SAMPLES, LENGTH = 4, 2, 16, 8, 8
Balance = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # scores, probabilities, chosen experts, mask -> loss
Fix = dict[str, Any]


def load(chosen: Tensor, like: Tensor) -> Tensor:
    """Return how many of a token's choices each expert is: [b, s, chosen] -> [b, s, experts]."""
    return F.one_hot(chosen, EXPERTS).sum(2).to(like.dtype)


def switch(z: Tensor, p: Tensor, chosen: Tensor, mask: Tensor) -> Tensor:
    return EXPERTS * (load(chosen, p).mean((0, 1)) * p.mean((0, 1))).sum()


def switch_of_rows(z: Tensor, p: Tensor, chosen: Tensor, mask: Tensor) -> Tensor:
    counts = torch.bincount(chosen.reshape(-1), minlength=EXPERTS).to(p.dtype)
    return EXPERTS * (counts / chosen.numel() * p.reshape(-1, EXPERTS).mean(0)).sum()


def switch_masked(z: Tensor, p: Tensor, chosen: Tensor, mask: Tensor) -> Tensor:
    shares = (load(chosen, p) * mask[..., None]).sum((0, 1)) / mask.sum()
    return EXPERTS * (shares * (p * mask[..., None]).sum((0, 1)) / mask.sum()).sum()


def z_loss(z: Tensor, p: Tensor, chosen: Tensor, mask: Tensor) -> Tensor:
    return (z.logsumexp(-1).square() * mask).sum() / mask.sum()


def by_sequence(z: Tensor, p: Tensor, chosen: Tensor, mask: Tensor) -> Tensor:
    """Sum over experts of products of means over a sequence, averaged over sequences, as DeepSeek-V2 writes it."""
    b, s = mask.shape
    ones = torch.ones(b, s * CHOSEN, dtype=p.dtype)
    counts = torch.zeros(b, EXPERTS, dtype=p.dtype).scatter_add_(1, chosen.reshape(b, -1), ones)
    return (counts.div_(s * CHOSEN / EXPERTS) * p.mean(1)).sum(1).mean()


def added_by_index(z: Tensor, p: Tensor, chosen: Tensor, mask: Tensor) -> Tensor:
    ones = torch.ones(chosen.numel(), dtype=p.dtype)
    counts = torch.zeros(EXPERTS, dtype=p.dtype).index_add_(0, chosen.reshape(-1), ones)
    return (counts / chosen.numel() - 0.5).square().sum() * p.square().mean().sqrt()


class Mixture(nn.Module):
    """A layer's loss beside its output, in an attribute. `parts`: samples of which the loss is a weighted mean."""

    def __init__(self, balance: Balance) -> None:
        super().__init__()
        self.balance = balance
        self.parts: list[list[int]] = []
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 24) / 8)
        self.down = nn.Parameter(torch.randn(EXPERTS, 24, WIDTH) / 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        z = self.router(x)
        p = z.softmax(-1)
        best, chosen = torch.topk(p, CHOSEN, dim=-1)
        gates = torch.zeros_like(p).scatter(-1, chosen, best)
        self.lost = self.balance(z, p, chosen, mask) if not self.parts else self.averaged(z, p, chosen, mask)
        y = torch.einsum("bsh,ehf->bsef", x, self.up).relu()
        return torch.einsum("bsef,efh,bse->bsh", y, self.down, gates)

    def averaged(self, *given: Tensor) -> Tensor:
        terms = [self.balance(*(x[part] for x in given)) * (len(part) / len(given[0])) for part in self.parts]
        return torch.stack(terms).sum()


class Net(nn.Module):
    def __init__(self, *balances: Balance) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(map(Mixture, balances))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x, mask)
        loss = F.cross_entropy(self.head(x).view(-1, VOCAB), labels.view(-1))
        return loss + 0.1 * torch.stack([layer.lost for layer in self.layers]).mean() + 0.25


NETS: dict[str, tuple[Balance, ...]] = {
    "switch": (switch, switch, switch),
    "sums": (z_loss, by_sequence, by_sequence),
    "mixed": (switch_masked, z_loss, switch_of_rows, added_by_index),
}


@cache
def net(name: str) -> Net:
    torch.manual_seed(0)
    found = randomised(Net(*NETS[name]))
    assert isinstance(found, Net)
    return found


@cache
def batch() -> dict[str, Tensor]:
    ids = torch.randint(0, VOCAB, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(3))
    labels, mask = ids.roll(-1, 1).clone(), torch.ones(SAMPLES, LENGTH, dtype=torch.float64)
    for i in range(SAMPLES):
        labels[i, : i % 5] = -100
        mask[i, LENGTH - i % 4 :] = 0
    return {"ids": ids, "labels": labels, "mask": mask}


@cache
def traced(name: str, averaging: str) -> TracedModel:
    inputs = {n: x[:2] for n, x in batch().items()}
    return autoptd.trace(net(name), inputs=inputs, precision="fp64", loss_averaging=averaging)


def made(source: TracedModel, fix: Fix) -> Parallel:
    fix = {"dp": 1, "tp": 1, "pp": 1, "micro": 2, **fix}
    world = fix["dp"] * fix["tp"] * fix["pp"] * fix.get("cp", 1)
    return autoptd.parallelize(
        source, world=world, cluster="dgx-h100", batch=SAMPLES, optimizer="sgd", optimizer_options=OPTIONS["sgd"],
        fix=fix,
    )  # fmt: skip


def off(parallel: Parallel, reference: nn.Module, given: dict[str, Tensor]) -> float:
    """Return the largest relative difference of a loss, a norm, or any gradient or parameter after two steps."""
    found = train_in_lockstep(parallel, [given, given])
    alone = train_alone(reference, [given, given], optimizer="sgd", optimizer_options=OPTIONS["sgd"])
    pairs = [*zip(found.losses, alone.losses, strict=True), *zip(found.norms, alone.norms, strict=True)]
    wrong = [abs(x - y) / abs(y) for x, y in pairs]
    wrong += [*differences(found.gradients, alone.gradients).values(), *differences(found.state, alone.state).values()]
    return max(wrong) if not found.diverged else float("inf")


def parts(dp: int, averaging: str) -> list[list[int]]:
    """Return the samples that each term is computed from, in microbatches of two."""
    if averaging == "global":
        return []
    ranks = [share.split(2) for share in torch.arange(SAMPLES).tensor_split(dp)]
    if averaging == "per-microbatch":
        return [piece.tolist() for pieces in ranks for piece in pieces]
    return [torch.cat(pieces).tolist() for pieces in zip(*ranks, strict=True)]


def trained(name: str, averaging: str, fix: Fix) -> float:
    parallel = made(traced(name, averaging), fix)
    assert parallel.plan.loss_averaging == averaging
    reference = copy.deepcopy(net(name))
    for layer in reference.layers:
        if layer.balance not in (z_loss, by_sequence):  # sums are exact under any averaging
            layer.parts = parts(fix.get("dp", 1), averaging)
    return off(parallel, reference, batch())


DP, OVER_DP = "per-microbatch", "per-microbatch-over-dp"
CASES: list[tuple[str, str, Fix]] = [
    ("sums", "global", {"dp": 2, "cp": 2}),
    ("sums", "global", {"dp": 2, "tp": 2, "pp": 2, "recompute": "full", "schedule": "1f1b"}),
    ("mixed", "global", {"dp": 2, "tp": 2, "recompute": "ops"}),
    ("mixed", "global", {"cp": 2, "pp": 2, "schedule": "1f1b", "zero": 1}),
    ("mixed", DP, {"dp": 2, "cp": 2, "recompute": "full"}),
    ("mixed", DP, {"dp": 2, "tp": 2, "pp": 2, "schedule": "zero-bubble"}),
    ("mixed", OVER_DP, {"dp": 2, "cp": 2, "zero": 3}),
    ("mixed", OVER_DP, {"dp": 2, "tp": 2, "pp": 2, "schedule": "1f1b", "recompute": "full"}),
    ("mixed", OVER_DP, {"dp": 4, "zero": 2, "recompute": "selective"}),
    ("switch", OVER_DP, {"cp": 2, "tp": 2}),
]


@pytest.mark.parametrize(("name", "averaging", "fix"), CASES, ids=[f"{n}-{a}-{i}" for i, (n, a, _) in enumerate(CASES)])
def test_balanced_as_on_one_process(name: str, averaging: str, fix: Fix) -> None:
    assert trained(name, averaging, fix) <= TOLERANCE


@pytest.mark.parametrize("averaging", [DP, OVER_DP])
def test_plan_and_program_name_the_averaging(averaging: str) -> None:
    parallel = made(traced("mixed", averaging), {"dp": 2})
    assert any(averaging in note for note in parallel.plan.notes)
    assert averaging in parallel.plan.explain()
    assert "terms of the loss that are no sums averaged over microbatches" in method(parallel.plan)
    source = "\n".join(parallel.program.files.values())
    assert "and averaged by samples" in source and ("dp.sum(" in source) == (averaging == OVER_DP)


def test_evaluation_with_unequal_shares() -> None:
    """A rank with fewer microbatches keeps the others company, and adds nothing to their sums."""
    parallel = made(traced("switch", OVER_DP), {"dp": 2})

    def body(communicators: Communicators) -> float:
        mine, rows = copy.copy(parallel), slice(0, 4) if communicators.dp.rank == 0 else slice(4, 6)
        mine.start(communicators, parallel.initial_values())
        return float(mine.eval_step({n: x[rows] for n, x in batch().items()}))

    found = run_lockstep(parallel.layout.mesh, body)
    reference = copy.deepcopy(net("switch"))
    for layer in reference.layers:
        layer.parts = [[0, 1, 4, 5], [2, 3]]
    wanted = float(reference(**{n: x[:6] for n, x in batch().items()}).detach())
    assert found == pytest.approx([wanted] * 2, rel=1e-12)


def _without_share(patch: pytest.MonkeyPatch) -> None:
    whole = Shares.of

    def unweighted(self: Any, x: Any, before: Any = None) -> Any:
        part = whole(self, x, before)
        if before is not None:
            part.target, part.args = torch.ops.aten.mul.Scalar, (x, 1.0)
        return part

    patch.setattr(Shares, "of", unweighted)


def _gradient_of_a_rank(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Replicas, "sum", lambda self, x: self.all_reduce(x))


def _tokens_of_a_rank(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tokens, "all_reduce", lambda self, x: x)
    patch.setattr(Tokens, "all_reduce_both", lambda self, x: x)


@pytest.mark.fault("auxiliary losses scaled")
@pytest.mark.parametrize("plant_fault", [_without_share, _gradient_of_a_rank, _tokens_of_a_rank])
def test_auxiliary_losses_scaled_or_of_some_ranks_are_seen(
    plant_fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    traced.cache_clear()
    plant_fault(monkeypatch)
    try:
        assert trained("switch", OVER_DP, {"dp": 2, "cp": 2}) > 1e-4
    finally:
        traced.cache_clear()


@pytest.mark.fault("a router's gradient of some tokens")
def test_a_router_whose_gradient_is_not_summed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drop what the second cp rank's tokens contribute to the gradient of each router."""
    known = Trainer.__init__

    def init(self: Trainer, stages: Any, layout: Any, communicators: Communicators, *rest: Any, **options: Any) -> None:
        known(self, stages, layout, communicators, *rest, **options)
        for name, p in [pair for stage in stages for pair in stage.named_parameters()]:
            if "router" in name and communicators.cp.rank:
                p.register_hook(torch.zeros_like)

    assert trained("sums", "global", {"cp": 2}) <= TOLERANCE
    monkeypatch.setattr(Trainer, "__init__", init)
    assert trained("sums", "global", {"cp": 2}) > 1e-4


# ---- mixtures of transformers ----


def balanced(**options: Any) -> nn.Module:
    """Return Mixtral with the balance loss of transformers, in float64."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, num_local_experts=4, num_experts_per_tok=2,
        output_router_logits=True, router_aux_loss_coef=0.5, **options,
    )  # fmt: skip
    model = mixture(MixtralForCausalLM, config).model
    module = sys.modules[type(model).__module__]
    text = inspect.getsource(sys.modules["transformers.models.mixtral.modeling_mixtral"].load_balancing_loss_func)
    exec(text.replace("float32", "float64").replace(".float()", ".double()"), module.__dict__)
    return model


@pytest.fixture(scope="module")
def mixtral() -> Any:
    """Yield Mixtral and its trace with padded samples, whose padding its balance loss leaves out."""
    from transformers.models.mixtral import modeling_mixtral

    known = modeling_mixtral.load_balancing_loss_func
    model = balanced()
    given = {"input_ids": batch()["ids"], "labels": batch()["labels"], "attention_mask": batch()["mask"].long()}
    yield model, autoptd.trace(model, inputs={n: x[:2] for n, x in given.items()}, precision="fp64"), given
    modeling_mixtral.load_balancing_loss_func = known


@pytest.mark.parametrize(
    "fix",
    [
        {"dp": 2, "tp": 2},
        {"cp": 2, "dp": 2, "ep": 4, "recompute": "full"},
        {"dp": 2, "pp": 2, "ep": 2, "schedule": "1f1b", "recompute": "ops"},
    ],
    ids=str,
)
def test_the_balance_loss_of_transformers(fix: Fix, mixtral: Any) -> None:
    model, source, given = mixtral
    assert off(made(source, fix), model, given) <= TOLERANCE


def flip(patch: pytest.MonkeyPatch) -> None:
    """Let every second run choose the worst experts instead of the best."""
    known = torch.topk

    def topk(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        run = getattr(recompute._HERE, "run", None)
        return known(-x if run is not None and run.second_run else x, *args, **kwargs)

    patch.setattr(torch, "topk", topk)


@pytest.mark.parametrize("policy", ["selective", "ops", "full"])
def test_recomputation_keeps_routes(policy: str, mixtral: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, source, given = mixtral
    parallel = made(source, {"dp": 2, "ep": 2, "recompute": policy})
    if policy != "selective":
        text = "\n".join(parallel.program.files.values())
        assert "keep(torch.topk" in text and "keep(ep.route" in text
    flip(monkeypatch)
    assert off(parallel, model, given) <= TOLERANCE


@pytest.mark.fault("experts chosen anew")
def test_experts_chosen_anew_are_seen(mixtral: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, source, given = mixtral
    for where in (activations, recompute_source):
        monkeypatch.setattr(where, "decides", lambda step: False)
    parallel = made(source, {"dp": 2, "recompute": "full"})
    flip(monkeypatch)
    assert off(parallel, model, given) > 1e-4
