"""Plans that were found before, kept in a folder of the user's for the next time the same is asked.

A plan is looked up by a hash of everything that it depends on: the graph (operations, shapes, wiring, names of
parameters and modules), the contents of the cluster file, world, batch, sizes, precision, optimizer, what was fixed or
included, how far the search goes, and the program itself: the text of every file of this package, and the versions of
what it computes with. So a plan is never out of date; one that nobody asks for any more is dropped in time.

The folder is `$AUTOPTD_CACHE`, or `autoptd` in `$XDG_CACHE_HOME` or `~/.cache`; `AUTOPTD_CACHE=off` keeps nothing. What
cannot be read or written there is no error, and a file that another user wrote or could write to is not read: the plan
is searched again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from autoptd.errors import PlanFileError
from autoptd.outputs import PRIVATE, read_own, write_whole
from autoptd.passes.graph import module_path
from autoptd.plans import Plan

if TYPE_CHECKING:
    from autoptd.compile import TracedModel
    from autoptd.search.task import Task

OFF = "off"
_MOST = 500  # plans that are kept
_OURS = "autoptd", "autoptd.passes", "autoptd.cost_models"
_COMPUTES = "torch", "highspy", "pulp", "numpy", "sympy"


def key_of(source: TracedModel, task: Task, notes: Sequence[str] = ()) -> str:
    """What the plan of a task is kept under; empty where it is not: nowhere to keep it, or a time limit, with which the
    machine's speed decides. `notes`: what the plan says besides."""
    if folder() is None or task.time_limit_s < math.inf:
        return ""
    paths = [module_path(node) for node in task.folded.traced.graph.graph.nodes]
    asked = {f.name: getattr(task, f.name) for f in dataclasses.fields(task) if f.name not in ("folded", "sizes")}
    sizes = {str(symbol): int(n) for symbol, n in task.sizes.items()}
    parts = [source.graph_hash, source.name, paths, asked, sizes, notes, _program()]
    return hashlib.sha256(json.dumps(_plain(parts)).encode()).hexdigest()


def find(key: str) -> Plan | None:
    """The plan that was kept, if any."""
    path = _path(key)
    if path is None:
        return None
    try:
        plan = Plan.from_json(read_own(path).decode(), str(path))
        os.utime(path, follow_symlinks=False)
    except (PlanFileError, OSError, UnicodeDecodeError):
        return None
    return plan


def keep(key: str, plan: Plan) -> None:
    """For the next time; the plan least asked for makes room."""
    path = _path(key)
    if path is None:
        return
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, plan.to_json(), PRIVATE)
        ours = (p for p in path.parent.glob("*.json") if re.fullmatch("[0-9a-f]{64}", p.stem))
        kept = sorted(ours, key=lambda p: p.lstat().st_mtime)
        for old in kept[: max(0, len(kept) - _MOST)]:
            old.unlink(missing_ok=True)
    except (PlanFileError, OSError):
        return


def folder() -> Path | None:
    """Where plans are kept; None where they are not."""
    named = os.environ.get("AUTOPTD_CACHE", "")
    if named.lower() == OFF:
        return None
    if named:
        return Path(named)
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # a user without a home
        return None
    return Path(home) / "autoptd"


def _path(key: str) -> Path | None:
    where = folder()
    return None if where is None else where / f"{key}.json"


@cache
def _program() -> list[str]:
    """The text of this program, as a hash, and what it computes with."""
    text = hashlib.sha256()
    for name in _OURS:
        root = Path(importlib.import_module(name).__path__[0])
        for path in sorted(p for p in root.rglob("*") if p.suffix in (".py", ".toml", ".json")):
            text.update(f"{name}/{path.relative_to(root)}\0".encode() + path.read_bytes())
    return [text.hexdigest(), *(f"{name} {_version(name)}" for name in _COMPUTES)]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _plain(value: Any) -> Any:
    """What JSON can hold, the same for equal values. Raises TypeError for anything that is not known to be complete."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, BaseModel):
        return _plain(value.model_dump())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [type(value).__name__, _plain({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})]
    if isinstance(value, Mapping):
        return sorted(([_plain(k), _plain(v)] for k, v in value.items()), key=json.dumps)
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(v) for v in value), key=json.dumps)
    raise TypeError(f"{type(value).__name__} is not part of a key")
