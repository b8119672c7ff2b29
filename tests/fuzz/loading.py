"""Load a file as a user does, and judge the outcome."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist

import autoptd
from autoptd.cost_models.cluster import Cluster
from autoptd.errors import AutoptdError, InputsError, PlanError, PlanFileError
from autoptd.plans.model import Plan
from autoptd.schedule import prove, training_step
from tests.fuzz.bases import BASES, traced

_LONG_S = 8.0  # processor seconds: there is no search, or that of a tiny model
_LONGEST = 2500  # characters of a message


@dataclass(frozen=True)
class Outcome:
    """Outcome of loading a file. `end`: loaded, refused, or what went wrong."""

    end: str
    text: str = ""

    @property
    def wrong(self) -> bool:
        return self.end not in ("loaded", "refused")


class GroupStarted(Exception):
    """A process group was started for a file."""


@contextmanager
def guarded() -> Iterator[None]:
    """Make starting a process group an error."""

    def refuse(*_: object, **__: object) -> None:
        raise GroupStarted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "init_process_group", refuse)
        yield


def load(kind: str, path: Path) -> Outcome:
    """Load a plan for the base model `kind`, or a cluster."""
    start = time.process_time()
    outcome = _loaded(kind, path)
    took_s = time.process_time() - start
    return Outcome("slow", f"{took_s:.0f} s: {outcome.text}") if took_s > _LONG_S else outcome


def _loaded(kind: str, path: Path) -> Outcome:
    try:
        _load_plan(kind, path) if kind in BASES else _load_cluster(path)
    except AutoptdError as error:
        flaw = _flaw(error, kind)
        return Outcome(flaw, f"{flaw}: {type(error).__name__}: {error}") if flaw else Outcome("refused", str(error))
    except Exception:  # noqa: BLE001  any other error is what is looked for
        return Outcome("a traceback", "\n".join(traceback.format_exc().splitlines()[-14:]))
    return Outcome("loaded")


def _load_plan(kind: str, path: Path) -> None:
    parallel = autoptd.parallelize(traced(BASES[kind].model), plan=path)
    plan, layout = parallel.plan, parallel.layout
    for rank in range(plan.world):
        for chunk in range(plan.schedule.virtual):
            stage = parallel.stage_module(rank, chunk)
            held = {name: tuple(x.shape) for name, x in stage.named_parameters()}
            assert held == {name: layout.parameters[name].local_shape(plan.mesh.tp) for name in held}
    how = plan.schedule
    prove(training_step(how.kind, plan.mesh.pp, how.microbatches, how.virtual), plan.route)
    plan.explain(all=True)
    assert Plan.from_json(plan.to_json()) == plan


def _load_cluster(path: Path) -> None:
    cluster = Cluster.load(path)
    assert Cluster.from_data(cluster.to_data()) == cluster
    cluster.describe()
    ranks = sum(pool.ranks for pool in cluster.others) + 4
    plan = autoptd.plan(
        traced("nanogpt"), world=ranks, cluster=cluster, batch=4 * ranks, fix={"tp": 2, "pp": 2, "micro": 1}
    )
    plan.explain()


def _flaw(error: AutoptdError, kind: str) -> str:
    """Return what the refusal lacks, or ""."""
    if not error.where:
        return "no place"
    if not error.fix:
        return "no way out"
    if kind in BASES and not isinstance(error, (PlanFileError, PlanError, InputsError)):
        return "another error"
    return "" if readable(str(error)) else "unreadable"


def readable(text: str) -> bool:
    """Return whether the text is of bounded length and free of characters that a terminal would take as commands."""
    return len(text) <= _LONGEST and all(c.isprintable() or c == "\n" for c in text)
