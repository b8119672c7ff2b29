"""Status of all ranks, merged along the tree of ranks: which wait, and which keeps them waiting.

a rank     reads the heartbeats of the ranks below it each tick; its own has them merged with itself
rank 0's   is about all ranks, a few ticks ago: no rank reads all heartbeats
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autoptd.runtime.faults.rank_status import SHOWN, Snapshot


@dataclass(frozen=True)
class Waits:
    """The status of some ranks, merged."""

    ranks: int = 0  # that are counted
    waiting: tuple[int, ...] = ()  # the lowest of those in a communication: one more than a text lists beside `busy`
    busy: int = -1  # the rank that is longest in one state without a communication; -1: none
    where: Snapshot = field(default_factory=Snapshot)  # of `busy`

    @staticmethod
    def of(rank: int, here: Snapshot, least_s: float) -> Waits:
        """Return the status of one rank, busy once it is in one state for `least_s` seconds."""
        if here.comm:
            return Waits(1, (rank,))
        return Waits(1, (), rank, here) if here.for_s >= least_s else Waits(1)

    @staticmethod
    def merged(found: Iterable[Waits]) -> Waits:
        each = list(found)
        waiting = sorted(rank for some in each for rank in some.waiting)[: SHOWN + 2]
        longest = min(each, key=lambda some: (some.busy < 0, -some.where.for_s, some.busy), default=Waits())
        return Waits(sum(some.ranks for some in each), tuple(waiting), longest.busy, longest.where)

    def after(self, seconds: float) -> Waits:
        """Return the status that much later, if nothing has changed."""
        return replace(self, where=replace(self.where, for_s=round(self.where.for_s + seconds, 1)))

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Waits:
        where = Snapshot(**{**data["where"], "peers": ()}) if data["where"] else Snapshot()
        return Waits(data["ranks"], tuple(data["waiting"]), data["busy"], where)

    def to_json(self) -> dict[str, Any]:
        """Return the fields, without the snapshot of no rank: heartbeats are short."""
        where = {**vars(self.where), "peers": []} if self.busy >= 0 else {}
        return {"ranks": self.ranks, "waiting": self.waiting, "busy": self.busy, "where": where}
