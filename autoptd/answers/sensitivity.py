"""Sensitivity of a plan to the description of the cluster: each rate and the memory, 20 % less and 20 % more.

    regret = step time of the chosen plan on the changed cluster ÷ step time of the best plan there - 1

The chosen plan is the one for the cluster as described; it keeps its splits, cuts and recomputation on the changed one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from autoptd.answers.in_processes import answered
from autoptd.answers.query import PlanQuery
from autoptd.answers.reprice import step_time_on
from autoptd.answers.sweep import reason
from autoptd.cost_models.cluster import Cluster, Device, Link, Pool
from autoptd.errors import DoesNotFit
from autoptd.explain.choices import changes, short
from autoptd.explain.tables import WIDTH, columns, render, seconds, section
from autoptd.plans.model import Plan
from autoptd.progress import Progress, Silent

FACTORS = (0.8, 1.2)
_SAME = 1e-6  # of a step: smaller differences count as equal


@dataclass(frozen=True)
class Reaction:
    """The effect of one change of the cluster. `best`: the plan for the changed cluster, or why nothing fits there.

    chosen_s: step time of the chosen plan there; None if it does not fit.
    """

    what: str
    factor: float
    chosen: Plan
    best: Plan | DoesNotFit
    chosen_s: float | None

    @property
    def best_s(self) -> float | None:
        """Step time of the faster of the two plans: the search need not be exact."""
        times = [self.chosen_s] if self.chosen_s is not None else []
        times += [self.best.predicted.step_time_s] if isinstance(self.best, Plan) else []
        return min(times, default=None)

    @property
    def regret(self) -> float | None:
        """The relative cost of keeping the chosen plan; None if it does not fit."""
        return None if self.chosen_s is None or self.best_s is None else self.chosen_s / self.best_s - 1

    @property
    def changed(self) -> tuple[str, ...]:
        """Changes from the chosen plan to the best one; empty if these gain nothing."""
        if not isinstance(self.best, Plan) or (self.regret is not None and self.regret <= _SAME):
            return ()
        return tuple(changes(self.chosen, self.best))

    def to_data(self) -> dict[str, Any]:
        """Return the reaction as JSON data, in seconds."""
        return {
            "what": self.what,
            "factor": self.factor,
            "changes": list(self.changed),
            "step_time_s": self.best_s,
            "kept_step_time_s": self.chosen_s,
            "regret": self.regret,
            "refused": reason(self.best) if isinstance(self.best, DoesNotFit) else None,
        }


def variants(cluster: Cluster) -> dict[str, Callable[[float], Cluster]]:
    """Return property -> function from a factor to the cluster with that property scaled."""
    found: dict[str, Callable[[float], Cluster]] = {
        "links in a node": lambda f: _with_levels(cluster, (_faster(cluster.levels[0], f), *cluster.levels[1:]))
    }
    if len(cluster.levels) > 1:
        found["links between nodes"] = lambda f: _with_levels(
            cluster, (cluster.levels[0], *(_faster(level, f) for level in cluster.levels[1:]))
        )
    found["device memory"] = lambda f: _with_device(cluster, lambda d: {"memory_bytes": int(d.memory_bytes * f)})
    found["matmul rate"] = lambda f: _with_device(cluster, lambda d: {"matmul_flops_per_s": _peaks(d, f)})
    found["memory bandwidth"] = lambda f: _with_device(
        cluster, lambda d: {"memory_bytes_per_s": d.memory_bytes_per_s * f}
    )
    return found


def _with_levels(cluster: Cluster, levels: tuple[Link, ...]) -> Cluster:
    return cluster.model_copy(update={"levels": levels})


def _faster(level: Link, factor: float) -> Link:
    port = level.port_bytes_per_s
    rates = {"bytes_per_s": level.bytes_per_s * factor, "port_bytes_per_s": None if port is None else port * factor}
    return level.model_copy(update=rates)


def _with_device(cluster: Cluster, update: Callable[[Device], dict[str, Any]]) -> Cluster:
    """Return the cluster with every type of device changed."""

    def changed(part: Cluster | Pool) -> dict[str, Any]:
        return {"device": part.device.model_copy(update=update(part.device))}

    others = tuple(pool.model_copy(update=changed(pool)) for pool in cluster.others)
    return cluster.model_copy(update={**changed(cluster), "others": others})


def _peaks(device: Device, factor: float) -> Any:
    peaks = device.matmul_flops_per_s
    return peaks.model_copy(update={name: rate and rate * factor for name, rate in peaks})  # None: no such products


def sensitivity(query: PlanQuery, chosen: Plan, progress: Progress | None = None) -> list[Reaction]:
    """Return a reaction per property and factor. Raises what planning raises, except DoesNotFit, which is an answer."""
    changed = [(what, factor, make(factor)) for what, make in variants(query.cluster).items() for factor in FACTORS]
    name = f"plan for {len(changed)} changed clusters"
    return answered(progress or Silent(), name, lambda change: _reaction(query, chosen, *change), changed)


def _reaction(query: PlanQuery, chosen: Plan, what: str, factor: float, cluster: Cluster) -> Reaction:
    best: Plan | DoesNotFit
    try:
        best = query.with_changes(cluster=cluster).plan()
    except DoesNotFit as error:
        best = error
    there = chosen.model_copy(update={"cluster": cluster})
    devices = (there.device_of(there.route.stages_of(rank)[0]) for rank in range(there.mesh.pp))
    needed = query.device_bytes(chosen)
    fits = all(nbytes <= device.memory_bytes for nbytes, device in zip(needed, devices, strict=True))
    chosen_s = step_time_on(chosen, query.traced, cluster) if fits else None
    return Reaction(what, factor, chosen, best, chosen_s)


def sensitivity_text(title: str, found: Sequence[Reaction], width: int = WIDTH) -> str:
    """Return a table with a row per change, and a sentence with the largest regret."""
    chosen = found[0].chosen
    gap = 1 if width < WIDTH else 2
    table = columns("changed", "by>", "best step>", "vs chosen>", "regret>", "best plan there", gap=gap)
    for row in found:
        cells = ["–", "–"]
        if row.best_s is not None:
            cells = [seconds(row.best_s), f"{row.best_s / chosen.predicted.step_time_s - 1:+.1%}"]
        regret = "no fit" if row.chosen_s is None else "none" if not row.regret else f"{row.regret:.1%}"
        what = reason(row.best) if isinstance(row.best, DoesNotFit) else ", ".join(row.changed) or "unchanged"
        table.add_row(row.what, f"{row.factor - 1:+.0%}", *cells, regret, what)
    head = f"chosen: {short(chosen)}, {seconds(chosen.predicted.step_time_s)} a step"
    return render([title, head, *section("On a changed cluster", table), "", _verdict(found)], width)


def _verdict(found: Sequence[Reaction]) -> str:
    parts = []
    if lost := [row for row in found if row.chosen_s is None]:
        parts.append(f"the plan does not fit with {', '.join(f'{row.what} {row.factor - 1:+.0%}' for row in lost)}")
    worst = max(found, key=lambda row: row.regret or 0.0)
    if worst.regret and worst.regret > _SAME:
        parts.append(f"keeping it costs at most {worst.regret:.1%}, with {worst.what} {worst.factor - 1:+.0%}")
    return "; ".join(parts) or "the choice depends on none of these"
