"""The loss of a batch does not depend on how the batch is cut into microbatches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from interpret import assert_same, assert_unchanged, in_microbatches, normalised, whole
from torch import Tensor, nn

from autoptd.errors import InputsError, TraceError
from autoptd.passes.trace import loss_of, trace

SAMPLES, LENGTH, CLASSES = 6, 5, 7
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


class Model(nn.Module):
    """x [b, s, 4], labels [b, s] ragged, mask [b, s] -> loss(logits [b, s, classes], labels, mask)."""

    def __init__(self, loss: Loss, classes: int = CLASSES) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8)
        self.head = nn.Linear(8, classes)
        self.register_buffer("weights", torch.linspace(0.5, 2.0, CLASSES))
        self.loss = loss

    def forward(self, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        return self.loss(self.head(self.inner(x).tanh()), labels, mask)


def ragged() -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(0)
    labels = torch.randint(0, CLASSES, (SAMPLES, LENGTH), generator=rng)
    for i in range(SAMPLES):
        labels[i, : i % LENGTH] = -100
    mask = (torch.arange(LENGTH) < torch.tensor([[5], [1], [3], [2], [4], [1]])).double()
    return {"x": torch.randn(SAMPLES, LENGTH, 4, generator=rng, dtype=torch.float64), "labels": labels, "mask": mask}


def model_of(loss: Loss, classes: int = CLASSES) -> Model:
    torch.manual_seed(0)
    return Model(loss, classes).double()


def shifted(labels: Tensor) -> Tensor:
    return F.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()


def flat_ce(z: Tensor, y: Tensor, **options: object) -> Tensor:
    return F.cross_entropy(z.view(-1, CLASSES), y.view(-1), **options)  # type: ignore[arg-type]


def positive(y: Tensor) -> Tensor:
    return y.clamp(min=0)


# What is summed and counted: exact, whatever the microbatches hold.
EXACT: dict[str, Loss] = {
    "cross_entropy": lambda z, y, m: flat_ce(z, y),
    "cross_entropy_shifted": lambda z, y, m: flat_ce(z, shifted(y)),
    "cross_entropy_ignore_index": lambda z, y, m: flat_ce(z, y.masked_fill(y < 0, 3), ignore_index=3),
    "cross_entropy_label_smoothing": lambda z, y, m: flat_ce(z, y, label_smoothing=0.1),
    "cross_entropy_sum": lambda z, y, m: flat_ce(z, y, reduction="sum"),
    "cross_entropy_over_sum": lambda z, y, m: flat_ce(z, y, reduction="sum") / (y != -100).sum(),
    "cross_entropy_n_c_d": lambda z, y, m: F.cross_entropy(z.transpose(1, 2), y),
    "cross_entropy_in_float32": lambda z, y, m: flat_ce(z.float(), y).double(),
    "nll_of_log_softmax": lambda z, y, m: F.nll_loss(z.log_softmax(-1).view(-1, CLASSES), y.view(-1)),
    "mean": lambda z, y, m: z.square().mean(),
    "mean_over_dims": lambda z, y, m: z.square().mean(dim=(0, 1, 2)),
    "mean_of_sample_means": lambda z, y, m: z.square().mean(dim=(1, 2)).mean(),
    "sum": lambda z, y, m: z.square().sum(),
    "sum_over_dims": lambda z, y, m: z.square().sum(dim=(0, 1, 2)),
    "sum_over_batch_size": lambda z, y, m: z.square().sum() / z.size(0),
    "sum_over_element_count": lambda z, y, m: z.square().sum() / (2 * z.size(0) * z.size(1)),
    "masked_average": lambda z, y, m: (z.square().mean(-1) * m).sum() / m.sum(),
    "masked_average_guarded": lambda z, y, m: (z.square().mean(-1) * m).sum() / m.sum().clamp(min=1),
    "masked_average_scaled": lambda z, y, m: -0.1 * (z.mean(-1) * m).sum() / m.sum(),
    "masked_average_cast": lambda z, y, m: (z.mean(-1) * (y != -100)).sum() / (y != -100).sum().double(),
    "mse": lambda z, y, m: F.mse_loss(z[..., 0], m),
    "mse_sum": lambda z, y, m: F.mse_loss(z[..., 0], m, reduction="sum"),
    "l1": lambda z, y, m: F.l1_loss(z[..., 0], m),
    "smooth_l1": lambda z, y, m: F.smooth_l1_loss(z[..., 0], m, beta=0.3),
    "huber": lambda z, y, m: F.huber_loss(z[..., 0], m, delta=0.4),
    "bce_with_logits": lambda z, y, m: F.binary_cross_entropy_with_logits(z[..., 0], m),
    "bce_weighted": lambda z, y, m: F.binary_cross_entropy_with_logits(z[..., 0], m, weight=m + 1),
    "bce": lambda z, y, m: F.binary_cross_entropy(z[..., 0].sigmoid(), m),
    "kl_div": lambda z, y, m: F.kl_div(z.log_softmax(-1), F.one_hot(positive(y), CLASSES).double()),
    "kl_div_batchmean": lambda z, y, m: F.kl_div(
        z.log_softmax(-1), F.one_hot(positive(y), CLASSES).double(), reduction="batchmean"
    ),
    "two_terms": lambda z, y, m: flat_ce(z, y) + 0.1 * (z.square().mean(-1) * m).sum() / m.sum(),
    "difference": lambda z, y, m: flat_ce(z, y) - z.square().mean() / 3,
    "negative": lambda z, y, m: flat_ce(z, y).neg().neg(),
    "scaled_by_a_tensor": lambda z, y, m: torch.tensor(0.5, dtype=torch.float64) * flat_ce(z, y),
    "scaled_on_the_left": lambda z, y, m: 2 * flat_ce(z, y) / 7,
}


@pytest.mark.parametrize("name", EXACT)
def test_exact(name: str) -> None:
    tolerant = 1e-6 if "float32" in name else 1e-12
    model, batch = model_of(EXACT[name]), ragged()
    traced = normalised(model, batch)
    assert not traced.graph.meta["loss_notes"]
    wanted = whole(model, batch)
    for pieces in ([6], [1, 3, 2], [3, 3], [1] * 6):
        assert_same(in_microbatches(model, traced, batch, pieces), wanted, tolerant)


def test_microbatch_without_a_valid_token() -> None:
    batch = ragged()
    batch["labels"][0] = -100
    assert_unchanged(model_of(EXACT["cross_entropy"]), batch)


class Regularised(Model):
    """A penalty that no input reaches counts once, not once per microbatch."""

    def forward(self, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x, labels, mask) + 0.01 * self.head.weight.square().sum() + self.inner.bias.mean()


def test_penalty_on_parameters_counts_once() -> None:
    torch.manual_seed(0)
    traced = assert_unchanged(Regularised(EXACT["cross_entropy"]).double(), ragged())
    assert not traced.graph.meta["loss_notes"]


class Constant(Model):
    def forward(self, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x, labels, mask) + self.weights.sum() + mask.sum() / mask.sum()


def test_terms_without_gradient_keep_their_value() -> None:
    torch.manual_seed(0)
    assert_unchanged(Constant(EXACT["mean"]).double(), ragged(), pieces=(2, 2, 2))


# What has no such form: a mean over samples, said in a note; exact in one piece.
INEXACT: dict[str, Loss] = {
    "class_weights": lambda z, y, m: flat_ce(z, y, weight=torch.linspace(0.5, 2, CLASSES, dtype=torch.float64)),
    "root": lambda z, y, m: F.mse_loss(z[..., 0], m).sqrt(),
    "balance": lambda z, y, m: (z.softmax(-1).mean((0, 1)) * z.mean((0, 1))).sum(),
    "balance_mean": lambda z, y, m: z.mean((0, 1)).square().mean(),
    "labels_of_the_model": lambda z, y, m: flat_ce(z, z.argmax(-1)),
    "count_of_the_model": lambda z, y, m: (z * m[..., None]).sum() / (z > 0).sum(),
    "count_that_is_no_sum": lambda z, y, m: (z * m[..., None]).sum() / m.sum().square(),
    "soft_labels": lambda z, y, m: flat_ce_soft(z, y),
}


def flat_ce_soft(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z.view(-1, CLASSES), F.one_hot(positive(y).view(-1), CLASSES).double())


@pytest.mark.parametrize("name", INEXACT)
def test_falls_back_to_samples_and_says_so(name: str) -> None:
    model, batch = model_of(INEXACT[name]), ragged()
    traced = normalised(model, batch)
    (note,) = traced.graph.meta["loss_notes"]
    assert "averaged over samples" in note
    wanted = whole(model, batch)
    assert_same(in_microbatches(model, traced, batch, [6]), wanted)


@pytest.mark.parametrize("name", INEXACT)
def test_fallback_weighs_microbatches_by_samples(name: str) -> None:
    model, batch = model_of(INEXACT[name]), ragged()
    traced = normalised(model, batch)
    parts = [{n: x[a:b] for n, x in batch.items()} for a, b in ((0, 1), (1, 6))]
    losses = [whole(model, part).loss for part in parts]
    found = in_microbatches(model, traced, batch, [1, 5]).loss
    torch.testing.assert_close(found, losses[0] / 6 + losses[1] * 5 / 6)


def test_no_parameter_reaches_the_loss() -> None:
    with pytest.raises(TraceError, match="no trainable parameter reaches the loss"):
        normalised(model_of(lambda z, y, m: m.mean()), ragged())


def test_counts_depend_on_inputs_alone() -> None:
    traced = normalised(model_of(EXACT["two_terms"]), ragged())
    output = next(n for n in traced.graph.graph.nodes if n.op == "output")
    assert len(output.args) == 3
    assert [n.name for n in traced.graph.graph.nodes if n.name.startswith("loss_count")] == [
        "loss_count_0",
        "loss_count_1",
    ]


class Output:
    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


@pytest.mark.parametrize(
    "wrap", [lambda x: x, Output, lambda x: {"loss": x, "logits": torch.ones(3)}, lambda x: (x, torch.ones(3))]
)
def test_loss_is_found(wrap: Callable[[Tensor], object]) -> None:
    value = torch.tensor(2.0)
    assert loss_of(wrap(value), None, {}) is value


@pytest.mark.parametrize(
    "out", [torch.ones(3), {"logits": torch.ones(3)}, (torch.ones(2),), None, {"loss": torch.ones(3)}]
)
def test_no_loss_is_refused(out: object) -> None:
    with pytest.raises(InputsError, match="holds no scalar loss"):
        loss_of(out, None, {})


def test_loss_callable_takes_outputs_or_also_inputs() -> None:
    z = torch.ones(3)
    assert loss_of(z, lambda out: out.sum(), {}) == 3
    assert loss_of(z, lambda out, inputs: out.sum() * inputs["w"], {"w": torch.tensor(2)}) == 6


class Logits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


def test_loss_callable_is_traced_with_the_model() -> None:
    torch.manual_seed(0)
    model, x = Logits().double(), torch.randn(6, 4, dtype=torch.float64)
    traced = normalised(model, {"x": x}, loss=lambda out: out.square().mean())
    found = in_microbatches(model, traced, {"x": x}, [1, 5]).loss
    torch.testing.assert_close(found, model(x).square().mean().detach())


def test_a_model_without_loss_is_refused() -> None:
    with pytest.raises(InputsError, match="a tensor of 2 dims, which holds no scalar loss"):
        trace(Logits(), {"x": torch.ones(6, 4)})
