"""A query to the planner as a value, and variations of it.

The model is traced once. Its graph is valid for every sequence length, so another length only changes a size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import autoptd.api
from autoptd.compile.traced import TracedModel
from autoptd.cost_models.cluster import Cluster, Pool
from autoptd.cost_models.memory import HEADROOM
from autoptd.errors import InputsError
from autoptd.passes.trace.traced import SEQUENCE
from autoptd.plans.model import Plan
from autoptd.progress import Progress, Silent
from autoptd.search.constraints.assumed import by_keyword


@dataclass(frozen=True)
class PlanQuery:
    """Arguments of `autoptd.plan`. `fix`: its keywords `fix` and `assume` in one; `options`: its other keywords."""

    traced: TracedModel
    world: int
    cluster: Cluster
    batch: int | None  # samples per step over all devices; None: the default of `autoptd.plan`
    fix: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""  # of the model; default: that of the traced model

    def plan(self, progress: Progress | None = None) -> Plan:
        """Return the plan. Raises DoesNotFit, PlanError."""
        fix, assume = by_keyword(self.fix)
        found = autoptd.api.plan(
            self.traced,
            world=self.world,
            cluster=self.cluster,
            batch=self.batch,
            fix=fix,
            assume=assume,
            progress=progress or Silent(),
            **self.options,
        )
        return found.model_copy(update={"model": self.name}) if self.name else found

    def with_changes(self, **changes: Any) -> PlanQuery:
        """Return the query with other values of `world`, `batch`, `cluster`, `seq` or fixable options (None: free).

        Raises InputsError for `seq` if the model has no sequence.
        """
        query = self
        for name, value in changes.items():
            if name in ("world", "batch"):
                query = replace(query, **{name: value})
            elif name == "cluster":
                query = replace(query, cluster=value if isinstance(value, Cluster) else Cluster.load(value))
            elif name == "seq":
                query = replace(query, traced=with_seq(query.traced, value))
            else:
                others = {n: v for n, v in query.fix.items() if n != name}
                query = replace(query, fix=others if value is None else others | {name: value})
        return query

    def device_bytes(self, plan: Plan) -> list[int]:
        """Return the memory that a device of each pipeline rank must have for a plan to fit, headroom included."""
        free = self.fix.get("headroom", HEADROOM)
        return [math.ceil(sum(row.values()) / (1 - free)) for row in plan.predicted.memory]

    def within(self, seconds: float) -> PlanQuery:
        """Return the query with at most `seconds` of search after the first plan."""
        limit_s = min(seconds, self.options.get("time_limit_s") or math.inf)
        return self if limit_s == math.inf else replace(self, options={**self.options, "time_limit_s": limit_s})

    def with_memory(self, nbytes: int) -> PlanQuery:
        """Return the query for devices with `nbytes` of memory; other types have no more if these are fewer than now,
        else no less."""

        def limited(part: Cluster | Pool, memory_bytes: int) -> dict[str, Any]:
            return {"device": part.device.model_copy(update={"memory_bytes": memory_bytes})}

        of_both = min if nbytes < self.cluster.device.memory_bytes else max
        pools = self.cluster.others
        others = [pool.model_copy(update=limited(pool, of_both(pool.device.memory_bytes, nbytes))) for pool in pools]
        changes = {**limited(self.cluster, nbytes), "others": tuple(others)}
        return replace(self, cluster=self.cluster.model_copy(update=changes))


def with_seq(traced: TracedModel, seq: int) -> TracedModel:
    """Return the traced model for samples of `seq` tokens. Raises InputsError if it has no sequence."""
    if SEQUENCE not in traced.sizes:
        raise InputsError(
            f"{traced.name} has no sequence whose length could be changed", where="seq", fix="leave it out"
        )
    return replace(traced, sizes={**traced.sizes, SEQUENCE: seq})
