"""Dropout of rows that a mask selects: any two plans drop what one process drops, whichever rows are selected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autoptd
from autoptd.ops.dropout import Elements
from autoptd.testing.parity import differences, train_in_lockstep
from autoptd.verification.call_numbers import CallNumbers
from autoptd.verification.selected_rows import SelectedRows
from autoptd.verification.verdict import verify_plan
from tests.parity.test_parity_expert_loops import EXPERTS, WIDTH, Mixture, batch

Body = Callable[[Mixture, Tensor, Tensor, Tensor], Tensor]


class Dropping(Mixture):
    """A mixture whose experts drop; no row chooses the second expert."""

    def __init__(self, body: Body) -> None:
        super().__init__(body)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 12), nn.SiLU(), nn.Dropout(0.3), nn.Linear(12, WIDTH))
            for _ in range(EXPERTS)
        )
        self.drop = nn.Dropout(0.2)
        nn.init.constant_(self.router.bias, 0.0)
        self.router.bias.data[1] = -100.0


def chosen_only(m: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Loop over the experts that some row chose, between other dropout."""
    mask, out = F.one_hot(chosen, EXPERTS).permute(2, 1, 0), m.drop(torch.ones_like(x))
    for e in (mask.sum((1, 2)) > 0).nonzero():
        slot, row = torch.where(mask[e].squeeze(0))
        made = m.experts[e](x[None, row].reshape(-1, WIDTH)) * weights[row, slot, None]
        out.index_add_(0, row, made)
    return m.drop(out)


def unless_empty(m: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        row, slot = torch.where(chosen == e)
        if row.numel() == 0:
            continue
        out = out.index_add(0, row, expert(x[row]) * weights[row, slot, None])
    return out


def all_of_them(m: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """One dropout for all experts, none of which is left out."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        here = (chosen == e).any(-1)
        out[here] = out[here] + F.dropout(expert[:2](x[here]), 0.4) @ m.up[e].mT
    return out


def one_for_all(m: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        row = torch.where((chosen == e).any(-1))[0]
        if len(row):
            out = out.index_add(0, row, m.drop(x[row] @ m.up[e] @ m.down[e]))
    return out


def recomputed(m: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Each expert is recomputed in the backward pass."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        row, slot = torch.where(chosen == e)
        made = checkpoint(expert, x[row], use_reentrant=False)
        out = out.index_add(0, row, made * weights[row, slot, None])
    return out


BODIES = [chosen_only, unless_empty, all_of_them, recomputed]
FIXES = [{"dp": 4, "micro": 1}, {"dp": 2, "tp": 2, "micro": 1}, {"pp": 2, "tp": 2, "micro": 2, "recompute": "full"}]


def parallel(body: Body, world: int, **fix: Any) -> autoptd.Parallel:
    torch.manual_seed(0)
    ask: dict[str, Any] = {"cluster": "dgx-h100", "batch": 8, "precision": "fp64", "optimizer": "sgd"}
    inputs = {n: x[:2] for n, x in batch().items()}
    return autoptd.parallelize(Dropping(body).double(), world=world, inputs=inputs, fix=fix, **ask)


def batches() -> list[dict[str, Tensor]]:
    return [{n: torch.cat((x, x[:2])).roll(step, 0) for n, x in batch().items()} for step in range(2)]


@pytest.mark.parametrize("fix", FIXES, ids=str)
def test_every_mesh_drops_what_one_process_drops(fix: dict[str, Any]) -> None:
    plans = parallel(chosen_only, 4, **fix), parallel(chosen_only, 1, micro=8)
    found, alone = (train_in_lockstep(made, batches()) for made in plans)
    assert max((differences(found.gradients, alone.gradients) | differences(found.state, alone.state)).values()) < 1e-10


def verified(body: Body, fix: dict[str, Any]) -> tuple[bool, bool]:
    """Return whether a plan agrees with the model itself, and whether both drop."""
    torch.manual_seed(0)
    model = Dropping(body).double()
    found = verify_plan(parallel(body, 4, **fix).plan, model, inputs={n: x[:2] for n, x in batch().items()})
    return found.agrees, not any("dropout disabled" in text for text in found.made)


def _id(case: Any) -> str:
    return getattr(case, "__name__", str(case))


@pytest.mark.parametrize(("body", "fix"), list(zip(BODIES, [*FIXES, FIXES[1]], strict=True)), ids=_id)
def test_the_model_itself_drops_these(body: Body, fix: dict[str, Any]) -> None:
    assert verified(body, fix) == (True, True)


def test_calls_that_cannot_be_told_apart_are_compared_without_dropout() -> None:
    """One module drops for all experts, of which one is left out: its calls are those of other experts than traced."""
    assert verified(one_for_all, FIXES[0]) == (True, False)


def of_the_first_rows(self: Elements, dim: int, right: Callable[..., Any] = Elements._coordinates) -> Any:
    """Number the rows of a microbatch, whichever samples they belong to."""
    return right(replace(self, first=0), dim)


@pytest.mark.fault("masks of selected rows")
@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        (SelectedRows, "mask", lambda self, x: self._masks[x].roll(1, 0)),
        (Elements, "_coordinates", of_the_first_rows),
        (CallNumbers, "start", lambda self, model: setattr(self, "_of", [""] * len(self._of))),
    ],
    ids=["rows", "samples", "calls"],
)
def test_masks_of_other_rows_are_seen(owner: Any, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, wrong)
    assert verified(chosen_only, FIXES[0]) != (True, True)
