"""Non-finite gradients: how all ranks handle them, and the loss scale that keeps float16 gradients in range.

An infinity or NaN on any rank makes the reduced loss or norm non-finite, and every rank sees the same values, so all
ranks skip the step together. The norm covers every logical element once and no padding; the check costs no message.

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
_LEAST = 2.0**-24  # float16's smallest positive number: an overflow at a smaller scale has another cause


@dataclass
class LossScale:
    """The dynamic loss scale. Its fields may be changed between steps, equally on all ranks."""

    scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    steps_without_overflow: int = 0

    def update(self, *, overflow: bool) -> None:
        """Update the scale after a step; `overflow`: it was skipped for an overflow."""
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
        """True if a smaller scale cannot prevent an overflow."""
        return self.scale < _LEAST

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the fields. Raises KeyError for missing ones."""
        for each in fields(self):
            setattr(self, each.name, state[each.name])


class Finite:
    """Decides from the reduced loss and norm whether a step is taken. `scaling`: the scale of float16, else None."""

    def __init__(self, non_finite: str, scaling: LossScale | None) -> None:
        if non_finite not in NON_FINITE:
            fix = nearest(str(non_finite), NON_FINITE)
            raise PlanError(f"unknown non_finite {non_finite!r}", where="non_finite", fix=fix)
        self._raises = non_finite == "raise"
        self.scaling = scaling
        self.skipped = False  # whether the last step was skipped
        self._seen = (0.0, 0.0)

    @property
    def scale(self) -> float:
        """The loss scale of this step, a factor of all its gradients."""
        return 1.0 if self.scaling is None else self.scaling.scale

    def options(self) -> str:
        """Return the fields of the loss scale as text, a line for each; the same on all ranks."""
        fields_of = {} if self.scaling is None else self.scaling.state_dict()
        return "\n".join(f"{name} = {value} in loss_scale" for name, value in fields_of.items())

    def steps(self, loss: float, norm: float) -> bool:
        """Return whether to take this step; `loss` and `norm`: of the global batch, the same on all ranks."""
        self._seen = (loss, norm)
        self.skipped = not (math.isfinite(norm) and (self.scaling is not None or math.isfinite(loss)))
        if self.scaling is not None:
            self.scaling.update(overflow=self.skipped)
        return not self.skipped

    @property
    def fatal(self) -> bool:
        """True if the last step ends training: "raise", and with float16 only once the scale is exhausted."""
        return self.skipped and self._raises and (self.scaling is None or self.scaling.exhausted)

    def fail(self, step: int, here: list[str], first: str) -> None:
        """Raise RuntimeFault for step `step`, counted from 0, on all ranks.

        `here`: this rank's parameters with non-finite gradients; `first`: the origin of the non-finite value.
        """
        loss, norm = self._seen
        raise RuntimeFault(
            f"step {step} is not finite: loss {loss:g}, gradient norm {norm:g}; no rank took it",
            where=first + ("\ngradients of " + ", ".join(here[:4]) + (" …" if len(here) > 4 else "") if here else ""),
            fix="check the batch, lower lr or give clip_norm; non_finite='skip' skips such steps",
        )
