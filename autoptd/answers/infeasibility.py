"""Why nothing fits: the smallest set of pins that cannot be had together, and what would help, each by a plan.

The set is found by a deletion filter (Chinneck and Dravnieks 1991, Locating minimal infeasible constraint sets in
linear programs): pins are dropped one at a time, and stay dropped while nothing fits without them. What is left does
not fit, and would with any one of them dropped. Pins are what was fixed, and the batch and the length of a sample
where these were given; dropped, a batch is one sample for each device, a length `_SHORT` tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoptd.answers.pareto import needed_by_stage, needed_bytes
from autoptd.answers.query import PlanQuery
from autoptd.answers.sweep import shown
from autoptd.cost_models.cluster import Cluster
from autoptd.errors import AutoptdError, DoesNotFit
from autoptd.explain.choices import short
from autoptd.plans.model import Plan
from autoptd.progress import Progress, Silent

_SHORT = 128  # tokens of a sample that takes next to nothing
_DOUBLINGS = 6  # of the devices, or of their memory
_HALVINGS = 5  # of the bracket in which the least memory lies
SETTING, UNWRITTEN, TRAINING, HARDWARE = range(4)  # kinds of remedies, the cheapest first


@dataclass(frozen=True)
class Remedy:
    """A change with which a plan fits. `kind`: a setting, one the runtime cannot run, other training, hardware."""

    what: str
    kind: int
    plan: Plan

    def to_data(self) -> dict[str, Any]:
        """For machines: seconds."""
        said = self.plan.predicted
        return {
            "what": self.what,
            "plan": short(self.plan),
            "step_time_s": said.step_time_s,
            "tokens_per_s": said.tokens_per_s,
            "predicted_only": list(self.plan.not_runnable),
        }


@dataclass(frozen=True)
class Conflict:
    """`pins`: name -> text of those that cannot be had together, empty where none is to blame; `minimal`: whether the
    filter came to its end. `leanest`: the plan that needs least memory, as far as it was looked for."""

    pins: Mapping[str, str]
    minimal: bool
    leanest: Plan | None
    device_bytes: int
    remedies: tuple[Remedy, ...]
    untried: tuple[str, ...]

    @property
    def missing_bytes(self) -> list[int]:
        """What each pipeline rank of the leanest plan lacks."""
        stages = [] if self.leanest is None else needed_by_stage(self.leanest)
        return [max(0, needed - self.device_bytes) for needed in stages]

    def to_data(self) -> dict[str, Any]:
        """For machines: seconds and bytes."""
        return {
            "conflict": dict(self.pins),
            "minimal": self.minimal,
            "leanest": short(self.leanest) if self.leanest else None,
            "missing_bytes": self.missing_bytes,
            "remedies": [remedy.to_data() for remedy in self.remedies],
            "untried": list(self.untried),
        }


class _OutOfTime(Exception):
    """The limit came before the end."""


@dataclass(frozen=True)
class _Clock:
    """Plans until the time is spent."""

    ends_at: float
    now: Callable[[], float]

    def plan(self, asked: PlanQuery) -> Plan | None:
        """The plan, or None where nothing fits. Raises _OutOfTime, and what planning raises besides."""
        left_s = self.ends_at - self.now()
        if left_s <= 0:
            raise _OutOfTime
        try:
            return asked.within(left_s).plan()
        except DoesNotFit:
            return None


def conflict(
    asked: PlanQuery,
    given: Sequence[str] = (),
    *,
    time_limit_s: float = math.inf,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Conflict:
    """Explain a question that raised DoesNotFit. `given`: of "batch" and "seq", those that are the asker's wish."""
    progress = progress or Silent()
    timed = _Clock(clock() + time_limit_s, clock)
    pins = {name: shown(value) for name, value in asked.fix.items() if name != "splits"}
    pins |= {"splits": "…"} if "splits" in asked.fix else {}
    pins |= {name: str(asked.batch if name == "batch" else asked.traced.seq) for name in given}
    with progress.stage("find the pins that cannot be had together"):
        blamed, minimal = _filtered(asked, list(pins), timed)
    with progress.stage("look for ways out"):
        remedies, untried = _remedies(asked, blamed, timed)
    with progress.stage("find the leanest plan"):
        leanest = _leanest(asked, timed)
    if leanest is None:
        untried += ("more memory per device",)
    elif not any(remedy.kind == HARDWARE and remedy.what.startswith("devices") for remedy in remedies):
        what = f"devices of {math.ceil(10 * needed_bytes(leanest) / 2**30) / 10:.1f} GiB"
        remedies = (*remedies, Remedy(what, HARDWARE, leanest))
    ordered = tuple(sorted(remedies, key=lambda r: (r.kind, r.plan.predicted.step_time_s)))
    memory = asked.cluster.device.memory_bytes
    return Conflict({name: pins[name] for name in blamed}, minimal, leanest, memory, ordered, untried)


def _filtered(asked: PlanQuery, pins: list[str], timed: _Clock) -> tuple[list[str], bool]:
    """The pins of the smallest set, and whether each was tried."""
    try:
        if not _fails(without(asked, pins), timed):
            kept = list(pins)
            for pin in pins:
                if _fails(without(asked, [p for p in pins if p not in kept or p == pin]), timed):
                    kept.remove(pin)
            return kept, True
    except _OutOfTime:
        return pins, False
    return [], True


