"""Lower bounds never exceed the simulated time of any cut under any schedule; some are tight."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autoptd.cost_models.memory import alive as alive_of
from autoptd.cost_models.memory import in_flight
from autoptd.cost_models.simulate import simulate
from autoptd.cost_models.step_times import ChunkTimes, Overlap, StageTimes
from autoptd.schedule import route_of, row_of, step_lists
from autoptd.search import critical_paths as critical
from autoptd.search.critical_paths import PassShares, PathWeights, average_path
from autoptd.search.pipeline import exact as refine
from autoptd.search.pipeline import lower_bounds as bounds
from autoptd.search.pipeline import lp_bound as relax
from autoptd.search.pipeline import stages as stages_module
from autoptd.search.pipeline.lower_bounds import cut_bound_s, even_bound_s, interleaved_rounds
from autoptd.search.pipeline.lp_bound import BlockOptions, Blocks, Pipeline, relaxed_bound
from autoptd.search.pipeline.stages import Stages
from autoptd.search.pipeline.windows import PartitionProblem
from tests.search.pipeline.random_cuts import all_cuts

SCHEDULES = ("1f1b", "gpipe", "zero-bubble", "interleaved", "zero-bubble-v")
SLACK = 1 + 1e-9


@dataclass(frozen=True)
class Run:
    """A pipeline of `ranks` with these seconds per segment (forward, backward, the parameters' part of backward)."""

    schedule: str
    ranks: int
    virtual: int
    microbatches: int
    segments: tuple[tuple[float, float, float], ...]
    cuts: tuple[tuple[int, int], ...]
    sends: tuple[float, ...] = ()
    reductions: tuple[float, ...] = ()  # of the gradients of each segment

    @property
    def forward_s(self) -> list[float]:
        return [sum(f for f, _, _ in self.segments[i : j + 1]) for i, j in self.cuts]

    @property
    def backward_s(self) -> list[float]:
        return [sum(b for _, b, _ in self.segments[i : j + 1]) for i, j in self.cuts]

    @property
    def total_s(self) -> float:
        return sum(f + b for f, b, _ in self.segments)

    @property
    def share(self) -> float:
        """Return a lower bound of the share that a forward or backward pass has of any segment."""
        return max(min(f, b) / (f + b) for f, b, _ in self.segments)

    def seconds(self, overlap: Sequence[str] = ("p2p",)) -> float:
        """Return the simulated time, with sends overlapped or not."""
        weights = [sum(w for _, _, w in self.segments[i : j + 1]) for i, j in self.cuts]
        sends = (*self.sends, 0.0) if self.sends else (0.0,) * len(self.cuts)
        times = zip(self.forward_s, self.backward_s, weights, sends, (0.0, *sends), strict=False)
        chunks = [ChunkTimes(f, b, min(w, b), 0.0, 0.0, ahead, back) for f, b, w, ahead, back in times]
        lists = step_lists(self.schedule, self.ranks, self.microbatches, self.virtual, Overlap.of(overlap).early)
        route = route_of(self.schedule, self.ranks, self.virtual)
        reductions = [sum(self.reductions[i : j + 1]) for i, j in self.cuts]
        stages = [StageTimes(route.of(chunks, rank), sum(route.of(reductions, rank))) for rank in range(self.ranks)]
        return simulate(lists, stages, Overlap.of(overlap), route).makespan_s

    def bound_s(self, sends: tuple[float, ...] = ()) -> float:
        return cut_bound_s(self.forward_s, self.backward_s, self.schedule, self.ranks, self.microbatches, sends)

    @property
    def weight_s(self) -> list[float]:
        return [sum(min(w, b) for _, b, w in self.segments[i : j + 1]) for i, j in self.cuts]

    @property
    def shares(self) -> PassShares:
        send_s = sum(self.sends) / max(1, len(self.sends)) * len(self.cuts)
        return PassShares.of(sum(self.forward_s), sum(self.backward_s), sum(self.weight_s), send_s)

    def chains_s(self, shares: PassShares) -> float:
        """Return the average of chains that is best for stages with these shares."""
        path = average_path(self.schedule, self.ranks, self.microbatches, self.virtual, shares)
        stages = zip(self.forward_s, self.backward_s, self.weight_s, strict=True)
        return sum(path.seconds(*each)[k] for k, each in enumerate(stages)) + path.sends_s(self.sends)

    def even_s(self, share: float) -> float:
        return even_bound_s(self.total_s, self.schedule, self.ranks, self.microbatches, self.virtual, share)


def random_run(seed: int) -> Run:
    """Make segments from equal to very unequal, forward shares from none to most, few and many microbatches."""
    rng = random.Random(seed)
    schedule, ranks = rng.choice(SCHEDULES), rng.randint(1, 5)
    virtual = row_of(schedule).chunks or rng.choice([2, 3])
    n, spread, part = (
        ranks * virtual + rng.randint(0, 5),
        rng.choice([0.0, 1.0, 4.0]),
        rng.choice([0.1, 1 / 3, 0.5, 0.7]),
    )
    segments = []
    for _ in range(n):
        total, f = math.exp(rng.uniform(0, spread)), part * rng.uniform(0.6, 1.3)
        segments.append((f * total, (1 - f) * total, rng.choice([0.0, 0.5, 1.0]) * (1 - f) * total))
    edges = sorted(rng.sample(range(1, n), ranks * virtual - 1))
    cuts = tuple(zip((0, *edges), (e - 1 for e in (*edges, n)), strict=True))
    m = ranks * rng.randint(1, 5) if schedule == "interleaved" else rng.randint(1, 14)
    sends = tuple(rng.choice([0.0, 0.1, 3.0]) for _ in cuts[:-1])
    return Run(schedule, ranks, virtual, m, tuple(segments), cuts, sends)


RUNS = [random_run(seed) for seed in range(700)]


def share_of(run: Run) -> float:
    return run.share


def stages_of(run: Run, budgets: float = math.inf) -> Any:
    """Return the attributes of a candidate that `Stages` and `_CutTree` read, for a pipeline without memory limits."""
    n, nothing = len(run.segments), np.zeros(len(run.segments))
    problem = PartitionProblem(
        names=tuple(range(n)),
        base_s=(np.array([f + b for f, b, _ in run.segments]),),
        send_s=_sends_everywhere(run),
        alive=(1,) * len(run.cuts),
        pools=(0,) * len(run.cuts),
        state=nothing,
        kept=nothing,
        least_kept=nothing,
        recompute_s=(math.inf,),
        budget_bytes=(math.inf,),
        forward_share=share_of(run),
    )
    route = route_of(run.schedule, run.ranks, run.virtual)
    candidate = SimpleNamespace(pp=run.ranks, microbatches=run.microbatches, route=route)
    method = SimpleNamespace(schedule=run.schedule, virtual=run.virtual)
    least_sends_s = tuple((problem.least_sends_s[:-1] / 2).tolist())

    def passes(_: int, first: int, last: int) -> tuple[float, float]:
        inside = run.segments[first : last + 1]
        return sum(f for f, _, _ in inside), sum(b for _, b, _ in inside)

    return SimpleNamespace(
        candidate=candidate,
        method=method,
        problem=problem,
        count=len(run.cuts),
        least_sends_s=least_sends_s,
        passes=passes,
        _is_full=lambda found: False,
        _first_reduction_s=np.zeros_like(problem.send_s),
    )


def _sends_everywhere(run: Run) -> Any:
    """Return [stage, segment] send times both ways: those of the run at its cuts, twice as much elsewhere."""
    sends = np.array([*(run.sends or (0.0,) * (len(run.cuts) - 1)), 0.0])
    found = np.tile(4 * sends[:, None], (1, len(run.segments)))
    for k, (_, last) in enumerate(run.cuts):
        found[k, last] = 2 * sends[k]
    found[:, -1] = 0.0
    return found


def too_high(run: Run) -> Iterator[str]:
    """Yield the bounds that exceed the simulated time of a pipeline."""
    least, found = min(run.seconds(), run.seconds(())) * SLACK, {}
    found["of the cut"] = run.bound_s()
    found["of the cut and its messages"] = run.bound_s(run.sends)
    found["of any cut"] = run.even_s(run.share)
    found["of any cut, whatever the share of passes"] = run.even_s(0.5)
    found["of cuts in line"] = Stages.least(stages_of(run), measured=False).seconds
    found["of measured cuts"] = Stages.least(stages_of(run), measured=True).seconds
    for shares in (run.shares, PassShares(0.5), PassShares(0.2, 0.6, 1.0), PassShares(0.35, last=0.6)):
        found[f"of chains for {shares}"] = run.chains_s(shares)
    walk = refine._CutTree(stages_of(run), math.inf)
    for k in range(1, len(run.cuts) + 1):
        rest = sum(f + b for f, b, _ in run.segments[run.cuts[k - 1][1] + 1 :])
        found[f"of the first {k} stages"] = walk._bound_s(
            run.forward_s[:k], run.backward_s[:k], [*run.sends, 0.0][:k], rest
        )
    yield from (name for name, bound in found.items() if bound > least)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_bound_is_above_the_simulated_time(schedule: str) -> None:
    runs = [run for run in RUNS if run.schedule == schedule]
    assert len(runs) > 100
    assert [(run, wrong) for run in runs for wrong in too_high(run)] == []


def test_bounds_are_worth_having() -> None:
    """Ordinary pipelines have useful bounds: many microbatches, backward twice as long as forward, quick sends."""
    ratios = []
    for seed in range(60):
        rng = random.Random(seed)
        segments = tuple((x, 2 * x, x) for x in (rng.uniform(0.8, 1.2) for _ in range(16)))
        cuts = tuple((4 * k, 4 * k + 3) for k in range(4))
        run = Run("1f1b", 4, 1, rng.choice([8, 16, 32]), segments, cuts)
        ratios.append((run.bound_s() / run.seconds(), run.even_s(run.share) / run.seconds()))
    assert min(cut for cut, _ in ratios) > 0.9 and min(every for _, every in ratios) > 0.75


def test_every_cut_of_a_line_is_above_the_bound_of_all() -> None:
    """All cuts of one model, under the schedules with one chunk per rank."""
    for seed in range(12):
        rng = random.Random(seed)
        segments = tuple((rng.uniform(0.1, 2), rng.uniform(0.1, 4), 0.0) for _ in range(7))
        for schedule, m in (("1f1b", 2), ("1f1b", 5), ("gpipe", 3), ("zero-bubble", 4)):
            runs = [Run(schedule, 3, 1, m, segments, cuts) for cuts in all_cuts(7, 3)]
            assert not [wrong for run in runs for wrong in too_high(run)], (seed, schedule)


# ---- equal stages ----


def even(schedule: str, ranks: int, microbatches: int, virtual: int = 1, weight: float = 1.0) -> Run:
    n = ranks * virtual
    return Run(schedule, ranks, virtual, microbatches, ((1.0, 2.0, weight),) * n, tuple((k, k) for k in range(n)))


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 5), (2, 2), (4, 4), (4, 8), (4, 16), (6, 32)])
def test_equal_stages_meet_the_bound(ranks: int, microbatches: int) -> None:
    """(m + p - 1) T of Narayanan et al. 2021; (m + (p - 1) / v) T with v chunks; ZB-H1 of Qi et al. 2023, whose
    gradients of parameters take a third: m T + (p - 1) T / 3."""
    for schedule in ("1f1b", "gpipe"):
        run = even(schedule, ranks, microbatches)
        assert run.bound_s() == pytest.approx(3.0 * (microbatches + ranks - 1)) == pytest.approx(run.seconds())
    if microbatches % ranks == 0:
        run = even("interleaved", ranks, microbatches, 2)
        assert run.bound_s() == pytest.approx(3.0 * (2 * microbatches + ranks - 1)) == pytest.approx(run.seconds())
    if microbatches >= 2 * ranks:
        run = even("zero-bubble", ranks, microbatches)
        assert run.bound_s() == pytest.approx(3.0 * microbatches + ranks - 1) == pytest.approx(run.seconds())


