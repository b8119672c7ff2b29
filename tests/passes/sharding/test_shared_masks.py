"""Boolean masks that several attentions read: converted once a stage, with equal bits and one copy in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.codegen import freeing, stage
from autoptd.ops.attention import additive_mask
from autoptd.passes.sharding import shared_masks
from autoptd.search.pipeline import stage_parameters
from autoptd.testing.parity import train_in_lockstep
from tests.codegen.test_freeing import held

ROWS = 128
MASK_BYTES = 2 * ROWS * ROWS  # of a copy in bf16


class Windowed(nn.Module):
    """Layers whose attention sees a window of tokens, or what `allowed` says of two tokens."""

    def __init__(
        self, layers: int = 4, width: int = 32, also: bool = False, allowed: Callable[..., Tensor] | None = None
    ) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(32, width), nn.Linear(width, 32)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "out": nn.Linear(width, width)}) for _ in range(layers)
        )
        self.also = also
        self.allowed = allowed or (lambda i, j: (i >= j) & (i - j < 16))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids)
        i = torch.arange(ids.shape[1], device=ids.device)
        mask = self.allowed(i[:, None], i[None])
        for layer in self.layers:
            q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in layer["qkv"](x).chunk(3, -1))
            attention = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            if self.also:
                attention = attention + torch.where(mask, q @ k.transpose(-1, -2), 0.0) @ v
            x = x + layer["out"](attention.transpose(1, 2).flatten(2))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batch(rows: int = ROWS) -> dict[str, Tensor]:
    ids = torch.arange(4 * rows).view(4, rows)
    return {"ids": ids * 7 % 32, "labels": ids * 5 % 32}


def planned(model: nn.Module, rows: int = ROWS, world: int = 1, precision: str = "bf16", **fix: Any) -> Any:
    fix = {"micro": 1, "recompute": "none", "kernels": "eager", "headroom": 0} | fix
    traced = autoptd.trace(model, inputs=batch(rows), precision=precision)
    plan = autoptd.plan(traced, world=world, cluster="dgx-h100", batch=4, fix=fix)
    return autoptd.parallelize(traced, plan=plan, compile=False)


def conversions(parallel: Any) -> list[str]:
    text = "".join(parallel.program.files.values())
    return [line.strip() for line in text.splitlines() if "additive_mask" in line]


def leave_boolean(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (stage, freeing, stage_parameters):
        monkeypatch.setattr(module, "shared_masks", lambda *given: {})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(64, 64), (2, 1, 64, 64), (2, 1, 1, 64)])
def test_attention_is_equal_by_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    mask = torch.rand(shape) > 0.3
    mask[..., -1, :] = mask[..., -1, :] & (torch.arange(64) < (0 if len(shape) == 2 else 64))  # a row without keys
    q, k, v = (torch.randn(2, 4, 64, 16, dtype=dtype) for _ in range(3))

    def run(given: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        result = F.scaled_dot_product_attention(*leaves, attn_mask=given)
        return [result.detach(), *torch.autograd.grad(result.square().sum(), leaves)]

    converted = additive_mask(mask, dtype)
    assert converted.dtype == dtype and converted.shape == mask.shape
    assert all(torch.equal(a, b) for a, b in zip(run(mask), run(converted), strict=True))


@pytest.mark.parametrize("recompute", ["none", "full", "selective", "ops"])
def test_training_is_equal_by_bits(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Windowed()
    found = planned(model, recompute=recompute)
    assert conversions(found) == ["mask = ops.additive_mask(mask, BF16)"]
    leave_boolean(monkeypatch)
    before = planned(model, recompute=recompute)
    assert not conversions(before)
    ours, theirs = (train_in_lockstep(parallel, [batch(), batch()]) for parallel in (found, before))
    assert ours.losses == theirs.losses
    assert all(torch.equal(ours.state[name], theirs.state[name]) for name in theirs.state)


def test_stages_and_tensor_parallel_ranks_convert_their_own() -> None:
    assert len(conversions(planned(Windowed(), world=2, pp=2, schedule="1f1b"))) == 2
    assert len(conversions(planned(Windowed(), world=2, tp=2))) == 1


def test_one_copy_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = planned(Windowed(layers=6))
    assert held(parallel, batch()) < 1.03
    (memory,) = parallel.plan.predicted.memory
    with monkeypatch.context() as patched:
        leave_boolean(patched)
        before = planned(Windowed(layers=6))
    (several,) = before.plan.predicted.memory
    bool_bytes = MASK_BYTES // 2  # the boolean mask is held no longer
    assert several["activations"] - memory["activations"] == 5 * MASK_BYTES + bool_bytes
    planned_bytes = [m["activations"] + m["temporary"] for m in (memory, several)]
    assert held(before, batch()) * planned_bytes[1] > 1.15 * planned_bytes[0]


@pytest.mark.parametrize(
    ("model", "rows", "fix"),
    [
        pytest.param(lambda: Windowed(layers=1), ROWS, {}, id="one attention"),
        pytest.param(lambda: Windowed(allowed=lambda i, j: i >= j), ROWS, {}, id="causal"),
        pytest.param(lambda: Windowed(also=True), ROWS, {}, id="another reader"),
        pytest.param(Windowed, ROWS + 8, {}, id="rows that a kernel pads"),
        pytest.param(Windowed, ROWS, {"cp": 2}, id="ring"),
        pytest.param(Windowed, ROWS, {"cp": 2, "context": "ulysses"}, id="ulysses"),
    ],
)
def test_masks_that_stay_boolean(model: Callable[[], nn.Module], rows: int, fix: dict[str, Any]) -> None:
    assert not conversions(planned(model(), rows, world=fix.get("cp", 1), **fix))


def test_copies_of_masks_that_a_kernel_pads_are_counted_by_layer() -> None:
    rows = ROWS + 8
    (padded,), (aligned,) = (planned(Windowed(), n).plan.predicted.memory for n in (rows, ROWS))
    assert padded["activations"] - aligned["activations"] > 3 * 2 * rows**2


def test_a_torch_whose_kernels_convert_in_two_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_masks.torch, "__version__", "2.11.0+cu130")
    assert not shared_masks.passes_masks_on()
    monkeypatch.setattr(shared_masks.torch, "__version__", "2.13.0+cu130")
    assert shared_masks.passes_masks_on()
