"""Explanation of infeasibility: a minimal set of conflicting constraints (pins), and remedies, each with its plan.

The set is found by a deletion filter (Chinneck and Dravnieks 1991, Locating minimal infeasible constraint sets in
linear programs): pins are dropped one at a time, and stay dropped while nothing fits without them. The remaining set
does not fit, but does with any one of them dropped. Pins are the fixed options, and batch and sequence length if given;
when dropped, the batch is one sample per device, the length `_SHORT` tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoptd.answers.query import PlanQuery
from autoptd.answers.sweep import shown
from autoptd.cost_models.cluster import Cluster
from autoptd.errors import AutoptdError, DoesNotFit
from autoptd.explain.choices import short
from autoptd.plans.model import Plan
from autoptd.progress import Progress, Silent

_SHORT = 128  # tokens of a sample with negligible activations
_DOUBLINGS = 6  # of the number of devices, or of their memory
_HALVINGS = 5  # of the interval that contains the least memory that fits
SETTING, PREDICTED_ONLY, TRAINING, HARDWARE = range(4)  # kinds of remedies, the cheapest first


@dataclass(frozen=True)
class Remedy:
    """A change with which a plan fits. `kind`: a setting, one that may not be runnable, other training, or hardware."""

    what: str
    kind: int
    plan: Plan

    def to_data(self) -> dict[str, Any]:
        """Return the remedy as JSON data, in seconds."""
        predicted = self.plan.predicted
        return {
            "what": self.what,
            "plan": short(self.plan),
            "step_time_s": predicted.step_time_s,
            "tokens_per_s": predicted.tokens_per_s,
            "predicted_only": list(self.plan.not_runnable),
        }


@dataclass(frozen=True)
class Conflict:
    """A minimal set of conflicting pins, with remedies.

    pins: name -> text; empty if nothing fits even without pins. minimal: whether the filter finished. least_memory: the
    plan that needs the least memory, as far as the search got; least_bytes: what each of its devices must have.
    untried: remedies that were not tried for lack of time.
    """

    pins: Mapping[str, str]
    minimal: bool
    least_memory: Plan | None
    least_bytes: tuple[int, ...]
    device_bytes: int
    remedies: tuple[Remedy, ...]
    untried: tuple[str, ...]

    @property
    def missing_bytes(self) -> list[int]:
        """The shortfall of each pipeline rank of the plan that needs the least memory."""
        return [max(0, nbytes - self.device_bytes) for nbytes in self.least_bytes]

    def to_data(self) -> dict[str, Any]:
        """Return the conflict as JSON data, in seconds and bytes."""
        return {
            "conflict": dict(self.pins),
            "minimal": self.minimal,
            "leanest": short(self.least_memory) if self.least_memory else None,
            "missing_bytes": self.missing_bytes,
            "remedies": [remedy.to_data() for remedy in self.remedies],
            "untried": list(self.untried),
        }


class _OutOfTime(Exception):
    """The time limit was reached."""


@dataclass(frozen=True)
class _Clock:
    """A planner with a deadline."""

    ends_at: float
    now: Callable[[], float]

    def plan(self, query: PlanQuery) -> Plan | None:
        """Return the plan, or None if nothing fits. Raises _OutOfTime, and what else planning raises."""
        left_s = self.ends_at - self.now()
        if left_s <= 0:
            raise _OutOfTime
        try:
            return query.within(left_s).plan()
        except DoesNotFit:
            return None


def conflict(
    query: PlanQuery,
    given: Sequence[str] = (),
    *,
    time_limit_s: float = math.inf,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Conflict:
    """Explain a query that raised DoesNotFit. `given`: those of "batch" and "seq" that the user specified."""
    progress = progress or Silent()
    timed = _Clock(clock() + time_limit_s, clock)
    pins = {name: shown(value) for name, value in query.fix.items() if name != "splits"}
    pins |= {"splits": "…"} if "splits" in query.fix else {}
    pins |= {name: str(query.batch if name == "batch" else query.traced.seq) for name in given}
    with progress.stage("find the conflicting constraints"):
        blamed, minimal = _filtered(query, list(pins), timed)
    with progress.stage("try remedies"):
        remedies, untried = _remedies(query, blamed, timed)
    with progress.stage("find the plan that needs the least memory"):
        least_memory = _least_memory_plan(query, timed)
    if least_memory is None:
        untried += ("more memory per device",)
    elif not any(remedy.kind == HARDWARE and remedy.what.startswith("devices") for remedy in remedies):
        what = f"devices of {math.ceil(10 * max(query.device_bytes(least_memory)) / 2**30) / 10:.1f} GiB"
        remedies = (*remedies, Remedy(what, HARDWARE, least_memory))
    ordered = tuple(sorted(remedies, key=lambda r: (r.kind, r.plan.predicted.step_time_s)))
    memory = query.cluster.device.memory_bytes
    least = () if least_memory is None else tuple(query.device_bytes(least_memory))
    return Conflict({name: pins[name] for name in blamed}, minimal, least_memory, least, memory, ordered, untried)


def _filtered(query: PlanQuery, pins: list[str], timed: _Clock) -> tuple[list[str], bool]:
    """Return the minimal set of conflicting pins, and whether the filter finished."""
    if not pins:  # nothing fits, as is known already
        return [], True
    try:
        if not _fails(without(query, pins), timed):
            kept = list(pins)
            for pin in pins:
                if _fails(without(query, [p for p in pins if p not in kept or p == pin]), timed):
                    kept.remove(pin)
            return kept, True
    except _OutOfTime:
        return pins, False
    return [], True


def _fails(query: PlanQuery, timed: _Clock) -> bool:
    """Return whether nothing fits; a query that is invalid for another reason does not count."""
    try:
        return timed.plan(query) is None
    except AutoptdError:
        return False


def without(query: PlanQuery, pins: Sequence[str]) -> PlanQuery:
    """Return the query with these pins dropped."""
    for pin in pins:
        if pin == "batch":
            query = query.with_changes(batch=query.world * int(query.fix.get("micro", 1)))
        elif pin == "seq":
            query = query.with_changes(seq=min(query.traced.seq or _SHORT, _SHORT))
        else:
            query = query.with_changes(**{pin: None})
    return query


# --- remedies -----------------------------------------------------------------------------------------------------


def _remedies(query: PlanQuery, blamed: Sequence[str], timed: _Clock) -> tuple[tuple[Remedy, ...], tuple[str, ...]]:
    """Return the first candidate of each group that fits, and the groups not tried for lack of time."""
    found, untried = [], []
    for title, kind, candidates in _candidates(query, blamed):
        try:
            for what, changed in candidates:
                try:
                    plan = timed.plan(changed)
                except AutoptdError:  # such as a mesh that does not divide: not a remedy
                    continue
                if plan is not None:
                    found.append(Remedy(what, kind, plan))
                    break
        except _OutOfTime:
            untried.append(title)
    return tuple(found), tuple(untried)


_Candidates = Iterator[tuple[str, PlanQuery]]


def _candidates(query: PlanQuery, blamed: Sequence[str]) -> Iterator[tuple[str, int, _Candidates]]:
    """Yield (title, kind, candidates) of each group of remedies, the smallest change first."""
    for pin in blamed:
        if pin not in ("batch", "seq"):
            yield f"{pin} free", SETTING, iter([(f"leave {pin} free", query.with_changes(**{pin: None}))])
    fixed = [pin for pin in blamed if pin not in ("batch", "seq")]
    if len(fixed) > 1:
        yield "all of them free", SETTING, iter([(f"leave {', '.join(fixed)} free", without(query, fixed))])
    if "recompute" in query.fix and "recompute" not in blamed:
        yield "recompute free", SETTING, iter([("leave recompute free", query.with_changes(recompute=None))])
    if int(query.fix.get("micro", 1)) > 1:
        yield "smaller microbatches", SETTING, iter([("--fix micro=1", query.with_changes(micro=1))])
    zeros = [zero for zero in (1, 2, 3) if zero > int(query.fix.get("zero", 1))]
    yield "ZeRO", PREDICTED_ONLY, ((f"--fix zero={zero}", query.with_changes(zero=zero)) for zero in zeros)
    yield "a larger world", HARDWARE, _larger_worlds(query)
    if query.traced.seq:
        yield "shorter samples", TRAINING, _shorter_samples(query)
    if "batch" in blamed:
        yield "another batch", TRAINING, iter([(f"--batch {query.world}", query.with_changes(batch=query.world))])
    yield "another cluster", HARDWARE, _larger_memory(query)


def _larger_worlds(query: PlanQuery) -> _Candidates:
    """Yield 2, 4, … times the devices with the same batch and pins; dp is freed if the whole mesh is fixed."""
    grown = query.with_changes(dp=None) if {"dp", "tp", "pp"} <= query.fix.keys() else query
    for doubling in range(1, _DOUBLINGS + 1):
        world = query.world * 2**doubling
        yield f"--world {world}", grown.with_changes(world=world)


def _shorter_samples(query: PlanQuery) -> _Candidates:
    length = query.traced.seq or 0
    while (length := length // 2) >= _SHORT:
        yield f"--seq {length}", query.with_changes(seq=length)


def _larger_memory(query: PlanQuery) -> _Candidates:
    """Yield shipped clusters with more memory per device and at least half the matmul rate, the least memory first.

    Of clusters with equal memory only the first by name is tried.
    """
    clusters = sorted(map(Cluster.load, Cluster.names()), key=lambda c: (c.device.memory_bytes, c.name))
    tried = query.cluster.device.memory_bytes
    least = query.cluster.device.matmul_flops_per_s.bf16 / 2
    for cluster in clusters:
        device = cluster.device
        if device.memory_bytes > tried and device.matmul_flops_per_s.bf16 >= least:
            tried = device.memory_bytes
            yield f"--cluster {cluster.name}", query.with_changes(cluster=cluster)


def _least_memory_plan(query: PlanQuery, timed: _Clock) -> Plan | None:
    """Return the plan that fits with the least additional memory, to a few percent of the shortfall."""
    least = query.cluster.device.memory_bytes
    found = None
    try:
        for doubling in range(1, 2 * _DOUBLINGS + 1):
            found = timed.plan(query.with_memory(least * 2))
            if found is not None or doubling == 2 * _DOUBLINGS:
                break
            least *= 2
        for _ in range(_HALVINGS if found is not None else 0):
            assert found is not None
            middle = (least + max(query.device_bytes(found))) // 2
            better = timed.plan(query.with_memory(middle))
            if better is None:
                least = middle
            else:
                found = better
    except _OutOfTime:
        return found
    return found
