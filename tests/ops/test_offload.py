"""Offloaded blocks: gradients bit by bit, what stays on the device, and writes to saved tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from autoptd.ops import offload as module
from autoptd.ops.offload import offload


class Host:
    """Stands for a host with memory of its own: counts its copies, which may be spoilt."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.there: list[int] = []
        self.back: list[int] = []
        to_host, to_device = module._to_host, module._to_device

        def there(x: Tensor) -> Tensor:
            self.there.append(x.numel())
            return to_host(x)

        def back(x: Tensor, device: torch.device) -> Tensor:
            self.back.append(x.numel())
            return to_device(x, device)

        monkeypatch.setattr(module, "_to_host", there)
        monkeypatch.setattr(module, "_to_device", back)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch)


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.LayerNorm(width)
        self.register_buffer("scale", torch.full((width,), 0.7))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        kept = torch.softmax(q @ k.transpose(-1, -2) + mask, -1) @ v
        return x + F.dropout(F.gelu(self.out(kept) * self.scale), 0.3)


def gradients(dtype: torch.dtype, by: Callable[..., Tensor], retain: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    layers = [Block().to(dtype) for _ in range(3)]
    x, mask = torch.randn(2, 5, 8, dtype=dtype, requires_grad=True), torch.randn(5, 5, dtype=dtype)
    torch.manual_seed(1)
    y = x * 1.0
    for layer in layers:
        y = by(layer, y, mask)
    if retain:
        y.square().sum().backward(retain_graph=True)
        x.grad = None
        for p in (p for layer in layers for p in layer.parameters()):
            p.grad = None
    y.square().sum().backward()
    return [g for p in (x, *(p for layer in layers for p in layer.parameters())) if (g := p.grad) is not None]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) > 0 and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def plainly(fn: Callable[..., Tensor], *args: Any) -> Tensor:
    return fn(*args)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("retain", [False, True])
def test_gradients_are_equal_bit_by_bit(host: Host, dtype: torch.dtype, retain: bool) -> None:
    assert same(gradients(dtype, offload, retain=retain), gradients(dtype, plainly, retain=retain))
    assert host.there and (retain or len(host.back) == len(host.there))


def test_a_storage_goes_once_however_many_ops_save_it(host: Host) -> None:
    x = torch.randn(4, 4, requires_grad=True)
    wide = x * 1.0
    offload(lambda x: x.exp() * x[:2].sum() + (x.t() @ x).sin(), wide)
    assert host.there == [64, 4, 64, 64], "exp, which two ops save; the sum; x, which one op saves twice; the product"


def test_parameters_masks_and_what_a_stage_received_stay(host: Host) -> None:
    weight, received = nn.Parameter(torch.randn(4, 4)), torch.randn(4, 4, requires_grad=True)
    out = offload(lambda x, w, m: F.linear(x * m, w), received, weight, torch.randn(4, 4))
    assert host.there == [64], "the product of the input and the mask"
    out.sum().backward()
    layer = nn.Linear(4, 4)
    offload(layer, torch.randn(4, 4) * received).sum().backward()
    assert host.there == [64, 64]


def test_the_device_is_left(host: Host) -> None:
    saved: list[StorageWeakRef] = []

    def block(x: Tensor) -> Tensor:
        y = x.sin()
        saved.extend(StorageWeakRef(t.untyped_storage()) for t in (x, y))
        return y.square()

    x = torch.randn(1000, requires_grad=True) * 1.0
    out = offload(block, x)
    del x
    assert all(ref.expired() for ref in saved) and sum(host.there) == 8000
    out.sum().backward()
    assert sum(host.back) == 8000


def test_addresses_that_are_used_again_are_not_mixed_up(host: Host) -> None:
    """Within a block a freed tensor's place may be taken by the next one, of the same version."""

    def block(x: Tensor) -> Tensor:
        for _ in range(50):
            x = (x * 1.1).sin()
        return x

    def gradient(by: Callable[..., Tensor]) -> Tensor:
        x = torch.linspace(0, 1, 100, requires_grad=True)
        by(block, x * 1.0).sum().backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(offload), gradient(plainly))


# ---- writes in place ----


def test_what_is_on_the_host_is_as_it_was_saved() -> None:
    """Autograd refuses this without hooks; the gradient at the value that was read is right."""
    x = torch.tensor([0.5, 2.0], requires_grad=True)

    def block(x: Tensor) -> Tensor:
        y = x * 1.0
        z = y.square()
        y.mul_(10)
        return z

    offload(block, x * 1.0).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1.0, 4.0]


