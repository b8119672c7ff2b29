"""The answer of a search: its plan, and others that it did not choose, of other meshes and values of each choice.

A search excludes most candidates by lower bounds, without a plan of theirs. Here some of these are planned after it: of
each mesh and value the candidate with the least bound, and the one of those without chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from autoptd.errors import AutoptdError
from autoptd.search.meshes import Candidate
from autoptd.search.pipeline.evaluate import Staged
from autoptd.search.sharding.cache import ShardingCache, ShardingQuery
from autoptd.search.sharding.tensors import Tensors
from autoptd.search.visit.candidate_queue import NEVER, QueueEntry

_MESHES = 8  # the most promising, which are planned
_VALUES = 12  # of a choice
CHOICES = ("tp", "pp", "dp", "cp", "ep", "micro", "zero", "schedule")


@dataclass(frozen=True)
class RunnerUp:
    """The best plan that was tried of a mesh, or of a value of another choice.

    `seconds`: of a step, infinite if no plan of it that was tried fits; `least_s`: lower bound of all its plans,
    infinite if none fits."""

    choice: str  # "mesh", or a field of `Candidate`
    candidate: Candidate
    seconds: float
    least_s: float


@dataclass(frozen=True)
class Answer:
    """The best plan found, and how the search went."""

    staged: Staged
    tensors: Tensors
    considered: int  # candidates
    visited: int  # candidates whose cuts into stages were measured
    gap: float  # no candidate takes less than (1 - gap) times the best
    question: ShardingQuery  # answered by `tensors`
    known: ShardingCache
    runners_up: tuple[RunnerUp, ...]


def runners_up(
    entries: Iterable[QueueEntry], best: Candidate, predict: Callable[[Candidate], float]
) -> tuple[RunnerUp, ...]:
    """Return the most promising other meshes, then, for each choice, its other values, in order.

    `predict`: returns the seconds of a candidate's plan, or raises AutoptdError. The entries keep them."""
    ordered = sorted(entries, key=lambda e: min(e.found_s, e.bound_s))
    groups: dict[tuple[str, object], list[QueueEntry]] = {}
    for choice in ("mesh", *CHOICES):
        by_value: dict[object, list[QueueEntry]] = {}
        for e in ordered:
            by_value.setdefault(_value(e.candidate, choice), []).append(e)
        by_value.pop(_value(best, choice), None)
        kept = list(by_value)[: _MESHES if choice == "mesh" else _VALUES]
        groups |= {(choice, value): by_value[value] for value in (kept if choice == "mesh" else sorted(kept))}  # type: ignore[type-var]
    for e in (e for group in groups.values() for e in _promising(group)):
        if e.found_s == NEVER and e.bound_s < NEVER:
            with suppress(AutoptdError):
                e.found_s = predict(e.candidate)
    tried = {key: min(group, key=lambda e: (e.found_s, e.bound_s)) for key, group in groups.items()}
    least_s = {key: min(e.bound_s for e in group) for key, group in groups.items()}
    return tuple(RunnerUp(key[0], e.candidate, e.found_s, least_s[key]) for key, e in tried.items())


def _promising(group: Sequence[QueueEntry]) -> list[QueueEntry]:
    """Return candidates that may be the best of a group, which is in order: few, since each is planned."""
    simple = (e for e in group if e.candidate.virtual == 1)
    return [group[0], next(simple, group[0])]


def _value(c: Candidate, choice: str) -> object:
    return (c.dp, c.tp, c.pp, c.cp, c.ep) if choice == "mesh" else getattr(c, choice)
