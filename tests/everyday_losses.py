"""Everyday losses: `loss(z, y, m)` of logits z [b, s, c], labels y [b, s] (ragged) and a mask m [b, s]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SAMPLES, LENGTH, CLASSES = 6, 5, 7
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


class Model(nn.Module):
    """Model from x [b, s, 4], labels [b, s] (ragged) and mask [b, s] to loss(logits [b, s, classes], labels, mask)."""

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


def ctc(z: Tensor, y: Tensor, m: Tensor, **options: Any) -> Tensor:
    """CTC of as many labels of each sample as the mask says, less two: some have none."""
    steps, lengths = torch.full((z.size(0),), z.size(1)), (m.sum(1).long() - 2).clamp(min=0)
    return F.ctc_loss(z.log_softmax(-1).transpose(0, 1), y[:, 2:].clamp(min=1), steps, lengths, **options)


def positive(y: Tensor) -> Tensor:
    return y.clamp(min=0)


# Sums and counts: exact for any microbatches.
EXACT: dict[str, Loss] = {
    "cross_entropy": lambda z, y, m: flat_ce(z, y),
    "cross_entropy_shifted": lambda z, y, m: flat_ce(z, shifted(y)),
    "cross_entropy_ignore_index": lambda z, y, m: flat_ce(z, y.masked_fill(y < 0, 3), ignore_index=3),
    "cross_entropy_label_smoothing": lambda z, y, m: flat_ce(z, y, label_smoothing=0.1),
    "cross_entropy_sum": lambda z, y, m: flat_ce(z, y, reduction="sum"),
    "cross_entropy_over_sum": lambda z, y, m: flat_ce(z, y, reduction="sum") / (y != -100).sum(),
    "cross_entropy_n_c_d": lambda z, y, m: F.cross_entropy(z.transpose(1, 2), y),
    "cross_entropy_in_float32": lambda z, y, m: flat_ce(z.float(), y).double(),
    "ctc": lambda z, y, m: ctc(z, y, m),
    "ctc_sum": lambda z, y, m: ctc(z, y, m, reduction="sum", zero_infinity=True),
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
    "bce_weighted_by_what_another_loss_broadcasts": lambda z, y, m: (
        F.smooth_l1_loss(z[..., 1], m) + F.binary_cross_entropy(z[..., 0].sigmoid(), m, weight=m + 1)
    ),
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


def class_weights() -> Tensor:
    return torch.linspace(0.5, 2, CLASSES, dtype=torch.float64)


def soft(y: Tensor) -> Tensor:
    return F.one_hot(positive(y), CLASSES).double() * 0.8 + 0.2 / CLASSES


def flat_ce_soft(z: Tensor, y: Tensor, **options: object) -> Tensor:
    return F.cross_entropy(z.reshape(-1, CLASSES), soft(y).reshape(-1, CLASSES), **options)  # type: ignore[arg-type]


def looked_up(y: Tensor) -> Tensor:
    return class_weights()[positive(y)]


# A sum over samples ÷ a number that depends on inputs and constants only, in any notation.
RATIOS: dict[str, Loss] = {
    "class_weights": lambda z, y, m: flat_ce(z, y, weight=class_weights()),
    "class_weights_smoothed": lambda z, y, m: flat_ce(z, y, weight=class_weights(), label_smoothing=0.1),
    "class_weights_n_c_d": lambda z, y, m: F.cross_entropy(z.transpose(1, 2), y, weight=class_weights()),
    "class_weights_nll": lambda z, y, m: F.nll_loss(
        z.log_softmax(-1).view(-1, CLASSES), y.view(-1), weight=class_weights()
    ),
    "class_weights_sum": lambda z, y, m: flat_ce(z, y, weight=class_weights(), reduction="sum"),
    "soft_labels": lambda z, y, m: flat_ce_soft(z, y),
    "soft_labels_weighted": lambda z, y, m: flat_ce_soft(z, y, weight=class_weights(), label_smoothing=0.1),
    "eps": lambda z, y, m: (z.square().mean(-1) * m).sum() / (m.sum() + 1e-5),
    "eps_large": lambda z, y, m: (z.square().mean(-1) * m).sum() / (m.sum() + 3.5),
    "clamp_small": lambda z, y, m: (z.square().mean(-1) * m).sum() / m.sum().clamp(min=1e-6),
    "clamp_that_binds": lambda z, y, m: (z.square().mean(-1) * m).sum() / m.sum().clamp(min=100.0),
    "clamp_between": lambda z, y, m: (z.square().mean(-1) * m).sum() / m.sum().clamp(2.0, 7.0),
    "maximum": lambda z, y, m: (z.mean(-1) * m).sum() / torch.maximum(m.sum(), torch.ones((), dtype=m.dtype)),
    "maximum_of_int": lambda z, y, m: (z.mean(-1) * m).sum() / torch.maximum((y > 0).sum(), torch.tensor(1)),
    "where_none": lambda z, y, m: (z.mean(-1) * m).sum() / torch.where(m.sum() > 0, m.sum(), torch.ones_like(m.sum())),
    "mean_over_mean": lambda z, y, m: (z.square().mean(-1) * m).mean() / m.mean(),
    "mean_over_mean_eps": lambda z, y, m: (z.square().mean(-1) * m).mean() / (m.mean() + 1e-3),
    "image_modelling": lambda z, y, m: (z.square() * m[..., None]).sum() / (m.sum() + 1e-5) / CLASSES,
    "weights_by_label": lambda z, y, m: (
        (F.cross_entropy(z.transpose(1, 2), positive(y), reduction="none") * looked_up(y)).sum() / looked_up(y).sum()
    ),
    "weights_normalised": lambda z, y, m: (z.square().mean(-1) * (m / m.sum())).sum(),
    "weights_over_largest": lambda z, y, m: (z.square().mean(-1) * m * y / y.max()).mean(),
    "weights_over_smallest": lambda z, y, m: (z.square().mean(-1) / (y.amin().abs() + 1)).mean(),
    "any_valid": lambda z, y, m: torch.where((y >= 0).any(), z.square().sum(), z.sum()) / m.sum(),
    "all_valid": lambda z, y, m: torch.where((y >= 0).all(), z.square().sum(), z.sum()) / m.sum(),
    "targets_standardised": lambda z, y, m: F.mse_loss(z[..., 0], (m - m.mean()) / (m.std() + 1e-3)),
    "inverse_frequencies": lambda z, y, m: (
        F.nll_loss(z.log_softmax(-1).transpose(1, 2), positive(y), reduction="none")
        * (1 / (F.one_hot(positive(y), CLASSES).sum((0, 1)).double() + 1))[positive(y)]
    ).mean(),
    "power_of_a_count": lambda z, y, m: (z.mean(-1) * m).sum() / m.sum().square(),
    "root_of_a_count": lambda z, y, m: (z.mean(-1) * m).sum() / m.sum().sqrt(),
    "square_of_the_batch": lambda z, y, m: z.square().sum() / z.size(0) ** 2,
    "batch_less_one": lambda z, y, m: z.square().sum() / (z.size(0) - 1),
    "batch_as_a_tensor": lambda z, y, m: z.square().sum() / z.new_full((), z.size(0)),
    "each_over_the_batch": lambda z, y, m: (z.square() / z.size(0)).sum(),
    "offset": lambda z, y, m: 1 - F.cosine_similarity(z[..., :3], z[..., 3:6], dim=-1).mean(),
    "offset_added": lambda z, y, m: z.square().mean() + 2.5,
    "offset_taken_away": lambda z, y, m: z.square().mean() - 0.5,
    "dot": lambda z, y, m: torch.dot(z[..., 0].flatten(), m.flatten()) / m.sum(),
    "matmul": lambda z, y, m: (m.flatten() @ z.flatten(0, 1)).sum() / m.sum(),
    "einsum": lambda z, y, m: torch.einsum("bsc,bs->", z, m) / m.sum(),
    "norm_1": lambda z, y, m: z.norm(p=1) / m.sum(),
    "cosine_embedding": lambda z, y, m: F.cosine_embedding_loss(z[:, 0], z[:, 1], (m[:, 3] * 2 - 1)),
    "triplet": lambda z, y, m: F.triplet_margin_loss(z[:, 0], z[:, 1], z[:, 2]),
    "margin_ranking": lambda z, y, m: F.margin_ranking_loss(z[:, 0, 0], z[:, 1, 0], m[:, 3] * 2 - 1, margin=0.3),
    "hinge": lambda z, y, m: F.hinge_embedding_loss(z[..., 0], m * 2 - 1),
    "multi_margin": lambda z, y, m: F.multi_margin_loss(z[:, 0], positive(y[:, 4])),
    "poisson": lambda z, y, m: F.poisson_nll_loss(z[..., 0], m),
    "gaussian": lambda z, y, m: (0.5 * (z[..., 1] + (z[..., 0] - m).square() / z[..., 1].exp())).mean(),
    "gaussian_nll": lambda z, y, m: F.gaussian_nll_loss(z[..., 0], m, z[..., 1].square()),
    "gaussian_nll_full": lambda z, y, m: F.gaussian_nll_loss(
        z[..., :3], z[..., 3:6], z[..., 6].exp(), full=True, eps=1
    ),
    "gaussian_nll_sum": lambda z, y, m: F.gaussian_nll_loss(z[..., 0], m, z[:, :1, 1].exp(), reduction="sum") / m.sum(),
    "multilabel_soft_margin": lambda z, y, m: F.multilabel_soft_margin_loss(z[:, 0], soft(y)[:, 0].round()),
    "focal": lambda z, y, m: (
        ((1 - (-F.cross_entropy(z.transpose(1, 2), positive(y), reduction="none")).exp()).square() * m).sum()
        / (m.sum() + 1e-8)
    ),
    "rows": lambda z, y, m: flat_ce(z, y, reduction="none").mean(),
    "rows_masked": lambda z, y, m: (flat_ce(z, y, reduction="none") * m.flatten()).sum() / m.sum(),
    "rows_by_sample": lambda z, y, m: (
        (flat_ce(z, y, reduction="none").view(len(y), -1) * m).sum(1) / (m.sum(1) + 1)
    ).mean(),
    "rows_soft": lambda z, y, m: (flat_ce_soft(z, y, reduction="none", label_smoothing=0.1) * m.flatten()).mean(),
    "rows_weighted": lambda z, y, m: flat_ce(z, positive(y), reduction="none", weight=class_weights()).mean(),
    "rows_nll": lambda z, y, m: (
        F.nll_loss(z.log_softmax(-1).flatten(0, 1), positive(y).flatten(), reduction="none").square().mean()
    ),
    "rows_focal": lambda z, y, m: (
        (1 - (-flat_ce(z, y, reduction="none")).exp()).square() * flat_ce(z, y, reduction="none")
    ).mean(),
    "log_probability_of_groups": lambda z, y, m: (z.logsumexp(-1) * m).sum() / m.sum().clamp(min=1),
}


# A function of a few sums that depend on parameters.
FUNCTIONS: dict[str, Loss] = {
    "root": lambda z, y, m: F.mse_loss(z[..., 0], m).sqrt(),
    "root_of_ratio": lambda z, y, m: ((z.square().mean(-1) * m).sum() / (m.sum() + 1e-5)).sqrt(),
    "exp_of_mean": lambda z, y, m: flat_ce(z, y).exp(),
    "log_sum_exp": lambda z, y, m: z.flatten().logsumexp(0),
    "log_mean_exp": lambda z, y, m: z.exp().mean().log(),
    "norm": lambda z, y, m: z.norm(),
    "norm_3": lambda z, y, m: torch.linalg.vector_norm(z, 3),
    "norm_of_zeros": lambda z, y, m: flat_ce(z, y) + (0 * z).norm() + torch.linalg.vector_norm(0 * z, 3),
    "deviation_of_equals": lambda z, y, m: flat_ce(z, y) + (0 * z).std() + (0 * z + 1).std((0, 1)).sum(),
    "norm_per_class": lambda z, y, m: torch.linalg.vector_norm(z, dim=(0, 1)).sum(),
    "dice": lambda z, y, m: 1 - (2 * (z[..., 0].sigmoid() * m).sum() + 1) / (z[..., 0].sigmoid().sum() + m.sum() + 1),
    "dice_per_class": lambda z, y, m: (
        1 - (2 * (z.softmax(-1) * soft(y)).sum((0, 1)) / (z.softmax(-1).sum((0, 1)) + soft(y).sum((0, 1)))).mean()
    ),
    "tversky": lambda z, y, m: (
        -(z[..., 0].sigmoid() * m).sum()
        / ((z[..., 0].sigmoid() * m).sum() + 0.3 * (z[..., 0].sigmoid() * (1 - m)).sum() + 1e-6)
    ),
    "learned_weights": lambda z, y, m: (z[..., 0].square() * z[..., 1].sigmoid()).sum() / z[..., 1].sigmoid().sum(),
    "learned_weights_clamped": lambda z, y, m: (
        (z[..., 0] * z[..., 1].exp()).sum() / z[..., 1].exp().sum().clamp(min=1e-6)
    ),
    "switch": lambda z, y, m: (
        CLASSES * (z.softmax(-1).mean((0, 1)) * F.one_hot(z.argmax(-1), CLASSES).double().mean((0, 1))).sum()
    ),
    "balance": lambda z, y, m: (z.softmax(-1).mean((0, 1)) * z.mean((0, 1))).sum(),
    "balance_mean": lambda z, y, m: z.mean((0, 1)).square().mean(),
    "entropy_of_the_mean": lambda z, y, m: (lambda p: (p * p.log()).sum())(z.softmax(-1).mean((0, 1))),
    "labels_of_the_model": lambda z, y, m: flat_ce(z, z.argmax(-1)),
    "labels_of_the_model_weighted": lambda z, y, m: flat_ce(z, z.argmax(-1), weight=class_weights()),
    "count_of_the_model": lambda z, y, m: (z * m[..., None]).sum() / (z > 0).sum(),
    "count_of_the_model_guarded": lambda z, y, m: (z * m[..., None]).sum() / ((z > 0).sum() + 1),
    "confident_only": lambda z, y, m: (
        ((z.softmax(-1).amax(-1) > 0.2) * z.square().mean(-1)).sum() / (z.softmax(-1).amax(-1) > 0.2).sum().clamp(min=1)
    ),
    "standard_deviation": lambda z, y, m: z.std(),
    "variance_per_class": lambda z, y, m: z.var((0, 1)).sum(),
    "variance_of_all": lambda z, y, m: z.var(unbiased=False),
    "hinge_on_std": lambda z, y, m: F.relu(1.5 - (z.flatten(0, 1).var(0) + 1e-4).sqrt()).mean(),
    "correlation": lambda z, y, m: (
        -((z[..., 0] * m).mean() - z[..., 0].mean() * m.mean())
        / (z[..., 0].square().mean() - z[..., 0].mean().square()).sqrt()
    ),
    "larger_of_two": lambda z, y, m: torch.maximum(z.mean(), F.mse_loss(z[..., 0], m)),
    "distance_of_a_mean": lambda z, y, m: (z.mean() - 0.3).abs(),
    "clamped_mean": lambda z, y, m: z.square().mean().clamp(min=0.1),
    "term_beside": lambda z, y, m: flat_ce(z, y) + 0.1 * F.mse_loss(z[..., 0], m).sqrt() + 1.0,
    "two_products": lambda z, y, m: flat_ce(z, y) * z.square().mean(),
    "mean_class_accuracy": lambda z, y, m: (
        ((z.softmax(-1) * soft(y)).sum((0, 1)) / soft(y).sum((0, 1)).clamp(min=1e-6)).square().mean()
    ),
    "weights_of_the_mean": lambda z, y, m: (z.mean((0, 1)).softmax(0) * class_weights()).sum(),
    "mean_of_the_wrong_ones": lambda z, y, m: (
        (z.square().mean(-1) * (z.argmax(-1) != y)).sum() / (1 + (z.argmax(-1) != y).sum())
    ),
    "a_count_less_a_number": lambda z, y, m: z.square().mean() * (7 - (z[..., 0] > 0.1).sum()),
}


# Not a function of a few sums.
REFUSED: dict[str, tuple[Loss, str]] = {
    "max": (lambda z, y, m: z.square().max(), "max needs all samples of the batch at once"),
    "amax": (lambda z, y, m: z.square().amax((0, 1)).sum(), "amax needs all samples"),
    "median": (lambda z, y, m: z.median(), "median needs all samples"),
    "norm_inf": (lambda z, y, m: torch.linalg.vector_norm(z, float("inf")), "vector_norm needs all samples"),
    "product": (lambda z, y, m: z.square().prod(), "prod needs all samples"),
    "first_sample": (lambda z, y, m: z[0].square().mean(), "select needs all samples"),
    "noise_on_pairs": (lambda z, y, m: F.dropout(z[:, 0] @ z[:, 0].T, 0.5).mean(), "pairs samples"),
}


def first(z: Tensor) -> Tensor:
    return F.normalize(z[:, 0], dim=-1)


def clip(u: Tensor, v: Tensor, t: Tensor) -> Tensor:
    logits, own = t.exp() * u @ v.t(), torch.arange(len(u))
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.t(), own)) / 2


def two_views(z: Tensor) -> Tensor:
    """Compare each view of a sample with all other views of all samples (Chen et al. 2020, SimCLR)."""
    views = torch.cat((first(z), F.normalize(z[:, 1], dim=-1)))
    b = z.size(0)
    logits = (views @ views.t() / 0.5).masked_fill(torch.eye(2 * b, dtype=torch.bool), -1e9)
    return F.cross_entropy(logits, torch.arange(2 * b).roll(b))


def same_class(z: Tensor, ids: Tensor) -> Tensor:
    """Pull samples with equal ids together (Khosla et al. 2020, Supervised Contrastive Learning)."""
    alike = (ids[:, None] == ids[None]).double()
    chances = (first(z) @ first(z).t()).log_softmax(-1)
    return -((chances * alike).sum(-1) / alike.sum(-1)).mean()


def hardest_triplet(z: Tensor, ids: Tensor) -> Tensor:
    apart = (first(z)[:, None] - first(z)[None]).square().sum(-1)
    alike = ids[:, None] == ids[None]
    near = apart.masked_fill(alike, 1e9).amin(1)
    return F.relu(apart.masked_fill(~alike, 0.0).amax(1) - near + 0.3).mean()


# Functions of all samples of the batch together.
# One number of all samples that is no sum over them.
PICKED: dict[str, Callable[[Tensor], Tensor]] = {
    "maximum": lambda x: x.max(),
    "median": lambda x: x.detach().median(),
    "quantile": lambda x: x.detach().quantile(0.7),
    "two_largest": lambda x: x.topk(2).values.mean(),
    "product": lambda x: x.prod(),
    "first": lambda x: x[0],
    "place": lambda x: x.argmax() / 7,
    "cosine": lambda x: F.cosine_similarity(x, x * x, dim=0),
}


def by_sample(z: Tensor) -> Tensor:
    return z.square().flatten(1).mean(1)


WHOLE: dict[str, Loss] = {
    **{
        name: lambda z, y, m, pick=pick: (by_sample(z) - pick(by_sample(z))).square().mean()
        for name, pick in PICKED.items()
    },
    "clip": lambda z, y, m: clip(first(z), F.normalize(z[:, 2], dim=-1), z.new_tensor(0.7)),
    "clip_beside_cross_entropy": lambda z, y, m: flat_ce(z, y) + 0.1 * clip(first(z), z[:, 1], z.mean()),
    "siglip": lambda z, y, m: (
        -F.logsigmoid((2 * torch.eye(z.size(0)) - 1) * (first(z) @ first(z).t())).sum() / z.size(0)
    ),
    "two_views": lambda z, y, m: two_views(z),
    "same_class": lambda z, y, m: same_class(z, positive(y[:, 4])),
    "same_long_number": lambda z, y, m: same_class(z, positive(y[:, 4]) + 2**62 - 3),
    "hardest_triplet": lambda z, y, m: hardest_triplet(z, positive(y[:, 4]) % 3),
    "pairwise_ranking": lambda z, y, m: F.relu(
        1 - (z[:, 0, 0][:, None] - z[:, 0, 0]) * (m[:, 1][:, None] - m[:, 1])
    ).mean(),
    "negatives_of_the_next": lambda z, y, m: F.triplet_margin_loss(z[:, 0], z[:, 1], z[:, 0].roll(1, 0)),
    "mean_of_others": lambda z, y, m: (first(z) - first(z).mean(0)).abs().mean(),
    "standardised": lambda z, y, m: F.huber_loss((z[:, 0] - z[:, 0].mean(0)) / z[:, 0].std(0), m[:, :1].expand(-1, 7)),
    "samples_last": lambda z, y, m: (lambda f: (f.t() @ f).softmax(-1).diagonal().log().mean())(z[:, 0].t().tanh()),
    "broadcast": lambda z, y, m: F.mse_loss(z[:, 0, :1], z[:, 1, 1] * m[:, 0]),
    "covariance": lambda z, y, m: (z[:, 0] @ z[:, 0].T).square().mean(),
    "covariance_of_features": lambda z, y, m: z[:, 0].t().cov().square().sum() + z[:, 1].t().corrcoef().triu(1).sum(),
    "softmax_over_samples": lambda z, y, m: (z[:, 0, 0].softmax(0) * m[:, 0]).sum(),
    "place_of_the_sample": lambda z, y, m: (z[:, 0].sum(-1) * torch.arange(z.size(0))).sum(),
    "tokens_counted_at_the_end": lambda z, y, m: (
        z[:, 0].amax(0).sum() * torch.arange(z.size(1)).sum().log() + z.mean().exp()
    ),
    "weights_that_have_no_derivative": lambda z, y, m: F.cross_entropy(
        first(z) @ first(z).t(), torch.arange(z.size(0)), weight=1 + m[:, 0]
    ),
}

# Exact where all samples have the number of tokens of the example.
AT_ONE_LENGTH: dict[str, Loss] = {
    "pairs_of_tokens": lambda z, y, m: torch.einsum("isc,jsc->ij", z, z).square().mean(),
    "distances_of_masks": lambda z, y, m: F.mse_loss(first(z) @ first(z).t(), m @ m.t()),
    "masks_in_common": lambda z, y, m: F.binary_cross_entropy_with_logits(
        first(z) @ first(z).t(), (m @ m.t() > 2).double(), pos_weight=1 + m @ m.t()
    ),
    "labels_of_the_next": lambda z, y, m: flat_ce(z, y.roll(1, 0)),
    "norm_of_each_token": lambda z, y, m: z.square().sum((0, 2)).sqrt().mean(),
    "share_of_the_mask": lambda z, y, m: (z.square().mean(-1).sum(0) / (1 + m.sum(0))).sum() * z.mean().exp(),
}
