"""Critical paths of a schedule: lower bounds on the seconds of a step, for all cuts into stages at once.

An action waits for the one before it on its rank, and for its message. A step takes at least as long as any chain of
actions that wait for one another, and so at least as long as any average of chains. That is linear in the seconds of
stage s, for a forward pass f, a backward pass b and, if the schedule splits them off, parameter gradients w, and of the
message x after it:

    C >= sum_s (alpha_s f_s + beta_s b_s + omega_s w_s + gamma_s x_s)                                       (1)

Every chain passes some stages more often than others, so that a cut escapes it by making those small. `average_path`
returns the average that the fewest cuts escape: the dual solution of

    minimise C   subject to   (1) for every chain,  f_s, b_s, w_s = fixed shares of y_s,  sum_s y_s = 1,  y >= 0,
                              y of the last stage >= the share of the model's last segment

whose value is the least time of any division of a model that takes one second. A head that takes longer than an even
share decides it: while the last rank runs it, the others wait, chunk by chunk. Chains are found by cutting planes
(Kelley 1960): the longest one under the best y so far is added, until it is hardly longer than C. Of even cuts
Narayanan et al. (2021) give the time, (m + p - 1) / p for 1F1B; uneven ones may be faster, which this takes account of.

A step of many microbatches m repeats rounds. A path of a shorter step, of n microbatches, that crosses rank r where
rounds are inserted passes every stage of r another m - n times. `_insertion` checks that this is so.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from autoptd.schedule import Schedule, period_of, route_of
from autoptd.schedule.schedules import compute_lists
from autoptd.search.pipeline.windows import Floats
from autoptd.search.solver import CuttingPlanes

_ROUNDS = 3  # microbatches per rank of the step whose paths are found, if it repeats rounds
_LARGEST = 40_000  # actions of a step that does not
_TOLERANCE = 4e-3  # relative distance of the longest path from the optimum
_EFFORT = 30_000  # actions that are visited by all searches for the longest path
_MORE = 8  # times as many for a closer average
_PLACES = 4  # on each rank, across which the first chains are found
_STEPS = 20  # that shares are rounded to
_KINDS = "FBW"


@dataclass(frozen=True)
class PathWeights:
    """The times that a chain, or an average of chains, passes each stage, [F, B or W; stage], and message, [stage]."""

    passes: Floats
    sends: Floats

    def seconds(self, forward_s: float, backward_s: float, weight_s: float = 0.0) -> Floats:
        """Return what a part of the model of these seconds adds to the step on each stage; `backward_s` has W."""
        return self.passes[0] * forward_s + self.passes[1] * (backward_s - weight_s) + self.passes[2] * weight_s

    def sends_s(self, sends_s: Sequence[float]) -> float:
        """Return the seconds of messages, given those of one after each stage but the last."""
        return float(self.sends[: len(sends_s)] @ np.array(sends_s, dtype=float))


class Links:
    """The links of each action to what precedes it in chains of one direction: an action on its rank, and one on
    another rank with the stage after which the message between the two is sent; -1 where there is none."""

    def __init__(
        self,
        passes: Sequence[int],
        on_rank: Sequence[int],
        on_other: Sequence[int],
        edges: Sequence[int],
        order: Iterable[int],
    ) -> None:
        """`passes`: of each action, its kind * stages + its stage; `order`: the actions that chains may pass, each
        after what precedes it."""
        self._passes, self._on_rank, self._on_other, self._edges = passes, on_rank, on_other, edges
        self._rows = [(i, passes[i], on_rank[i], on_other[i], edges[i]) for i in order]

    def reversed(self, order: Iterable[int]) -> Links:
        """Return the links to what follows each action; `order`: as for a new object, in this direction."""
        on_rank, on_other, edges = ([-1] * len(self._passes) for _ in range(3))
        for i, (mine, other, edge) in enumerate(zip(self._on_rank, self._on_other, self._edges, strict=True)):
            if mine >= 0:
                on_rank[mine] = i
            if other >= 0:
                on_other[other], edges[other] = i, edge
        return Links(self._passes, on_rank, on_other, edges, order)

    def longest(self, seconds: Sequence[float], sends_s: Sequence[float]) -> list[float]:
        """Return the seconds of the longest chain up to each action, and 0 at the end of the list, for -1."""
        times = [0.0] * (len(self._passes) + 1)
        for i, kind, mine, other, edge in self._rows:
            time_s = times[mine]
            if other >= 0 and (arrives_s := times[other] + sends_s[edge]) > time_s:
                time_s = arrives_s
            times[i] = time_s + seconds[kind]
        return times

    def chain(self, action: int, times: Sequence[float], sends_s: Sequence[float]) -> tuple[list[int], list[int]]:
        """Return the passes of the longest chain up to an action, and its messages; `times`: those of `longest`."""
        passes, sent = [], []
        while action >= 0:
            passes.append(self._passes[action])
            mine, other, edge = self._on_rank[action], self._on_other[action], self._edges[action]
            is_sent = other >= 0 and times[other] + sends_s[edge] > times[mine]
            if is_sent:
                sent.append(edge)
            action = other if is_sent else mine
        return passes, sent


class ScheduleGraph:
    """The actions of a schedule in an order in which they may run, and the longest chains of them.

    Actions are numbered. `waits`: the links to what an action waits for, of those that may come before inserted rounds;
    `followed`: to what waits for it, of those that may come after them. `crossings`: ranks and two consecutive actions
    of theirs, between which rounds are inserted if any `repeats`.
    """

    def __init__(self, kind: str, ranks: int, microbatches: int, virtual: int, repeats: bool = False) -> None:
        """`repeats`: rounds will be inserted. Raises ValueError if they cannot be."""
        self.ranks, self.stages, self.route = ranks, ranks * virtual, route_of(kind, ranks, virtual)
        lists = compute_lists(kind, ranks, microbatches, virtual)
        self.splits_backward = any(action.kind == "W" for action in lists[0])
        self.passes: list[int] = []  # of each action, its kind * stages + its stage
        on_rank, senders, edges = self._lay_out(lists)
        early: Collection[int] = range(len(self.passes))
        late = early
        self.repeats = repeats
        self.crossings = [
            (rank, mine[n - 1], mine[n])
            for rank, mine in enumerate(on_rank)
            for k in range(_PLACES)
            if (n := len(mine) * (2 * k + 1) // (2 * _PLACES))
        ]
        if repeats:
            period = period_of(kind, ranks)
            kept = _insertion(lists, compute_lists(kind, ranks, microbatches + period, virtual), period)
            early = {i for mine, n in zip(on_rank, kept, strict=True) for i in mine[:n]}
            if any(senders[i] >= 0 and senders[i] not in early for i in early):
                raise ValueError("an action before the rounds waits for one after them")
            late = [i for i in late if i not in early]
            pairs = zip(on_rank, kept, strict=True)
            self.crossings = [(rank, mine[n - 1], mine[n]) for rank, (mine, n) in enumerate(pairs)]
        before = [-1] * len(self.passes)
        for mine in on_rank:
            for first, second in pairwise(mine):
                before[second] = first
        self.waits = Links(self.passes, before, senders, edges, sorted(early))
        self.followed = self.waits.reversed(sorted(late, reverse=True))

    def _lay_out(self, lists: Schedule) -> tuple[list[list[int]], list[int], list[int]]:
        """Number the actions in an order in which they may run; return those of each rank, and of each action the one
        on another rank that it waits for and the stage after which that one's message is sent, -1 if there is none."""
        on_rank: list[list[int]] = [[] for _ in lists]
        senders: list[int] = []
        edges: list[int] = []
        known: dict[tuple[str, int, int | None], int] = {}
        waiting: dict[tuple[str, int, int | None], int] = {}
        ready = deque(range(len(lists)))
        while ready:
            rank = ready.popleft()
            mine = on_rank[rank]
            for action in lists[rank][len(mine) :]:
                stage = self.route.stage(rank, action.chunk)
                needs = self._needs(action.kind, stage, action.microbatch)
                if needs is not None and needs not in known:
                    waiting[needs] = rank
                    break
                own = action.kind, stage, action.microbatch
                sent = needs is not None and self.route.holder(needs[1]) != rank
                senders.append(known[needs] if sent and needs is not None else -1)
                edges.append((stage - 1 if action.kind == "F" else stage) if sent else -1)
                known[own] = len(self.passes)
                mine.append(len(self.passes))
                self.passes.append(_KINDS.index(action.kind) * self.stages + stage)
                if own in waiting:
                    ready.append(waiting.pop(own))
        return on_rank, senders, edges

    def _needs(self, kind: str, stage: int, microbatch: int | None) -> tuple[str, int, int | None] | None:
        match kind:
            case "F":
                return ("F", stage - 1, microbatch) if stage else None
            case "B":
                return ("B", stage + 1, microbatch) if stage + 1 < self.stages else ("F", stage, microbatch)
        return None

    def chains(
        self, seconds: Sequence[float], sends_s: Sequence[float], more: int = 0, every: bool = False
    ) -> list[tuple[float, PathWeights]]:
        """Return seconds and weights of the longest chain, or of that across `every` crossing.

        `seconds`: of each kind of pass on each stage, [kind * stages + stage]; `sends_s`: after each stage; `more`:
        microbatches of the inserted rounds."""
        ends = self.waits.longest(seconds, sends_s)
        if not self.repeats and not every:
            last = max(range(len(ends)), key=ends.__getitem__)
            return [(ends[last], self._weights(*self.waits.chain(last, ends, sends_s)))]
        tails = self.followed.longest(seconds, sends_s)
        totals = [sum(seconds[stage :: self.stages]) for stage in range(self.stages)]
        long_s = [
            ends[before] + more * sum(self.route.of(totals, rank)) + tails[after]
            for rank, before, after in self.crossings
        ]
        found, longest_s = list[tuple[float, PathWeights]](), max(long_s)
        for seconds_s, (rank, before, after) in zip(long_s, self.crossings, strict=True):
            if every or (seconds_s == longest_s and not found):
                passes, sent = self.waits.chain(before, ends, sends_s)
                later, sent_later = self.followed.chain(after, tails, sends_s)
                path = self._weights(passes + later, sent + sent_later)
                path.passes[:, list(self.route.stages_of(rank))] += more
                found.append((seconds_s, path))
        return found

    def _weights(self, passes: Sequence[int], sent: Sequence[int]) -> PathWeights:
        """Return what a chain of these passes and messages weighs."""
        by_kind = np.bincount(passes, minlength=3 * self.stages).astype(float).reshape(3, -1)
        if not self.splits_backward:
            by_kind[2] = by_kind[1]
        sends = np.bincount(np.array(sent, dtype=int), minlength=self.stages).astype(float)
        return PathWeights(by_kind, sends)


