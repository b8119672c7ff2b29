"""Simulation of one training step from the lists of actions that its stages execute.

    F, B                  forward, backward of a microbatch: the stage is busy for their seconds
    SF, SB                send on: takes the stage no time; the message leaves when its edge and direction are free, and
                          is there `send_*_s` later
    RF, RB                receive: the stage waits until the message is there
    REDUCE, STEP, GATHER  end of the step: busy for their seconds

Each stage does its list in order, and an edge's two directions are separate, each first in, first out. Such a network
has one outcome whatever order the stages are visited in (Kahn 1974), so no clock or queue of events is needed: run a
stage until it waits for a message, then whoever may go on.

1F1B, 3 stages, 4 microbatches, forward 1 s, backward 2 s, messages free; a column is a second, (4 + 3 - 1) * 3 of them:

    F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3
    .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3 .  .
    .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  .  .  .
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from autoptd.errors import PlanError


class ActionLike(Protocol):
    """What a stage does: its kind, and the microbatch it does it for (None at the end of a step)."""

    @property
    def kind(self) -> str: ...
    @property
    def microbatch(self) -> int | None: ...


@dataclass(frozen=True)
class StageTimes:
    """Seconds of each kind of action on one stage; sends are the time of the message to the neighbour."""

    forward_s: float
    backward_s: float
    send_forward_s: float = 0.0
    send_backward_s: float = 0.0
    reduce_s: float = 0.0
    step_s: float = 0.0
    gather_s: float = 0.0


class Event(NamedTuple):
    """One action of one stage; for a receive, the time it waited."""

    stage: int
    action: ActionLike
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """One simulated step. `idle_s` is the bubble: the makespan less the time that a stage works."""

    makespan_s: float
    busy_s: tuple[float, ...]
    idle_s: tuple[float, ...]
    events: tuple[Event, ...]  # by stage, then in order of execution

    @property
    def bubble(self) -> float:
        """The fraction of all stages' time in which they do not work."""
        whole_s = self.makespan_s * len(self.idle_s)
        return sum(self.idle_s) / whole_s if whole_s else 0.0

    def busy_by_kind_s(self, stage: int) -> dict[str, float]:
        """Seconds that a stage spends on each kind of action; a receive's are waiting."""
        seconds: dict[str, float] = {}
        for event in self.events:
            if event.stage == stage:
                seconds[event.action.kind] = seconds.get(event.action.kind, 0.0) + event.end_s - event.start_s
        return seconds


WORK = {"F": "forward_s", "B": "backward_s", "REDUCE": "reduce_s", "STEP": "step_s", "GATHER": "gather_s"}
SENDS = {"SF": (+1, "send_forward_s"), "SB": (-1, "send_backward_s")}
RECEIVES = {"RF": -1, "RB": +1}


class _Edge:
    """Messages on the way from one stage to a neighbour."""

    def __init__(self) -> None:
        self.free_s = 0.0
        self.messages: deque[tuple[int | None, float]] = deque()

    def send(self, microbatch: int | None, now_s: float, transfer_s: float) -> None:
        self.free_s = max(now_s, self.free_s) + transfer_s
        self.messages.append((microbatch, self.free_s))


