"""All plans of a small task, one by one: every candidate, every cut, every way to recompute each block, simulated."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from autoptd.cost_models.memory import Memory
from autoptd.errors import AutoptdError
from autoptd.search.menus import Way, bytes_of
from autoptd.search.meshes import Candidate
from autoptd.search.planner import Planner
from autoptd.search.staged import StageSolution, simulated, timed
from autoptd.search.stages import Stages

Cuts = tuple[tuple[int, int], ...]


def least_seconds(
    planner: Planner,
    thorough: bool = False,
    candidates: Iterable[Candidate] | None = None,
    keep: Callable[[Cuts], bool] = lambda cuts: True,
) -> tuple[float, int]:
    """The least step time of all plans that fit, and how many were looked at. The search has no part in it.

    Of the ways in which a rank may recompute, only those are looked at that no other betters on all of its chunks (no
    action that takes longer ever ends a step sooner), unless it is to be `thorough`. Only these `candidates`, and
    those cuts of them that are to `keep`.
    """
    best, count = math.inf, 0
    for candidate in planner.candidates() if candidates is None else candidates:
        if isinstance(planner._solved(candidate), AutoptdError):
            continue
        for seconds in _all_seconds(planner, candidate, thorough, keep):
            best, count = min(best, seconds), count + 1
    return best, count


def _all_seconds(
    planner: Planner, candidate: Candidate, thorough: bool, keep: Callable[[Cuts], bool]
) -> Iterator[float]:
    stages = planner._stages(candidate)
    choices: dict[tuple[object, ...], list[tuple[list[dict[int, str]], Memory]]] = {}
    for cuts in filter(keep, all_cuts(len(stages.folded.segments), stages.count)):
        ranks = []
        for rank in range(candidate.pp):
            key = rank, tuple(cuts[rank :: candidate.pp]), stages.chunks._sharers(cuts).__repr__()
            if key not in choices:
                found = list(_rank_choices(stages, rank, cuts))
                choices[key] = [(p, m) for p, m, _ in (found if thorough else _undominated(found))]
            ranks.append(choices[key])
            if not choices[key]:
                break
        if not ranks[-1]:
            continue
        for chosen in itertools.product(*ranks):
            policies: list[dict[int, str]] = [{} for _ in cuts]
            for rank, (ways, _) in enumerate(chosen):
                for stage, mine in zip(range(rank, len(cuts), candidate.pp), ways, strict=True):
                    policies[stage] = mine
            staged = timed(stages.chunks, StageSolution(cuts, tuple(policies)), tuple(m for _, m in chosen))
            yield simulated(staged).seconds


def all_cuts(segments: int, stages: int) -> Iterator[Cuts]:
    for places in itertools.combinations(range(1, segments), stages - 1):
        edges = (0, *places, segments)
        yield tuple((a, b - 1) for a, b in itertools.pairwise(edges))


RankChoice = tuple[list[dict[int, str]], Memory, tuple[float, ...]]


def _undominated(found: list[RankChoice]) -> list[RankChoice]:
    def worse(a: RankChoice, b: RankChoice) -> bool:
        return a[2] != b[2] and all(x >= y for x, y in zip(a[2], b[2], strict=True))

    return [choice for choice in found if not any(worse(choice, other) for other in found)]


def _rank_choices(stages: Stages, rank: int, cuts: Cuts) -> Iterator[RankChoice]:
    """Policies of each chunk of a rank, and its memory, of all that fit; the slower of two that hold alike left out."""
    site = stages.site(rank)
    mine = [cuts[k] for k in range(rank, len(cuts), stages.candidate.pp)]
    blocks = [list(site.blocks(*run)) for run in mine]
    menus = [[[site.way(b, p) for p in site.policies_for(b)] for b in chunk] for chunk in blocks]
    state = stages.chunks.state(mine, site.largest_block, cuts)
    upcast = stages.chunks.upcast_bytes(mine)
    flat = [menu for chunk in menus for menu in chunk]
    seen: set[tuple[float, ...]] = set()
    for ways in itertools.product(*flat):
        chunks = _regrouped(ways, [len(c) for c in menus])
        kept, extra = bytes_of(chunks, stages.alive(rank))
        memory = site.memory(state, upcast, kept, extra)
        if memory.needed > site.limit:
            continue
        again = tuple(round(sum(w.again_s for w in chunk), 15) for chunk in chunks)
        if again in seen:  # a plan of the same times that fits is there
            continue
        seen.add(again)
        yield (
            [
                {i: w.policy for run, w in zip(chunk, mine_ways, strict=True) if w.policy != "none" for i in run}
                for chunk, mine_ways in zip(blocks, chunks, strict=True)
            ],
            memory,
            again,
        )


def _regrouped(ways: Sequence[Way], lengths: Sequence[int]) -> list[tuple[Way, ...]]:
    found, at = [], 0
    for n in lengths:
        found.append(tuple(ways[at : at + n]))
        at += n
    return found
