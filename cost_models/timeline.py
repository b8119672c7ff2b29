"""Result of a simulated step: start and end of each action on each rank, and a breakdown of the time.

The simulation records flat lists of numbers; events, messages and breakdowns are computed from them on demand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

from autoptd.schedule import Action, StageMap, peer_of


class ActionLike(Protocol):
    """An action of a rank: its kind, its microbatch (None at the end of a step), and its chunk."""

    @property
    def kind(self) -> str: ...
    @property
    def microbatch(self) -> int | None: ...
    @property
    def chunk(self) -> int: ...


class Event(NamedTuple):
    """An interval on one stream of a pipeline rank; a receive on the compute stream is the time spent waiting."""

    stage: int
    action: ActionLike
    start_s: float
    end_s: float
    stream: str = "compute"


class Message(NamedTuple):
    """A message between two ranks: its send and receive actions, departure and arrival."""

    source: int
    sent: ActionLike
    target: int
    received: ActionLike
    start_s: float
    end_s: float


@dataclass
class RankRecord:
    """Times of one rank; `starts_s` and `ends_s` are parallel to `actions`."""

    actions: Sequence[ActionLike]
    tp_overlaps: bool = False  # whether tp communication overlaps with compute instead of following it
    starts_s: list[float] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)
    sent: list[tuple[int, float, float]] = field(default_factory=list)  # index of the send, departure, arrival
    dp: list[tuple[ActionLike, float, float]] = field(default_factory=list)  # overlapped: action, start, end
    tp_s: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # kind -> chunk -> (total, exposed)
    busy_s: float = 0.0
    exposed_sends_s: float = 0.0  # sends on the compute stream
    awaited_s: float = 0.0  # waiting at receives for messages in flight
    dp_exposed_s: float = 0.0  # exposed dp communication besides the actions REDUCE and GATHER


@dataclass(frozen=True)
class Timeline:
    """One simulated step of `len(busy_s)` pipeline ranks.

    `busy_s` is the time during which a rank's compute stream is occupied, by work and by exposed communication.
    `idle_s`, the rest of the makespan, is the bubble plus the wait for messages in flight.
    """

    makespan_s: float
    busy_s: tuple[float, ...]
    records: tuple[RankRecord, ...] = field(repr=False, compare=False)
    route: StageMap = field(repr=False, compare=False)

    @property
    def idle_s(self) -> tuple[float, ...]:
        return tuple(self.makespan_s - busy_s for busy_s in self.busy_s)

    @property
    def bubble(self) -> float:
        """The idle fraction of all ranks' compute streams."""
        whole_s = self.makespan_s * len(self.busy_s)
        return sum(self.idle_s) / whole_s if whole_s else 0.0

    @property
    def critical(self) -> int:
        """The busiest rank; the first among equals."""
        return self.busy_s.index(max(self.busy_s)) if self.busy_s else 0

    @property
    def exposed_s(self) -> dict[str, float]:
        """Seconds of exposed tp, p2p and dp communication on the critical rank."""
        parts = self.breakdown_s(self.critical)
        return {stream: parts[stream] for stream in ("tp", "p2p", "dp")}

    def breakdown_s(self, stage: int) -> dict[str, float]:
        """Return the parts of a rank's makespan: compute, exposed tp, p2p and dp, optimizer, bubble; they add up."""
        record = self.records[stage]
        ran = Counter((action.kind, action.chunk) for action in record.actions)
        tp_s = sum(count * record.tp_s[kind][chunk][1] for (kind, chunk), count in ran.items() if kind in record.tp_s)
        spent = self.busy_by_kind_s(stage)
        dp_s = spent.get("REDUCE", 0.0) + spent.get("GATHER", 0.0) + record.dp_exposed_s
        optimizer_s = spent.get("STEP", 0.0)
        return {
            "compute": self.busy_s[stage] - tp_s - record.exposed_sends_s - dp_s - optimizer_s,
            "tp": tp_s,
            "p2p": record.exposed_sends_s + record.awaited_s,
            "dp": dp_s,
            "optimizer": optimizer_s,
            "bubble": self.idle_s[stage] - record.awaited_s,
        }

    def busy_by_kind_s(self, stage: int) -> dict[str, float]:
        """Return the seconds that a rank's compute stream spends on each kind of action; for receives, on waiting."""
        record = self.records[stage]
        seconds: dict[str, float] = {}
        for action, start_s, end_s in zip(record.actions, record.starts_s, record.ends_s, strict=True):
            seconds[action.kind] = seconds.get(action.kind, 0.0) + end_s - start_s
        return seconds

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """The compute streams: every action of the lists, by rank, then in order of execution."""
        return tuple(
            Event(stage, action, start_s, end_s)
            for stage, record in enumerate(self.records)
            for action, start_s, end_s in zip(record.actions, record.starts_s, record.ends_s, strict=True)
        )

    @cached_property
    def communication(self) -> tuple[Event, ...]:
        """The tp and dp streams. tp follows the compute of its action, or starts with it if the two overlap."""
        return tuple(event for stage in range(len(self.records)) for event in self._communication(stage))

    def _communication(self, stage: int) -> Iterator[Event]:
        record = self.records[stage]
        work = {"REDUCE", "GATHER"} - {part.kind for part, _, _ in record.dp}
        for action, start_s, end_s in zip(record.actions, record.starts_s, record.ends_s, strict=True):
            whole_s = record.tp_s[action.kind][action.chunk][0] if action.kind in record.tp_s else 0.0
            if whole_s:
                start_s = start_s if record.tp_overlaps else end_s - whole_s
                yield Event(stage, action, start_s, start_s + whole_s, "tp")
            elif action.kind in work and end_s > start_s:
                yield Event(stage, action, start_s, end_s, "dp")
        yield from (Event(stage, part, start_s, end_s, "dp") for part, start_s, end_s in record.dp)

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """Every message, by sender: forwards, then backwards."""
        found = []
        for source, record in enumerate(self.records):
            for at, start_s, end_s in sorted(record.sent, key=lambda s: record.actions[s[0]].kind == "SB"):
                sent = record.actions[at]
                peer = peer_of(source, Action(sent.kind, sent.microbatch, sent.chunk), self.route)
                assert peer is not None, "it was sent"
                found.append(Message(source, sent, *peer, start_s, end_s))
        return tuple(found)
