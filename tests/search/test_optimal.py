"""The search against all plans, on small random tasks; `benchmarks/optimality.py` tries larger ones."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import pytest

import autoptd
from autoptd.errors import DoesNotFit, PlanError
from autoptd.progress import Silent
from autoptd.search.constraints.options import DIMENSIONS
from autoptd.search.meshes import WITH_HOST, Candidate
from autoptd.search.pipeline import exact as refine
from autoptd.search.pipeline import lower_bounds, stages
from autoptd.search.pipeline import recompute_options as menus
from autoptd.search.planner import EFFORT, Planner, Task
from autoptd.search.visit import visit
from autoptd.search.visit.visit import Visit
from tests.search import random_tasks
from tests.search.every_plan import least_seconds
from tests.search.random_tasks import MODELS, random_task, wide_task

EQUAL = 1e-9
TASKS = 120
WORLDS, CLUSTERS = (1, 2, 2, 2, 3, 3, 4, 4), 4  # few, so that they share split problems


@cache
def task_of(seed: int) -> tuple[autoptd.TracedModel, Task]:
    return random_task(seed, worlds=WORLDS, clusters=CLUSTERS)


def found_by(seed: int, **changes: object) -> tuple[float, float]:
    """Return (seconds, gap) of the search; infinite if nothing fits."""
    model, task = task_of(seed)
    try:
        answer = Planner(replace(task, **changes), Silent(), model.known).answer()  # type: ignore[arg-type]
    except DoesNotFit:
        return math.inf, 0.0
    return answer.staged.seconds, answer.gap


@cache
def best_of(seed: int) -> float | None:
    """Return the least seconds of all plans; None if the batch fits no mesh, or there are too many plans."""
    model, task = task_of(seed)
    if {"recompute", "virtual"} <= task.constraints.searched:  # minutes of ways to recompute the chunks of a rank
        return None
    try:
        return least_seconds(Planner(task, Silent(), model.known))[0]
    except PlanError:
        return None


STARTS = range(0, TASKS, 20)
SOME = [*range(20), *range(60, 80)]  # whose best plans are known in a run of every third of these, as `make test` is


@pytest.mark.parametrize("start", STARTS)
def test_the_search_finds_the_best_of_all_plans(start: int) -> None:
    for seed in range(start, start + 20):
        best = best_of(seed)
        if best is not None:
            seconds, gap = found_by(seed)
            assert seconds == pytest.approx(best, rel=EQUAL), seed
            assert gap <= EQUAL, seed


def test_the_tasks_are_of_all_kinds() -> None:
    tasks = {seed: task_of(seed)[1] for seed in range(TASKS) if best_of(seed) is not None}
    assert len(tasks) >= 110
    assert sum(best_of(seed) != math.inf for seed in tasks) >= 0.7 * len(tasks)
    assert sum(best_of(seed) == math.inf for seed in tasks) >= 3, "too little memory for anything"
    for name in DIMENSIONS:
        assert sum(name in task.constraints.searched for task in tasks.values()) >= 10
    assert {len(task.constraints.searched) for task in tasks.values()} == {0, 1, 2}
    assert len({id(task.folded) for task in tasks.values()}) == len(MODELS)


@pytest.mark.parametrize("effort", [0, 2])
def test_a_gap_is_never_smaller_than_the_true_one(effort: int) -> None:
    """A search limited to few cuts of each candidate reports a gap that covers its loss."""
    gaps = []
    for seed in SOME:
        best = best_of(seed)
        if best is None or best == math.inf:
            continue
        seconds, gap = found_by(seed, effort=effort)
        assert seconds * (1 - gap) <= best * (1 + EQUAL), seed
        gaps.append(gap)
    assert max(gaps) > 0 == min(gaps)


def test_a_gap_counts_recomputation_that_was_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search with too many choices to try all recomputes everything, and reports a gap that covers its loss."""

    def all_of_it(groups: Sequence[menus.Group], _: object) -> Iterator[tuple[tuple[int, ...], ...]]:
        leanest = [min(menu, key=lambda way: way.peak.kept) for menu, _ in groups]
        pairs = zip(groups, leanest, strict=True)
        yield tuple(tuple(len(where) * (way is least) for way in menu) for (menu, where), least in pairs)

    monkeypatch.setattr(menus, "EXACT", 1)
    monkeypatch.setattr(menus, "_greedy", all_of_it)
    worse = 0
    for seed in SOME:
        best = best_of(seed)
        seconds, gap = found_by(seed) if best is not None else (math.inf, 0.0)
        if best is not None and seconds < math.inf:
            assert seconds * (1 - gap) <= best * (1 + EQUAL), seed
            worse += seconds > best * (1 + EQUAL)
    assert worse


# ---- every dimension ----

WIDE, GROUPS = range(60, 180), (4, 0, 1, 2, 3, 5)  # the first of these groups has what the planted bugs need


@cache
def wide_best(seed: int) -> float:
    model, task = wide_task(seed)
    return least_seconds(Planner(task, Silent(), model.known))[0]


def wide_answer(seed: int) -> tuple[float, float, float]:
    """Return the seconds of the best plan, those after taking offload back that no rank needs, and the gap."""
    model, task = wide_task(seed)
    search = Planner(task, Silent(), model.known)
    try:
        answer = search.answer()
    except DoesNotFit:
        return math.inf, math.inf, 0.0
    assert search.visit.best is not None
    return search.visit.best.seconds, answer.staged.seconds, answer.gap


