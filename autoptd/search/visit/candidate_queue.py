"""The queue of a search: its candidates, in the order in which they take their next steps.

    plain     meshes with every other option at its default, and with offload where they do not fit without: they soon
              find a plan that few others beat, so that most microbatches are excluded before tensors are split
    near      those that differ from the best plan so far in one choice, where most improvements are
    others

Each of these three turns is ordered by the best lower bound that is known. Unless the search is exact, a turn ends
early after `_TRIES` simulations without a better plan. So does, in the second and third turn, a group of candidates
that are alike, since few that follow are better than those before them:

    group of a mesh and schedule        any number of chunks per rank, and any of what a number of chunks leaves open
    group of a number of chunks         any offload, splits and recomputation
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass

from autoptd.search.meshes import Candidate
from autoptd.search.pipeline.stages import Stages

NEVER = float("inf")
PLAIN, NEAR, OTHER = range(3)
_TRIES = NEVER, 16, 24
_ALIKE = 8, 2  # simulations of a group without a better plan
_Place = tuple[int, float, int, int]  # its turn, its bound, -step, and index


@dataclass
class QueueEntry:
    """A candidate of a search: a lower bound of all its cuts, and the steps taken so far."""

    candidate: Candidate
    bound_s: float
    passes_s: float = 0.0  # lower bound on the seconds of all cuts without the step's end
    reduced_s: float = 0.0  # the same with the reduction of gradients
    found_s: float = NEVER  # the least seconds of a simulation
    is_full: bool = False  # whether memory raises its bound, or its stages recompute
    stages: Stages | None = None
    step: int = 0  # into `_STEPS` of `visit.py`
    split_s: float = NEVER  # the bound by its split tensors, before memory counts
    is_weighed: bool = False  # whether the model's work on one rank bounds it already
    closed: bool = False  # whether all its cuts were examined
    effort: int = 0  # cuts beyond the first that could be simulated
    is_short: bool = False  # whether all candidates of its family lack memory
    limits: tuple[bool, ...] = ()  # by which its variants were enqueued last, if memory limits it
    is_variant: bool = False  # of a candidate that memory limits: with memory-saving splits, or with offload
    turn: int = PLAIN
    place: _Place | None = None  # in the queue

    @property
    def is_varied(self) -> bool:
        return self.is_variant or not self.candidate.is_plain


class CandidateQueue:
    """A queue of entries, and all that were ever in it."""

    def __init__(self) -> None:
        self.entries: list[QueueEntry] = []
        self._heap: list[_Place] = []
        self._known: dict[Candidate, int] = {}
        self._best: Candidate | None = None  # if the entries near it are still to be moved
        self._tries = [0, 0, 0]  # simulations since the last better plan, by turn
        self._alike = Counter[tuple[object, ...]]()  # the same, by group
        self.refused = 0  # candidates of which no cut that was tried fits, though another may

    def __contains__(self, c: Candidate) -> bool:
        return c in self._known

    def add(self, e: QueueEntry) -> None:
        """Add an entry, to be taken at its bound."""
        if e.is_varied and e.turn == PLAIN:
            e.turn = OTHER
        self._known[e.candidate] = len(self.entries)
        self.entries.append(e)
        self.put(e, e.bound_s)

    def put(self, e: QueueEntry, bound_s: float) -> None:
        """Put an entry back, or move it, to be taken at this bound."""
        e.place = e.turn, bound_s, -e.step, self._known[e.candidate]
        heapq.heappush(self._heap, e.place)

    def pop(self) -> QueueEntry | None:
        """Return the next entry, None if none is left."""
        while self._heap:
            if self._best is not None and self._heap[0][0] == OTHER:
                self._move_near(self._best)
                self._best = None
            place = heapq.heappop(self._heap)
            if (e := self.entries[place[-1]]).place is place:
                e.place = None
                return e
        return None

    def prefer(self, best: Candidate) -> None:
        """Take the entries near a better candidate before others."""
        self._best, self._tries = best, [0, 0, 0]
        self._alike.clear()

    def count(self, e: QueueEntry) -> None:
        """Count a simulation of an entry."""
        self._tries[e.turn] += 1
        self._alike.update(_groups(e.candidate))

    def has_ended(self, e: QueueEntry) -> bool:
        """Return whether the turn of an entry, or its group, ended early."""
        if e.turn == PLAIN or self._tries[e.turn] >= _TRIES[e.turn]:
            return e.turn != PLAIN
        return any(self._alike[group] >= most for group, most in zip(_groups(e.candidate), _ALIKE, strict=True))

    def _move_near(self, best: Candidate) -> None:
        for e in self.entries:
            if e.place is not None and e.turn == OTHER and _is_near(e.candidate, best):
                e.turn = NEAR
                self.put(e, e.place[1])


def _groups(c: Candidate) -> tuple[tuple[object, ...], tuple[object, ...]]:
    mesh = c.dp, c.tp, c.pp, c.cp, c.micro, c.ep, c.etp, c.zero, c.shards, c.pools, c.schedule
    return mesh, (*mesh, c.virtual)


def _is_near(c: Candidate, best: Candidate) -> bool:
    return sum(a != b for a, b in zip(c.choices, best.choices, strict=True)) <= 1