def test_any_cut_of_interleaved_chunks_has_a_part_of_the_fill() -> None:
    """About half of the fill that even chunks have, (p - 1) T / (p v), and never more."""
    for ranks, microbatches, virtual in ((4, 4, 2), (8, 16, 2), (8, 128, 4), (16, 32, 2)):
        fill = interleaved_rounds(ranks, microbatches, virtual) - microbatches / ranks
        assert 0.3 < fill / ((ranks - 1) / (ranks * virtual)) < 1
    assert interleaved_rounds(1, 5, 3) == pytest.approx(5)
    assert interleaved_rounds(8, 7, 8) == 7 / 8  # not a number of microbatches for this schedule


def test_messages_to_and_fro_meet_the_bound() -> None:
    """Sends dominate: one in four microbatches of four ranks makes the round trip alone."""
    run = replace(even("1f1b", 4, 41), sends=(5.0, 5.0, 5.0))
    assert run.bound_s(run.sends) == pytest.approx(run.seconds())
    assert run.bound_s(run.sends) > 3 * run.bound_s()


def test_neighbours_by_turns_meet_the_bound() -> None:
    """Two stages whose sends outlast their passes: two microbatches per two sends and two passes of both.
    GPipe sends them one after the other, each way."""
    run = replace(even("1f1b", 2, 9), sends=(50.0,))
    assert run.bound_s(run.sends) == pytest.approx(run.seconds()) == pytest.approx(6 + 100 + 4 * (6 + 100))
    run = replace(even("gpipe", 4, 9), sends=(0.0, 50.0, 0.0))
    assert run.bound_s(run.sends) == pytest.approx(run.seconds()) == pytest.approx(12 + 18 * 50)