def _wide_faults(group: int) -> list[int]:
    wrong = []
    for seed in WIDE[group :: len(GROUPS)]:
        (seconds, trimmed_s, gap), best = wide_answer(seed), wide_best(seed)
        if seconds != pytest.approx(best, rel=EQUAL) or trimmed_s > seconds or gap > EQUAL:
            wrong.append(seed)
    return wrong


@pytest.mark.parametrize("group", GROUPS)
def test_the_search_finds_the_best_where_every_dimension_counts(group: int) -> None:
    assert _wide_faults(group) == []


def test_every_dimension_counts() -> None:
    """Each is in the space of some tasks, and in the best plan of some."""
    spaces, chosen = Counter[str](), Counter[str]()
    for seed in WIDE:
        model, task = wide_task(seed)
        search = Planner(task, Silent(), model.known)
        spaces.update({name for c in search.space() for name in _dimensions(c, task)})
        try:
            search.answer()
        except DoesNotFit:
            continue
        best = search.visit.best
        assert best is not None
        chosen.update(_dimensions(best.candidate, task))
        chosen.update({policy for stage in best.solution.policies for policy in stage.values()})
    everything = {"offload", "activations", "uneven", "zero 2", "zero 3", "shards", "cp", "ep", "interleaved"}
    everything |= {"zero-bubble", "zero-bubble-v", "memory-saving", "zero 0", "zero 1", "tp", "pp"}
    assert {name for name in everything if spaces[name] < 3} == set()
    found = {"offload", "uneven", "cp", "ep", "zero-bubble", "zero-bubble-v", "memory-saving", "full"}
    assert {name for name in found if not chosen[name]} == set() and chosen["offload"] > 10 > 0 < chosen["activations"]


def _dimensions(c: Candidate, task: Task) -> Iterator[str]:
    yield f"zero {c.zero}"
    yield c.schedule
    yield from (name for name in ("tp", "pp", "cp", "ep") if getattr(c, name) > 1)
    flags = {"offload": c.offload > 0, "activations": c.recompute == WITH_HOST, "shards": c.shards > 0}
    flags |= {"uneven": c.dp * c.micro * c.microbatches != task.batch, "memory-saving": c.memory_saving}
    yield from (name for name, holds in flags.items() if holds)


def test_a_host_without_limit_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "host_share", lambda *_: None)
    unlimited = {seed: wide_answer(seed)[0] for seed in WIDE[GROUPS[0] :: len(GROUPS)]}
    monkeypatch.undo()
    assert any(seconds < wide_best(seed) * (1 - EQUAL) for seed, seconds in unlimited.items())


def test_a_candidate_closed_by_one_cut_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """One chunk of a rank may need more memory than the other."""
    honest = stages.StagesDoNotFit.__init__
    monkeypatch.setattr(
        stages.StagesDoNotFit, "__init__", lambda self, what, every_cut: honest(self, what, every_cut=True)
    )
    assert _wide_faults(GROUPS[0])


def test_a_gap_counts_recomputation_in_other_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over dp that begin where a chunk ends start earlier if a later one recomputes; only one choice is tried."""
    monkeypatch.setattr(random_tasks, "exactly_searched", lambda _: {})
    model, task = random_task(76, worlds=WORLDS, clusters=CLUSTERS)
    answer, best = Planner(task, Silent(), model.known).answer(), least_seconds(Planner(task, Silent(), model.known))[0]
    assert answer.staged.seconds > best * 1.01 > answer.staged.seconds * (1 - answer.gap)


# ---- planted bugs ----


def _bad(seeds: range) -> bool:
    """Return whether some task's answer is not optimal, or claims a smaller gap than the true one."""
    for seed in seeds:
        best = best_of(seed)
        if best is not None:
            seconds, gap = found_by(seed)
            if seconds != pytest.approx(best, rel=EQUAL) or gap > EQUAL:
                return True
    return False


def test_a_wrong_bound_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = lower_bounds.even_bound_s
    monkeypatch.setattr(lower_bounds, "even_bound_s", lambda *args: 1.3 * honest(*args))
    assert _bad(range(30))


def test_a_cut_that_is_not_tried_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visit, "refine", lambda *_: (None, True))
    assert _bad(range(60))


def test_a_wrong_walk_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = refine._CutTree._bound_s
    monkeypatch.setattr(refine._CutTree, "_bound_s", lambda *args: 1.5 * honest(*args))
    assert _bad(range(60))


def test_tight_tasks_try_splits_that_save_memory_with_the_usual_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    """One stage on two ranks that has to recompute: splits that save less work but more memory are 17 % faster."""
    model, task = random_task(96, worlds=(1, 2, 2, 4))
    best = Planner(task, Silent(), model.known).answer().staged
    assert best.candidate.memory_saving and best.candidate.pp == 1
    usual = replace(task, effort=EFFORT)
    assert Planner(usual, Silent(), model.known).answer().staged.seconds == pytest.approx(best.seconds, rel=1e-9)
    monkeypatch.setattr(Visit, "_enqueue_variants", lambda *_: None)
    assert Planner(usual, Silent(), model.known).answer().staged.seconds > 1.1 * best.seconds
