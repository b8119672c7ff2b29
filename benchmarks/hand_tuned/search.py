"""Comparison of a run's own plan with the best that a search finds for the same model, devices, batch and memory.

The search chooses all that a plan decides: dp, tp, cp, pp, chunks, microbatch, ZeRO, shards, recomputation, schedule,
stages and splits. Kernels and the other properties of the run's software (`SOFTWARE`) are fixed. Devices have the
memory of the run's devices, or that predicted for the own plan if larger, so that the own plan is in the search space.
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
from autoptd.search.constraints.options import DIMENSIONS, read_constraints
from autoptd.search.meshes import Candidate
from autoptd.search.pipeline.evaluate import Staged
from autoptd.search.planner import Planner
from benchmarks.published.fix import Fix, fix_of
from benchmarks.published.predict import planner_of, staged
from benchmarks.published.rows import Row, Unsupported
from benchmarks.published.shapes import shape_of

SOFTWARE = (
    "attention",
    "bucket_bytes",
    "dispatch",
    "fp8",
    "gathers",
    "gradients",
    "kernels",
    "loss",
    "overlap",
    "permutation",
    "routing",
    "sends",
)
ROUNDING = 1e-9  # relative rounding difference between two sums of the same seconds
_FAULTS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class SearchResult(BaseModel):
    """Result of a search. `gap`: no plan of its space takes less than (1 − gap) × `seconds`."""

    model_config = ConfigDict(frozen=True)

    dimensions: tuple[str, ...]
    seconds: float | None  # of a step; None if no plan was found
    plan: str
    gap: float = 0.0
    considered: int = 0
    visited: int = 0
    search_s: float = 0.0
    loss: str = ""  # why it is slower than the own plan; "" if it is not


class Comparison(BaseModel):
    """One run. `free`: search of every dimension; `used`: search of those that its own plan uses."""

    model_config = ConfigDict(frozen=True)

    id: str
    group: str
    model: str
    devices: str
    own_s: float | None  # None if the own plan cannot be predicted; `own` then holds the reason
    own: str
    measured_s: float | None = None
    memory_bytes: int = 0  # of each device
    needed_bytes: int = 0  # by the own plan
    free: SearchResult | None = None
    used: SearchResult | None = None

    @property
    def gain(self) -> float | None:
        """Own plan's time ÷ free plan's time − 1."""
        return gain_of(self.own_s, self.free)

    @property
    def used_gain(self) -> float | None:
        return gain_of(self.own_s, self.used)

    @property
    def losses(self) -> list[str]:
        return [f.loss for f in (self.free, self.used) if f is not None and f.loss]


def gain_of(own_s: float | None, free: SearchResult | None) -> float | None:
    """Return `own_s` ÷ time of the free plan − 1; None if either is unknown."""
    return None if own_s is None or free is None or free.seconds is None else own_s / free.seconds - 1


@dataclass(frozen=True)
class _SearchKey:
    """Key of a search among runs of one model: all else that its result depends on."""

    cluster: Cluster
    world: int
    batch: int
    software: tuple[tuple[str, object], ...]
    dimensions: tuple[str, ...]


def compare(rows: Sequence[Row], time_limit_s: float = float("inf"), only_used: bool = False) -> Iterator[Comparison]:
    """Compare runs of one model; equal searches run once.

    `time_limit_s`: seconds after which a search ends once it has found a plan. `only_used`: omit the search of every
    dimension. It takes longest and, if both are complete, its plan is no slower.
    """
    known: dict[_SearchKey, tuple[Planner, SearchResult]] = {}
    for row in rows:
        try:
            yield _compared(row, known, time_limit_s, only_used)
        except Unsupported as reason:
            yield _skipped(row, str(reason))
        except _FAULTS as error:  # a fault on one run is reported, the others are still compared
            yield _skipped(row, f"fault: {type(error).__name__}: {str(error).splitlines()[:1]}")


def _skipped(row: Row, reason: str) -> Comparison:
    return Comparison(id=row.id, group=row.group, model=row.model_name, devices="", own_s=None, own=reason)


def _compared(
    row: Row, known: dict[_SearchKey, tuple[Planner, SearchResult]], time_limit_s: float, only_used: bool
) -> Comparison:
    own, cluster = staged(row)
    fix = fix_of(row, shape_of(row))
    needed = max(m.needed for m in own.memory)
    enlarged = with_memory(cluster, needed)
    used = _search_result(row, enlarged, fix, used_by(own.candidate), own, known, time_limit_s)
    free = None if only_used else _search_result(row, enlarged, fix, searchable(row), own, known, time_limit_s)
    return Comparison(
        id=row.id,
        group=row.group,
        model=row.model_name,
        devices=f"{row.n_gpus} × {cluster.device.name}",
        own_s=own.seconds,
        own=one_line(own),
        measured_s=row.measured_time_s,
        memory_bytes=cluster.device.memory_bytes,
        needed_bytes=needed,
        free=free,
        used=used,
    )


def with_memory(cluster: Cluster, needed_bytes: int) -> Cluster:
    """Return the cluster with at least `needed_bytes` of memory per device."""
    if needed_bytes <= cluster.device.memory_bytes:
        return cluster
    device = cluster.device.model_copy(update={"memory_bytes": needed_bytes})
    return cluster.model_copy(update={"device": device})


def searchable(row: Row) -> tuple[str, ...]:
    """Return the searchable dimensions: all but cp for unfused attention, which sees the keys of its own rank only."""
    return tuple(name for name in DIMENSIONS if name != "cp" or not shape_of(row).unfused)


def used_by(own: Candidate) -> tuple[str, ...]:
    """Return the dimensions of `DIMENSIONS` that a plan uses."""
    uses = {
        "cp": own.cp > 1,
        "offload": own.offload > 0,
        "recompute": own.recompute in ("selective", "ops"),
        "shards": own.shards > 0,
        "virtual": own.virtual > 1 and own.schedule != "zero-bubble-v",
        "zero": own.zero > 1,
        "zero-bubble": own.schedule == "zero-bubble",
        "zero-bubble-v": own.schedule == "zero-bubble-v",
    }
    return tuple(name for name in DIMENSIONS if uses[name])


def _search_result(
    row: Row,
    cluster: Cluster,
    fix: Fix,
    dimensions: tuple[str, ...],
    own: Staged,
    known: dict[_SearchKey, tuple[Planner, SearchResult]],
    time_limit_s: float,
) -> SearchResult:
    assert row.n_gpus and row.global_batch_size_seqs
    software = tuple((name, fix[name]) for name in SOFTWARE if name in fix)
    key = _SearchKey(cluster, row.n_gpus, row.global_batch_size_seqs, software, dimensions)
    if key not in known:
        carried_out, assume = by_keyword(dict(software))
        constraints = read_constraints({**carried_out, "headroom": 0}, assume).searching(*dimensions)
        planner = planner_of(row, constraints, cluster, time_limit_s)
        known[key] = planner, _search(planner, dimensions)
    planner, result = known[key]
    if result.seconds is not None and result.seconds <= own.seconds * (1 + ROUNDING):
        return result
    return result.model_copy(update={"loss": cause(planner, own)})


def _search(planner: Planner, dimensions: tuple[str, ...]) -> SearchResult:
    started = time.monotonic()
    try:
        found = planner.answer()
    except AutoptdError as error:
        seconds = time.monotonic() - started
        return SearchResult(dimensions=dimensions, seconds=None, plan=error.what, search_s=seconds)
    return SearchResult(
        dimensions=dimensions,
        seconds=found.staged.seconds,
        plan=one_line(found.staged),
        gap=found.gap,
        considered=found.considered,
        visited=found.visited,
        search_s=time.monotonic() - started,
    )


# ---- causes of a loss ----


def cause(planner: Planner, own: Staged) -> str:
    """Return why a search missed the own plan, or one as fast on the same mesh."""
    space = planner.candidates()
    same = [c for c in space if not differences(c, own.candidate)]
    if not same:
        return outside(space, own.candidate)
    found, refused = [], ""
    for candidate in same:
        try:
            found.append(planner.predict(candidate).seconds)
        except DoesNotFit:
            refused = refused or "its mesh does not fit by the memory model of the search"
        except AutoptdError as error:
            refused = refused or f"its mesh cannot be split: {error.what}"
    if not found:
        return refused
    if min(found) <= own.seconds * (1 + ROUNDING):
        return "its mesh is as fast in the search, which ended before it got there"
    return f"its mesh takes {min(found):.4g} s with the splits, cuts and recomputation of the search"


def outside(space: Sequence[Candidate], own: Candidate) -> str:
    """Name the fewest dimensions in which every candidate differs from `own`, and the values searched for them."""
    if not space:
        return "the space is empty"
    nearest = min((differences(c, own) for c in space), key=len)
    searched = {name: sorted({getattr(c, name) for c in space if differences(c, own) == nearest}) for name in nearest}
    texts = (f"{name} {getattr(own, name)} (searched: {', '.join(map(str, searched[name]))})" for name in nearest)
    return f"outside the space: {' and '.join(texts)}"


def differences(c: Candidate, own: Candidate) -> tuple[str, ...]:
    """Return the dimensions of the mesh in which two candidates differ with an effect on the plan."""
    names = ["dp", "tp", "pp", "cp", "ep", "etp", "micro", "zero", "shards", "schedule", "virtual"]
    if own.dp * own.cp == 1:
        names = [name for name in names if name not in ("zero", "shards")]
    if own.pp == 1 and own.virtual == 1:
        names.remove("schedule")
    return tuple(name for name in names if getattr(c, name) != getattr(own, name))


# ---- one-line text of a plan ----


def one_line(plan: Staged) -> str:
    """Return `dp8 tp8 pp8 micro1 zero1 virtual2 · recompute full 24 of 99 · stages 12 13 …`; stages in segments."""
    c, total = plan.candidate, len(plan.chunks.folded.segments)
    policies = Counter(policy for stage in plan.solution.policies for policy in stage.values())
    recompute = " + ".join(f"{policy} {count}" for policy, count in sorted(policies.items()))
    mesh = str(c).replace(f" recompute={c.recompute}", "")
    lengths = [last - first + 1 for first, last in plan.solution.boundaries]
    stages = f" · stages {_runs(lengths)}" if len(lengths) > 1 else ""
    return f"{mesh} · {f'recompute {recompute} of {total}' if recompute else 'no recompute'}{stages}"


def _runs(lengths: Sequence[int]) -> str:
    """Return run-length text: `13 12×6 11`."""
    found: list[list[int]] = []
    for n in lengths:
        if found and found[-1][0] == n:
            found[-1][1] += 1
        else:
            found.append([n, 1])
    return " ".join(f"{n}×{times}" if times > 1 else str(n) for n, times in found)
