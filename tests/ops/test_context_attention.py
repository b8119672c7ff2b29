"""Attention over tokens split over ranks equals torch's own attention, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from autoptd.errors import RuntimeFault
from autoptd.layout.mesh import Mesh
from autoptd.ops import fused_attention as fused
from autoptd.ops.attention import attention
from autoptd.ops.context_attention import ring_attention, ulysses_attention
from autoptd.ops.cp_axis import Tokens
from autoptd.ops.dropout import DropoutKey
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import run_lockstep
from tests.runtime.fake_device.device import Device, labelled
from tests.runtime.fake_device.nccl import Nccl
from tests.runtime.fake_device.run import gpu

WAYS = {"ring": ring_attention, "ulysses": ulysses_attention}


@dataclass(frozen=True)
class Case:
    """Arguments of attention. `mask`: its kind, and its shape in terms of the sizes of q."""

    tokens: int = 24
    heads: int = 4
    kv_heads: int = 4
    width: int = 6
    value_width: int = 6
    is_causal: bool = False
    mask: str = ""
    scale: float | None = None
    dropout: float = 0.0
    dtype: torch.dtype = torch.float64


def made(case: Case) -> tuple[list[Tensor], Tensor | None, Tensor]:
    """Return (q, k, v), mask, gradient of the result."""
    draw = torch.Generator().manual_seed(5)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64).to(case.dtype)

    s = case.tokens
    q, k = random(2, case.heads, s, case.width), random(2, case.kv_heads, s, case.width)
    v, grad = random(2, case.kv_heads, s, case.value_width), random(2, case.heads, s, case.value_width)
    lengths = torch.tensor([s, s // 3])
    padding = (torch.arange(s) < lengths[:, None])[:, None, None, :]
    match case.mask:
        case "padding":
            mask: Tensor | None = padding
        case "causal and padding":
            mask = torch.ones(s, s, dtype=torch.bool).tril() & padding
        case "causal and padding, added":
            seen = torch.ones(s, s, dtype=torch.bool).tril() & padding
            mask = torch.zeros(seen.shape, dtype=case.dtype).masked_fill(~seen, -torch.inf)
        case "none seen":
            mask = (torch.arange(s)[:, None] > 3) & padding
        case "bias per head":
            mask = random(case.heads, s, s)
        case "lowest":
            mask = torch.zeros(2, 1, s, s, dtype=case.dtype).masked_fill(~padding, torch.finfo(case.dtype).min)
            mask[0, :, 2] = torch.finfo(case.dtype).min  # a fully masked row: its softmax is uniform
        case _:
            mask = None
    return [q, k, v], mask, grad


def options(case: Case) -> dict[str, object]:
    grouped = case.heads != case.kv_heads
    return {"scale": case.scale, "enable_gqa": grouped, "dropout_p": case.dropout, "key": "0", "rng": DropoutKey(1)}


def whole(case: Case, precision: torch.dtype | None = None) -> list[Tensor]:
    """Return result and gradients of torch's attention, or, with dropout, of one rank's."""
    operands, mask, grad = made(case)
    leaves = [x.to(precision or case.dtype).requires_grad_() for x in operands]
    mask = mask.to(leaves[0].dtype) if mask is not None and mask.is_floating_point() else mask
    out = attention(*leaves, mask, is_causal=case.is_causal, **options(case))
    return [out, *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def cut(case: Case, ranks: int, way: str, zigzag: bool) -> list[Tensor]:
    """Return result and gradients computed by `ranks` ranks, joined."""
    operands, mask, grad = made(case)

    def body(c: Communicators) -> list[Tensor]:
        cp = Tokens(c.cp, zigzag)
        leaves = [cp.slice(x, -2).requires_grad_() for x in operands]
        rows = mask
        if mask is not None and way == "ring" and mask.shape[-2] > 1:
            rows = cp.slice(mask, -2)
        parts = [cp.part(dim=2 if way == "ring" else 1)]
        out = WAYS[way](*leaves, cp, rows, is_causal=case.is_causal, parts=parts, **options(case))
        gradients = torch.autograd.grad(out, leaves, cp.slice(grad, -2))
        return [cp.all_gather_whole(x, -2) for x in (out.detach(), *gradients)]

    results = run_lockstep(Mesh(cp=ranks), body)
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True))
    return results[0]


CASES = {
    "causal": Case(is_causal=True),
    "all see all": Case(),
    "causal, grouped": Case(is_causal=True, heads=8, kv_heads=4, scale=0.3),
    "padding": Case(mask="padding"),
    "padding, grouped": Case(mask="padding", heads=8, value_width=4),
    "causal and padding": Case(mask="causal and padding"),
    "rows that see nothing": Case(mask="none seen"),
    "bias per head": Case(mask="bias per head", heads=8, kv_heads=4),
    "lowest number": Case(mask="lowest"),
    "causal, narrow values": Case(is_causal=True, value_width=3),
    "causal, dropout": Case(is_causal=True, dropout=0.3),
    "padding, grouped, dropout": Case(mask="padding", heads=8, value_width=4, dropout=0.3),
    "long": Case(tokens=48, is_causal=True, width=3, value_width=3),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize(
    ("ranks", "way", "zigzag"), [(2, "ring", True), (3, "ring", False), (4, "ring", True), (4, "ulysses", False)]
)
def test_cut_attention_is_attention(case: Case, ranks: int, way: str, zigzag: bool) -> None:
    with sdpa_kernel(SDPBackend.MATH):  # torch's fused kernel loses the sum of a row masked by the lowest finite number
        expected_ones = whole(case)
    if way == "ulysses" and case.mask == "lowest":
        expected_ones = whole(case)
    for found, expected in zip(cut(case, ranks, way, zigzag), expected_ones, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("mask", "ranks", "most"),
    [("", 8, 2**0.5), ("causal and padding", 4, 2**0.5), ("causal and padding, added", 4, 1.1)],
)
def test_sums_are_in_float32(mask: str, ranks: int, most: float) -> None:
    """The result in bfloat16 is as accurate as torch's own, which sums in float32.

    Fused tiles are rounded once more each, which adds at most as much variance as the rounding of the result.
    """
    case = Case(tokens=256, is_causal=True, mask=mask, dtype=torch.bfloat16)
    found, theirs, truths = cut(case, ranks, "ring", True), whole(case), whole(case, torch.float64)
    for mine, torchs, truth in zip(found, theirs, truths, strict=True):
        assert mine.dtype is torch.bfloat16
        assert (mine.double() - truth).norm() <= most * (torchs.double() - truth).norm()


@pytest.mark.parametrize(
    ("dtype", "width", "value_width", "masked", "kernel"),
    [
        (torch.bfloat16, 32, 32, False, "fused"),
        (torch.bfloat16, 36, 24, False, "fused"),
        (torch.float16, 32, 32, True, "efficient"),
        (torch.float32, 30, 20, True, "efficient"),
        (torch.bfloat16, 512, 512, False, "efficient"),
    ],
)
def test_fused_tiles_are_asked_for_as_the_kernels_of_a_gpu_want_it(
    dtype: torch.dtype, width: int, value_width: int, masked: bool, kernel: str
) -> None:
    """Shapes and types alone are checked: no GPU computes."""
    kind = fused.tile_kernel("cuda", dtype, width, value_width, torch.bool if masked else None, False)
    assert kind == kernel
    with torch.device("meta"):
        q, k = (torch.empty(2, heads, 72, width, dtype=dtype) for heads in (8, 2))
        v = torch.empty(2, 2, 72, value_width, dtype=dtype)
        mask = torch.ones(2, 1, 72, 72, dtype=torch.bool) if masked else None
    out, sums = fused.forward(q, k, v, mask, not masked, 0.3)
    gradients = fused.backward(q, k, v, out, out, sums, mask, not masked, 0.3)
    assert out.shape == (2, 8, 72, value_width) and (sums.shape, sums.dtype) == ((2, 8, 72), torch.float32)
    assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize(
    ("dtype", "widths", "masked", "kernel"),
    [
        (torch.float32, (12, 9), True, "efficient"),
        (torch.float32, (8, 8), False, "efficient"),
        (torch.bfloat16, (16, 16), True, "efficient"),
        (torch.bfloat16, (24, 16), False, "fused"),
    ],
)
def test_kernels_of_a_gpu_are_given_what_they_take(
    dtype: torch.dtype, widths: tuple[int, int], masked: bool, kernel: str
) -> None:
    """A GPU in name computes by the CPU's kernel, and checks sizes, alignment and padding as the GPU's kernel does."""
    draw = torch.Generator().manual_seed(1)
    q, k, v, grad = (
        torch.randn(2, heads, rows, width, generator=draw).to(dtype)
        for heads, rows, width in ((4, 20, widths[0]), (2, 28, widths[0]), (2, 28, widths[1]), (4, 20, widths[1]))
    )
    mask = torch.rand(2, 1, 20, 28, generator=draw) < 0.6 if masked else None
    if mask is not None:
        mask[0, 0, 3] = False
    assert fused.tile_kernel("cuda", dtype, *widths, None if mask is None else mask.dtype, False) == kernel

    def computed(*given: Tensor | None) -> list[Tensor]:
        q, k, v, grad, mask = given
        assert q is not None and k is not None and v is not None and grad is not None
        out, sums = fused.forward(q, k, v, mask, False, 0.4)
        logs = sums.masked_fill(sums == -torch.inf, torch.inf)
        return [out, sums, *fused.backward(q, k, v, grad, out, logs, mask, False, 0.4)]

    expected = computed(q, k, v, grad, mask)
    device = Device(lambda *_: False)
    with gpu(device, Nccl(device)), device:
        found = computed(*(None if x is None else labelled(x.clone()) for x in (q, k, v, grad, mask)))
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.device.type == "cuda"
        with torch._C._DisableTorchDispatch():
            near = {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 4e-3}
            torch.testing.assert_close(mine.as_subclass(Tensor), theirs, check_device=False, check_dtype=False, **near)


@pytest.mark.parametrize("name", ["bias per head", "causal, dropout"])
def test_long_rows_go_in_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    monkeypatch.setattr("autoptd.ops.context_attention.SCORES", 2 * 4 * 6 * 5)
    for found, expected in zip(cut(case, 2, "ring", True), whole(case), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_uneven_tokens_are_an_error() -> None:
    with pytest.raises(RuntimeFault, match="does not divide by 4 chunks"):
        cut(Case(tokens=26), 2, "ring", True)
    with pytest.raises(RuntimeFault, match="does not divide by 1 × 4"):
        cut(Case(tokens=26), 4, "ring", False)