def _insertion(short: Schedule, longer: Schedule, period: int) -> list[int]:
    """Return after how many actions of each rank one round more makes `short` the `longer` schedule: as many rounds
    before the first difference as the ranks take, so that a chain can still reach the last rank and come back.

    Raises ValueError if there is no such place."""
    for back in (-(-len(short) // period), 1, 0):
        found = []
        for mine, other in zip(short, longer, strict=True):
            length = len(other) - len(mine)
            at = next((n for n, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), len(mine))
            at -= back * length
            later = [action._replace(microbatch=(action.microbatch or 0) + period) for action in mine[max(0, at) :]]
            if 0 < at < len(mine) and list(other[at + length :]) == later:
                found.append(at)
        if len(found) == len(short):
            return found
    raise ValueError("a longer step is no shorter one with a round more")


class PassShares(NamedTuple):
    """Rounded shares of a model's seconds: of forward passes, of W, of a message in the seconds of a stage, and of what
    only the last stage may hold, 0 if that is no more than an even share."""

    forward: float
    weight: float = 0.0
    send: float = 0.0
    last: float = 0.0

    @classmethod
    def of(
        cls,
        forward_s: float,
        backward_s: float,
        weight_s: float,
        send_s: float = 0.0,
        last_s: float = 0.0,
        stages: int = 1,
    ) -> PassShares:
        """Return the shares of passes over all stages, of a message of `send_s` seconds times their number, and of
        `last_s` seconds on the last one of `stages`."""
        whole_s = forward_s + backward_s
        if whole_s <= 0:
            return cls(0.5)
        forward, weight = (round(_STEPS * n / whole_s) / _STEPS for n in (forward_s, weight_s))
        relative, last = send_s / whole_s, last_s / whole_s
        return cls(
            forward,
            weight,
            2.0 ** round(math.log2(relative)) if relative > 1 / _STEPS else 0.0,
            2.0 ** (math.ceil(2 * math.log2(last)) / 2) if last * stages > 1 else 0.0,
        )


@lru_cache(maxsize=64)
def _repeated(kind: str, ranks: int, microbatches: int, virtual: int) -> ScheduleGraph | None:
    try:
        return ScheduleGraph(kind, ranks, microbatches, virtual, repeats=True)
    except ValueError:
        return None


def _busy(graph: ScheduleGraph, rank: int, microbatches: int) -> PathWeights:
    """Return all passes of a rank."""
    passes = np.zeros((3, graph.stages))
    passes[:, list(graph.route.stages_of(rank))] = microbatches
    return PathWeights(passes, np.zeros(graph.stages))


@lru_cache(maxsize=128)
def _graph(kind: str, ranks: int, microbatches: int, virtual: int) -> tuple[ScheduleGraph, int] | None:
    """Return the actions of a step, or those of a shorter one and the microbatches of the rounds that it lacks; None
    if there are too many."""
    period = period_of(kind, ranks)
    short = microbatches % period + period * -(-_ROUNDS * ranks // period)
    if short < microbatches and (found := _repeated(kind, ranks, short, virtual)):
        return found, microbatches - short
    too_large = 2 * microbatches * ranks * virtual > _LARGEST
    return None if too_large else (ScheduleGraph(kind, ranks, microbatches, virtual), 0)


def longest_path_s(
    kind: str,
    ranks: int,
    microbatches: int,
    virtual: int,
    passes_s: Sequence[Sequence[float]],
    sends_s: Sequence[float],
) -> float:
    """Return the seconds of the longest chain of one cut that crosses repeated rounds; 0 if the step repeats none.

    `passes_s`: of forward passes, backward passes and of W in these, by stage; `sends_s`: of a message after each."""
    period = period_of(kind, ranks)
    short = microbatches % period + period * -(-_ROUNDS * ranks // period)
    if ranks == 1 or short >= microbatches or (graph := _repeated(kind, ranks, short, virtual)) is None:
        return 0.0
    forward_s, backward_s, weight_s = (np.array(seconds) for seconds in passes_s)
    weight_s = weight_s if graph.splits_backward else 0 * weight_s
    seconds = np.concatenate([forward_s, backward_s - weight_s, weight_s]).tolist()
    return graph.chains(seconds, [*sends_s, 0.0], microbatches - short)[0][0]


@lru_cache(maxsize=4096)
def average_path(
    kind: str, ranks: int, microbatches: int, virtual: int, shares: PassShares, close: bool = False
) -> PathWeights:
    """Return the average of chains that the fewest cuts escape, in whose stages passes have these shares.

    It is a bound for all others too, though not as good. `close`: closer to the best, in more time."""
    stages = ranks * virtual
    even = PathWeights(np.full((3, stages), microbatches / ranks), np.zeros(stages))  # of every rank's own actions
    if (found := _graph(kind, ranks, microbatches, virtual)) is None:
        return even
    graph, more = found
    try:
        least = np.zeros(stages)
        least[-1] = min(1.0, shares.last)
        planes = CuttingPlanes(least)
    except ImportError:
        return even
    weight = shares.weight if graph.splits_backward else 0.0
    split = np.array([shares.forward, 1 - shares.forward - weight, weight])
    sends_s = [shares.send / stages] * stages
    best, bound, shortest = least + (1 - least[-1]) / stages, 0.0, math.inf
    lowest = best
    paths = [_busy(graph, rank, microbatches) for rank in range(ranks)]
    weights = [1.0] * ranks
    for path in paths:
        planes.add(split @ path.passes)
    for turn in range(max(2, _EFFORT * (_MORE if close else 1) // len(graph.passes))):
        sizes = (best + lowest) / 2  # between the best division so far and that of the planes: fewer turns
        chains = graph.chains((split[:, None] * sizes).ravel().tolist(), sends_s, more, every=more > 0 or not turn)
        if (longest := max(seconds for seconds, _ in chains)) < shortest:
            best, shortest = sizes, longest
        if bound >= shortest * (1 - _TOLERANCE):
            break
        for _, path in chains:
            paths.append(path)
            planes.add(split @ path.passes + path.sends_s(sends_s))
        bound, lowest, weights = planes.solve()
    if not sum(weights) > 0:  # the solver failed
        return even
    share = np.array(weights) / sum(weights)
    return PathWeights(
        np.tensordot(share, np.array([path.passes for path in paths]), 1),
        share @ np.array([path.sends for path in paths]),
    )
