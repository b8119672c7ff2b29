"""A question to the planner as a value: what is asked, what of it the asker pinned, and the same with a change.

The model is traced once. Its graph holds for every length of a sequence, so that a question about another length only
changes a size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import autoptd.api
from autoptd.compile.traced import TracedModel
from autoptd.cost_models.cluster import Cluster
from autoptd.errors import InputsError
from autoptd.passes.trace.traced import SEQUENCE
from autoptd.plans.model import Plan
from autoptd.progress import Progress, Silent
from autoptd.search.constraints.assumed import by_keyword


@dataclass(frozen=True)
class PlanQuery:
    """What `autoptd.plan` is asked. `fix`: what it fixes and what it assumes. `options`: further keywords of it."""

    traced: TracedModel
    world: int
    cluster: Cluster
    batch: int  # samples of a step over all devices
    fix: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""  # of the model; left out, the traced one's

    def plan(self, progress: Progress | None = None) -> Plan:
        """The plan. Raises DoesNotFit, PlanError."""
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

    def but(self, **changes: Any) -> PlanQuery:
        """The same with other values: of `world`, `batch`, `cluster`, `seq`, or of what can be fixed (None: free).

        Raises InputsError for a `seq` where the model has none.
        """
        asked = self
        for name, value in changes.items():
            if name in ("world", "batch"):
                asked = replace(asked, **{name: value})
            elif name == "cluster":
                asked = replace(asked, cluster=value if isinstance(value, Cluster) else Cluster.load(value))
            elif name == "seq":
                asked = replace(asked, traced=with_seq(asked.traced, value))
            else:
                others = {n: v for n, v in asked.fix.items() if n != name}
                asked = replace(asked, fix=others if value is None else others | {name: value})
        return asked

    def within(self, seconds: float) -> PlanQuery:
        """The same with less time, once there is a plan."""
        limit_s = min(seconds, self.options.get("time_limit_s") or math.inf)
        return self if limit_s == math.inf else replace(self, options={**self.options, "time_limit_s": limit_s})

    def with_memory(self, nbytes: int) -> PlanQuery:
        """The same on devices of `nbytes` of memory."""
        device = self.cluster.device.model_copy(update={"memory_bytes": nbytes})
        return replace(self, cluster=self.cluster.model_copy(update={"device": device}))


def with_seq(traced: TracedModel, seq: int) -> TracedModel:
    """The traced model for samples of `seq` tokens. Raises InputsError where it has no sequence."""
    if SEQUENCE not in traced.sizes:
        raise InputsError(
            f"{traced.name} has no sequence whose length could be changed", where="seq", fix="leave it out"
        )
    return replace(traced, sizes={**traced.sizes, SEQUENCE: seq})