class _Simulation:
    def __init__(self, schedule: Sequence[Sequence[ActionLike]], times: Sequence[StageTimes]) -> None:
        self.schedule = schedule
        self.seconds = [{kind: getattr(t, name) for kind, name in WORK.items()} for t in times]
        self.transfer_s = [{kind: getattr(t, name) for kind, (_, name) in SENDS.items()} for t in times]
        stages = len(schedule)
        self.done = [0] * stages
        self.clock_s = [0.0] * stages
        self.busy_s = [0.0] * stages
        self.events: list[list[Event]] = [[] for _ in range(stages)]
        self.edges = {(s, t): _Edge() for s in range(stages) for t in (s - 1, s + 1) if 0 <= t < stages}

    def run(self) -> None:
        ready = deque(range(len(self.schedule)))
        while ready:
            ready.extend(self._advance(ready.popleft()))
        blocked = [s for s, actions in enumerate(self.schedule) if self.done[s] < len(actions)]
        if blocked:
            raise PlanError(
                f"the schedule cannot finish: {len(blocked)} of {len(self.schedule)} stages wait for messages that "
                "nobody sends",
                where="\n".join(self._standing(s) for s in blocked),
                fix="every receive needs its send, and no two stages may wait for each other",
            )

    def _advance(self, stage: int) -> set[int]:
        """Run one stage until it waits or is done; returns the stages that it sent to."""
        actions, seconds = self.schedule[stage], self.seconds[stage]
        now_s, woken = self.clock_s[stage], set()
        for at in range(self.done[stage], len(actions)):
            action, start_s = actions[at], now_s
            kind = action.kind
            if kind in seconds:
                now_s += seconds[kind]
                self.busy_s[stage] += seconds[kind]
            elif kind in SENDS:
                woken.add(self._send(stage, at, now_s))
            elif kind in RECEIVES:
                there_s = self._receive(stage, at)
                if there_s is None:
                    break
                now_s = max(now_s, there_s)
            else:
                raise self._wrong(stage, at, f"known kinds: {', '.join([*WORK, *SENDS, *RECEIVES])}")
            self.events[stage].append(Event(stage, action, start_s, now_s))
        self.done[stage] = len(self.events[stage])
        self.clock_s[stage] = now_s
        return woken

    def _send(self, stage: int, at: int, now_s: float) -> int:
        """Put the message on its edge; returns the stage it goes to."""
        action = self.schedule[stage][at]
        target = stage + SENDS[action.kind][0]
        self._edge(stage, target, stage, at).send(action.microbatch, now_s, self.transfer_s[stage][action.kind])
        return target

    def _receive(self, stage: int, at: int) -> float | None:
        """When the message is there; None if nobody has sent it yet."""
        action = self.schedule[stage][at]
        edge = self._edge(stage + RECEIVES[action.kind], stage, stage, at)
        if not edge.messages:
            return None
        microbatch, there_s = edge.messages.popleft()
        if microbatch != action.microbatch:
            raise self._wrong(stage, at, f"the message that arrives is that of microbatch {microbatch}")
        return there_s

    def _edge(self, source: int, target: int, stage: int, at: int) -> _Edge:
        if (source, target) not in self.edges:
            raise self._wrong(stage, at, "there is no stage on that side")
        return self.edges[source, target]

    def _standing(self, stage: int) -> str:
        at = self.done[stage]
        return f"stage {stage} at {_text(self.schedule[stage][at])}, action {at} of {len(self.schedule[stage])}"

    def _wrong(self, stage: int, at: int, why: str) -> PlanError:
        return PlanError(
            f"the schedule is wrong at {_text(self.schedule[stage][at])}: {why}",
            where=f"stage {stage}, action {at} of {len(self.schedule[stage])}",
            fix="make the lists of both stages of this edge send and receive in the same order",
        )


def _text(action: ActionLike) -> str:
    return action.kind if action.microbatch is None else f"{action.kind}{action.microbatch}"


def simulate(schedule: Sequence[Sequence[ActionLike]], times: Sequence[StageTimes]) -> Timeline:
    """Play one step: `schedule[s]` is what stage s does in order, `times[s]` how long its actions take.

    Raises PlanError for lists that cannot finish (with the actions at which stages are blocked), that receive a
    message meant for another microbatch, or that hold an unknown kind.
    """
    if len(schedule) != len(times):
        raise ValueError(f"{len(schedule)} stages, but times for {len(times)}")
    simulation = _Simulation(schedule, times)
    simulation.run()
    makespan_s = max(simulation.clock_s, default=0.0)
    return Timeline(
        makespan_s=makespan_s,
        busy_s=tuple(simulation.busy_s),
        idle_s=tuple(makespan_s - busy_s for busy_s in simulation.busy_s),
        events=tuple(event for events in simulation.events for event in events),
    )


def makespan_bound(stage_s: Sequence[float], microbatches: int, p2p_s: float = 0.0) -> float:
    """Seconds of a 1F1B step in closed form: steady state of the slowest stage, and one microbatch through all.

        (m - 1) * (slowest + 2 (p - 1)/p * p2p)  +  sum of all stages + 2 (p - 1) * p2p

    `stage_s`: forward plus backward of one microbatch on each stage; `p2p_s`: one message between neighbours. The
    p2p term of the steady state is there because at most p microbatches are under way: p of them pay one way down and
    back. Exact for equal stages with free messages, (m + p - 1) * stage; an upper bound on `simulate` whenever all
    stages spend the same share of their time on the backward. Where shares differ, the step may exceed it: the slowest
    forward and the slowest backward then sit on different stages, and (m - 1) * their sum + sum of all is the bound.
    """
    if not stage_s or microbatches < 1:
        raise ValueError(f"a step needs a stage and a microbatch, got {len(stage_s)} and {microbatches}")
    stages = len(stage_s)
    round_trip_s = 2 * (stages - 1) * p2p_s
    return (microbatches - 1) * (max(stage_s) + round_trip_s / stages) + sum(stage_s) + round_trip_s
