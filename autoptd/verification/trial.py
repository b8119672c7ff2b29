"""What is run of a subject: its emitted program read as float64, batches, and what the plain model makes of them."""

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
from autoptd.verification.inputs import USER_ERRORS, Batch, try_batches
from autoptd.verification.keyed import TYPES, Draw, MoreDraws, float64_by_default
from autoptd.verification.plain import NoReference, PlainStep, draws_of, train_plain, widened
from autoptd.verification.smaller.smaller import Subject

STEPS = 2  # the second sees what the first left behind: stale gradients, parameters that were not collected
OPTIONS: dict[str, dict[str, Any]] = {"adamw": {"lr": 3e-3, "weight_decay": 0.1}, "sgd": {"lr": 0.05, "momentum": 0.9}}


class Widened(Parallel):
    """Parallel whose inputs, buffers and constants are float64 too, as its program is."""

    @cached_property
    def layout(self) -> Layout:
        """As planned, but for types."""
        found = super().layout
        specs = {name: replace(spec, dtype=_wide(spec.dtype)) for name, spec in found.specs.items()}
        buffers = {
            name: spec if spec.dtype is None else replace(spec, dtype=_wide(spec.dtype))
            for name, spec in found.buffers.items()
        }
        return replace(found, specs=specs, buffers=buffers)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype in TYPES else dtype


@dataclass(frozen=True)
class Trial:
    """A subject with its program, about to run, and what the plain model computes.

    `made`: how the inputs were made, in words. `clip`: the norm to which gradients are clipped. `drops`: whether
    dropout is on, on both sides.
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

    def parallel(self, clip: float) -> Parallel:
        """All that a rank needs."""
        s = self.subject
        return Widened(s.plan, s.source, self.program, self.optimizer, self.options, clip, 0)


def make_trial(subject: Subject, steps: int = STEPS, progress: Progress | None = None) -> Trial:
    """Raises CannotVerify where no inputs that can be made give the plain model a finite loss and gradient."""
    plan, source = subject.plan, subject.source
    optimizer = plan.optimizer if plan.optimizer in OPTIONS else "sgd"
    program = widened(make_program(source, plan, read_sharding(source, plan)))
    failed: list[tuple[Exception, tuple[str, ...]]] = []
    with (progress or Silent()).stage("train the plain model"), float64_by_default():
        for batches, made in try_batches(source, plan.sizes, plan.batch, steps):
            try:
                draws, expected, clip = _train(subject, batches, optimizer)
            except USER_ERRORS as error:
                failed.append((error, made))
                continue
            if draws is None:
                files = {name: text.replace("rng=self.dropout", "rng=None") for name, text in program.files.items()}
                program, made = replace(program, files=files), (*made, "nothing is dropped, on either side")
            known = tuple(batches), tuple(draws or ()), optimizer, tuple(expected), clip, made
            return Trial(subject, program, *known, drops=draws is not None)
    raise _nothing_to_compare(failed) from failed[0][0]


def _nothing_to_compare(failed: Sequence[tuple[Exception, tuple[str, ...]]]) -> CannotVerify:
    error, made = failed[0]
    said = (str(error).strip().splitlines() or [""])[0]
    why = said if isinstance(error, NoReference) else f"{type(error).__name__}: {said}"
    others = f"\nand {len(failed) - 1} other ways to make them" if len(failed) > 1 else ""
    return CannotVerify(
        f"the plain model, alone in one process, gives nothing to compare with: {why}",
        where=f"inputs made here: {'; '.join(made)}{others}",
        fix="nothing is known about the plan: see that the model trains on such inputs in plain PyTorch, in float64",
    )


def _train(subject: Subject, batches: list[Batch], optimizer: str) -> tuple[list[Draw] | None, list[PlainStep], float]:
    """With the graph's draws; where the plain model drops other things, or what one drops depends on microbatches, with
    none on either side.
    """
    draws = draws_of(subject.source, batches[0])
    try:
        return draws, *train_plain(subject.source, batches, optimizer, OPTIONS[optimizer], draws)
    except MoreDraws:
        return None, *train_plain(subject.source, batches, optimizer, OPTIONS[optimizer], None)


def replace_text(trial: Trial, old: str, new: str) -> Trial:
    """A trial of a program with other text, to see what is said of it. Raises ValueError where `old` is nowhere."""
    files = {name: text.replace(old, new) for name, text in trial.program.files.items()}
    if files == trial.program.files:
        raise ValueError(f"the emitted program has no {old!r}")
    return replace(trial, program=replace(trial.program, files=files))
