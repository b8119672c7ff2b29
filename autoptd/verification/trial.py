"""A trial of a subject: its emitted program in float64, the batches, and the plain model's steps on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from autoptd.api import Parallel
from autoptd.codegen.emit import Program
from autoptd.compile.program import make_program, read_sharding
from autoptd.errors import CannotVerify
from autoptd.layout.layout import Layout
from autoptd.progress import Progress, Silent
from autoptd.verification.call_numbers import MoreDraws
from autoptd.verification.inputs import USER_ERRORS, Batch, try_batches
from autoptd.verification.keyed import WIDE, Draw, float64_by_default
from autoptd.verification.plain import NoReference, PlainStep, draws_of, train_plain, widened
from autoptd.verification.smaller.smaller import Subject

STEPS = 2  # the second shows state left by the first: stale gradients, parameters that were not gathered
REPEATED = 1e-6  # the largest relative difference of a plain model from itself that is taken for rounding
OPTIONS: dict[str, dict[str, Any]] = {  # without lion: the sign of a gradient that is zero up to rounding is arbitrary
    "adamw": {"lr": 3e-3, "weight_decay": 0.1},
    "sgd": {"lr": 0.05, "momentum": 0.9},
    "adafactor": {"lr": 0.01, "weight_decay": 0.1},
    "muon": {"lr": 0.01, "adamw": {"lr": 3e-3}},
}


class Widened(Parallel):
    """Parallel with float64 inputs, buffers and constants, to match its program."""

    @cached_property
    def layout(self) -> Layout:
        """The planned layout with float64 in place of narrower float types."""
        found = super().layout
        specs = {name: replace(spec, dtype=_wide(spec.dtype)) for name, spec in found.specs.items()}
        buffers = {
            name: spec if spec.dtype is None else replace(spec, dtype=_wide(spec.dtype))
            for name, spec in found.buffers.items()
        }
        return replace(found, specs=specs, buffers=buffers)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return WIDE.get(dtype, dtype)


@dataclass(frozen=True)
class Trial:
    """A subject with its program, the batches to run, and the plain model's steps on them.

    made: a description of each input. clip: the norm to which gradients are clipped. drops: whether dropout is enabled,
    in the program and in the plain model.
    """

    subject: Subject
    program: Program
    batches: tuple[Mapping[str, Tensor], ...]
    draws: tuple[Draw, ...]
    optimizer: str
    expected: tuple[PlainStep, ...]
    clip: float
    made: tuple[str, ...]
    drops: bool = True

    @property
    def options(self) -> dict[str, Any]:
        return OPTIONS[self.optimizer]

    def rounded(self) -> list[PlainStep]:
        """Return the plain model's steps from weights that differ in their last bits.

        Raises CannotVerify if they differ by more than `REPEATED`: the weights do not decide what it computes.
        """
        draws = self.draws if self.drops else None
        steps, _ = train_plain(self.subject.source, self.batches, self.optimizer, self.options, draws, rounded=True)
        off = max(_difference(one, other) for one, other in zip(self.expected, steps, strict=True))
        if not off <= REPEATED:
            raise CannotVerify(
                "the plan and the plain model differ, but the plain model differs from itself as well: trained again "
                f"from weights that differ by rounding, its loss or its gradient is off by {off:.1g}",
                where=type(self.subject.source.model).__name__,
                fix="let forward depend on its inputs, parameters and buffers: no clock, no file, no random numbers "
                "other than torch's; or choose weights at which rounding decides less (ties, thresholds, overflow)",
            )
        return steps

    @property
    def first(self) -> Mapping[str, Tensor]:
        """The first batch, with a row of dim 0 for each sample in every tensor."""
        return self.subject.source.folded.traced.by_sample(self.batches[0])

    def parallel(self, clip: float) -> Parallel:
        """Return the object from which each rank starts."""
        s = self.subject
        made = Widened(s.plan, s.source, self.program, self.optimizer, self.options, clip, 0)
        made._planned.only_tries()
        return made


def make_trial(subject: Subject, steps: int = STEPS, progress: Progress | None = None) -> Trial:
    """Prepare a trial. Raises CannotVerify if no generated inputs give the plain model a finite loss and gradient."""
    plan, source = subject.plan, subject.source
    failed: list[tuple[Exception, tuple[str, ...]]] = []
    with (progress or Silent()).stage("train the plain model"):
        for batches, made in try_batches(source, plan.sizes, plan.batch, steps):
            try:
                return trial_on(subject, batches, made)
            except USER_ERRORS as error:
                failed.append((error, made))
    raise _nothing_to_compare(failed) from failed[0][0]


def _difference(step: PlainStep, other: PlainStep) -> float:
    """Return the relative difference of two steps' losses or of their whole gradients, the larger one."""
    square = sum((other.gradients[n] - g).norm().item() ** 2 for n, g in step.gradients.items() if n in other.gradients)
    return max(abs(other.loss - step.loss) / (abs(step.loss) or 1.0), square**0.5 / step.norm)


@float64_by_default()
def trial_on(subject: Subject, batches: Sequence[Batch], made: tuple[str, ...] = ()) -> Trial:
    """Prepare a trial on these global batches. Raises NoReference, and what the plain model raises."""
    plan, source = subject.plan, subject.source
    batches = [source.objective.nest.flat(batch) for batch in batches]
    unknown = "adafactor" if plan.optimizer == "custom-whole" else "sgd"
    optimizer = plan.optimizer if plan.optimizer in OPTIONS else unknown
    draws, expected, clip = _train(subject, batches, optimizer)
    program = widened(make_program(source, plan, read_sharding(source, plan)))
    if draws is None:
        files = {name: text.replace("rng=self.dropout", "rng=None") for name, text in program.files.items()}
        program, made = replace(program, files=files), (*made, "dropout disabled in plan and model")
    known = tuple(batches), tuple(draws or ()), optimizer, tuple(expected), clip, made
    return Trial(subject, program, *known, drops=draws is not None)


def _nothing_to_compare(failed: Sequence[tuple[Exception, tuple[str, ...]]]) -> CannotVerify:
    error, made = failed[0]
    said = (str(error).strip().splitlines() or [""])[0]
    why = said if isinstance(error, NoReference) else f"{type(error).__name__}: {said}"
    others = f"\nand {len(failed) - 1} other combinations" if len(failed) > 1 else ""
    return CannotVerify(
        f"the plain model, alone in one process, gives nothing to compare with: {why}",
        where=f"generated inputs: {'; '.join(made)}{others}",
        fix="nothing is known about the plan: check that the model trains on such inputs in plain PyTorch, in float64",
    )


def _train(
    subject: Subject, batches: Sequence[Batch], optimizer: str
) -> tuple[list[Draw] | None, list[PlainStep], float]:
    """Train the plain model with the graph's dropout masks; without dropout if the two cannot have equal masks."""
    draws = draws_of(subject.source, batches[0])
    try:
        return draws, *train_plain(subject.source, batches, optimizer, OPTIONS[optimizer], draws)
    except MoreDraws:
        return None, *train_plain(subject.source, batches, optimizer, OPTIONS[optimizer], None)


def replace_text(trial: Trial, old: str, new: str) -> Trial:
    """Return the trial with text of its program replaced, to plant a fault. Raises ValueError if `old` is missing."""
    files = {name: text.replace(old, new) for name, text in trial.program.files.items()}
    if files == trial.program.files:
        raise ValueError(f"the emitted program has no {old!r}")
    return replace(trial, program=replace(trial.program, files=files))