def test_one_rank_meets_every_bound() -> None:
    for schedule in ("1f1b", "gpipe", "zero-bubble"):
        run = even(schedule, 1, 7)
        assert run.even_s(1 / 3) == pytest.approx(21.0) == run.bound_s() == run.seconds()


def test_the_bound_of_all_cuts_is_that_of_geometric_stages() -> None:
    """Its stages make every path (1) equally long: T_k = B (1 - 1/m)^k of the first stage's B = C / m."""
    p, m, total = 4, 8, 10.0
    bound = total / (1 - (1 - 1 / m) ** p)
    times = [bound / m * (1 - 1 / m) ** k for k in range(p)]
    assert sum(times) == pytest.approx(total)
    assert cut_bound_s([0.0] * p, times, "gpipe", p, m) >= bound
    paths = [m * t + sum(times[:k]) for k, t in enumerate(times)]
    assert paths == pytest.approx([bound] * p)
    round_trips_s = total + (m - 1) * total / p  # path (2) of equal stages is longer
    assert even_bound_s(total, "gpipe", p, m, 1, 0.5) == pytest.approx(round_trips_s) and round_trips_s > bound


# ---- chains of actions ----


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 8), (4, 8), (4, 40), (8, 64)])
def test_no_cut_of_1f1b_escapes_the_fill(ranks: int, microbatches: int) -> None:
    """Uneven stages are no faster than even ones, m + p - 1 of them, given two microbatches per rank or more."""
    path = average_path("1f1b", ranks, microbatches, 1, PassShares(0.35))
    found = path.seconds(0.35, 0.65).min()
    assert found == pytest.approx((microbatches + ranks - 1) / ranks, rel=critical._TOLERANCE)


