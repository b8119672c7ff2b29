"""Random small sequences of segments with the times of their stages, and the exhaustive search over all cuts."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autoptd.search.pipeline.windows import Floats, PartitionProblem

Cuts = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Kind:
    """A segment: seconds per type of device; bytes of state, of activations saved, and of those left by
    recomputation."""

    base_s: tuple[float, ...]
    state: float
    kept: float
    least_kept: float
    recompute_s: float


@dataclass(frozen=True)
class Problem:
    """A partition problem and its times. `ragged`: seed of the time that a stage takes beyond its segments'."""

    kinds: tuple[Kind, ...]
    partitioning: PartitionProblem
    rounds: float
    ragged: int
    forward_part: float = 0.25

    def segment(self, i: int) -> Kind:
        return self.kinds[self.partitioning.names[i]]

    def seconds(self, stage: int, first: int, last: int) -> float:
        """Return the least time over all sets of recomputed segments, without sends; infinity if none fits."""
        own = [self.segment(i) for i in range(first, last + 1)]
        best = math.inf
        for chosen in itertools.product((False, True), repeat=len(own)):
            kept = sum(s.least_kept if again else s.kept for s, again in zip(own, chosen, strict=True))
            if self.share(stage, first, last, kept) <= 1:
                best = min(best, sum(s.recompute_s for s, again in zip(own, chosen, strict=True) if again))
        return self.seconds_without(stage, first, last) + best

    def share(self, stage: int, first: int, last: int, kept: float) -> float:
        """Return the part of its budget that a stage needs which keeps these bytes per microbatch."""
        given = self.partitioning
        state = sum(self.segment(i).state for i in range(first, last + 1))
        temporary = float(given.temporary[last]) if len(given.temporary) > 1 else 0.0
        work = (1 + given.waste) * (given.alive[stage] * kept + temporary)
        return (state + work) / given.budget_bytes[given.pools[stage]]

    def passes(self, stage: int, first: int, last: int) -> tuple[float, float] | None:
        """Return the same as seconds of a forward and a backward pass; None if none fits."""
        seconds = self.seconds(stage, first, last)
        return None if seconds == math.inf else (self.forward_part * seconds, (1 - self.forward_part) * seconds)

    def seconds_without(self, stage: int, first: int, last: int) -> float:
        """Return the time of a stage without recomputation or sends."""
        contents = (first == 0, self.partitioning.names[first : last + 1])
        base = sum(self.segment(i).base_s[self.partitioning.pools[stage]] for i in range(first, last + 1))
        return base + random.Random(repr((self.ragged, contents))).randint(0, 3) * bool(self.ragged)

    @cached_property
    def table(self) -> dict[tuple[int, int, int], float]:
        """Return the time of every stage and run of segments, sends included."""
        n = len(self.partitioning.names)
        return {
            (k, i, j): self.seconds(k, i, j) + float(self.partitioning.send_s[k, j])
            for k in range(self.partitioning.stages)
            for i in range(n)
            for j in range(i, n)
        }

    def bound_s(self, cuts: Cuts) -> float:
        times = [self.table[k, i, j] for k, (i, j) in enumerate(cuts)]
        return self.rounds * max(times) + sum(times) if max(times) < math.inf else math.inf

    def brute_force(self) -> float:
        """Return the least bound of all allowed cuts; infinity if none fits."""
        cuts = all_cuts(len(self.partitioning.names), self.partitioning.stages)
        return min(
            (self.bound_s(c) for c in cuts if self.partitioning.uncut.isdisjoint(first for first, _ in c)),
            default=math.inf,
        )

    def with_budget(self, more: float) -> Problem:
        return replace(
            self,
            partitioning=replace(
                self.partitioning, budget_bytes=tuple(r + more for r in self.partitioning.budget_bytes)
            ),
        )


def random_problem(seed: int) -> Problem:
    """Make up to 8 segments of up to 4 kinds, 1 to 4 stages on one or two types of device, tight and loose memory."""
    rng = random.Random(seed)
    devices = rng.choice([1, 1, 2])
    kinds = tuple(_kind(rng, devices) for _ in range(rng.randint(1, 4)))
    names = tuple(rng.randrange(len(kinds)) for _ in range(rng.randint(2, 8)))
    stages = min(rng.choice([1, 2, 3, 3, 4]), len(names))
    falling = rng.random() < 0.7
    alive = tuple(range(stages, 0, -1)) if falling else tuple(rng.randint(1, 4) for _ in range(stages))
    own = [kinds[name] for name in names]
    share, kept = sum(alive) / stages**2, rng.uniform(0.0, 1.5)
    needed = sum(s.state / stages + share * (s.least_kept + kept * (s.kept - s.least_kept)) for s in own)
    partitioning = PartitionProblem(
        names=names,
        base_s=tuple(np.array([s.base_s[pool] for s in own]) for pool in range(devices)),
        send_s=_random_sends(rng, stages, len(names)),
        alive=alive,
        pools=tuple(sorted(rng.randrange(devices) for _ in alive)),
        state=np.array([s.state for s in own]),
        kept=np.array([s.kept for s in own]),
        least_kept=np.array([s.least_kept for s in own]),
        recompute_s=(min(s.recompute_s / max(1.0, s.kept) for s in kinds),) * devices,
        budget_bytes=tuple(round(needed * rng.uniform(0.8, 1.2)) + 5.0 for _ in range(devices)),
        uncut=frozenset(i for i in range(1, len(names)) if rng.random() < rng.choice([0.0, 0.0, 0.3])),
    )
    if rng.random() < 0.3:
        partitioning = replace(
            partitioning,
            temporary=np.array([float(rng.randint(0, 9)) for _ in names]),
            whole_from=np.arange(len(names)),
            waste=rng.choice([0.0, 0.25]),
        )
    return Problem(kinds, partitioning, float(rng.choice([0, 1, 1, 2, 3, 15])), rng.choice([0, seed + 1]))


def _random_sends(rng: random.Random, stages: int, segments: int) -> Floats:
    """Return [stage, segment] times: the bytes at each boundary times the edge after each stage; 0 after the last."""
    places = np.array([float(rng.choice([0, 1, 4, 12])) for _ in range(segments - 1)] + [0.0])
    edges = np.array([float(rng.choice([1, 1, 3])) for _ in range(stages - 1)] + [0.0])
    return np.outer(edges, places)


def _kind(rng: random.Random, devices: int) -> Kind:
    kept = rng.randint(0, 20)
    return Kind(
        base_s=tuple(float(rng.randint(1, 18)) for _ in range(devices)),
        state=float(rng.randint(0, 20)),
        kept=float(kept),
        least_kept=float(rng.randint(0, kept)),
        recompute_s=float(rng.randint(0, 9)),
    )


def all_cuts(segments: int, stages: int) -> Iterator[Cuts]:
    for inner in itertools.combinations(range(1, segments), stages - 1):
        edges = (0, *inner, segments)
        yield tuple((a, b - 1) for a, b in itertools.pairwise(edges))