def test_both_versions_of_a_tensor_are_kept() -> None:
    x = torch.tensor([0.5, 2.0], requires_grad=True)

    def block(x: Tensor) -> Tensor:
        y = x * 1.0
        z = y.detach().square() * y  # saves the square
        before = y.square()
        with torch.no_grad():
            y.mul_(10)
        return z + before + y.square()

    offload(block, x * 1.0).sum().backward()
    wanted = torch.tensor([0.5, 2.0])
    assert x.grad is not None and torch.equal(x.grad, wanted.square() + 2 * wanted + 20 * wanted)


@pytest.mark.parametrize("cell", [nn.GRU, nn.LSTM, nn.RNN])
def test_parts_of_a_storage_have_versions_of_their_own(cell: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    block = cell(4, 4, batch_first=True).double()
    x = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    found = []
    for by in (plainly, offload):
        block.zero_grad()
        x.grad = None
        by(block, x * 1.0)[0].square().sum().backward()
        found.append([p.grad.clone() for p in (x, *block.parameters()) if p.grad is not None])
    assert same(*found)


def test_what_stays_on_the_device_has_its_version_checked() -> None:
    x, mask = torch.randn(3, requires_grad=True), torch.ones(3)
    out = offload(lambda x, mask: x * mask, x * 1.0, mask)
    mask.add_(1)
    with pytest.raises(RuntimeError, match="modified in place after it was saved: it is at version 1 instead of 0"):
        out.sum().backward()


def test_nothing_is_copied_without_gradients(host: Host) -> None:
    with torch.no_grad():
        offload(torch.exp, torch.randn(3))
    assert host.there == []


def test_views_that_hold_their_sign_or_conjugate_stay(host: Host) -> None:
    x = torch.randn(3, dtype=torch.complex64, requires_grad=True)
    offload(lambda x: (x.conj() * x).imag.sin(), x * 1.0).sum().backward()
    other = torch.Tensor.clone(x.detach()).requires_grad_()
    (other.conj() * other).imag.sin().sum().backward()
    assert x.grad is not None and other.grad is not None and torch.equal(x.grad, other.grad)


# ---- planted ----


def wrong_version(patch: pytest.MonkeyPatch) -> None:
    """A storage that was written is not copied again."""
    key = module._OffloadedCall.pack

    def pack(self: Any, x: Tensor) -> Any:
        for (address, _), copy in list(self.copies.items()):
            if address == x.untyped_storage()._cdata:
                return copy.view(x)
        return key(self, x)

    patch.setattr(module._OffloadedCall, "pack", pack)


def too_early(patch: pytest.MonkeyPatch) -> None:
    """The host copies before the kernels have written: zeros stand for what it finds."""
    patch.setattr(module, "_to_host", torch.zeros_like)


def unchecked(patch: pytest.MonkeyPatch) -> None:
    unpack = module._OffloadedCall.unpack
    patch.setattr(
        module._OffloadedCall,
        "unpack",
        staticmethod(lambda p: p.tensor if isinstance(p, module._OnDevice) else unpack(p)),
    )


def whole_views(patch: pytest.MonkeyPatch) -> None:
    """All views begin where their storage does."""
    view = module._HostCopy.view

    def at_start(self: Any, x: Tensor) -> Any:
        found = view(self, x)
        found.offset = 0
        return found

    patch.setattr(module._HostCopy, "view", at_start)


@pytest.mark.parametrize(
    "bug",
    [
        pytest.param(wrong_version, marks=pytest.mark.fault("old activations")),
        pytest.param(too_early, marks=pytest.mark.fault("unwritten activations")),
        pytest.param(unchecked, marks=pytest.mark.fault("unchecked versions")),
        pytest.param(whole_views, marks=pytest.mark.fault("views without offsets")),
    ],
)
def test_a_bug_is_caught(bug: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        bug(patch)
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            for check in (
                test_both_versions_of_a_tensor_are_kept,
                test_what_stays_on_the_device_has_its_version_checked,
                lambda: _equal(torch.float32),
            ):
                check()


def _equal(dtype: torch.dtype) -> None:
    assert same(gradients(dtype, offload), gradients(dtype, plainly))
