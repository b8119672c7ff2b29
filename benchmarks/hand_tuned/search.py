"""A run's own plan and the best that a search finds for the same model, devices, batch and memory.

The search is free in what a plan decides: dp, tp, cp, pp, chunks, microbatch, ZeRO, shards, recomputation, schedule,
stages and splits. It carries plans out as the run's software does (`WAYS`): kernels are no choice of a plan. Devices
have the memory of the run's, or as much as the run's own plan is predicted to need where that is more, so that the own
plan is always one of those that may be found.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from autoptd.cost_models.cluster import Cluster
from autoptd.errors import AutoptdError, DoesNotFit
from autoptd.search.constraints.assumed import by_keyword
from autoptd.search.constraints.options import INCLUDABLE, read_constraints
from autoptd.search.meshes import Candidate
from autoptd.search.pipeline.evaluate import Staged
from autoptd.search.planner import Planner
from benchmarks.published.fix import Fix, fix_of
from benchmarks.published.predict import planner_of, staged
from benchmarks.published.rows import Row, Unsupported
from benchmarks.published.shapes import shape_of

WAYS = ("attention", "bucket_bytes", "gathers", "gradients", "kernels", "loss", "overlap", "sends")
ROUNDING = 1e-9  # what two sums of the same seconds may differ by
_FAULTS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class Free(BaseModel):
    """What a search found. `gap`: no plan of its space takes less than (1 - gap) `seconds`."""

    model_config = ConfigDict(frozen=True)

    include: tuple[str, ...]
    seconds: float | None  # of a step; None where it found nothing
    plan: str
    gap: float = 0.0
    considered: int = 0
    visited: int = 0
    search_s: float = 0.0
    loss: str = ""  # why it takes longer than the own plan, where it does


class Comparison(BaseModel):
    """One run. `free`: every dimension searched; `used`: those alone that its own plan made use of."""

    model_config = ConfigDict(frozen=True)

    id: str
    group: str
    model: str
    devices: str
    own_s: float | None  # None where the own plan is not predicted, with the reason in `own`
    own: str
    measured_s: float | None = None
    memory_bytes: int = 0  # of each device
    needed_bytes: int = 0  # by the own plan
    free: Free | None = None
    used: Free | None = None

    @property
    def gain(self) -> float | None:
        """Time of the own plan over that of the free one, less one."""
        return gain_of(self.own_s, self.free)

    @property
    def used_gain(self) -> float | None:
        return gain_of(self.own_s, self.used)

    @property
    def losses(self) -> list[str]:
        return [f.loss for f in (self.free, self.used) if f is not None and f.loss]


def gain_of(own_s: float | None, free: Free | None) -> float | None:
    """`own_s` over the time of the free plan, less one; None where one of them is not known."""
    return None if own_s is None or free is None or free.seconds is None else own_s / free.seconds - 1


@dataclass(frozen=True)
class _Question:
    """All that a search depends on, the model apart."""

    cluster: Cluster
    world: int
    batch: int
    ways: tuple[tuple[str, object], ...]
    include: tuple[str, ...]


@dataclass(frozen=True)
class _Answer:
    planner: Planner
    staged: Staged | None
    free: Free


def compare(rows: Sequence[Row], time_limit_s: float = float("inf"), only_used: bool = False) -> Iterator[Comparison]:
    """Of runs of one model; equal searches are made once.

    `time_limit_s`: of each, once it has found a plan. `only_used`: leave out the search of every dimension, which takes
    longest, and finds nothing slower where both are complete.
    """
    known: dict[_Question, _Answer] = {}
    for row in rows:
        try:
            yield _compared(row, known, time_limit_s, only_used)
        except Unsupported as reason:
            yield _skipped(row, str(reason))
        except _FAULTS as error:  # one run's, shown as such
            yield _skipped(row, f"fault: {type(error).__name__}: {str(error).splitlines()[:1]}")


def _skipped(row: Row, reason: str) -> Comparison:
    return Comparison(id=row.id, group=row.group, model=row.model_name, devices="", own_s=None, own=reason)


def _compared(row: Row, known: dict[_Question, _Answer], time_limit_s: float, only_used: bool) -> Comparison:
    own, cluster = staged(row)
    fix = fix_of(row, shape_of(row))
    needed = max(m.needed for m in own.memory)
    roomy = with_memory(cluster, needed)
    used = _searched(row, roomy, fix, used_by(own.candidate), own, known, time_limit_s)
    free = None if only_used else _searched(row, roomy, fix, includable(row), own, known, time_limit_s)
    return Comparison(
        id=row.id,
        group=row.group,
        model=row.model_name,
        devices=f"{row.n_gpus} × {cluster.device.name}",
        own_s=own.seconds,
        own=in_short(own),
        measured_s=row.measured_time_s,
        memory_bytes=cluster.device.memory_bytes,
        needed_bytes=needed,
        free=free,
        used=used,
    )


def with_memory(cluster: Cluster, needed_bytes: int) -> Cluster:
    """A cluster whose devices have at least so much."""
    if needed_bytes <= cluster.device.memory_bytes:
        return cluster
    device = cluster.device.model_copy(update={"memory_bytes": needed_bytes})
    return cluster.model_copy(update={"device": device})


def includable(row: Row) -> tuple[str, ...]:
    """Dimensions that may be searched: attention that is written out looks at the keys of one rank alone, so no cp."""
    return tuple(name for name in INCLUDABLE if name != "cp" or not shape_of(row).unfused)


def used_by(own: Candidate) -> tuple[str, ...]:
    """Those of `INCLUDABLE` that a plan makes use of."""
    uses = {
        "cp": own.cp > 1,
        "recompute": own.recompute in ("selective", "ops"),
        "shards": own.shards > 0,
        "virtual": own.virtual > 1 and own.schedule != "zero-bubble-v",
        "zero": own.zero > 1,
        "zero-bubble": own.schedule == "zero-bubble",
        "zero-bubble-v": own.schedule == "zero-bubble-v",
    }
    return tuple(name for name in INCLUDABLE if uses[name])


def _searched(
    row: Row,
    cluster: Cluster,
    fix: Fix,
    include: tuple[str, ...],
    own: Staged,
    known: dict[_Question, _Answer],
    time_limit_s: float,
) -> Free:
    assert row.n_gpus and row.global_batch_size_seqs
    ways = tuple((name, fix[name]) for name in WAYS if name in fix)
    question = _Question(cluster, row.n_gpus, row.global_batch_size_seqs, ways, include)
    if question not in known:
        carried_out, assume = by_keyword(dict(ways))
        constraints = read_constraints(carried_out, include, assume)
        known[question] = _answered(planner_of(row, constraints, cluster, time_limit_s), include)
    answer = known[question]
    if answer.free.seconds is not None and answer.free.seconds <= own.seconds * (1 + ROUNDING):
        return answer.free
    return answer.free.model_copy(update={"loss": cause(answer.planner, own)})


def _answered(planner: Planner, include: tuple[str, ...]) -> _Answer:
    started = time.monotonic()
    try:
        found = planner.answer()
    except AutoptdError as error:
        seconds = time.monotonic() - started
        return _Answer(planner, None, Free(include=include, seconds=None, plan=error.what, search_s=seconds))
    free = Free(
        include=include,
        seconds=found.staged.seconds,
        plan=in_short(found.staged),
        gap=found.gap,
        considered=found.considered,
        visited=found.visited,
        search_s=time.monotonic() - started,
    )
    return _Answer(planner, found.staged, free)


# ---- why a search lost ----


def cause(planner: Planner, own: Staged) -> str:
    """What keeps a search from the own plan, or from one as good on the same mesh."""
    space = planner.candidates()
    same = [c for c in space if not differences(c, own.candidate)]
    if not same:
        return outside(space, own.candidate)
    found, refused = [], ""
    for candidate in same:
        try:
            found.append(planner.predict(candidate).seconds)
        except DoesNotFit:
            refused = refused or "its mesh has no room as the search counts memory"
        except AutoptdError as error:
            refused = refused or f"its mesh cannot be split: {error.what}"
    if not found:
        return refused
    if min(found) <= own.seconds * (1 + ROUNDING):
        return "its mesh is as fast in the search, which ended before"
    return f"its mesh takes {min(found):.4g} s as the search splits, cuts and recomputes it"


def outside(space: Sequence[Candidate], own: Candidate) -> str:
    """The fewest dimensions in which every candidate differs from a plan's mesh, and what is searched of them."""
    if not space:
        return "the space is empty"
    nearest = min((differences(c, own) for c in space), key=len)
    searched = {name: sorted({getattr(c, name) for c in space if differences(c, own) == nearest}) for name in nearest}
    texts = (f"{name} {getattr(own, name)} (searched: {', '.join(map(str, searched[name]))})" for name in nearest)
    return f"outside the space: {' and '.join(texts)}"