@pytest.mark.parametrize(("schedule", "ranks", "virtual"), [("interleaved", 4, 2), ("zero-bubble-v", 4, 2)])
def test_uneven_chunks_may_be_faster(schedule: str, ranks: int, virtual: int) -> None:
    """The average of chains is below even chunks, and above the work of a rank."""
    m, even = 2 * ranks, [1.0] * (ranks * virtual)
    path = average_path(schedule, ranks, m, virtual, PassShares(0.35, 0.3))
    run = Run(
        schedule, ranks, virtual, m, tuple((0.35, 0.65, 0.3) for _ in even), tuple((i, i) for i in range(len(even)))
    )
    least = path.seconds(0.35, 0.65, 0.3).min() * len(even)
    assert m * virtual * (1 - 1e-9) <= least < run.seconds()


def test_no_division_escapes_a_slow_head() -> None:
    """A head of twice an even share: with any division of the rest into chunks, other ranks wait while it runs."""
    ranks, virtual, m = 4, 4, 8
    head = 2 / (ranks * virtual)
    found = {}
    for last in (0.0, head):
        path = average_path("interleaved", ranks, m, virtual, PassShares(0.35, last=last), close=True)
        seconds = path.seconds(0.35, 0.65)
        found[last] = float((1 - head) * seconds.min() + head * seconds[-1])
    graph, _ = critical._graph("interleaved", ranks, m, virtual) or pytest.fail()
    rest = (1 - head) / (ranks * virtual - 1)
    even = [rest] * (ranks * virtual - 1) + [head]
    longest = graph.chains([0.35 * y for y in even] + [0.65 * y for y in even] + [0.0] * len(even), [0.0] * len(even))
    assert 1.1 * found[0.0] < found[head] <= longest[0][0]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_repeated_rounds_are_those_of_a_long_step(schedule: str) -> None:
    """The longest chain of a short step with repeated rounds is one of the long step; for a slow rank, the longest."""
    ranks, virtual = 3, row_of(schedule).chunks or 2
    long = 15 * ranks
    found = critical._graph(schedule, ranks, long, virtual)
    assert found is not None
    graph, more = found
    assert more > 0 and graph.crossings
    whole = critical.ScheduleGraph(schedule, ranks, long, virtual)
    for seed in range(60):
        rng = random.Random(seed)
        seconds = [rng.uniform(0.2, 1.0) for _ in range(3 * ranks * virtual)]
        if not whole.splits_backward:
            seconds[2 * ranks * virtual :] = [0.0] * ranks * virtual
        slow = rng.randrange(ranks * virtual) if seed % 2 else None
        for kind in range(3) if slow is not None else ():
            seconds[kind * ranks * virtual + slow] *= 5
        sends = [rng.choice([0.0, 0.3]) for _ in range(ranks * virtual)]
        seen_s, path = max(graph.chains(seconds, sends, more), key=lambda chain: chain[0])
        longest = max(chain_s for chain_s, _ in whole.chains(seconds, sends))
        assert seen_s <= longest * SLACK and (slow is None or seen_s >= longest * 0.95)
        passes = path.passes.ravel().tolist()
        again = sum(a * b for a, b in zip(passes, seconds, strict=True)) + path.sends_s(sends)
        assert again == pytest.approx(seen_s)


