"""Comparison of every rank's tensors with the plain model's: the largest difference and the first wrong rank of each.

‖found − expected‖ / ‖expected‖   of a rank's part, relative to the norm of the whole tensor. If that norm is zero up
                                  to rounding (the gradient of a key's bias), relative to the norm of all tensors.

Some models amplify rounding: the gradient of a bias before a batch norm is the rounding of a sum of large numbers.
`rounded` are the steps of the plain model from weights that differ by rounding. If they are given, a tensor's norm
counts as at least ‖rounded − expected‖ · AMPLE / TOLERANCE, so that AMPLE times its own rounding is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from autoptd.layout.layout import Layout
from autoptd.runtime.lazy_tensor import own_part
from autoptd.testing.parity import difference
from autoptd.verification.plain import PlainStep
from autoptd.verification.ranks import RankRun, RankStep

TOLERANCE = 1e-9
AMPLE = 100.0  # a different order of additions rounds more than a change of the weights in their last bits


@dataclass
class Deviation:
    """The largest difference of a tensor over all ranks, and the first rank whose difference exceeds `TOLERANCE`."""

    difference: float = 0.0
    rank: int | None = None

    def add(self, difference: float, rank: int) -> None:
        """Record a rank's difference; NaN counts as infinite."""
        difference = difference if difference == difference else float("inf")
        self.difference = max(self.difference, difference)
        if difference > TOLERANCE and self.rank is None:
            self.rank = rank


@dataclass
class Compared:
    """Differences over all steps, up to and including the first step that has one.

    diverged: tensors whose copies are no longer bit-identical -> two ranks that differ. missing: parameters of the
    plain model that no rank holds, or that have a gradient there but are in no rank's optimizer.
    """

    loss: Deviation = field(default_factory=Deviation)
    norm: Deviation = field(default_factory=Deviation)
    gradients: dict[str, Deviation] = field(default_factory=dict)
    state: dict[str, Deviation] = field(default_factory=dict)
    diverged: dict[str, tuple[int, int]] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    step: int | None = None  # the first step with a difference

    @property
    def agrees(self) -> bool:
        return self.step is None and not self.diverged and not self.missing


def compare(
    layout: Layout,
    runs: Sequence[RankRun],
    expected: Sequence[PlainStep],
    clip: float,
    rounded: Sequence[PlainStep] | None = None,
) -> Compared:
    """Compare every rank's steps with the plain model's, up to the first step that differs."""
    held, updated = {n for run in runs for n in run.steps[0].state}, {p.name for run in runs for p in run.owned}
    found = Compared(missing=tuple(n for n in expected[0].state if n not in held))
    found.missing += tuple(n for n, g in expected[0].gradients.items() if n in held - updated and bool(g.any()))
    for number, step in enumerate(expected):
        mine = [run.steps[number] for run in runs]
        near = step if rounded is None else rounded[number]
        for rank, one in enumerate(mine):
            found.loss.add(abs(one.loss - step.loss) / (_scale(abs(step.loss), near.loss - step.loss) or 1.0), rank)
            found.norm.add(abs(one.norm - step.norm) / _scale(step.norm, near.norm - step.norm), rank)
        _gradients(found, layout, mine, step, near, clip)
        _states(found, layout, mine, step, near)
        offs = [found.loss, found.norm, *found.gradients.values(), *found.state.values()]
        if any(off.rank is not None for off in offs):
            found.step = number
            break  # later differences follow from this one
    _replicas(found, layout, runs, -1 if found.step is None else found.step)
    return found


def _scale(norm: float, rounding: float) -> float:
    """Return the norm that a difference is relative to."""
    return max(norm, abs(rounding) * AMPLE / TOLERANCE)


def _scales(expected: Mapping[str, Tensor], near: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the norm that each tensor's differences are relative to."""
    norms = {name: x.double().norm().item() for name, x in expected.items()}
    if near is expected:
        return norms
    return {n: _scale(norms[n], _norm({n: near[n] - x}) if n in near else 0.0) for n, x in expected.items()}


def _gradients(
    found: Compared, layout: Layout, mine: Sequence[RankStep], step: PlainStep, near: PlainStep, clip: float
) -> None:
    whole, scales = _norm(step.gradients), _scales(step.gradients, near.gradients)
    for rank, one in enumerate(mine):
        undo = 1 / min(1.0, clip / (one.norm + 1e-6)) if one.norm == one.norm else 1.0
        for part in one.parts:
            off = found.gradients.setdefault(part.name, Deviation())
            full = step.gradients.get(part.name)
            if full is None:  # the plain model has no gradient for it
                off.add(part.gradient.norm().item() / (whole or 1.0), rank)
                continue
            wanted = own_part(full, layout.parameters[part.name], layout.mesh, rank).reshape(-1)
            wanted = wanted[part.start : part.start + part.gradient.numel()]
            off.add(difference(part.gradient * undo, wanted, scales[part.name], whole), rank)


def _states(found: Compared, layout: Layout, mine: Sequence[RankStep], step: PlainStep, near: PlainStep) -> None:
    whole, scales = _norm(step.state), _scales(step.state, near.state)
    for rank, one in enumerate(mine):
        for name, x in one.state.items():
            if name in step.state:
                wanted = own_part(step.state[name], layout.spec(name), layout.mesh, rank)
                found.state.setdefault(name, Deviation()).add(difference(x, wanted, scales[name], whole), rank)


def _replicas(found: Compared, layout: Layout, runs: Sequence[RankRun], step: int) -> None:
    """Record tensors whose copies are not bit-identical on all ranks that hold one."""
    first: dict[tuple[str, tuple[int, int]], int] = {}
    for rank, run in enumerate(runs):
        for name, x in run.steps[step].state.items():
            spec = layout.spec(name)
            other = first.setdefault((name, spec.part(layout.mesh, rank)), rank)
            if name not in found.diverged and not _same(runs[other].steps[step].state[name], x):
                found.diverged[name] = (other, rank)


def _same(a: Tensor, b: Tensor) -> bool:
    return bool((a == b).all())


def _norm(tensors: Mapping[str, Tensor]) -> float:
    return float(sum(x.double().norm().item() ** 2 for x in tensors.values())) ** 0.5
