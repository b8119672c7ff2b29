"""Every kind of input and way to run is verified, with uneven inputs; models that cannot be verified give an error."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.compile.read import read_model
from autoptd.errors import CannotVerify
from autoptd.plans.model import Plan
from autoptd.progress import Silent
from autoptd.verification.inputs import try_batches, uneven
from autoptd.verification.verdict import Verdict, verify_plan
from tests.verification.everyday import CASES, CLASSES, IDS, NUMBERS, PAIR, REAL, Case, is_traced, perceptron
from tests.verification.verified import told


def planned(case: Case) -> tuple[nn.Module, Plan]:
    torch.manual_seed(0)
    model = case.build()
    world = torch.Size(case.fix.get(axis, 1) for axis in ("dp", "tp", "pp", "cp")).numel()
    plan = autoptd.plan(
        model,
        world=world,
        batch=8,
        inputs=case.examples(),
        loss=case.loss,
        precision=case.precision,
        fix=case.fix,
        cluster="dgx-h100",
    )
    return model, plan


def verified(case: Case) -> Verdict:
    model, plan = planned(case)
    return verify_plan(plan, model, inputs=case.examples(), loss=case.loss)


@cache
def made(name: str) -> dict[str, Tensor]:
    """Return the first batch tried for a case: 12 samples in microbatches of two."""
    case = CASES[name]
    source = read_model(
        case.build(),
        inputs=case.examples(),
        loss=case.loss,
        seq=None,
        precision=case.precision,
        progress=Silent(),
    )
    sizes = {"b": 2, **{str(s): n for s, n in source.sizes.items()}}
    return next(try_batches(source, sizes, 12, 1))[0][0]


@pytest.mark.parametrize("name", CASES)
def test_a_right_plan_is_verified(name: str) -> None:
    found = verified(CASES[name])
    assert found.agrees, told(found)
    assert found.difference < 1e-10
    assert found.certificate is not None


def test_every_precision_and_enough_kinds_are_tried() -> None:
    assert {case.precision for case in CASES.values()} == {"fp64", "fp32", "fp16", "bf16"}
    assert len(CASES) >= 20


# --- values of inputs ---------------------------------------------------------------------------------------------


def test_what_counts_is_uneven_and_one_microbatch_has_none() -> None:
    for shape in ((12,), (12, 7), (12, 5), (12, 1, 4, 6), (12, 1)):
        counts = uneven(shape, 0, 2, empty=True).reshape(12, -1).sum(1)
        assert len(set(counts.tolist())) > 1
        assert counts[2:4].sum() == 0
        kept = uneven(shape, 1, 2, empty=False)
        assert kept.any() and not kept.all()
    assert uneven((1,), 2, 1, empty=True).any()


def test_labels_stay_within_their_classes_but_for_the_one_that_is_left_out() -> None:
    labels = made("float inputs")["y"]
    assert -100 in labels
    assert set(labels.tolist()) - {-100} <= set(range(5))
    assert 3 in made("likelihood, a label left out")["y"]
    assert made("likelihood, a label left out")["y"].min() >= 0


def to_positions(out: Tensor, y: Tensor) -> Tensor:
    """The ignored label is a size, as in question answering."""
    return nn.functional.cross_entropy(out.transpose(1, 2)[:, 0], y.clamp(0, out.shape[1]), ignore_index=out.shape[1])


def test_a_label_that_is_left_out_may_be_a_size() -> None:
    found = verified(Case(perceptron(to_positions), {"x": ((6, 8), REAL), "y": ((), IDS)}, PAIR))
    assert found.agrees, told(found)
    assert any(text.startswith("y: 0 to ") and "uneven" in text for text in found.made), found.made


def test_padding_is_found_where_a_model_compares() -> None:
    ids = made("padding by id")["ids"]
    assert (ids == 0).any(1).all() and (ids[2:4] == 0).all()


def test_operands_of_logarithms_and_targets_of_probabilities_are_shares() -> None:
    for name in ("probabilities", "divergence", "logarithm and root"):
        y = made(name)["y"]
        assert y.min() > 0 and y.max() < 1
    assert made("regression")["y"].min() < 0


@pytest.mark.parametrize("name", ["boolean mask of four dims", "integer mask"])
def test_masks_are_uneven(name: str) -> None:
    mask = made(name)["mask"].reshape(12, -1).double().mean(1)
    assert len(set(mask.tolist())) > 3


def nan(out: Tensor, y: Tensor) -> Tensor:
    return (out - y).mean() * torch.sqrt(-1 - y.pow(2)).mean()


def test_a_plain_model_that_gives_nan_is_no_verdict() -> None:
    with pytest.raises(CannotVerify, match=r"(?s)in step 1 its loss is nan.*x: normal; y: .*\n.*other combinations"):
        verified(Case(perceptron(nan), NUMBERS, PAIR))


def needs_positive(out: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return ((out - y).pow(2) * torch.log(w + 1)[:, None]).mean()


def test_inputs_that_a_graph_does_not_explain_are_found_by_trying() -> None:
    """Inputs without a constraint in the graph are tried: log(w + 1) of normal numbers is NaN for the plain model."""
    found = verified(Case(perceptron(needs_positive), {**NUMBERS, "w": ((), REAL)}, PAIR))
    assert found.agrees, told(found)
    assert "w: between 0 and 1" in found.made


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return (self.a(x) * scale).pow(2).mean()


@pytest.mark.parametrize("shape", [(), (4,), (3, 4)], ids=str)
def test_inputs_without_samples_are_made(shape: tuple[int, ...]) -> None:
    inputs = {"x": torch.empty(2, 3, 4, device="meta"), "scale": torch.empty(shape, device="meta")}
    planned = autoptd.plan(Scaled(), world=2, batch=8, inputs=inputs, precision="fp32", cluster="dgx-h100")
    found = verify_plan(planned, Scaled(), inputs=inputs)
    assert found.agrees, told(found)


class Restarted(nn.Module):
    """Checkpointed by torch, with dropout inside, and a dropout without readers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c, self.drop = nn.Linear(8, 8), nn.Linear(8, 5), nn.Dropout(0.3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.utils.checkpoint.checkpoint(lambda t: self.drop(torch.tanh(self.a(t))), x, use_reentrant=False)
        return nn.functional.cross_entropy(self.c(self.drop(h)), y)


class RestartedNarrow(Restarted):
    """A checkpoint of code that computes in float32 by itself, as routers and norms of libraries do."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        def inner(t: Tensor) -> Tensor:
            return self.a(t).softmax(-1, dtype=torch.float32).to(t.dtype) * t.float().square().mean().to(t.dtype)

        return nn.functional.cross_entropy(self.c(torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False)), y)


class Unread(Restarted):
    """Calls dropout once more, for a result that nothing reads."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.drop(x)
        return super().forward(x, y)


class Untraced(Restarted):
    """Calls dropout once more, except while it is traced."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x if is_traced(x) else self.drop(x), y)


@pytest.mark.parametrize("model", [Restarted, Unread])
def test_each_call_drops_what_its_own_node_drops(model: type[nn.Module]) -> None:
    """Also where it runs again in a checkpoint, or after a call that nothing reads."""
    found = verified(Case(model, CLASSES, PAIR))
    assert found.agrees, told(found)
    assert not any("dropout" in text for text in found.made)


def test_what_is_checkpointed_runs_again_in_float64() -> None:
    found = verified(Case(RestartedNarrow, CLASSES, PAIR))
    assert found.agrees and found.difference < 1e-13, told(found)


def test_a_dropout_that_the_graph_does_not_have_turns_dropout_off_on_both_sides() -> None:
    found = verified(Case(Untraced, CLASSES, PAIR))
    assert found.agrees, told(found)
    assert found.made[-1] == "dropout disabled in plan and model"


def test_marks_that_do_not_suit_the_model_are_left_out() -> None:
    """Labels that are also used for a look-up cannot be -100."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(6, 8), nn.Linear(8, 6)

        def forward(self, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.head(self.table(y)), y)

    found = verified(Case(Both, {"y": ((), IDS)}, PAIR))
    assert found.agrees, told(found)
    assert found.made == ("y: 0 to 5",)
