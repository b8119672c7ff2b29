"""Models whose forward puts other modules in place in its first pass: planned as they are after that."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.errors import InputsError
from autoptd.passes.trace.skeleton import settle
from autoptd.verification.smaller.smaller import Subject
from autoptd.verification.trial import trial_on
from autoptd.verification.verdict import judge

FEW = 8  # tokens


class Sparse(nn.Module):
    """Adds what the token before says."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.drop = nn.Linear(8, 8), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.value(x)).roll(1, 1)


class Full(Sparse):
    """Adds what all tokens say."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.value(x)).mean(1, keepdim=True)


class Switching(nn.Module):
    """Uses `Full` for ever once a batch has few tokens. keeps: whether it takes over the layer of `Sparse`."""

    def __init__(self, keeps: bool = True) -> None:
        super().__init__()
        self.inner, self.head, self.keeps = Sparse(), nn.Linear(8, 8), keeps
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] <= FEW and type(self.inner) is Sparse:
            full = Full()
            if self.keeps:
                full.value = self.inner.value
            self.inner = full
        with torch.no_grad():
            self.seen.add_(1)
        return self.head(self.inner(x)).square().mean() * (1 + 0 * self.seen.detach())


def model() -> Switching:
    torch.manual_seed(0)
    return Switching().double()


def examples(tokens: int) -> dict[str, Tensor]:
    return {"x": torch.randn(8, tokens, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))}


@pytest.mark.parametrize("tokens", [4, 16])
def test_trains_as_one_process(tokens: int) -> None:
    source = autoptd.trace(model(), inputs=examples(tokens), precision="fp64")
    assert source.folded.traced.settled == (tokens <= FEW)
    planned = autoptd.plan(source, world=4, cluster="dgx-h100", batch=8, optimizer="sgd", fix={"tp": 2, "dp": 2})
    verdict = judge(trial_on(Subject(source, planned, source), [examples(tokens)] * 2), planned)
    assert verdict.agrees, verdict.faults
    assert any("replaces modules" in note for note in planned.notes) == (tokens <= FEW)


def test_sizes_are_those_of_the_examples() -> None:
    """Another number of tokens might make other modules."""
    source = autoptd.trace(model(), inputs=examples(4), precision="fp64")
    assert not any(str(symbol) == "s" for symbol in source.folded.traced.sizes)


def test_other_parameters_after_the_first_pass_are_refused() -> None:
    with pytest.raises(InputsError, match="no module registers"):
        autoptd.trace(Switching(keeps=False), inputs={"x": torch.empty(8, 4, 8)})


def test_a_pass_for_its_modules_changes_no_buffer() -> None:
    plain = model()
    settle(plain, lambda: plain(**examples(4)))
    assert type(plain.inner) is Full and not plain.seen