# ---- the linear relaxation ----


@dataclass(frozen=True)
class Shared:
    """A sequence of blocks with one of its cuts and one of its recomputations: a feasible point of the relaxation."""

    pipeline: Pipeline
    blocks: tuple[Blocks, ...]
    run: Run
    fits: bool


def random_shared(seed: int) -> Shared:
    """Return one to three kinds of blocks of one or two segments; a random cut with random recomputation, and a
    memory limit that just admits it or is a little lower."""
    rng = random.Random(seed)
    schedule, ranks = rng.choice(SCHEDULES), rng.randint(2, 4)
    virtual = row_of(schedule).chunks or 2
    m = ranks * rng.randint(1, 3) if schedule == "interleaved" else rng.randint(1, 9)
    kinds = [[_part(rng) for _ in range(rng.choice([1, 2]))] for _ in range(rng.randint(1, 3))]
    order = [rng.randrange(len(kinds)) for _ in range(ranks * virtual + rng.randint(0, 3))]
    ends, only = random.Random(f"ends of {seed}"), {}
    if ends.random() < 0.5:  # an embedding and a head, which may take as long as several blocks
        only = {len(kinds): 0, len(kinds) + 1: -1}
        kinds += [[_part(ends)], [_longer(_part(ends), ends.choice([1, 8]))]]
        order = [len(kinds) - 2, *order, len(kinds) - 1]
    parts = [part for kind in order for part in kinds[kind]]
    count = ranks * virtual
    edges = sorted(rng.sample(range(1, len(parts)), count - 1))
    cuts = tuple(zip((0, *edges), (e - 1 for e in (*edges, len(parts))), strict=True))
    ways = [rng.choice(part.options) for part in parts]
    segments = tuple((p.forward_s + w[0], p.backward_s + w[1], p.weight_s) for p, w in zip(parts, ways, strict=True))
    counted = [alive_of(rank, ranks, m, schedule, virtual) for rank in range(ranks)]
    alive = tuple(map(relax.in_flight, counted))
    route = route_of(schedule, ranks, virtual)
    held = []
    for rank, each in enumerate(counted):
        mine = [list(_slice(parts, ways, i, j)) for i, j in route.of(cuts, rank)]
        kept = [sum(n * sum(w[2] for _, w in own) for n, own in zip(row, mine, strict=True)) for row in each.rows]
        held.append(sum(p.state for own in mine for p, _ in own) + max(kept) / each.parts)
    budget_bytes = max(held) * rng.choice([1.0, 1.0, 1.3])
    blocks = tuple(
        Blocks(order.count(k), _together(kind), tuple(kind) if len(kind) > 1 else (), only.get(k))
        for k, kind in enumerate(kinds)
    )
    sends = tuple(rng.choice([0.0, 0.1, 3.0]) for _ in cuts[:-1])
    ending = (route.holder(count - 1),)
    pipeline = Pipeline(schedule, m, virtual, alive, (0,) * ranks, (budget_bytes,) * ranks, sends, ending)
    present = tuple(b for b in blocks if b.count)
    reductions = tuple(part.reduce_s for part in parts)
    run = Run(schedule, ranks, virtual, m, segments, cuts, sends, reductions)
    return Shared(pipeline, present, run, max(held) <= budget_bytes)


