"""Features of images that a mask places into tokens: as on one process, or an error where a sample lacks some."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.errors import RuntimeFault
from autoptd.parallel import Parallel
from autoptd.testing.parity import differences, train_alone, train_in_lockstep
from tests.parity.parity_check import TOLERANCE

IMAGE, WORDS, WIDTH, TOKENS, PATCHES = 30, 31, 16, 8, 3
Place = Callable[[Tensor, Tensor, Tensor], Tensor]  # of x [b, s, h], mask [b, s], features [b, t, h] -> x


def put(x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    x = x.clone()
    x[mask] = y.flatten(0, 1)
    return x


WAYS: dict[str, Place] = {
    "masked_scatter": lambda x, mask, y: x.masked_scatter(mask[..., None], y),
    "masked_scatter of an expanded mask": lambda x, mask, y: x.masked_scatter(
        mask[..., None].expand_as(x), y.flatten(0, 1)
    ),
    "indexed": put,
    "added to": lambda x, mask, y: x.masked_scatter(mask[..., None], (x[mask] * y.flatten(0, 1).sigmoid()).view(-1)),
}


def seen(y: Tensor) -> Tensor:
    """Mark the features of a sample that are no padding, whose last element is 0."""
    return y.detach()[..., -1] != 0


def put_seen(x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    x = x.clone()
    x[mask] = torch.tanh(y[seen(y)])
    return x


def added_to_seen(x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    features, tokens = y[seen(y)], x[mask]
    torch._check(features.shape[0] == tokens.shape[0])
    return x.masked_scatter(mask[..., None], (features * tokens.sigmoid()).view(-1))


def by_sample(x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    """Put together a list of the features of each sample, as models with several pictures per sample do."""
    kept = seen(y)
    parts = [part.reshape(-1, WIDTH) for part in y.flatten(0, 1)[kept.flatten()].split(kept.sum(1).tolist())]
    return x.masked_scatter(mask[..., None], torch.cat(parts))


def by_number(x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    """Read features at the numbers of their rows, and at places within each, as masks of attention are read."""
    rows = y[seen(y)]
    rows = rows[torch.arange(rows.shape[0])[:, None], torch.arange(WIDTH)[None].flip(1)]
    same = y.new_ones(WIDTH).cumsum(0).expand(rows.shape[0], -1)
    return x.masked_scatter(mask[..., None], torch.stack([rows, same.tanh()], 1).softmax(1)[:, 0])


PADDED: dict[str, Place] = {
    "masked_scatter": lambda x, mask, y: x.masked_scatter(mask[..., None], y[seen(y)]),
    "of an expanded mask": lambda x, mask, y: x.masked_scatter(mask[..., None].expand_as(x), y[seen(y)]),
    "indexed": put_seen,
    "added to": added_to_seen,
    "split by sample": by_sample,
    "read by number": by_number,
}


class Captioner(nn.Module):
    def __init__(self, place: Place) -> None:
        super().__init__()
        self.words, self.place = nn.Embedding(WORDS, WIDTH), place
        self.see, self.project = nn.Linear(12, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, image: Tensor, labels: Tensor) -> Tensor:
        features = self.project(F.gelu(self.see(image))) * (image[..., :1] != 0)
        x = self.place(self.words(ids), ids == IMAGE, features)
        x = x + self.down(F.gelu(self.up(x)))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batch() -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(0, IMAGE, (6, TOKENS), generator=rng)
    for i in range(6):
        ids[i, torch.randperm(TOKENS, generator=rng)[:PATCHES]] = IMAGE
    image = torch.randn(6, PATCHES, 12, generator=rng, dtype=torch.float64)
    return {"ids": ids, "image": image, "labels": ids.roll(1, 1)}


def made(place: Place, **fix: int) -> tuple[Captioner, Parallel]:
    torch.manual_seed(0)
    model, inputs = Captioner(place).double(), {n: x[:2] for n, x in batch().items()}
    ask = {"world": 4, "cluster": "dgx-h100", "batch": 6, "precision": "fp64", "optimizer": "sgd"}
    return model, autoptd.parallelize(model, inputs=inputs, optimizer_options={"lr": 0.05}, fix=fix, **ask)  # type: ignore[arg-type]


def padded() -> dict[str, Tensor]:
    """Return a batch whose sample i has features in 1 + i % 3 of its places, and as many tokens for them."""
    made = batch()
    for i in range(6):
        made["image"][i, torch.randperm(PATCHES, generator=torch.Generator().manual_seed(i))[1 + i % 3 :]] = 0
        made["ids"][i, (made["ids"][i] == IMAGE).nonzero()[1 + i % 3 :]] = 0
    return made


def check(place: Place, data: dict[str, Tensor], **fix: int) -> None:
    model, parallel = made(place, **fix)
    found = train_in_lockstep(parallel, [data])
    alone = train_alone(model, [data], optimizer="sgd", optimizer_options={"lr": 0.05})
    assert found.losses[0] == pytest.approx(alone.losses[0], rel=TOLERANCE)
    assert max(differences(found.gradients, alone.gradients).values()) <= TOLERANCE


MESHES = pytest.mark.parametrize(
    "fix",
    [{"dp": 2, "tp": 2, "micro": 3}, {"pp": 2, "tp": 2, "micro": 2}, {"cp": 2, "tp": 2, "micro": 2}, {"cp": 4}],
    ids=str,
)


@MESHES
@pytest.mark.parametrize("way", WAYS)
def test_as_on_one_process(way: str, fix: dict[str, int]) -> None:
    check(WAYS[way], batch(), **fix)


@MESHES
@pytest.mark.parametrize("way", PADDED)
def test_features_without_their_padding_are_as_on_one_process(way: str, fix: dict[str, int]) -> None:
    check(PADDED[way], padded(), **fix)


def test_several_rows_of_each_feature_are_as_on_one_process() -> None:
    data = padded()
    for i in range(6):  # two tokens for each feature
        data["ids"][i, : 2 * (1 + i % 3)], data["ids"][i, 2 * (1 + i % 3) :] = IMAGE, 0
    twice = lambda y: torch.stack([y, y.tanh()], 1).flatten(0, 1)  # noqa: E731
    check(lambda x, mask, y: x.masked_scatter(mask[..., None], twice(y[seen(y)])), data, dp=2, tp=2, micro=3)


@pytest.mark.fault("padding among features")
def test_padding_that_comes_before_features_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    sort = Tensor.argsort
    monkeypatch.setattr(Tensor, "argsort", lambda x, dim, stable: sort(x, dim=dim, descending=True, stable=stable))
    with pytest.raises(AssertionError):
        check(PADDED["masked_scatter"], padded(), dp=2, tp=2, micro=3)


@pytest.mark.fault("features of another sample")
@pytest.mark.parametrize("place", [WAYS["masked_scatter"], *PADDED.values()], ids=range(7))
def test_a_sample_that_marks_another_number_of_tokens_is_refused(place: Place) -> None:
    """One process would give the first sample a feature of the second."""
    _, parallel = made(place, dp=2, tp=2, micro=1)
    wrong = batch()
    wrong["ids"][0], wrong["ids"][1, wrong["ids"][1] == IMAGE] = IMAGE, 0
    with pytest.raises(RuntimeFault, match="selects another number of rows"):
        train_in_lockstep(parallel, [wrong])
