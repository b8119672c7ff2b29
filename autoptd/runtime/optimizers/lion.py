"""The Lion optimizer (Chen et al. 2023, Symbolic Discovery of Optimization Algorithms, algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer


class Lion(Optimizer):
    """Sign of an interpolated momentum, with decoupled weight decay.

    u = sign(β₁ m + (1 - β₁) g);  w ← w - η (u + λ w);  m ← β₂ m + (1 - β₂) g
    """

    elementwise = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        """Raise ValueError for a negative rate or decay, or betas outside [0, 1)."""
        if not (lr >= 0 and weight_decay >= 0 and all(0 <= beta < 1 for beta in betas)):
            raise ValueError(f"lr {lr}, betas {betas} and weight_decay {weight_decay}: one is out of range")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update all parameters with a gradient; return the closure's result."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                momentum = state["momentum"] = state["momentum"] if state else torch.zeros_like(p)
                update = momentum.lerp(p.grad, 1 - first).sign_()
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update.mul_(group["lr"]))
                momentum.lerp_(p.grad, 1 - second)
        return loss
