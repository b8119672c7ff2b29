"""Time of one prediction on a traced model: published runs with every choice fixed.

The time is that of `autoptd.plan(traced, …, fix=…)` from the call to the `Plan`: reading the constraints, legal
strategies, the splits ILP, cuts, memory, simulation, proof of the schedule, and the plan with all its tables.
`Planner.predict` leaves out the last two. The first such call on a traced model also analyses the graph: bytes that
ops move under these kernels, strategies that tp allows. A repeated call takes that analysis from a cache.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import autoptd
from autoptd.cost_models.cluster import Cluster
from autoptd.passes.gc_pause import without_collector
from autoptd.progress import Silent
from autoptd.search.constraints.assumed import by_keyword
from autoptd.search.constraints.options import read_constraints
from autoptd.search.planner import Planner, Task
from benchmarks.published.clusters import cluster_of
from benchmarks.published.fix import fix_of
from benchmarks.published.predict import traced
from benchmarks.published.rows import Row, Unsupported, read_rows
from benchmarks.published.shapes import shape_of


@dataclass(frozen=True)
class Timed:
    """Seconds of one prediction: the first call of `plan`, a repeated one, and `Planner.predict` alone."""

    row: str
    new_s: float
    again_s: float
    predict_s: float


def measure(path: Path, group: str) -> list[Timed]:
    """Time every run of a group that can be predicted, grouped by shape; models are traced beforehand."""
    return list(_each(row for row in read_rows(path) if row.group == group))


def _each(rows: Iterable[Row]) -> Iterator[Timed]:
    for row in sorted(rows, key=lambda row: str(_shape(row))):
        if (shape := _shape(row)) is None:
            continue
        try:
            cluster, fix = cluster_of(row), fix_of(row, shape)
        except Unsupported:
            continue
        model = traced(shape, row.seq_len_tokens or 0, "bf16")
        ask = _asking(model, row, cluster, fix)
        new_s, again_s = seconds(ask), seconds(ask)
        yield Timed(row.id, new_s, again_s, seconds(_predicting(model, row, cluster, fix)))


def _shape(row: Row) -> Any:
    try:
        return shape_of(row)
    except Unsupported:
        return None


def _asking(model: Any, row: Row, cluster: Cluster, fix: Mapping[str, Any]) -> Callable[[], object]:
    assert row.n_gpus
    world, batch, (fix, assume) = row.n_gpus, row.global_batch_size_seqs, by_keyword(fix)
    return lambda: autoptd.plan(model, world=world, cluster=cluster, batch=batch, fix=fix, assume=assume)


def _predicting(model: Any, row: Row, cluster: Cluster, fix: Mapping[str, Any]) -> Callable[[], object]:
    """Return a call of `Planner.predict` on a new planner, which shares the cached analysis of the graph only."""
    assert row.n_gpus and row.global_batch_size_seqs
    fix, assume = by_keyword(fix)
    constraints = read_constraints(fix, assume=assume)
    task = Task(
        model.folded, cluster, row.n_gpus, row.global_batch_size_seqs, model.sizes, "bf16", "adamw", constraints
    )
    planner = Planner(task, Silent(), model.known)
    (candidate,) = planner.candidates()
    return lambda: planner.predict(candidate)


@without_collector()
def seconds(ask: Callable[[], object]) -> float:
    """Return the wall seconds of one call."""
    start = time.perf_counter()
    ask()
    return time.perf_counter() - start


def summary(timed: list[Timed]) -> str:
    """Return a line per kind of call: `plan, first  median 31 ms, at most 80 ms (73)`, runs in brackets."""
    columns = {
        "plan, first": [t.new_s for t in timed],
        "plan, repeated": [t.again_s for t in timed],
        "predict, cached": [t.predict_s for t in timed],
    }
    return "\n".join(
        f"{name:16} median {statistics.median(times) * 1e3:5.1f} ms, at most {max(times) * 1e3:5.1f} ms ({len(times)})"
        for name, times in columns.items()
    )
