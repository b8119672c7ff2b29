"""Warnings of what reads the parameters of `par.optimizer`, which have no gradients between steps.

    clip_grad_norm_((p for group in par.optimizer.param_groups for p in group["params"]), 1.0)    limits nothing
    sum(p.grad.norm() for p in par.optimizer.param_groups[0]["params"] if p.grad is not None)     is 0

Schedulers read the options of groups only; torch's optimizers, and all that the package calls, read them rightly.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch.optim import Optimizer

from autoptd.old_values import level_outside

_READERS = ("torch.optim", "torch.distributed", "autoptd", "copy", "pickle")  # for the sake of the optimizer itself
_TEXT = (
    "the parameters of par.optimizer are this rank's parts, flat, and have no gradients between steps: clip_norm= "
    "limits the norm of all, par.grad_norm is that norm, and par.gradients() and par.state_dict() have whole tensors"
)


class _Parts(list[Any]):
    """The parameters of a group. Copies are plain lists."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        _read(sys._getframe(1))
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        _read(sys._getframe(1))
        return super().__getitem__(index)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return list, ([*super().__iter__()],)


def warning_of_reads(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer whose groups warn of whoever reads their parameters between steps."""
    for group in optimizer.param_groups:
        if not isinstance(group["params"], _Parts):
            group["params"] = _Parts(group["params"])
    return optimizer


def _read(frame: FrameType | None) -> None:
    """Warn at the line of the user's code, unless an optimizer is among the callers of this frame."""
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith(_READERS):
            return
        frame = frame.f_back
    warnings.warn(_TEXT, stacklevel=level_outside())
