"""Gradients that are not finite: what all ranks do about one, and the scale that keeps those of float16 in range.

Every rank sees the same reduced loss and norm, in which an infinity or NaN of any rank shows, so all of them decide
alike: nobody steps. The norm holds every logical element once and no padding; it needs no message of its own.

Dynamic loss scaling (Micikevicius et al. 2018, section 3.2) with the rule and constants of torch.amp.GradScaler: the
loss's gradient is `scale` instead of 1, reduced gradients are divided by it before norm and clipping, and

    overflow                           scale *= backoff_factor
    growth_interval steps without one  scale *= growth_factor
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from autoptd.errors import PlanError, RuntimeFault, nearest

NON_FINITE = ("raise", "skip")
_LEAST = 2.0**-24  # float16's smallest positive number: what overflows below is not the scale's fault


@dataclass
class LossScale:
    """The scale and how long it has held. Its numbers may be changed between steps, on all ranks alike."""

    scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    steps_without_overflow: int = 0

    def update(self, *, overflow: bool) -> None:
        """After a step, or after one that was skipped for its overflow."""
        if overflow:
            self.scale *= self.backoff_factor
            self.steps_without_overflow = 0
            return
        self.steps_without_overflow += 1
        if self.steps_without_overflow == self.growth_interval:
            grown = self.scale * self.growth_factor
            self.scale = grown if grown <= 2.0**127 else self.scale
            self.steps_without_overflow = 0

    @property
    def exhausted(self) -> bool:
        """Whether a smaller scale can help no more."""
        return self.scale < _LEAST

    def state_dict(self) -> dict[str, Any]:
        """Numbers for a checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from these. Raises KeyError for missing ones."""
        for each in fields(self):
            setattr(self, each.name, state[each.name])


class Finite:
    """Decides, from what all ranks agreed on, whether a step is taken. `scaling`: of float16, else None."""

    def __init__(self, non_finite: str, scaling: LossScale | None) -> None:
        if non_finite not in NON_FINITE:
            fix = nearest(str(non_finite), NON_FINITE)
            raise PlanError(f"unknown non_finite {non_finite!r}", where="non_finite", fix=fix)
        self._raises = non_finite == "raise"
        self.scaling = scaling
        self.skipped = False  # the last step
        self._seen = (0.0, 0.0)

    @property
    def scale(self) -> float:
        """By which this step's gradients are too large."""
        return 1.0 if self.scaling is None else self.scaling.scale

    def steps(self, loss: float, norm: float) -> bool:
        """Whether this step is taken; `loss` and `norm` are the whole batch's, the same on all ranks."""
        self._seen = (loss, norm)
        self.skipped = not (math.isfinite(norm) and (self.scaling is not None or math.isfinite(loss)))
        if self.scaling is not None:
            self.scaling.update(overflow=self.skipped)
        return not self.skipped

    @property
    def fatal(self) -> bool:
        """Whether the last step ends training: as asked for; an overflow of float16 once a smaller scale is no help."""
        return self.skipped and self._raises and (self.scaling is None or self.scaling.exhausted)

    def fail(self, step: int, here: list[str], first: str) -> None:
        """Of a step, whose number is counted from 0, on all ranks: raise RuntimeFault.

        `here`: this rank's parameters whose gradients are not finite; `first`: where such a value came from.
        """
        loss, norm = self._seen
        raise RuntimeFault(
            f"step {step} is not finite: loss {loss:g}, gradient norm {norm:g}; no rank took it",
            where=first + ("\ngradients of " + ", ".join(here[:4]) + (" …" if len(here) > 4 else "") if here else ""),
            fix="look at the batch, lower lr or give clip_norm; non_finite='skip' leaves such steps out",
        )
