"""Optimizers whose update of an element depends on other elements of the same parameter, in any precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def orthogonal(x: Tensor) -> Tensor:
    """Return the nearest matrix with orthonormal rows or columns, for each matrix of a stack; a vector's direction."""
    if x.ndim < 2:
        return x / x.norm().clamp(min=1e-30)
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-30)
    for _ in range(6):
        x = 1.5 * x - 0.5 * x @ x.mT @ x
    return x


class Orthogonal(Optimizer):
    """Momentum, orthogonalised; counts its steps in a Python number, and keeps a mean per row."""

    def __init__(self, params: Any, lr: float = 0.05, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["steps"] = state.get("steps", 0) + 1
                momentum = state.setdefault("momentum", torch.zeros_like(p))
                momentum.mul_(group["momentum"]).add_(p.grad)
                rows = state.setdefault("rows", torch.zeros(p.shape[:1], dtype=p.dtype, device=p.device))
                rows.lerp_(p.grad.flatten(1).mean(1) if p.ndim > 1 else p.grad, 1 / (1 + state["steps"]))
                size = 1 + rows.abs().sum()
                p.sub_(orthogonal(momentum) * (group["lr"] / size))


class Coded(Tensor):
    """A tensor [n, m] kept as integers and a scale for each row, as optimizers of few bits keep their states."""

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> Coded:
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.detach.default):
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(func)

    @classmethod
    def of(cls, x: Tensor) -> Coded:
        scale = x.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
        return cls((x / scale).round().to(torch.int8), scale)

    def read(self) -> Tensor:
        return self.codes * self.scale


class FewBits(Optimizer):
    """Momentum, of matrices in 8 bits."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                kept = self.state[p].get("momentum", 0)
                momentum = 0.9 * (kept.read() if isinstance(kept, Coded) else kept) + p.grad
                self.state[p]["momentum"] = Coded.of(momentum) if p.ndim == 2 else momentum
                p.sub_(group["lr"] * momentum)


class Coupled(Optimizer):
    """Normalises all gradients by their common norm."""

    begins = 1  # the first step in which it does

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        self.steps += 1
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm() if self.steps >= self.begins else 1.0
        for p in held:
            p.sub_(0.1 * p.grad / norm)


class Late(Coupled):
    """Begins with the fifth step."""

    begins = 5


class Early(Optimizer):
    """Pulls parameters back to the values that they had at construction."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.first = {p: p.detach().clone() for group in self.param_groups for p in group["params"]}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for p, first in self.first.items():
            if p.grad is not None:
                p.lerp_(first, 0.01).sub_(0.1 * p.grad)


class Noisy(Optimizer):
    """Adds noise of torch's generator."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(0.1 * p.grad + 0.01 * torch.randn_like(p))


class ByPlace(Optimizer):
    """Steps less for the parameters that come first, as schemes do that decay the rate from layer to layer."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for place, p in enumerate(group["params"]):
                if p.grad is not None:
                    p.sub_(group["lr"] * 0.9 ** (len(group["params"]) - place) * p.grad)


class DecaysMatrices(Optimizer):
    """Decays what has two dims, and claims to need no more than pieces."""

    elementwise = True

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(0.9 if p.ndim == 2 else 1.0).sub_(group["lr"] * p.grad)


class CoupledPieces(Coupled):
    """Claims to be elementwise: pieces together have the norm of the whole."""

    elementwise = True
