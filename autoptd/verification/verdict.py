"""Verification of a plan: all its ranks in one process beside the plain model, and proofs that need no run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from autoptd.api import Parallel
from autoptd.compile.program import make_program, read_sharding
from autoptd.errors import CannotVerify, RuntimeFault
from autoptd.plans.certificate import program_digest, versions
from autoptd.plans.data import Certificate
from autoptd.plans.model import Plan
from autoptd.progress import Progress, Silent
from autoptd.runtime.comm.threaded import one_thread
from autoptd.schedule import StuckSchedule, prove, step_lists
from autoptd.verification.compare import TOLERANCE, Compared, compare
from autoptd.verification.inputs import USER_ERRORS
from autoptd.verification.keyed import float64_by_default
from autoptd.verification.locate.explain import explain
from autoptd.verification.locate.graph import first_graph_mismatch
from autoptd.verification.locate.locate import describe, first_wrong_line
from autoptd.verification.locate.recorder import recording
from autoptd.verification.owners import wrong_owners
from autoptd.verification.plain import PlainStep
from autoptd.verification.ranks import RankRun, record_ranks, run_ranks
from autoptd.verification.smaller.smaller import Subject, subject_of
from autoptd.verification.trial import STEPS, Trial, make_trial, replace_text

Place = tuple[str, str]  # where, what


@dataclass(frozen=True)
class Verdict:
    """The result of a verification. `faults`: the first cause first."""

    plan: Plan
    subject: Subject
    proved: tuple[str, ...]
    faults: tuple[Place, ...]
    compared: Compared | None  # None if a rank failed or did not finish
    steps: int
    made: tuple[str, ...] = ()  # a description of each generated input
    certificate: Certificate | None = field(default=None)

    @property
    def agrees(self) -> bool:
        """True if the plan computes what the model computes."""
        return not self.faults

    @property
    def difference(self) -> float:
        """The largest relative difference of any loss, norm, gradient or parameter."""
        if self.compared is None:
            return float("inf")
        found = self.compared
        offs = [found.loss, found.norm, *found.gradients.values(), *found.state.values()]
        return max(off.difference for off in offs)


@one_thread()
def verify_plan(plan: Plan, model: nn.Module, *, progress: Progress | None = None, **options: Any) -> Verdict:
    """Run all ranks of a plan in this process in float64 beside the plain model, and report where they differ first.

    options: further keywords of `subject_of`. Raises what `subject_of` raises, and CannotVerify if the plain model
    computes nothing to compare with, or has the loss of whole batches where the plan averages.
    """
    progress = progress or Silent()
    if plan.loss_averaging != "global":
        raise CannotVerify(
            f"the plan averages its loss ({plan.loss_averaging}), which the plain model computes over whole batches",
            where="loss_averaging",
            fix="verify a plan of the same mesh with the loss of whole batches (--loss-averaging global)",
        )
    if plan.method.dropout == "fast":
        raise CannotVerify(
            "attention's kernel draws its own dropout masks in this plan, which no single process draws alike",
            where="dropout",
            fix="verify a plan of the same mesh with exact masks (--fix dropout=exact)",
        )
    subject = subject_of(plan, model, progress=progress, **options)
    found = judge(make_trial(subject, progress=progress), plan, progress)
    if not found.agrees:
        return found
    with progress.stage("certify"):
        program = make_program(subject.planned, plan, read_sharding(subject.planned, plan))
    certificate = Certificate(
        plan=plan.digest,
        graph=plan.graph_hash,
        program=program_digest(program),
        versions=versions(),
        ranks=subject.plan.world,
        shown=subject.shown,
        difference=float(f"{found.difference:.1e}"),
    )
    return replace(found, certificate=certificate)


@float64_by_default()
def judge(trial: Trial, planned: Plan, progress: Progress | None = None) -> Verdict:
    """Run the ranks, compare them with the plain model, and locate differences. `planned`: the plan at full size."""
    progress = progress or Silent()
    subject, faults = trial.subject, list(_stuck(planned))
    proved = [] if faults else [_schedule_text(planned)]
    expected, clip = trial.expected, trial.clip
    parallel, compared = trial.parallel(clip), None
    if not faults:
        with progress.stage(f"run {subject.plan.world} ranks"):
            runs, failed = _attempt(parallel, trial)
        if failed:
            with progress.stage("locate the fault"):
                faults += [found] if (found := _graph_mismatch(trial, parallel)) else []
        faults += failed
        if runs:
            wrong = list(wrong_owners(parallel.layout, runs))
            faults += wrong
            proved += [] if wrong else [_owners_text(parallel)]
            compared = compare(parallel.layout, runs, expected, clip)
            if compared.step is not None:
                compared = compare(parallel.layout, runs, expected, clip, trial.rounded())
                proved += [_AMPLIFIES] if compared.agrees else []
            if not compared.agrees:
                with progress.stage("locate the fault"):
                    faults += _located(trial, parallel, compared, runs, expected, clip)
    return Verdict(planned, subject, tuple(proved), tuple(faults), compared, len(expected), trial.made)


_AMPLIFIES = (
    "the plain model amplifies rounding: a change of its weights in their last bits changes its own gradients by more "
    "than the tolerance; up to 100 times that counts as rounding"
)


def _attempt(parallel: Parallel, trial: Trial) -> tuple[list[RankRun], list[Place]]:
    try:
        return run_ranks(parallel, trial.batches), []
    except RuntimeFault as fault:
        inner = fault.__cause__
        where = getattr(inner, "where", "") or fault.where
        rank = fault.what.partition(": ")[0]
        return [], [(where or "the run", f"{rank}: {inner.what}" if isinstance(inner, RuntimeFault) else fault.what)]


def _located(
    trial: Trial,
    parallel: Parallel,
    compared: Compared,
    runs: list[RankRun],
    expected: Sequence[PlainStep],
    clip: float,
) -> Iterator[Place]:
    """Yield the causes of the differences, the first one first."""
    if found := first_line(trial, parallel) or _graph_mismatch(trial, parallel):
        yield found
    yield from explain(parallel.layout, compared, runs, expected, clip)


def _graph_mismatch(trial: Trial, parallel: Parallel) -> Place | None:
    """Return where graph and model differ; None if they agree, or if an op of the graph cannot run by itself."""
    try:
        return first_graph_mismatch(trial, parallel.layout)
    except USER_ERRORS:
        return None


@float64_by_default()
def first_line(trial: Trial, parallel: Parallel) -> Place | None:
    """Return the first line of the emitted program whose value or gradient differs from the graph's in step 1."""
    subject = trial.subject
    instrumented, places = recording(trial.program)
    recorders = record_ranks(replace(trial, program=instrumented).parallel(1.0), trial.batches[0])
    recorded = [recorder.recorded for recorder in recorders]
    found = first_wrong_line(subject.source, subject.plan, parallel.layout, trial.first, trial.draws, recorded)
    return None if found is None else describe(subject.source, found, places)


def _stuck(plan: Plan) -> Iterator[Place]:
    """Yield the deadlock of the schedule, if it has one with the plan's own number of microbatches."""
    how = plan.schedule
    try:
        prove(step_lists(how.kind, plan.mesh.pp, how.microbatches, how.virtual), plan.route)
    except StuckSchedule as error:
        yield "schedule", str(error)


def _schedule_text(plan: Plan) -> str:
    count, stages = plan.schedule.microbatches, len(plan.stages)
    of = f"{count} microbatch{'es' * (count > 1)} on {stages} stage{'s' * (stages > 1)}"
    return f"the {plan.schedule.kind} schedule, {of}, cannot deadlock, whatever the timing"


def _owners_text(parallel: Parallel) -> str:
    elements = sum(spec.trainable for spec in parallel.layout.parameters.values())
    return f"every element of {elements} parameters has exactly one owner for its update and one for the norm"


__all__ = ["STEPS", "TOLERANCE", "Trial", "Verdict", "first_line", "judge", "make_trial", "replace_text", "verify_plan"]
