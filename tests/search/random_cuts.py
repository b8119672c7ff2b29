"""Random small stage problems, and the exhaustive search over all cuts and all sets of recomputed segments."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

from autoptd.search.cuts import SegmentCost, StageProblem, Unit, restored_bytes


def random_problem(seed: int) -> StageProblem:
    """Up to 7 segments in up to 3 units, 1 to 4 stages, tight and loose budgets, all kinds of recomputation."""
    rng = random.Random(seed)
    units: list[Unit] = []
    while sum(len(u.segments) * u.count for u in units) < rng.randint(2, 6):
        block = tuple(_segment(rng, f"u{len(units)}.{i}") for i in range(rng.randint(1, 2)))
        units.append(Unit(f"u{len(units)}", block, rng.randint(1, 3)))
    while (n := sum(len(u.segments) * u.count for u in units)) > 7:
        units.pop()
    stages = min(rng.choice([1, 2, 3, 3, 4]), n)
    falling = rng.random() < 0.7
    in_flight = tuple(range(stages, 0, -1)) if falling else tuple(rng.randint(1, 4) for _ in range(stages))
    # About what an even cut needs with some of it recomputed.
    kept = rng.uniform(-0.2, 1.3)
    segments = [s for u in units for s in u.segments * u.count]
    fixed = sum(s.parameter_bytes for s in segments) / stages + max(s.temporary_bytes for s in segments)
    flying = sum(s.recompute_activation_bytes + kept * restored_bytes(s) for s in segments) / stages
    return StageProblem(
        units=tuple(units),
        stages=stages,
        microbatches=rng.choice([1, 2, 2, 3, 4, 16]),
        budget_bytes=tuple(float(round(fixed + f * flying) + rng.randint(0, 5)) for f in in_flight),
        in_flight=in_flight,
        recompute=rng.choice(["none", "full", "auto", "auto", "auto"]),
    )


def _segment(rng: random.Random, name: str) -> SegmentCost:
    kept = rng.randint(0, 20)
    return SegmentCost(
        name,
        forward_s=float(rng.randint(1, 9)),
        backward_s=float(rng.randint(1, 9)),
        activation_bytes=float(kept),
        recompute_activation_bytes=float(rng.randint(0, kept)),
        recompute_s=float(rng.randint(0, 9)),
        parameter_bytes=float(rng.randint(0, 20)),
        temporary_bytes=float(rng.choice([0, rng.randint(0, 20)])),
        send_bytes_s=float(rng.choice([0, 1, 4, 12])),
    )


def all_cuts(segments: int, stages: int) -> Iterator[tuple[tuple[int, int], ...]]:
    for inner in itertools.combinations(range(1, segments), stages - 1):
        ends = (0, *inner, segments)
        yield tuple((a, b - 1) for a, b in itertools.pairwise(ends))


def brute_force(problem: StageProblem) -> float:
    """The least bound; infinity where nothing fits. Written from the definition, stage by stage."""
    best = math.inf
    for cuts in all_cuts(len(problem.segments), problem.stages):
        times = [_least_time(problem, k, first, last) for k, (first, last) in enumerate(cuts)]
        best = min(best, (problem.microbatches - 1) * max(times) + sum(times))
    return best


def _least_time(problem: StageProblem, stage: int, first: int, last: int) -> float:
    own = problem.segments[first : last + 1]
    flags = {"none": [(False,)], "full": [(True,)], "auto": [(False, True)]}[problem.recompute] * len(own)
    best = math.inf
    for chosen in itertools.product(*flags):
        nbytes = peak = seconds = 0.0
        for segment, again in zip(own, chosen, strict=True):
            kept = segment.recompute_activation_bytes if again else segment.activation_bytes
            nbytes += segment.parameter_bytes + problem.in_flight[stage] * kept
            peak = max(peak, segment.temporary_bytes + segment.activation_bytes - kept)
            seconds += segment.forward_s + segment.backward_s + (segment.recompute_s if again else 0.0)
        if stage < problem.stages - 1:
            seconds += own[-1].send_bytes_s
        if nbytes + peak <= problem.budget_bytes[stage]:
            best = min(best, seconds)
    return best
