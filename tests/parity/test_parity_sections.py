"""Parity of a scan whose projections are cut into unequal parts: a tp rank computes its own heads of each part."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.cost_models.cluster import Cluster
from autoptd.verification.smaller.smaller import Subject
from autoptd.verification.trial import trial_on
from autoptd.verification.verdict import judge
from tests.parity.parity_check import bulk

WIDTH, HEADS, HEAD, STATE, TOKENS = 16, 4, 8, 6, 8
INNER = HEADS * HEAD


class Mixer(nn.Module):
    """Mamba-2's: a gate, x, B, C and the steps of one projection; B and C are shared by the heads, x has HEADS."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj = nn.Linear(WIDTH, 2 * INNER + 2 * STATE + HEADS)
        self.conv1d = nn.Conv1d(INNER + 2 * STATE, INNER + 2 * STATE, 3, groups=INNER + 2 * STATE, padding=2)
        self.decay = nn.Parameter(torch.rand(HEADS))
        self.out_proj = nn.Linear(INNER, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        batch, tokens = h.shape[:2]
        gate, mixed, steps = self.in_proj(h).split([INNER, INNER + 2 * STATE, HEADS], -1)
        mixed = F.silu(self.conv1d(mixed.transpose(1, 2))[..., :tokens].transpose(1, 2))
        x, b, c = mixed.split([INNER, STATE, STATE], -1)
        x, b, c = (y.reshape(batch, tokens, -1, n) for y, n in ((x, HEAD), (b, STATE), (c, STATE)))
        b, c = (y.repeat_interleave(HEADS, 2, output_size=HEADS) for y in (b, c))
        decay = (F.softplus(steps) * -self.decay).transpose(1, 2).cumsum(-1)
        weights = (decay[..., :, None] - decay[..., None, :]).exp().tril()
        scores = torch.einsum("blhn,bshn->bhls", c, b) * weights
        y = torch.einsum("bhls,bshp->blhp", scores, x).reshape(batch, tokens, INNER)
        return h + self.out_proj(y * F.silu(gate))


class Scans(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mixer(), Mixer()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_heads_of_unequal_parts_are_split() -> None:
    torch.manual_seed(0)
    model = Scans().double()
    batch = {"x": torch.randn(4, TOKENS, WIDTH, dtype=torch.float64)}
    source = autoptd.trace(model, inputs=batch, precision="fp64")
    cluster = bulk(Cluster.load("dgx-h100"))
    plan = autoptd.plan(source, world=4, cluster=cluster, batch=4, optimizer="sgd", fix={"tp": 2, "pp": 2})
    chosen = [s for kind in plan.strategies.values() for op, s in kind.items() if "conv1d" in op or "einsum" in op]
    assert any(s == "S1, S0, S0 -> S1" for s in chosen) and all(s.count("S") > 1 for s in chosen if "einsum" in s)
    verdict = judge(trial_on(Subject(source, plan, source), [batch, batch]), plan)
    assert verdict.agrees and verdict.difference < 1e-9, verdict.faults