def _slice(parts: Sequence[BlockOptions], ways: Sequence[tuple[float, float, float]], i: int, j: int) -> Iterator[Any]:
    return zip(parts[i : j + 1], ways[i : j + 1], strict=True)


def _part(rng: random.Random) -> BlockOptions:
    forward, kept = rng.uniform(0.5, 2), rng.uniform(1, 10)
    backward = forward * rng.uniform(1.0, 2.5)
    weight = backward * rng.choice([0.0, 0.5, 1.0])
    reduction, state = rng.choice([0.0, 1.0, 10.0]), rng.uniform(0, 5)
    copied = rng.uniform(0.1, 3)  # to the host and back
    options = (0.0, 0.0, kept), (0.0, forward, rng.uniform(0, kept)), (copied, copied * rng.uniform(0.5, 2), 0.0)
    return BlockOptions(forward, backward, weight, reduction, state, options)


def _longer(part: BlockOptions, times: int) -> BlockOptions:
    passes = {name: times * getattr(part, name) for name in ("forward_s", "backward_s", "weight_s")}
    return replace(part, **passes)


def _together(parts: Sequence[BlockOptions]) -> BlockOptions:
    """Merge segments into one block with all combinations of their options, so that it covers every cut."""
    ways = [(0.0, 0.0, 0.0)]
    for part in parts:
        ways = [(a + there, b + again, c + kept) for a, b, c in ways for there, again, kept in part.options]
    names = "forward_s", "backward_s", "weight_s", "reduce_s", "state"
    return BlockOptions(*(sum(getattr(p, name) for p in parts) for name in names), tuple(ways))