def differences(c: Candidate, own: Candidate) -> tuple[str, ...]:
    """Dimensions of the mesh in which two candidates differ, as far as that changes the plan."""
    names = ["dp", "tp", "pp", "cp", "micro", "zero", "shards", "schedule", "virtual"]
    if own.dp * own.cp == 1:
        names = [name for name in names if name not in ("zero", "shards")]
    if own.pp == 1 and own.virtual == 1:
        names.remove("schedule")
    return tuple(name for name in names if getattr(c, name) != getattr(own, name))


# ---- a plan in a line ----


def in_short(plan: Staged) -> str:
    """`dp8 tp8 pp8 micro1 zero1 virtual2 · recompute full 24 of 99 · 12 13 …`: how many segments each stage has."""
    c, total = plan.candidate, len(plan.chunks.folded.segments)
    again = Counter(policy for stage in plan.solution.policies for policy in stage.values())
    recompute = " + ".join(f"{policy} {count}" for policy, count in sorted(again.items()))
    mesh = str(c).replace(f" recompute={c.recompute}", "")
    lengths = [last - first + 1 for first, last in plan.solution.boundaries]
    stages = f" · stages {_runs(lengths)}" if len(lengths) > 1 else ""
    return f"{mesh} · {f'recompute {recompute} of {total}' if recompute else 'no recompute'}{stages}"


def _runs(lengths: Sequence[int]) -> str:
    """`13 12×6 11`."""
    found: list[list[int]] = []
    for n in lengths:
        if found and found[-1][0] == n:
            found[-1][1] += 1
        else:
            found.append([n, 1])
    return " ".join(f"{n}×{times}" if times > 1 else str(n) for n, times in found)
