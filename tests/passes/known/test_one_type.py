"""Models that are written for float32 and make tensors in it train in bf16: near what float64 gives, and verified."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.errors import AutoptdError
from autoptd.passes.known.one_type import OneType
from autoptd.verification.verdict import verify_plan

WIDTH, WORDS, SAMPLES, TOKENS = 16, 11, 4, 6
Body = Callable[["Written", Tensor, Tensor], Tensor]


class Written(nn.Module):
    """`body` of the model and hidden states [b, s, h] gives hidden states."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body, self.words, self.norm = body, nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.mixed = nn.Linear(WIDTH, 3 * WIDTH), nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.recurrent, self.head = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, WORDS)
        self.register_buffer("filter", torch.ones(WIDTH, 1, 3) / 3)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(self, self.words(ids), ids)).flatten(0, 1), labels.flatten())


def masked(m: Written, h: Tensor, ids: Tensor) -> Tensor:
    q, k, v = m.qkv(h).chunk(3, -1)
    mask = torch.full((h.size(1), h.size(1)), -torch.inf).triu(1)
    return ((q @ k.mT) / WIDTH**0.5 + mask).softmax(-1) @ v


def positions(m: Written, h: Tensor, ids: Tensor) -> Tensor:
    at = torch.arange(h.size(1)).float()[:, None] / torch.pow(1e4, torch.arange(0, WIDTH, 2) / WIDTH)
    return m.norm(h + torch.cat([at.sin(), at.cos()], -1))


def shifted(m: Written, h: Tensor, ids: Tensor) -> Tensor:
    return torch.cat([torch.zeros(h.size(0), 1, WIDTH), h], 1)[:, :-1]


def pooled(m: Written, h: Tensor, ids: Tensor) -> Tensor:
    real = (ids > 2).float().unsqueeze(-1)
    return h + m.head.weight[:1] * (h * real).sum(1, keepdim=True) / real.sum(1, keepdim=True).clamp(min=1)


def attended(m: Written, h: Tensor, ids: Tensor) -> Tensor:
    x = h + torch.linspace(0, 1, WIDTH)
    mask = torch.zeros(h.size(1), h.size(1)).masked_fill(torch.ones(h.size(1), h.size(1)).triu(1) > 0, -1e9)
    return m.mixed(x, x, x, attn_mask=mask, need_weights=False)[0]


def filtered(m: Written, h: Tensor, ids: Tensor) -> Tensor:
    assert isinstance(m.filter, Tensor)
    return F.conv1d(h.mT, m.filter, padding=1, groups=WIDTH).mT


def recurrent(m: Written, h: Tensor, ids: Tensor) -> Tensor:
    found: Tensor = m.recurrent(h + torch.ones(1), torch.zeros(1, h.size(0), WIDTH))[0]
    return found


def stepped(m: Written, h: Tensor, ids: Tensor) -> Tensor:
    state, states = torch.zeros(h.size(0), WIDTH), []
    for i in range(h.size(1)):
        state = m.cell(h[:, i], state)
        states.append(state)
    return torch.stack(states, 1)


def scattered(m: Written, h: Tensor, ids: Tensor) -> Tensor:
    """Sums of messages into zeros, as graph networks and mixtures of experts write them."""
    at = (ids % 3)[..., None].expand(-1, -1, WIDTH)
    return h + torch.zeros(h.size(0), 3, WIDTH).scatter_add(1, at, h).mean(1, keepdim=True)


def sampled(m: Written, h: Tensor, ids: Tensor) -> Tensor:
    places = torch.linspace(-1, 1, TOKENS).view(1, 1, TOKENS, 1).expand(h.size(0), 1, TOKENS, 2)
    return h + F.grid_sample(h.mT.unsqueeze(2), places, align_corners=True)[:, :, 0].mT


def judged(m: Written, h: Tensor, ids: Tensor) -> Tensor:
    """Losses against float32 targets, of each element."""
    wanted = (ids % 2 * torch.ones(())).unsqueeze(-1).expand_as(h)
    losses = (F.binary_cross_entropy, F.huber_loss, F.smooth_l1_loss)
    given = (h.sigmoid(), h, h)
    return h + sum(loss(x, wanted, reduction="none") for loss, x in zip(losses, given, strict=True))


BODIES = [masked, positions, shifted, pooled, attended, filtered, recurrent, stepped, scattered, sampled, judged]


def batch() -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(0)
    return {name: torch.randint(WORDS, (SAMPLES, TOKENS), generator=rng) for name in ("ids", "labels")}


def planned(model: nn.Module) -> autoptd.Parallel:
    return autoptd.parallelize(
        model, world=1, batch=SAMPLES, inputs=batch(), cluster="local", fix={"micro": 2}, optimizer="sgd"
    )


@pytest.mark.parametrize("body", BODIES)
def test_near_float64(body: Body) -> None:
    torch.manual_seed(0)
    model = Written(body)
    exact = copy.deepcopy(model).double()
    torch.set_default_dtype(torch.float64)
    try:
        loss = exact(**batch())
    finally:
        torch.set_default_dtype(torch.float32)
    loss.backward()
    par = planned(model)
    assert float(par.train_step(batch())) == pytest.approx(float(loss), rel=5e-3)
    found = par.gradients()
    for name, parameter in exact.named_parameters():
        if parameter.grad is not None:
            off = float((found[name].double() - parameter.grad).norm() / parameter.grad.norm().clamp(min=1e-6))
            assert off <= 0.05, (name, off)


def test_such_a_plan_is_verified() -> None:
    torch.manual_seed(0)
    model = Written(masked)
    assert verify_plan(planned(model).plan, model, inputs=batch()).agrees


@pytest.mark.parametrize("body", BODIES)
def test_without_casts_it_is_refused(body: Body, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OneType, "_cast", lambda self, x, dtype: x)
    with pytest.raises(AutoptdError):
        autoptd.trace(Written(body), inputs=batch(), precision="bf16")


def test_types_that_the_model_mixes_itself_stay_refused() -> None:
    """float64 is no type of its parameters: the model does not run as it is."""
    wide = Written(lambda m, h, ids: h + torch.ones(1, dtype=torch.float64))
    with pytest.raises(AutoptdError, match="float64"):
        autoptd.trace(wide, inputs=batch(), precision="bf16")
