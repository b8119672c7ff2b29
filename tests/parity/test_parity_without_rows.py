"""Parameters that only the rows of a mask read, in steps in which it selects none: they have no gradient.

AdamW moves a parameter with a gradient of zero, by its momentum and its weight decay, and leaves one without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autoptd
from autoptd.testing.parity import train_in_lockstep
from tests.parity.parity_check import trained_apart

WIDTH, WORDS, EXPERTS, OPTIONS = 16, 32, 4, {"lr": 0.01, "weight_decay": 0.3}
Body = Callable[["Chooser", Tensor, Tensor], Tensor]


class Chooser(nn.Module):
    """A model whose input says which rows choose which expert."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body
        self.gate = nn.Parameter(torch.zeros(WIDTH))
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, ids: Tensor, labels: Tensor, chosen: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(self, self.table(ids), chosen)).flatten(0, 1), labels.flatten())


def unless_empty(m: Chooser, x: Tensor, chosen: Tensor) -> Tensor:
    rows, out = x.flatten(0, 1), torch.zeros_like(x).flatten(0, 1)
    for e, expert in enumerate(m.experts):
        (row,) = torch.where(chosen.flatten() == e)
        if row.numel() == 0:
            continue
        out.index_add_(0, row, expert(rows[row]))
    return x + out.view_as(x)


def chosen_only(m: Chooser, x: Tensor, chosen: Tensor) -> Tensor:
    rows, out = x.flatten(0, 1), torch.zeros_like(x).flatten(0, 1)
    mask = F.one_hot(chosen.flatten(), EXPERTS).t()
    for e in (mask.sum(-1) > 0).nonzero():
        (row,) = torch.where(mask[e.item()])
        out = out.index_add(0, row, m.experts[e](rows[row]))
    return x + out.view_as(x)


def written(m: Chooser, x: Tensor, chosen: Tensor) -> Tensor:
    """Rows of a mask, and all rows of which a mask takes some; and what all rows read after the first branch."""
    some, out = chosen == 3, x
    if some.any():
        out = x.clone()
        out[some] = m.experts[0](x[some])
    if some.any():
        out = torch.where(some[..., None], m.experts[1](out), out)
    return m.experts[2](out)


def gated(m: Chooser, x: Tensor, chosen: Tensor) -> Tensor:
    """A gate that starts at 0, so that rows give their experts gradients of zero."""
    return x + m.gate * (unless_empty(m, x, chosen) - x)


def shared(m: Chooser, x: Tensor, chosen: Tensor) -> Tensor:
    """One layer for rows of either of two masks, and another for those of both."""
    out, first, second = x.clone(), chosen == 3, chosen == 2
    if first.any():
        out[first] = m.experts[0](x[first])
    if second.any():
        out[second] = m.experts[0](x[second]) + m.gate
    some = first | second
    if some.any():
        out = torch.where(some[..., None], m.experts[1](out), out)
    return out


def beside(m: Chooser, x: Tensor, chosen: Tensor) -> Tensor:
    """A layer of rows outside of the branch on them has a gradient of zero without rows; one within has none."""
    some, out = chosen == 3, x.clone()
    out[some] = m.experts[0](x[some])
    if some.any():
        out[some] = m.experts[1](x[some])
    return out


def routed(m: Chooser, x: Tensor, chosen: Tensor) -> Tensor:
    """A mask that depends on a parameter, which only the branch trains."""
    scores = m.experts[0](x)[..., 0]
    some, out = scores.detach() * (chosen == 3) != 0, x.clone()
    if some.any():
        out[some] = m.experts[1](x[some]) * scores[some].unsqueeze(-1)
    return out


class Terms(Chooser):
    """A loss with a term of the rows of a mask."""

    def forward(self, ids: Tensor, labels: Tensor, chosen: Tensor) -> Tensor:
        x = self.table(ids)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        some = chosen == 3
        if some.any():
            loss = loss + self.experts[0](x)[some].square().mean()
        return loss


class Shifted(Terms):
    """A loss with a number that is in no state dict, as the logarithm of a density's norm is."""

    def __init__(self, body: Body) -> None:
        super().__init__(body)
        self.register_buffer("norm", torch.tensor(0.5, dtype=torch.float64), persistent=False)

    def forward(self, ids: Tensor, labels: Tensor, chosen: Tensor) -> Tensor:
        return super().forward(ids, labels, chosen) + self.norm


def batches() -> list[dict[str, Tensor]]:
    """Return batches of which some choose few experts: rows of those are in one microbatch of one rank."""
    rng = torch.Generator().manual_seed(1)
    found = [
        {name: torch.randint(0, WORDS, (8, 6), generator=rng) for name in ("ids", "labels")}
        | {"chosen": torch.randint(0, below, (8, 6), generator=rng)}
        for below in (EXPERTS, 2, 1, 3)
    ]
    found[1]["chosen"][5, 2] = 3
    return found


@pytest.mark.parametrize(
    "fix",
    [
        {"dp": 2, "tp": 2, "pp": 1, "zero": 3, "micro": 2},
        {"dp": 1, "tp": 2, "pp": 2, "micro": 2, "recompute": "full"},
        {"dp": 2, "tp": 1, "pp": 2, "zero": 1, "micro": 1, "schedule": "zero-bubble"},
        {"dp": 1, "tp": 1, "pp": 1, "micro": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "model",
    [
        *map(Chooser, (unless_empty, chosen_only, written, gated, shared, beside, routed)),
        Terms(written),
        Shifted(written),
    ],
    ids=lambda model: f"{type(model).__name__}-{model.body.__name__}",
)
def test_parameters_without_rows_are_not_updated(model: Chooser, fix: dict[str, Any]) -> None:
    torch.manual_seed(0)
    for name, parameter in model.double().named_parameters():
        nn.init.normal_(parameter, std=0.3 * (name != "gate"))
    error, _ = trained_apart(model, batches(), OPTIONS, fix)
    assert error < 1e-10


def test_a_step_reports_no_gradient_of_parameters_without_rows() -> None:
    model, steps = Chooser(unless_empty).double(), batches()[2:3]
    part = autoptd.parallelize(
        model, world=2, inputs=steps[0], batch=8, cluster="dgx-h100", precision="fp64", fix={"dp": 2, "micro": 2}
    )
    gradients = train_in_lockstep(part, steps).gradients
    assert {name.split(".")[1] for name in gradients if name.startswith("experts")} == {"0"}
