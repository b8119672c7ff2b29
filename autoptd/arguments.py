"""Checks of the public functions' arguments, made before anything is planned."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autoptd.cost_models.cluster import Cluster
from autoptd.cost_models.local_cluster import default_cluster
from autoptd.errors import AutoptdError, ClusterError, PlanError, nearest
from autoptd.parallel import Optimizer
from autoptd.plans.model import Plan
from autoptd.runtime.optimizers.groups import ParameterGroup, choose
from autoptd.runtime.optimizers.named import NAMED
from autoptd.search.constraints.options import require_count

_MOST_DEVICES = 2**18  # larger worlds take more than seconds: groups are enumerated rank by rank
_MOST_SAMPLES = 2**40  # larger batches take more than seconds to factorise


def optimizer_name(optimizer: Optimizer, options: Mapping[str, Any] | None = None) -> str:
    """Return the optimizer's name; of a callable `custom`, or `custom-whole` if it updates whole parameters.

    Raises PlanError if it cannot be constructed with these options, or cannot work on several ranks.
    """
    known = f"pass {', '.join(map(repr, NAMED))}, or a callable that takes parameters, such as torch.optim.Adam"
    if isinstance(optimizer, torch.optim.Optimizer):
        raise PlanError(
            f"optimizer is a {type(optimizer).__name__} that already holds parameters", where="optimizer", fix=known
        )
    if not callable(optimizer) and optimizer not in NAMED:
        fix = nearest(optimizer, NAMED) + "; or a callable" if isinstance(optimizer, str) else known
        raise PlanError(f"unknown optimizer {optimizer!r}", where="optimizer", fix=fix)
    try:
        chosen = choose(optimizer, options or {})
        chosen.build({})
    except (TypeError, ValueError, AttributeError) as error:
        if isinstance(error, AutoptdError):
            raise
        raise PlanError(
            f"cannot construct the optimizer: {error}",
            where="optimizer",
            fix="correct optimizer= or optimizer_options=",
        ) from error
    if isinstance(optimizer, str):
        return optimizer
    return "custom" if chosen.reads[0] == "elementwise" else "custom-whole"


def check_update(
    optimizer: Optimizer,
    options: Mapping[str, Any] | None,
    groups: Sequence[ParameterGroup],
    shapes: Mapping[str, tuple[int, ...]],
    hidden: Collection[str],
) -> None:
    """Raise PlanError if optimizers of whole parameters refuse those of these shapes, or groups have wrong options."""
    chosen = choose(optimizer, options or {}, groups, shapes, hidden)
    whole = set(chosen.names("whole"))
    chosen.build({n: nn.Parameter(torch.empty(shape, device="meta")) for n, shape in shapes.items() if n in whole})


def planned_optimizer(plan: Plan) -> str:
    """Return the name of the plan's optimizer. Raises PlanError for a custom one."""
    if plan.optimizer.startswith("custom"):
        raise PlanError(
            "the plan was made for a custom optimizer, which a plan file cannot hold",
            where="optimizer",
            fix="pass the same optimizer= as when planning",
        )
    return plan.optimizer


def check_nothing_to_search(**options: Any) -> None:
    """Raise PlanError if any option of the search is given beside a plan."""
    if given := [name for name, value in options.items() if value]:
        raise PlanError(
            f"a plan is given, so nothing is searched, and {' and '.join(given)} would have no effect",
            where=", ".join(["plan", *given]),
            fix=f"leave out {', '.join(given)}; or leave out plan to search again",
        )


def check_as_planned(plan: Plan, **asked: Any) -> None:
    """Raise PlanError if the plan was made for other values than those asked for; None asks for none."""
    held = {"cluster": plan.cluster, "batch": plan.batch, "seq": plan.sizes.get("s"), "precision": plan.precision}
    if not callable(asked["optimizer"]):
        held["optimizer"] = plan.optimizer
    others = [n for n, value in held.items() if None not in (asked[n], value) and _counted(asked[n]) != _counted(value)]
    if not others:
        return
    planned = {name: f"{name} {getattr(held[name], 'name', held[name])}" for name in others}
    wanted = {name: f"{name} {getattr(asked[name], 'name', asked[name])}" for name in others}
    if "cluster" in others and planned["cluster"] == wanted["cluster"]:
        wanted["cluster"] += " with other figures"
    raise PlanError(
        f"the plan is for {', '.join(planned.values())}, but the call asks for {', '.join(wanted.values())}",
        where=", ".join(["plan", *others]),
        fix=f"leave out {', '.join(others)} to use the plan's; or leave out plan to search again",
    )


def _counted(value: Any) -> Any:
    """Return a value as plans depend on it: clusters without their prices."""
    return value.unpriced if isinstance(value, Cluster) else value


def check_sizes(world: object, batch: object) -> None:
    require_count(world, "world", of="the devices over all nodes", most=_MOST_DEVICES)
    if batch is not None:
        require_count(batch, "batch", of="the samples of a step over all ranks", most=_MOST_SAMPLES)


def check_limit(time_limit_s: object) -> None:
    number = isinstance(time_limit_s, (int, float)) and not isinstance(time_limit_s, bool)
    if time_limit_s is not None and not (number and time_limit_s > 0):  # type: ignore[operator]
        raise PlanError(
            f"time_limit_s is {time_limit_s!r}", where="time_limit_s", fix="pass a positive number, or leave it out"
        )


def check_clip(clip_norm: object) -> None:
    number = isinstance(clip_norm, (int, float)) and not isinstance(clip_norm, bool)
    if clip_norm is not None and not (number and 0 < clip_norm < float("inf")):  # type: ignore[operator]
        raise PlanError(f"clip_norm is {clip_norm!r}", where="clip_norm", fix="pass a positive number, or leave it out")


def cluster_for(cluster: str | os.PathLike[str] | Cluster | None, world: int) -> Cluster:
    """Return the cluster, which has `world` devices; None: that of this machine. Raises ClusterError."""
    if cluster is not None and not isinstance(cluster, (str, os.PathLike, Cluster)):
        raise ClusterError(
            f"cluster is of type {type(cluster).__name__}",
            where="cluster",
            fix="pass a shipped name (listed by `autoptd clusters`), the path of a .toml file, or a Cluster",
        )
    given = default_cluster() if cluster is None else cluster
    found = given if isinstance(given, Cluster) else Cluster.load(os.fspath(given))
    found.check_world(world)
    return found
