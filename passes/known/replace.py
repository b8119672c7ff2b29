"""Replacement of functions that models of several libraries call, while a model is traced or run.

A function is known by its name and its parameters, since models carry copies of it. It is replaced in the Python
modules of the model's classes, and a method in the classes themselves.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoptd.passes.kept.python_values import is_users


def files_of(model: nn.Module, *, bases: bool = False) -> list[ModuleType]:
    """Return the Python modules of a model's classes, and of their bases."""
    classes = {cls for m in model.modules() for cls in (type(m).__mro__ if bases else (type(m),))}
    return [sys.modules[name] for name in {cls.__module__ for cls in classes} & sys.modules.keys()]


@contextmanager
def replaced_functions(model: nn.Module, functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace the functions of these names and parameters that the model's classes call, or have as methods."""
    classes = {cls for m in model.modules() for cls in type(m).__mro__}
    with ExitStack() as replaced:
        for owner in (*files_of(model), *classes):
            for name, made in functions.items():
                if _same_parameters(vars(owner).get(name), made):
                    replaced.enter_context(patch.object(owner, name, made))
        yield


def _same_parameters(given: Any, made: Callable[..., Any]) -> bool:
    return inspect.isfunction(given) and [*inspect.signature(given).parameters] == [*inspect.signature(made).parameters]


@contextmanager
def casts_that_change_nothing() -> Iterator[None]:
    """Let forward call `.to()` of a module that has that type and device already; torch.export cannot trace it."""
    to = nn.Module.to

    def checked(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        held = [x for x in (*self.parameters(), *self.buffers()) if x.is_floating_point()]
        if device is None and all(x.dtype == dtype for x in held):
            return self
        return to(self, *args, **kwargs)

    with patch.object(nn.Module, "to", checked):
        yield


@contextmanager
def checks_without_reading() -> Iterator[None]:
    """Let the model call losses of torch's that check their operands' values on the host, which is unknown in a trace.

    Where the check would raise an error, the loss is NaN.
    """
    with patch.object(F, "gaussian_nll_loss", _gaussian_nll_loss):
        yield


def _gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """Compute ½ (log σ² + (x - y)² / σ²) for variances σ² ≥ eps, whose gradients ignore that limit, as torch does."""
    if not isinstance(var, Tensor):
        var = torch.full_like(input, var)
    elif var.shape != input.shape and var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    elif sum(n != m for n, m in zip(var.shape, input.shape, strict=True)) > 1:
        raise ValueError("var is of incorrect size")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not valid")
    var = torch.where(var < 0, math.nan, var)
    var = var + (var.clamp(min=eps) - var).detach()
    losses = 0.5 * (var.log() + (input - target).square() / var)
    if full:
        losses = losses + 0.5 * math.log(2 * math.pi)
    return losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()


@contextmanager
def run_as_eager() -> Iterator[None]:
    """Answer the user's own code that asks whether it is compiled or exported as when it just runs.

    Libraries get the true answer: they compute the same in another way, which can be traced.
    """
    with ExitStack() as replaced:
        for owner, name in (
            (torch.compiler, "is_compiling"),
            (torch.compiler, "is_exporting"),
            (torch.jit, "is_tracing"),
        ):
            replaced.enter_context(patch.object(owner, name, _asked_by_users(getattr(owner, name))))
        yield


def _asked_by_users(ask: Callable[[], bool]) -> Callable[[], bool]:
    def asked() -> bool:
        return not is_users(sys._getframe(1).f_globals.get("__name__", "")) and ask()

    return asked