def _too_high_relaxed() -> list[int]:
    found = []
    for seed in range(600):
        shared = random_shared(seed)
        if relaxed_bound([shared.blocks], shared.pipeline).seconds > shared.run.seconds() * (1 + 1e-6):
            found.append(seed)
    return found


def test_the_relaxation_is_not_above_any_cut() -> None:
    assert _too_high_relaxed() == []


@pytest.mark.parametrize("groups", [1, 2])
def test_the_relaxation_of_grouped_ranks_is_not_above_any_cut(monkeypatch: pytest.MonkeyPatch, groups: int) -> None:
    """Ranks of one group may differ in their peaks, and in whether their chunks have the same numbers in flight."""
    monkeypatch.setattr(relax, "_GROUPS", groups)
    differ = [s.pipeline.alive for s in map(random_shared, range(200)) if s.pipeline.schedule == "zero-bubble-v"]
    assert any(len({(len(rank), len(rank[0])) for rank in alive}) > 1 for alive in differ)
    assert _too_high_relaxed() == []


def test_a_group_of_ranks_holds_no_more_than_any_of_them() -> None:
    rows = ((3.0, 1.0), (4.0, 0.0))
    assert relax.least_in_flight([rows, ((2.0,),)]) == [(2.0, 1.0), (2.0, 0.0)]
    assert relax.least_in_flight([((2.0,),), ((5.0,),)]) == [(2.0,)]


def test_the_relaxation_sees_memory() -> None:
    """Two stages of two blocks, which save 10 for each of 2 and 1 microbatches: 40 + 20 in all."""
    part = BlockOptions(1.0, 2.0, 0.0, 0.0, 0.0, ((0.0, 0.0, 10.0), (0.0, 1.0, 0.0)))
    pipeline = Pipeline("1f1b", 8, 1, (((2.0,),), ((1.0,),)), (0, 0), (40.0, 40.0))

    def bound(budget_bytes: float) -> float:
        tight = Pipeline(pipeline.schedule, 8, 1, (((2.0,),), ((1.0,),)), (0, 0), (budget_bytes, budget_bytes))
        return relaxed_bound([[Blocks(4, part)]], tight).seconds

    free, tight, none = bound(math.inf), bound(20.0), bound(0.0)
    assert even_bound_s(12.0, "1f1b", 2, 8, 1, 1 / 3) <= free < tight < none
    assert none >= even_bound_s(16.0, "1f1b", 2, 8, 1, 1 / 4), "all of it runs again"
    assert free == pytest.approx((8 + 2 - 1) / 2 * 12) and none == pytest.approx((8 + 2 - 1) / 2 * 16, rel=6e-3)
    heavy = BlockOptions(1.0, 2.0, 0.0, 0.0, 5.0, part.options)
    full = relaxed_bound([[Blocks(4, heavy)]], Pipeline("1f1b", 8, 1, (((2.0,),), ((1.0,),)), (0, 0), (9.0, 9.0)))
    assert full.seconds == math.inf and full.is_full


def test_the_relaxation_counts_the_reduction_of_the_first_rank() -> None:
    """The first rank ends last, so that its reduction follows all passes, however few blocks it has."""
    part = BlockOptions(1.0, 2.0, 0.0, 6.0, 0.0, ((0.0, 0.0, 0.0),))
    line = Pipeline("1f1b", 8, 1, (((2.0,),), ((1.0,),)), (0, 0), (math.inf, math.inf))
    found, without = (relaxed_bound([[Blocks(4, b)]], line).seconds for b in (part, replace(part, reduce_s=0.0)))
    even = Run("1f1b", 2, 1, 8, ((1.0, 2.0, 0.0),) * 4, ((0, 1), (2, 3)), reductions=(6.0,) * 4)
    assert without < 8 * 6 + 12 - 1 < found <= even.seconds() * SLACK


