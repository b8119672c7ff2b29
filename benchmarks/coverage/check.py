"""One model: traced, planned, and all its ranks run beside one process in float64, in training mode with dropout."""

from __future__ import annotations

import math
import re
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import autoptd
from autoptd.compile.traced import TracedModel
from autoptd.errors import AutoptdError
from autoptd.layout.sample_rows import SHARED
from autoptd.nest import Nest
from autoptd.passes.trace.traced import SEQUENCE
from autoptd.plans.model import Plan
from autoptd.runtime.batch import sample_count
from autoptd.verification.smaller.smaller import Subject
from autoptd.verification.trial import STEPS, trial_on
from autoptd.verification.verdict import judge
from benchmarks.coverage.sizes import dtype_of

Batch = Mapping[str, Tensor]
Mesh = Mapping[str, int]
FIX: Mesh = {"tp": 2, "pp": 2, "dp": 2}
CLUSTER, OPTIMIZER = "dgx-h100", "sgd"


class Case(Protocol):
    """A model of a library: `family` groups the report, `build` gives the model with its batch, which may be nested.

    A case with an attribute `loss` is trained with that function of the outputs, and of the batch's entries that its
    attribute `targets` names, which `forward` is not given. One with an attribute `meshes` is run on the first of them
    that has a plan.
    """

    @property
    def name(self) -> str: ...
    @property
    def family(self) -> str: ...
    def build(self) -> tuple[nn.Module, dict[str, Any]]: ...


@dataclass(frozen=True)
class Outcome:
    """The end of one model's check. `result`:

    trained    all ranks agree with one process to `difference`
    differs    they do not
    refused    one error of autoptd: its text, place and way out in `what`, `where`, `fix`
    crashed    any other exception in autoptd, or a time limit
    not built  the library cannot build or train the tiny model by itself
    built      it can; nothing else was tried
    """

    name: str
    family: str
    result: str
    what: str = ""
    where: str = ""
    fix: str = ""
    step: str = ""  # of the work, in which it ended
    difference: float = 0.0
    split: float = 0.0  # share of the parameters that tp splits
    experts: str = ""
    mesh: str = ""  # where it is another than the usual one, for a reason that `what` says
    free: str = ""  # mesh of the plan with nothing fixed
    tokens: bool = False  # whether the model has a sequence, whose length is not fixed by its code
    seconds: float = 0.0

    def data(self) -> dict[str, Any]:
        return asdict(self)


def check(case: Case, only_build: bool = False, free: bool = True, fix: Mesh | None = None) -> Outcome:
    """Return what becomes of a model. Never raises.

    free: whether a plan with nothing fixed is made as well. fix: the mesh to run on, in place of the usual one.
    """
    began, step = time.monotonic(), "build"
    found: dict[str, Any] = {}
    try:
        model, given = case.build()
        nest = Nest.of(given)
        batch = nest.flat(given)
        if only_build:
            return Outcome(case.name, case.family, "built", step=step, seconds=time.monotonic() - began)
        fill_zeros(model)
        step = "trace"
        examples = nest.nested(batch)
        loss = getattr(case, "loss", None)
        targets = {n: examples.pop(n) for n in getattr(case, "targets", ())} or None
        precision = "fp64" if dtype_of(model) == torch.float64 else "fp32"
        source = autoptd.trace(model, inputs=examples, loss=loss, targets=targets, precision=precision)
        found["tokens"] = SEQUENCE in source.sizes
        step = "plan"
        planned, others = _first_plan(source, batch, (fix,) if fix else getattr(case, "meshes", (FIX,)))
        found |= others | {"split": split_share(planned, model), "experts": expert_ranks(planned)}
        step = "run"
        source.model.double()  # as verification does with a model that was traced in another precision
        planned = planned.model_copy(update={"precision": "fp64"})
        found |= _compared(source, planned, batch)
        if free:
            step = "free plan"
            found["free"] = str(_plan(source, batch, {}, ranks(FIX)).mesh)
        return Outcome(case.name, case.family, step=step, seconds=time.monotonic() - began, **found)
    except AutoptdError as error:
        kind = "not built" if step == "build" else "refused"
        found |= {"what": error.what, "where": error.where, "fix": error.fix}
    except Exception as error:  # noqa: BLE001  whatever a library raises is a result
        kind = "not built" if step == "build" else "crashed"
        found |= {"what": f"{type(error).__name__}: {error}"[:500], "where": _place(error)}
    return Outcome(case.name, case.family, step=step, seconds=time.monotonic() - began, **found | {"result": kind})


