"""Verify a plan: all its ranks in one process, beside the plain model; and what can be proved without running."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from autoptd.api import Parallel
from autoptd.compile.program import make_program, read_sharding
from autoptd.errors import RuntimeFault
from autoptd.passes.trace.loss import Targets
from autoptd.plans.certificate import program_digest, versions
from autoptd.plans.data import Certificate
from autoptd.plans.model import Plan
from autoptd.progress import Progress, Silent
from autoptd.schedule import StuckSchedule, prove, step_lists
from autoptd.verification.compare import TOLERANCE, Compared, compare
from autoptd.verification.inputs import USER_ERRORS
from autoptd.verification.keyed import float64_by_default
from autoptd.verification.locate.explain import explain
from autoptd.verification.locate.graph import first_untrue
from autoptd.verification.locate.locate import first_wrong, tell
from autoptd.verification.locate.recorder import recording
from autoptd.verification.owners import wrong_owners
from autoptd.verification.plain import PlainStep
from autoptd.verification.ranks import RankRun, record_ranks, run_ranks
from autoptd.verification.smaller.smaller import Loss, Subject, subject_of
from autoptd.verification.trial import STEPS, Trial, make_trial, replace_text

Place = tuple[str, str]  # where, what


@dataclass(frozen=True)
class Verdict:
    """What was found. `faults`: where something is wrong and what, first what explains the rest."""

    plan: Plan
    subject: Subject
    proved: tuple[str, ...]
    faults: tuple[Place, ...]
    compared: Compared | None  # None where the ranks did not come to an end
    steps: int
    made: tuple[str, ...] = ()  # how the inputs were made, in words
    certificate: Certificate | None = field(default=None)

    @property
    def agrees(self) -> bool:
        """Whether the plan computes what the model computes."""
        return not self.faults

    @property
    def difference(self) -> float:
        """The largest relative difference of any loss, norm, gradient or parameter."""
        if self.compared is None:
            return float("inf")
        found = self.compared
        offs = [found.loss, found.norm, *found.gradients.values(), *found.state.values()]
        return max(off.difference for off in offs)


def verify_plan(
    plan: Plan,
    model: nn.Module,
    *,
    loss: Loss | None = None,
    targets: Targets | None = None,
    inputs: Mapping[str, Tensor] | None = None,
    full: bool = False,
    progress: Progress | None = None,
) -> Verdict:
    """Run all ranks of a plan in this process in float64, beside `model` alone, and say where they part.

    model: the planned one; it may be on meta. inputs, loss, targets: as `autoptd.plan` takes them. full: all layers and
    microbatches; without, the model is made as small as the plan's decisions allow (`smaller`).
    Raises PlanFileError for a plan of another model, PlanError where the model cannot be made small enough, InputsError
    for an input that has no dim of samples, CannotVerify where the plain model computes nothing to compare with.
    """
    progress = progress or Silent()
    subject = subject_of(plan, model, loss=loss, targets=targets, inputs=inputs, full=full, progress=progress)
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
    """Run, compare, and where something differs find out where. `planned`: the plan at its own size."""
    progress = progress or Silent()
    subject, faults = trial.subject, list(_stuck(planned))
    proved = [] if faults else [_schedule_text(planned)]
    expected, clip = trial.expected, trial.clip
    parallel, compared = trial.parallel(clip), None
    if not faults:
        with progress.stage(f"run {subject.plan.world} ranks"):
            runs, failed = _attempt(parallel, trial)
        if failed:
            with progress.stage("look for the place"):
                faults += [found] if (found := _untrue(trial, parallel)) else []
        faults += failed
        if runs:
            wrong = list(wrong_owners(parallel.layout, runs))
            faults += wrong
            proved += [] if wrong else [_owners_text(parallel)]
            compared = compare(parallel.layout, runs, expected, clip)
            if not compared.agrees:
                with progress.stage("look for the place"):
                    faults += _located(trial, parallel, compared, runs, expected, clip)
    return Verdict(planned, subject, tuple(proved), tuple(faults), compared, len(expected), trial.made)


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
    """What explains the differences, first what comes first."""
    if found := first_line(trial, parallel) or _untrue(trial, parallel):
        yield found
    yield from explain(parallel.layout, compared, runs, expected, clip)


def _untrue(trial: Trial, parallel: Parallel) -> Place | None:
    """Where the graph is not the model; None as well where an op cannot be run by itself: what ranks say has to do."""
    try:
        return first_untrue(trial, parallel.layout)
    except USER_ERRORS:
        return None


@float64_by_default()
def first_line(trial: Trial, parallel: Parallel) -> Place | None:
    """The first line of the emitted program that makes something else than the graph says, in the first step."""
    subject = trial.subject
    telling, places = recording(trial.program)
    recorders = record_ranks(replace(trial, program=telling).parallel(1.0), trial.batches[0])
    told = [recorder.told for recorder in recorders]
    found = first_wrong(subject.source, subject.plan, parallel.layout, trial.batches[0], trial.draws, told)
    return None if found is None else tell(subject.source, found, places)


def _stuck(plan: Plan) -> Iterator[Place]:
    """Why the schedule cannot finish, for as many microbatches as the plan has."""
    how = plan.schedule
    try:
        prove(step_lists(how.kind, plan.mesh.pp, how.microbatches, how.virtual), plan.route)
    except StuckSchedule as error:
        yield "schedule", str(error)


def _schedule_text(plan: Plan) -> str:
    count, stages = plan.schedule.microbatches, len(plan.stages)
    of = f"{count} microbatch{'es' * (count > 1)} on {stages} stage{'s' * (stages > 1)}"
    return f"the {plan.schedule.kind} schedule, {of}, ends whatever its parts take"


def _owners_text(parallel: Parallel) -> str:
    elements = sum(spec.trainable for spec in parallel.layout.parameters.values())
    return f"every element of {elements} parameters has one owner for its update and one for the norm"


__all__ = ["STEPS", "TOLERANCE", "Trial", "Verdict", "first_line", "judge", "make_trial", "replace_text", "verify_plan"]