def _fails(asked: PlanQuery, timed: _Clock) -> bool:
    """Whether memory is what it fails for: what cannot be at all for another reason does not count."""
    try:
        return timed.plan(asked) is None
    except AutoptdError:
        return False


def without(asked: PlanQuery, pins: Sequence[str]) -> PlanQuery:
    """The question with these pins dropped."""
    for pin in pins:
        if pin == "batch":
            asked = asked.but(batch=asked.world * int(asked.fix.get("micro", 1)))
        elif pin == "seq":
            asked = asked.but(seq=min(asked.traced.seq or _SHORT, _SHORT))
        else:
            asked = asked.but(**{pin: None})
    return asked


# --- ways out -----------------------------------------------------------------------------------------------------


def _remedies(asked: PlanQuery, blamed: Sequence[str], timed: _Clock) -> tuple[tuple[Remedy, ...], tuple[str, ...]]:
    """The first way out of each kind that fits, and the kinds that were not tried for lack of time."""
    found, untried = [], []
    for title, kind, ladder in _ladders(asked, blamed):
        try:
            for what, question in ladder:
                try:
                    plan = timed.plan(question)
                except AutoptdError:  # such as a mesh that does not divide: not a way out
                    continue
                if plan is not None:
                    found.append(Remedy(what, kind, plan))
                    break
        except _OutOfTime:
            untried.append(title)
    return tuple(found), tuple(untried)


_Ladder = Iterator[tuple[str, PlanQuery]]


def _ladders(asked: PlanQuery, blamed: Sequence[str]) -> Iterator[tuple[str, int, _Ladder]]:
    """(what it is called, kind, ways from the least change to the largest)."""
    for pin in blamed:
        if pin not in ("batch", "seq"):
            yield f"{pin} free", SETTING, iter([(f"leave {pin} free", asked.but(**{pin: None}))])
    fixed = [pin for pin in blamed if pin not in ("batch", "seq")]
    if len(fixed) > 1:
        yield "all of them free", SETTING, iter([(f"leave {', '.join(fixed)} free", without(asked, fixed))])
    if "recompute" in asked.fix and "recompute" not in blamed:
        yield "recompute free", SETTING, iter([("leave recompute free", asked.but(recompute=None))])
    if int(asked.fix.get("micro", 1)) > 1:
        yield "smaller microbatches", SETTING, iter([("--fix micro=1", asked.but(micro=1))])
    zeros = [zero for zero in (1, 2, 3) if zero > int(asked.fix.get("zero", 1))]
    yield "ZeRO", UNWRITTEN, ((f"--fix zero={zero}", asked.but(zero=zero)) for zero in zeros)
    yield "a larger world", HARDWARE, _larger_worlds(asked)
    if asked.traced.seq:
        yield "shorter samples", TRAINING, _shorter(asked)
    if "batch" in blamed:
        yield "another batch", TRAINING, iter([(f"--batch {asked.world}", asked.but(batch=asked.world))])
    yield "another cluster", HARDWARE, _roomier(asked)


def _larger_worlds(asked: PlanQuery) -> _Ladder:
    """Twice the devices and so on, the batch as it is; what is fixed stays, dp grows where all of a mesh is fixed."""
    grown = asked.but(dp=None) if {"dp", "tp", "pp"} <= asked.fix.keys() else asked
    for doubling in range(1, _DOUBLINGS + 1):
        world = asked.world * 2**doubling
        yield f"--world {world}", grown.but(world=world)


def _shorter(asked: PlanQuery) -> _Ladder:
    length = asked.traced.seq or 0
    while (length := length // 2) >= _SHORT:
        yield f"--seq {length}", asked.but(seq=length)


def _roomier(asked: PlanQuery) -> _Ladder:
    """Shipped clusters with more memory per device and no less than half the rate, the least memory first.

    Of those with equal memory the first by name.
    """
    clusters = sorted(map(Cluster.load, Cluster.names()), key=lambda c: (c.device.memory_bytes, c.name))
    tried = asked.cluster.device.memory_bytes
    least = asked.cluster.device.matmul_flops_per_s.bf16 / 2
    for cluster in clusters:
        device = cluster.device
        if device.memory_bytes > tried and device.matmul_flops_per_s.bf16 >= least:
            tried = device.memory_bytes
            yield f"--cluster {cluster.name}", asked.but(cluster=cluster)


def _leanest(asked: PlanQuery, timed: _Clock) -> Plan | None:
    """The plan that fits on devices with the least memory more, to a few percent of what is missing."""
    least = asked.cluster.device.memory_bytes
    found = None
    try:
        for doubling in range(1, 2 * _DOUBLINGS + 1):
            found = timed.plan(asked.with_memory(least * 2))
            if found is not None or doubling == 2 * _DOUBLINGS:
                break
            least *= 2
        for _ in range(_HALVINGS if found is not None else 0):
            assert found is not None
            middle = (least + needed_bytes(found)) // 2
            better = timed.plan(asked.with_memory(middle))
            if better is None:
                least = middle
            else:
                found = better
    except _OutOfTime:
        return found
    return found