def test_the_relaxation_is_no_worse_than_the_bound_of_all_cuts() -> None:
    for m, p in ((4, 2), (8, 4), (16, 4), (3, 8)):
        pipeline = Pipeline("1f1b", m, 1, tuple(((float(k),),) for k in range(p, 0, -1)), (0,) * p, (math.inf,) * p)
        part = BlockOptions(1.0, 2.0, 0.0, 0.0, 0.0, ((0.0, 0.0, 1.0),))
        found = relaxed_bound([[Blocks(3 * p, part)]], pipeline).seconds
        assert found >= even_bound_s(9.0 * p, "1f1b", p, m, 1, 1 / 3) * (1 - 1e-6)
        assert found <= even("1f1b", p, m).seconds() * 3 * SLACK


# ---- planted bugs ----


def test_planted_bugs_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:  # a stage that waits less before its first backward pass than it does
        for module in (bounds, refine, stages_module):
            patch.setattr(module, "passed_over", lambda *_: 0)
        assert any(any(too_high(run)) for run in RUNS[:300])
    with monkeypatch.context() as patch:  # passes of no length, where they are waited for
        patch.setattr(f"{__name__}.share_of", lambda run: 0.0)
        assert any("of cuts in line" in too_high(run) for run in RUNS)
    with monkeypatch.context() as patch:  # one in-flight microbatch fewer than there is
        patch.setattr(bounds, "warm_up", lambda schedule, k, p, m: max(1, in_flight(k, p, m, schedule) - 1))
        assert any(run.bound_s(run.sends) > run.seconds() * SLACK for run in RUNS)
    with monkeypatch.context() as patch:  # W passes that cannot be delayed
        patch.setattr(refine, "cut_bound_s", lambda f, b, _, p, m, x: cut_bound_s(f, b, "1f1b", p, m, x))
        assert any(any(too_high(run)) for run in RUNS)
    turn, beside, edges = bounds.alternations, bounds.message_path_s, bounds.busiest_edge_s
    wrong = {  # twice the turns, both directions of an edge one after the other, an edge that is not there
        "alternations": lambda *args: 2 * turn(*args),
        "message_path_s": lambda x, _, m: beside(x, "gpipe", m),
        "busiest_edge_s": lambda x, _, ranks, m: edges(x, "interleaved", ranks, m),
    }
    for name, planted in wrong.items():
        with monkeypatch.context() as patch:
            for module in (bounds, refine, stages_module):
                patch.setattr(module, name, planted, raising=False)
            assert any(any(too_high(run)) for run in RUNS), name
    with monkeypatch.context() as patch:  # one round more than the step has
        patch.setattr(critical, "_graph", _with_a_round_more)
        with pytest.raises(AssertionError):
            test_repeated_rounds_are_those_of_a_long_step("1f1b")
    counted = PathWeights.seconds
    with monkeypatch.context() as patch:  # backward passes that are counted as forward passes are
        patch.setattr(PathWeights, "seconds", lambda path, f, b, w=0.0: counted(path, f + b, 0.0))
        assert any(any(too_high(run)) for run in RUNS)
    honest = relax.path_of
    with monkeypatch.context() as patch:  # every schedule of one chunk treated as GPipe
        patch.setattr(
            relax, "path_of", lambda blocks, kind, p, m, v, *x: honest(blocks, _gpipe_for(kind, v), p, m, v, *x)
        )
        assert _too_high_relaxed()
    rounds = relax._rounds
    with monkeypatch.context() as patch:  # a microbatch more on the last stage
        patch.setattr(relax, "_rounds", lambda p, m, v: rounds(p, m + 1, v))
        assert _too_high_relaxed()
    with monkeypatch.context() as patch:  # segments at the other end of the model
        swapped = Blocks  # the name is patched
        patch.setattr(f"{__name__}.Blocks", lambda *of: swapped(*of[:3], only={0: -1, -1: 0}.get(of[3])))
        assert _too_high_relaxed()


def _with_a_round_more(kind: str, ranks: int, microbatches: int, virtual: int) -> Any:
    return critical._repeated(kind, ranks, 4 * ranks, virtual), microbatches - 3 * ranks


def _gpipe_for(schedule: str, virtual: int) -> str:
    return "gpipe" if virtual == 1 else schedule