@torch.no_grad()
def fill_zeros(model: nn.Module) -> None:
    """Fill trainable parameters that are zero with small random numbers, which neither hide faults nor rounding.

    Of equal queries, attention weights have gradients of zero, up to the rounding of what made them equal.
    """
    torch.manual_seed(1)
    for p in model.parameters():
        if p.requires_grad and not p.is_meta and not p.any():
            p.uniform_(-0.02, 0.02)


def ranks(mesh: Mesh) -> int:
    """Return the number of ranks of a mesh."""
    return math.prod(mesh.values())


def _first_plan(source: TracedModel, batch: Batch, meshes: Sequence[Mesh]) -> tuple[Plan, dict[str, str]]:
    """Return the plan of the first mesh that has one; and if that is a later one, what the error of the first says."""
    refused: AutoptdError | None = None
    for fix in meshes:
        try:
            planned = _plan(source, batch, fix, ranks(fix))
        except AutoptdError as error:
            refused = refused or error
        else:
            if refused is None:
                return planned, {}
            said = {"what": refused.what, "where": refused.where, "fix": refused.fix}
            return planned, {"mesh": str(planned.mesh), **said}
    assert refused is not None, "no mesh is given"
    raise refused


def _plan(source: TracedModel, batch: Batch, fix: Mesh, world: int) -> Plan:
    samples = samples_of(source, batch)
    return autoptd.plan(source, world=world, cluster=CLUSTER, batch=samples, optimizer=OPTIMIZER, fix=fix)


def _compared(source: TracedModel, planned: Plan, batch: Batch) -> dict[str, Any]:
    """Run all ranks and the plain model for two steps; the second has the samples in another order."""
    wide = {n: x.double() if x.is_floating_point() else x for n, x in batch.items()}
    batches = [moved(source, wide, step) for step in range(STEPS)]
    verdict = judge(trial_on(Subject(source, planned, source), batches), planned)
    if verdict.agrees:
        return {"result": "trained", "difference": verdict.difference}
    where, what = verdict.faults[0]
    return {"result": "differs", "difference": verdict.difference, "where": where, "what": what}


def samples_of(source: TracedModel, batch: Batch) -> int:
    """Return the number of samples of a batch."""
    return sample_count(source.folded.traced.by_sample(batch))


def moved(source: TracedModel, batch: Batch, step: int) -> dict[str, Tensor]:
    """Return a batch after a shift of its samples by some."""
    traced = source.folded.traced
    apart = traced.by_sample(batch)
    return traced.as_given({n: x if traced.rows.get(n) == SHARED else x.roll(step, 0) for n, x in apart.items()})


def split_share(planned: Plan, model: nn.Module) -> float:
    """Return the share of all parameters' elements that tp splits."""
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    split = sum(n for name, n in sizes.items() if planned.splits.parameters.get(name, "B").startswith("S"))
    return split / (sum(sizes.values()) or 1)


def expert_ranks(planned: Plan) -> str:
    """Return how the plan splits experts over ranks, in words; empty without such a split."""
    return f"ep {planned.mesh.ep}" if planned.mesh.ep > 1 else ""


def _place(error: BaseException) -> str:
    """Return the last line of autoptd that ran, and the line that raised."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [
        f
        for f in frames
        if re.search(r"/(autoptd|passes|cost_models)/", f.filename) and "site-packages" not in f.filename
    ]
    own, last = (ours or frames)[-1], frames[-1]
    return f"{_short(own.filename)}:{own.lineno}, raised at {_short(last.filename)}:{last.lineno}"


def _short(path: str) -> str:
    return path.rpartition("site-packages/")[2] if "site-packages" in path else "/".join(path.split("/")[-3:])
