"""Custom backward passes as users write them, and a small model to use them in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

WIDTH = 16


class Net(nn.Module):
    """Blocks h -> h, each with its own linear layer and a vector; ends in a mean over samples."""

    def __init__(self, body: Callable[[nn.Module, Tensor], Tensor], blocks: int = 3) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 5)
        self.blocks = nn.ModuleList([Block(body) for _ in range(blocks)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = h + block(h)
        return F.cross_entropy(self.last(h), y)


class Block(nn.Module):
    def __init__(self, body: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.scale, self.body = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH)), body

    def forward(self, h: Tensor) -> Tensor:
        return self.body(self, h)


# ---- torch.autograd.Function ----


class Round(Function):
    """Straight-through estimator: its forward alone has gradient 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, steps: int = 8) -> Tensor:
        return (x * steps).round() / steps

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


apply_round = Round.apply  # bound long before any trace


class Reverse(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return -ctx.factor * grad, None


class Clip(Function):
    """Clip each element of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.clamp(-1e-3, 1e-3)


class ClipNorm(Clip):
    """Clip the gradient of the batch by its norm."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * (100 / grad.norm()).clamp(max=1.0)


class Centred(Clip):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad - grad.mean(0)


class PerSample(Clip):
    """Divide by the number of samples."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad / grad.shape[0]


class RowNorm(Clip):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad / (grad.norm(dim=-1, keepdim=True) + 1e-6)


class Branch(Clip):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad if grad.norm() < 1e9 else torch.zeros_like(grad)


class Gelu(Function):
    """GELU with separate forward and setup_context; differentiable once."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(1.702 * x)
        return grad * (s + 1.702 * x * s * (1 - s))


class Several(Function):
    """Three results, the last without gradient; reads a parameter. Its gradient differs from autograd's on purpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Any:
        ctx.save_for_backward(x, scale)
        largest = x.amax(-1, keepdim=True)
        ctx.mark_non_differentiable(largest)
        return x * scale, x.abs() + scale, largest

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor, _: Any) -> Any:
        x, scale = ctx.saved_tensors
        return 2 * first * scale + second * x.sign(), (first * x + second).sum(0)


class Product(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x, grad.sum(0)


class Quantised(Function):
    """Quantise a weight by rows, straight through."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bits: int) -> Tensor:
        scale = weight.abs().amax(1, keepdim=True)
        return (weight / scale * 2**bits).round() * scale / 2**bits

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class Bits(Function):
    """Drop the last bits of float32 numbers, straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x.view(torch.int32) & -65536).view(torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad


class BySize(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:
        ctx.size = size
        return x * size

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.size, None


class SquareSum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x**2).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * grad * x


class SquareMean(SquareSum):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x**2).mean()


class InPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 2 * grad


class Noise(Clip):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad + torch.rand_like(grad)


class Positive(Clip):
    """Select some samples: their number depends on the data."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x[x[:, 0] > 0]


def straight_sign(factor: float) -> type[Function]:
    """Make a class that cannot be imported by name; all of them have one name."""

    class Sign(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.sign()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return factor * grad

    return Sign


# ---- torch.library ----


@torch.library.custom_op("autoptd_tests::running", mutates_args=())
def running(x: Tensor, scale: Tensor) -> Tensor:
    """Sum along each row."""
    return (x * scale).cumsum(-1)


@running.register_fake
def _(x: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(x)


def _running_backward(ctx: Any, grad: Tensor) -> Any:
    x, scale = ctx.saved_tensors
    back = grad.flip(-1).cumsum(-1).flip(-1)
    return back * scale, (back * x).sum(0)


running.register_autograd(_running_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


def library_op(name: str, backward: Callable[..., Any] | None, **options: Any) -> Callable[[Tensor], Tensor]:
    """Make an op that copies x."""

    def copied(x: Tensor) -> Tensor:
        return x * 1.0

    made = torch.library.custom_op(f"autoptd_tests::{name}", copied, mutates_args=(), **options)
    made.register_fake(torch.empty_like)
    if backward is not None:
        made.register_autograd(backward)
    return made


centred = library_op("centred", lambda ctx, grad: grad - grad.mean(0))
halved = library_op("halved", lambda ctx, grad: grad / 2)
forward_only = library_op("forward_only", None)
elsewhere = library_op("elsewhere", lambda ctx, grad: grad, device_types="cuda")
