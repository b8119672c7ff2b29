"""Samples of several lengths, in forms whose sizes depend on data: refused, with the way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.utils.rnn import pack_padded_sequence

import autoptd
from autoptd.errors import AutoptdError

SAMPLES, TOKENS, WIDTH = 4, 6, 8


class Packs(nn.Module):
    """A recurrent net over packed samples."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.net(packed)[1].square().mean()


class Jags(nn.Module):
    """A nested tensor made in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        nested = torch.nested.narrow(self.net(x), 1, torch.zeros_like(lengths), lengths, layout=torch.jagged)
        return nested.to_padded_tensor(0.0).square().mean()


class OneRow(nn.Module):
    """Attention over samples in one row, by their ends."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        q, k, v = self.qkv(x.flatten(0, 1)).unflatten(-1, (3, 2, -1)).unbind(1)
        return varlen_attn(q, k, v, lengths.int(), lengths.int(), TOKENS, TOKENS).square().mean()


class LoopsOverSamples(Jags):
    """A loop over the samples of a batch."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return torch.stack([self.net(sample).square().median() for sample in x]).mean()


CASES = {
    Packs: ("pack_padded_sequence makes batches of several sizes", "pad the samples to one length"),
    Jags: ("nested tensors hold samples of several lengths", "pad the samples to one length"),
    OneRow: ("sequences of several lengths in one row", "pad the samples to one length"),
    LoopsOverSamples: ("a loop over samples cannot be computed in one pass", "the tensor of all samples"),
}


def inputs() -> dict[str, Any]:
    return {"x": torch.randn(SAMPLES, TOKENS, WIDTH), "lengths": torch.tensor([6, 3, 5, 2])}


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_is_refused_with_the_way_out(kind: type[nn.Module]) -> None:
    what, fix = CASES[kind]
    with pytest.raises(AutoptdError) as caught:
        autoptd.trace(kind(), inputs=inputs(), precision="fp32")
    assert what in caught.value.what
    assert fix in caught.value.fix


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_as_an_input() -> None:
    nested = torch.nested.nested_tensor([torch.randn(n, WIDTH) for n in (3, 2)], layout=torch.jagged)
    with pytest.raises(AutoptdError, match="input 'x' is a nested tensor"):
        autoptd.trace(Jags(), inputs={"x": nested, "lengths": torch.tensor([3, 2])}, precision="fp32")
