"""Numbers read from constants while a model is traced: computed, unless drawn or written to through a view."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autoptd.errors import TraceError, UnsupportedOp
from autoptd.passes.trace.trace import trace

Read = Callable[[Tensor], float]


class Model(nn.Module):
    """A linear layer, times a number that `read` takes from tensors."""

    def __init__(self, read: Read) -> None:
        super().__init__()
        self.linear, self.read = nn.Linear(4, 4), read

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.read(x)).square().mean()


def causal(x: Tensor) -> float:
    mask = torch.full((x.size(1), x.size(1)), -torch.inf).triu(1)
    same = torch.full((x.size(1), x.size(1)), -torch.inf).triu(1) == mask
    return 2.0 if same.all() else 3.0


def item(x: Tensor) -> float:
    return torch.arange(5).max().item() / 2


def drawn(x: Tensor) -> float:
    return 2.0 if torch.bernoulli(torch.full((1,), 0.5)) else 3.0


def written(x: Tensor) -> float:
    ones = torch.ones(3)
    ones[:2].mul_(2)
    return 2.0 if ones.sum() > 4 else 3.0


def set_item(x: Tensor) -> float:
    ones = torch.ones(3)
    ones[0] = 5
    return 2.0 if ones.max() > 4 else 3.0


def data(x: Tensor) -> float:
    return 2.0 if x.sum() > 0 else 3.0


def any_size(x: Tensor) -> float:
    mask = torch.ones(x.shape[:2], dtype=torch.long)
    return 3.0 if ((mask[:, None, None, :] - 1) > 0).flatten().any().item() else 2.0


def written_at_any_size(x: Tensor) -> float:
    mask = torch.ones(x.shape[:2]).clamp(0, 1)
    mask[mask == 2] = 5
    return 3.0 if (mask > 1).any() else 2.0


def diagonal(x: Tensor) -> float:
    mask = torch.ones(3, 3)
    mask.fill_diagonal_(-1)
    return 2.0 if mask.min() < 0 else 3.0


@torch.no_grad()
def written_out(x: Tensor) -> float:
    """Read a constant that a result was written to, which depends on data or not."""
    mask = torch.zeros(())
    torch.add(x.sum(), 0, out=mask)
    return 2.0 if mask > 0 else 3.0


def clamped(x: Tensor) -> float:
    return torch.arange(x.size(1)).clamp(0, 9).max().item() / 3


def window(x: Tensor) -> float:
    """Read what is the same at small sizes, and another at large ones."""
    return 2.0 if torch.ones(x.size(1), x.size(1)).tril(9).triu(-9).all() else 3.0


def first(x: Tensor) -> float:
    return torch.ones(x.size(1))[:9].sum().item() / 3


@pytest.mark.parametrize("read", [causal, item, set_item, any_size, written_at_any_size, diagonal, window, first])
def test_a_number_of_a_constant_is_computed(read: Read) -> None:
    traced = trace(Model(read), {"x": torch.ones(2, 6, 4)})
    assert 2.0 in {a for n in traced.graph.graph.nodes for a in n.args}


def test_sizes_that_a_constant_depends_on_become_numbers() -> None:
    assert [str(s) for s in trace(Model(causal), {"x": torch.ones(2, 6, 4)}).sizes] == ["b"]
    assert [str(s) for s in trace(Model(item), {"x": torch.ones(2, 6, 4)}).sizes] == ["b", "s"]
    for read in (any_size, written_at_any_size):
        assert [str(s) for s in trace(Model(read), {"x": torch.ones(2, 6, 4)}).sizes] == ["b", "s"]


@pytest.mark.parametrize("read", [window, first, clamped])
def test_what_is_another_at_large_sizes_makes_sizes_numbers(read: Read) -> None:
    for tokens in (6, 12):
        traced = trace(Model(read), {"x": torch.ones(2, tokens, 4)})
        assert [str(s) for s in traced.sizes] == ["b"]
        assert read(torch.ones(2, tokens, 4)) in {a for n in traced.graph.graph.nodes for a in n.args}


@pytest.mark.parametrize("tokens", [8, 12])
def test_numbers_of_sizes_are_sizes(tokens: int) -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            half = x.new_ones(x.size(0), torch.div(x.size(1), 2, rounding_mode="trunc"), 4)
            return self.linear(torch.cat([x, half], 1)).square().mean()

    traced = trace(Halves(), {"x": torch.ones(2, tokens, 4)})
    assert [str(s) for s in traced.sizes] == ["b", "s"]


@pytest.mark.parametrize("read", [drawn, written, written_out, data])
def test_what_is_no_constant_is_refused(read: Read) -> None:
    model, before = Model(read), torch.get_rng_state()
    with pytest.raises(TraceError, match="depends on data"):
        trace(model, {"x": torch.ones(2, 6, 4)})
    assert torch.equal(before, torch.get_rng_state())


def test_data_that_is_replaced_is_refused() -> None:
    """Refuse what momentum encoders do: `key.data = key.data * m + query.data * (1 - m)`."""

    class Momentum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            self.key.weight.data = self.key.weight.data * 0.9 + self.query.weight.data * 0.1
            return (self.query(x) * self.key(x)).mean()

    with pytest.raises(UnsupportedOp, match=r"assigns to x\.data") as caught:
        trace(Momentum(), {"x": torch.ones(2, 4)})
    assert "test_traced_reads.py" in caught.value.where
