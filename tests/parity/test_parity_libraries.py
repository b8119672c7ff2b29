"""Ways of writing models that libraries have: each trains as in one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoptd.errors import InputsError
from autoptd.verification.copies import copied
from tests.parity.front_check import SAMPLES, WIDTH, Plain, Scored, random, wrong, x
from tests.parity.parity_models import randomised


class DataRead(Scored):
    """A model that reads a weight by `.data`."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(F.linear(self.first(x), self.middle.weight.data, self.middle.bias))
        return self.last(h).square().mean()


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_read_by_data(frozen: bool) -> None:
    """They have no gradient there, and still change with the steps."""
    model = randomised(DataRead())
    model.middle.weight.requires_grad_(not frozen)
    assert wrong(model, x()) == []


def test_a_model_that_has_run_is_copied() -> None:
    """The weight of the older weight norm is a computed tensor that the module holds."""
    model = Plain()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(model.middle)
    model(torch.randn(2, WIDTH)).sum().backward()
    other = copied(model, None).model
    assert torch.equal(other.middle.weight, model.middle.weight) and other.middle.weight.grad_fn is None
    assert wrong(randomised(model), x(), lambda out: out.square().mean()) == []


class Scales(Plain):
    """A model that takes a list of one constant apart."""

    def forward(self, x: Tensor) -> Tensor:
        (scale,) = x.new_full((1,), 0.5).unbind()
        return super().forward(x) * scale


def test_a_tuple_of_one_constant() -> None:
    assert wrong(randomised(Scales()), x(), lambda out: out.square().mean()) == []


class Moved(Plain):
    """A model that moves layers to where its input is, and others to the host."""

    def forward(self, x: Tensor) -> Tensor:
        self.last.to("cpu", x.dtype)
        hidden = self.middle.to(x)(torch.tanh(self.first.to(x.device)(x)))
        return self.last(torch.tanh(hidden)).square().mean()


def test_layers_moved_in_forward() -> None:
    assert wrong(randomised(Moved()), x()) == []


class Aligned(Scored):
    """A model with a sparse buffer, which the timing of words reads and training does not, as Whisper has."""

    def __init__(self, read: Callable[[Tensor], Any] | None = None) -> None:
        super().__init__()
        self.read = read
        self.register_buffer("heads", torch.eye(4).to_sparse(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 if self.read is None else self.read(self.heads))


def test_a_sparse_buffer_that_forward_does_not_read() -> None:
    assert wrong(randomised(Aligned()), x()) == []


@pytest.mark.parametrize("read", [Tensor.to_dense, len, lambda heads: heads.is_sparse, lambda heads: heads.sum()])
def test_a_sparse_buffer_that_forward_reads(read: Callable[[Tensor], Any]) -> None:
    with pytest.raises(InputsError, match="forward reads a buffer that is not a dense tensor"):
        wrong(Aligned(read), x())


class Bags(nn.Module):
    """Sparse features of one length, each bag in one row, as recommenders have them."""

    def __init__(self, mode: str, weighted: bool, padding: int | None) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(20, WIDTH, mode=mode, padding_idx=padding) for _ in range(2))
        self.last, self.weighted = nn.Linear(WIDTH, 4), weighted

    def forward(self, ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores if self.weighted else None
        one, two = (table(ids[:, i], per_sample_weights=scores) for i, table in enumerate(self.tables))
        return self.last(one * two).square().mean()


@pytest.mark.parametrize(
    ("mode", "weighted", "padding"),
    [
        *(("sum", False, None), ("sum", True, None), ("mean", False, None), ("max", False, None)),
        *(("sum", False, 2), ("sum", True, 2), ("mean", False, 2)),
    ],
)
def test_bags_of_one_length(mode: str, weighted: bool, padding: int | None) -> None:
    ids = torch.randint(20, (SAMPLES, 2, 3), generator=torch.Generator().manual_seed(2))
    ids[1], ids[2, :, 1:] = 2, 2  # bags of nothing but padding, if 2 stands for it
    assert wrong(randomised(Bags(mode, weighted, padding)), {"ids": ids, "scores": random(SAMPLES, 3)}) == []


def test_bags_of_one_id() -> None:
    ids = torch.randint(20, (SAMPLES, 2, 1), generator=torch.Generator().manual_seed(2))
    assert wrong(randomised(Bags("sum", False, None)), {"ids": ids, "scores": random(SAMPLES, 1)}) == []


class Prompted(Plain):
    """Trained prompts before the tokens, from ids that are the same for every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts = nn.Embedding(3, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.arange(3).unsqueeze(0).expand(x.size(0), -1).to(x.device)[:1]
        return super().forward(torch.cat([self.prompts(ids).repeat(x.size(0), 1, 1), x], 1))


def test_prompts_taken_from_one_row_of_equal_ones() -> None:
    model, tokens = randomised(Prompted()), {"x": random(SAMPLES, 5, WIDTH)}
    assert wrong(model, tokens, lambda out: out.square().mean()) == []


class Translator(nn.Module):
    """torch's own encoder and decoder, which compares the mask that it is given with the causal one."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(WIDTH, 2, 1, 1, 32, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = self.transformer.generate_square_subsequent_mask(x.size(1)).to(x.dtype)
        return self.transformer(x, x, tgt_mask=mask).square().mean()


def test_a_mask_that_is_compared_with_the_causal_one() -> None:
    assert wrong(randomised(Translator()), {"x": random(SAMPLES, 5, WIDTH)}) == []


class Padded(nn.Module):
    """Convolutions with named padding, one wider than its picture and one with an even kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.deep = nn.Conv2d(3, 8, 4, 4, "valid"), nn.Conv2d(8, 8, 5, padding="same", groups=8)
        self.last = nn.Conv2d(8, 4, (2, 3), padding="same")

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.deep(self.first(x)).tanh()).square().mean()


@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_named_padding() -> None:
    assert wrong(randomised(Padded()), {"x": random(SAMPLES, 3, 4, 4)}) == []


class Pairs(Plain):
    """A preference loss of pairs that go through the model as one batch, as TRL has it."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        n = chosen.size(0)
        score = super().forward(torch.cat([chosen, rejected])).sum(-1)
        if self.form == "halves":  # of the batch: its rows are compared with each other
            score, n = score[:n], n // 2
        better, worse = {
            "chunk": lambda: score.chunk(2),
            "slices": lambda: (score[:n], score[n:]),
            "both ends": lambda: (score[n : 2 * n], score[-n:]),
            "from the end": lambda: (score[:-n], score[-n:]),
            "halves": lambda: (score[:n], score[n : 2 * n]),
        }[self.form]()
        return -F.logsigmoid(better - 0.5 * worse).mean()


@pytest.mark.parametrize("form", ["chunk", "slices", "both ends", "from the end", "halves"])
def test_pairs_in_one_batch(form: str) -> None:
    pairs = {"chosen": random(SAMPLES, WIDTH), "rejected": random(SAMPLES, WIDTH) - 0.3}
    traced = SAMPLES if form == "halves" else 2  # a half of two samples is one, which torch would broadcast
    assert wrong(randomised(Pairs(form)), pairs, traced=traced) == []
