"""Heads in chunks of the vocabulary: the numbers of one process on every axis; whole logits where these are read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autoptd
from autoptd.compile.program import make_program, read_sharding
from autoptd.cost_models.cluster import Cluster
from autoptd.layout.mesh import Mesh
from autoptd.ops import linear_cross_entropy as chunked
from autoptd.passes.analysis import heads
from autoptd.testing.parity import train_alone, train_in_lockstep
from tests.parity.parity_check import OPTIONS, Variant, bulk, check, complaints, planned, source
from tests.parity.parity_models import TOKENS, VOCAB, WIDTH, randomised, tokens

PLAIN = Variant(bulk=True, loss="chunked")
TIED, APART = (replace(PLAIN, splits=((name, "S0"),)) for name in ("tokens.weight", "lm_head.weight"))
CASES = [
    ("nanogpt", Mesh(2, 2, 2), TIED),
    ("nanogpt", Mesh(1, 1, 8), replace(PLAIN, schedule="zero-bubble")),
    ("nanogpt", Mesh(2, 2, 2), replace(TIED, recompute="ops", zero=3)),
    ("nanogpt", Mesh(2, 2, 1, cp=2), TIED),
    ("llama", Mesh(2, 4, 1), replace(APART, recompute="full")),
    ("llama", Mesh(2, 2, 1, cp=2), replace(APART, gathers="again")),
    ("llama", Mesh(2, 2, 2), replace(APART, schedule="interleaved", virtual=2, zero=2)),
    ("llama", Mesh(4, 2, 1), replace(APART, sequence_parallel=False)),
    ("mixtral", Mesh(2, 2, 1, cp=2), APART),
    ("bert", Mesh(1, 4, 2), PLAIN),
    ("odd_mlp", Mesh(8, 1, 1), PLAIN),
]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "LOGITS", 64)
    monkeypatch.setattr(chunked, "_COLUMNS", 8)


@pytest.mark.parametrize(("name", "mesh", "variant"), CASES, ids=[f"{n}-{v.recompute}-{m}" for n, m, v in CASES])
def test_chunks_change_no_number(name: str, mesh: Mesh, variant: Variant) -> None:
    plan = planned(name, mesh, variant)
    text = "".join(make_program(source(name), plan, read_sharding(source(name), plan)).files.values())
    assert plan.not_runnable == () and text.count("ops.linear_cross_entropy(") == 1
    assert text.count("tp=tp") == (mesh.tp > 1) and "logits" in plan.partial
    assert not check(name, mesh, variant, "sgd")


class Ends(nn.Module):
    """A head with a bias, and losses of every form that is computed in chunks; `read`: something else reads logits."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.table, self.head, self.form = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB), form

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.table(ids)))
        labels = labels.masked_fill(labels % 5 == 0, -100)
        flat = logits.flatten(0, 1), labels.flatten()
        match self.form:
            case "smoothed":
                return F.cross_entropy(*flat, label_smoothing=0.1)
            case "shifted":
                return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            case "rows":
                return F.cross_entropy(*flat, reduction="none").view(labels.shape).square().mean()
            case "zeros ignored":
                return F.cross_entropy(flat[0], flat[1].clamp(0), ignore_index=0)
            case "read":
                return F.cross_entropy(*flat) + 1e-3 * logits.logsumexp(-1).square().mean()
        raise ValueError(self.form)


def trained(form: str, **fix: Any) -> tuple[str, list[str]]:
    """Return the program's text, and what is wrong with its training."""
    torch.manual_seed(0)
    ids, labels = tokens()
    model, batch = randomised(Ends(form)), {"ids": ids, "labels": labels}
    made = autoptd.parallelize(
        model, world=4, cluster=bulk(Cluster.load("dgx-h100")), batch=len(ids), seq=TOKENS,
        inputs={n: x[:2] for n, x in batch.items()},
        precision="fp64", optimizer="sgd", optimizer_options=OPTIONS["sgd"],
        fix={"dp": 2, "pp": 1, "micro": 2, "loss": "chunked", **fix},
    )  # fmt: skip
    alone = train_alone(model, [batch], optimizer="sgd", optimizer_options=OPTIONS["sgd"])
    return "".join(made.program.files.values()), complaints("ends", train_in_lockstep(made, [batch]), alone)


FORMS = ["shifted", "rows", "zeros ignored", "read"]


@pytest.mark.parametrize(("form", "tp"), [("smoothed", 1), *((form, tp) for form in FORMS for tp in (1, 2))])
def test_losses_of_any_form(form: str, tp: int) -> None:
    text, wrong = trained(form, dp=4 // tp, tp=tp, splits={"head.weight": "S0"} if tp > 1 else {})
    assert text.count("linear_cross_entropy(") + text.count("linear_row_cross_entropy(") == (form != "read")
    assert not wrong


@pytest.mark.fault("logits in chunks that something else reads")
def test_other_readers_of_logits_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: a head is joined whoever else reads its logits, which then do not exist."""
    monkeypatch.setattr(heads, "_reads_alone", lambda *_: True)
    with pytest.raises(KeyError):
        trained("read", dp=4, tp=1)


@pytest.mark.fault("a label outside its chunk")
def test_labels_of_other_chunks_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    place = chunked._place
    monkeypatch.setattr(chunked, "_place", lambda local, part: (place(local, part)[0], torch.ones_like(local) == 1))
    assert trained("rows", dp=4, tp=1)[1]


@pytest.mark.fault("a label that is no class")
def test_a_label_that_is_no_class_raises() -> None:
    x, weight = torch.randn(4, 3), torch.randn(24, 3)
    for label in (24, -1):
        with pytest.raises(RuntimeError, match="neither a class nor ignore_index"):
            chunked.linear_cross_entropy(x, weight, torch.tensor([1, 2, -100, label]))


def test_masked_classes_have_no_share() -> None:
    """Whole chunks of classes that a bias masks, as padding of a vocabulary does."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(6, 3).requires_grad_(), torch.randn(32, 3).requires_grad_(), torch.zeros(32)
    bias[:8] = bias[20:] = -torch.inf
    labels = torch.tensor([8, 9, 19, -100, 10, 12])
    whole = F.cross_entropy(F.linear(x, weight, bias), labels, reduction="sum")
    parts = chunked.linear_cross_entropy(x, weight, labels, bias)
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(torch.autograd.grad(parts, (x, weight)), torch.autograd.grad(whole, (x, weight)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_types_are_as_near_to_float64_as_whole_logits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    wide = torch.randn(40, 16, dtype=torch.float64), torch.randn(96, 16, dtype=torch.float64) / 4
    labels = torch.randint(96, (40,))

    def gradients(dtype: torch.dtype, parts: bool) -> list[Tensor]:
        x, weight = (y.to(torch.float16).to(dtype).requires_grad_() for y in wide)
        logits = F.linear(x, weight).to(torch.promote_types(dtype, torch.float32))
        whole = F.cross_entropy(logits, labels, reduction="sum")
        loss = chunked.linear_cross_entropy(x, weight, labels) if parts else whole
        return [g.double() for g in torch.autograd.grad(loss * 0.37, (x, weight))]

    exact, whole, parts = gradients(torch.float64, False), gradients(dtype, False), gradients(dtype, True)
    for right, one, other in zip(exact, whole, parts, strict=True):
        assert (other - right).norm() <= 1.5 * (one - right).norm() + 1e-12
