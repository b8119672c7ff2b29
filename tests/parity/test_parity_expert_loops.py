"""Mixtures written as a loop over experts, each of which takes the rows that chose it: as on one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.errors import RuntimeFault, UnsupportedOp
from autoptd.passes.rewrites import masked_rows
from tests.parity.parity_check import TOLERANCE, step_off_by

WORDS, WIDTH, TOKENS, EXPERTS, CHOSEN = 20, 8, 6, 4, 2
Body = Callable[["Mixture", Tensor, Tensor, Tensor], Tensor]


class Mixture(nn.Module):
    """`body` of the model, rows [n, h], weights and chosen experts [n, k] gives the mixed rows."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body, self.words, self.router = body, nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 12), nn.SiLU(), nn.Linear(12, WIDTH)) for _ in range(4)
        )
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 12))
        self.down = nn.Parameter(torch.randn(EXPERTS, 12, WIDTH))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids)
        weights, chosen = self.router(x.flatten(0, 1)).softmax(-1).topk(CHOSEN)
        x = x + self.body(self, x.flatten(0, 1), weights, chosen).view(x.shape)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def slots_first(m: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Mix as Mixtral was first published: a mask [experts, choices, rows]."""
    mask, out = F.one_hot(chosen, EXPERTS).permute(2, 1, 0), torch.zeros_like(x)
    for e in range(EXPERTS):
        slot, row = torch.where(mask[e])
        made = m.experts[e](x[None, row].reshape(-1, WIDTH)) * weights[row, slot, None]
        out.index_add_(0, row, made.to(x.dtype))
    return out


def rows_first(m: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Mix by comparison, with stacked weights, out of place."""
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        row, slot = torch.nonzero(input=chosen == e, as_tuple=True)
        made = F.silu(x[row] @ m.up[e]) @ m.down[e]
        out = out.index_add(0, row, made * weights[row, slot].unsqueeze(-1))
    return out


def dense_weights(m: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Mix the rows that chose an expert at any place, written back in place."""
    gates, out = torch.zeros(x.shape[0], EXPERTS, dtype=x.dtype).scatter(1, chosen, weights), torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        row = torch.where((chosen == e).any(-1))[0]
        out[row] += expert(x[row]) * gates[row, e, None]
    return out


def accumulated(m: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        row, slot = torch.nonzero(chosen == e).T
        out = out.index_put((row,), expert(x[row]) * weights[row, slot][:, None], accumulate=True)
    return out


def chosen_only(m: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Loop over the experts that some row chose, by tensors that hold their numbers; the mask has one expert more."""
    with torch.no_grad():
        mask = F.one_hot(chosen, EXPERTS + 1).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    out = torch.zeros_like(x)
    for e in hit:
        e = e[0]
        if e == EXPERTS:
            continue
        slot, row = torch.where(mask[e])
        out.index_add_(0, row, (x[row] @ m.up[e]).relu() @ m.down[e] * weights[row, slot, None])
    return out


def chosen_numbers(m: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Loop over Python numbers of these experts, and over names."""
    mask, out = F.one_hot(chosen, EXPERTS).permute(2, 1, 0), torch.zeros_like(x)
    experts = nn.ModuleDict({f"expert_{i}": expert for i, expert in enumerate(m.experts)})
    for e in mask.any((1, 2)).nonzero().squeeze(-1).tolist():
        slot, row = torch.where(mask[e])
        out.index_add_(0, row, m.experts[e](x[row]) * weights[row, slot, None])
    for e in (mask.sum((1, 2)) > 0).nonzero():
        slot, row = torch.where(mask[e].squeeze(0))
        out.index_add_(0, row, experts[f"expert_{e[0]}"](x[row]) * weights[row, slot, None])
    return out


def unless_empty(m: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Loop over all experts, passing over those without rows."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        row, slot = torch.where(chosen == e)
        if row.numel() == 0:
            continue
        out = out.index_add(0, row, expert(x[row]) * weights[row, slot, None])
        if row.shape[0] > 0:
            out.index_add_(0, row, x[row].tanh())
    return out


def counted(m: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Mix as DeepSeek was published: experts without rows are passed over by their counts."""
    counts, out = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist(), torch.zeros_like(x)
    for e in range(EXPERTS):
        if counts[e] == 0:
            continue
        row, slot = torch.where(chosen == e)
        out[row] += m.experts[e](x[row]) * weights[row, slot, None]
    return out


def counted_by_tensors(m: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Mix by choices [k, n], some of them twice."""
    counts, out, across = torch.bincount(chosen.flatten(), minlength=EXPERTS), torch.zeros_like(x), chosen.t()
    for e in range(EXPERTS):
        if counts[e] > 0:
            slot, row = torch.where(across == e)
            out = out.index_add(0, row, m.experts[e](x[row]) * weights[row, slot, None])
        if counts[e].item() != 0:
            row, slot = torch.where(chosen == e)
            out[row] = x[row].tanh() + out[row]
    return out


def counts_of_the_first(m: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Pass over experts that no row chose first."""
    counts, out = torch.bincount(chosen[:, 0], minlength=EXPERTS).tolist(), torch.zeros_like(x)
    for e in range(EXPERTS):
        if counts[e] == 0:
            continue
        row, slot = torch.where(chosen == e)
        out.index_add_(0, row, x[row] * weights[row, slot, None])
    return out


def adds_for_each_counted(m: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    counts, out = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist(), torch.zeros_like(x)
    for e in range(EXPERTS):
        if counts[e] > 0:
            row, slot = torch.where(chosen == e)
            out = out.index_add(0, row, x[row] * weights[row, slot, None]) + 0.1
    return out


def rows_of_another_count(m: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    counts, out = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist(), torch.zeros_like(x)
    for e in range(1, EXPERTS):
        if counts[e - 1] > 0:
            row, slot = torch.where(chosen == e)
            out.index_add_(0, row, x[row] * weights[row, slot, None])
    return out


def numbers_of_counts(m: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
    return x * counts[0]


def split_by_counts(m: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
    order = chosen.flatten().argsort(stable=True)
    return torch.cat([m.experts[e](rows) for e, rows in enumerate(x[order // CHOSEN].split(counts))])[: x.shape[0]]


def counts_hits(m: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    mask, out = F.one_hot(chosen, EXPERTS).permute(2, 1, 0), torch.zeros_like(x)
    for e in (mask.sum((1, 2)) > 0).nonzero():
        slot, row = torch.where(mask[e].squeeze(0))
        out = out.index_add(0, row, x[row] * weights[row, slot, None]) + 0.1
    return out


def rows_of_another(m: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    mask, out = F.one_hot(chosen, EXPERTS).permute(2, 1, 0), torch.zeros_like(x)
    for e in (mask[:, :1].sum((1, 2)) > 0).nonzero()[:, 0]:
        slot, row = torch.where(mask[e])
        out = out.index_add(0, row, x[row] * weights[row, slot, None])
    return out


def changed_mask(m: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Loop over the experts of a mask that is changed afterwards."""
    mask, out = F.one_hot(chosen, EXPERTS).permute(2, 1, 0), torch.zeros_like(x)
    hit = (mask.sum((1, 2)) > 0).nonzero()[:, 0]
    mask[:2] = 1
    for e in hit:
        slot, row = torch.where(mask[e])
        out = out.index_add(0, row, x[row] * weights[row, slot, None])
    return out


def odd_rows(m: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    row, slot = torch.where(chosen == 0)
    return x if row.numel() % 3 == 0 else torch.zeros_like(x).index_add(0, row, x[row] * weights[row, slot, None])


def scales_if_empty(m: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        row, slot = torch.where(chosen == e)
        out = out * 2 if row.numel() == 0 else out.index_add(0, row, x[row] * weights[row, slot, None])
    return out


def few_are_left_out(m: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    row, slot = torch.where(chosen == 0)
    return x if row.numel() < 2 else torch.zeros_like(x).index_add(0, row, x[row] * weights[row, slot, None])


def batch() -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(0)
    return {n: torch.randint(0, WORDS, (6, TOKENS), generator=rng) for n in ("ids", "labels")}


def off_by(body: Body, **fix: int) -> float:
    """Return the largest difference of a step's tensors from those of one process."""
    torch.manual_seed(0)
    return step_off_by(Mixture(body).double(), batch(), **fix)


BODIES: Iterable[Body] = [
    *(
        slots_first,
        rows_first,
        dense_weights,
        accumulated,
        chosen_only,
        chosen_numbers,
        unless_empty,
        counted,
        counted_by_tensors,
    ),
]


@pytest.mark.parametrize("body", BODIES)
def test_trains_as_one_process(body: Body) -> None:
    assert off_by(body, dp=2, tp=2, micro=1) <= TOLERANCE


REFUSED = [
    *(counts_hits, rows_of_another, changed_mask, odd_rows, scales_if_empty, few_are_left_out),
    *(counts_of_the_first, adds_for_each_counted, rows_of_another_count, numbers_of_counts, split_by_counts),
]


@pytest.mark.fault("turns without rows")
@pytest.mark.parametrize("body", REFUSED)
def test_turns_without_rows_that_change_something_are_refused(body: Body) -> None:
    with pytest.raises(UnsupportedOp, match=r"depend on|depends on|read from|number of rows") as error:
        autoptd.trace(Mixture(body), inputs=batch())
    assert error.value.fix


def chosen_twice(m: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Write sums into rows, some of which are there twice: the last of them stays."""
    numbers, out = torch.cat([chosen[:, :1], chosen[:, :1]], 1), torch.zeros_like(x)
    row, slot = torch.where(numbers == 0)
    out[row] += x[row] * weights[row, slot, None]
    return out


def chosen_across_rows(m: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Write sums into slots, each of which several rows may have."""
    out = torch.zeros_like(x)[:CHOSEN]
    row, slot = torch.where(chosen == 0)
    out[slot] += x[row]
    return x + out.sum(0)


@pytest.mark.fault("rows written twice")
@pytest.mark.parametrize("body", [chosen_twice, chosen_across_rows])
def test_sums_written_to_rows_that_may_be_there_twice_are_refused(body: Body) -> None:
    with pytest.raises(UnsupportedOp) as error:
        autoptd.trace(Mixture(body), inputs=batch())
    assert error.value.fix


@pytest.mark.fault("rows that are not selected")
def test_rows_of_other_experts_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masked_rows.MaskedRows, "where", lambda self, like, x, *_: x)
    with pytest.raises((AssertionError, RuntimeFault)):
        assert off_by(slots_first, dp=2, tp=2, micro=1) <= TOLERANCE
