"""The recomputation chosen for the blocks of a rank is the quickest of all that fit."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest
import torch
import transformers

import autoptd
from autoptd.cost_models.cluster import Cluster
from autoptd.cost_models.memory import FRAGMENTATION_LEAST, allocator_bytes, most_allocated
from autoptd.passes.analysis.liveness import Peak
from autoptd.passes.trace.traced import BATCH
from autoptd.schedule import Alive
from autoptd.search.constraints.options import SearchOptions
from autoptd.search.pipeline import recompute_options as menus
from autoptd.search.pipeline.recompute_options import (
    RecomputeChoice,
    RecomputeFront,
    RecomputeOption,
    RecomputeOptions,
    bytes_of,
    host_bytes_of,
    most_saving,
    undominated,
)
from autoptd.search.pipeline.stage_parameters import block_peak
from autoptd.search.sharding.tensors import Tensors
from tests.search.random_tasks import MODELS, traced

Chunks = list[list[RecomputeOptions]]
POLICIES = ("none", "selective", "ops", "full")


def random_menu(rng: random.Random, orderly: bool = True) -> RecomputeOptions:
    """Make up to four options. `orderly`: the less an option saves, the further its peak is above what it saves,
    since the recomputed tensors come back, and nothing else."""
    kept, above = rng.randint(5, 30), rng.randint(0, 10)
    ways = [RecomputeOption("none", 0.0, Peak(kept, kept + above // 2, kept + above, rng.choice([0, 5])))]
    for policy in rng.sample(POLICIES[1:], rng.randint(0, 3)):
        less = rng.randint(0, kept)
        above = above + rng.randint(0, kept - less + 5) if orderly else rng.randint(0, 30)
        kept = less if orderly else kept
        later = rng.choice([0, 5])
        ways.append(RecomputeOption(policy, float(rng.randint(0, 9)), Peak(less, less, less + above, later)))
    return undominated(ways)


def random_rank(seed: int, orderly: bool = True) -> tuple[Chunks, Alive, int]:
    """Make one to three chunks of blocks, some equal, in-flight microbatches (of each or of all), and a budget."""
    rng = random.Random(seed)
    known = [random_menu(rng, orderly) for _ in range(rng.randint(1, 3))]
    chunks = [[rng.choice(known) for _ in range(rng.randint(1, 4))] for _ in range(rng.choice([1, 1, 1, 2, 3]))]
    if sum(map(len, chunks)) > 7:
        chunks = chunks[:1]
    alive = random_alive(random.Random(seed), len(chunks))
    most, least = (bytes_of(ways, alive) for ways in (_first(chunks), most_saving(chunks)))
    budget_bytes = round(sum(least) + rng.uniform(-0.2, 1.1) * (sum(most) - sum(least)))
    upcast = rng.choice([0, 0, 40])  # as when gradients of the compute dtype are widened for the step
    return chunks, alive, budget_bytes if upcast <= budget_bytes else -1


def random_alive(rng: random.Random, chunks: int) -> Alive:
    if rng.random() < 0.5:
        return Alive(((rng.randint(1, 4) * chunks,) * chunks,), chunks)
    n = rng.randint(1, 3)
    rows, waiting = (
        tuple(tuple(rng.randint(0, most) for _ in range(chunks)) for _ in range(count))
        for most, count in ((5, n), (3, n))
    )
    return Alive(rows, waiting=waiting if rng.random() < 0.5 else ())


def _first(chunks: Chunks) -> list[tuple[RecomputeOption, ...]]:
    return [tuple(menu[0] for menu in chunk) for chunk in chunks]


def brute_force(chunks: Chunks, alive: Alive, budget_bytes: int) -> float:
    """Return the least seconds over all combinations of options of single blocks."""
    best = math.inf
    for ways in itertools.product(*(menu for chunk in chunks for menu in chunk)):
        found, at = [], 0
        for chunk in chunks:
            found.append(ways[at : at + len(chunk)])
            at += len(chunk)
        if sum(bytes_of(found, alive)) <= budget_bytes:
            best = min(best, sum(w.recompute_s for w in ways))
    return best


def checked(chunks: Chunks, alive: Alive, budget_bytes: int) -> RecomputeChoice | None:
    """Return the fastest choice within a budget after checking that its figures are right."""
    found = RecomputeFront(chunks, alive).within(budget_bytes)
    if found is not None:
        assert [len(ways) for ways in found.chosen] == [len(chunk) for chunk in chunks]
        pairs = [
            pair for ways, chunk in zip(found.chosen, chunks, strict=True) for pair in zip(ways, chunk, strict=True)
        ]
        assert all(way in menu for way, menu in pairs)
        assert (found.kept, found.extra) == bytes_of(found.chosen, alive) and found.kept + found.extra <= budget_bytes
        assert found.recompute_s == pytest.approx(sum(w.recompute_s for ways in found.chosen for w in ways))
    return found


def _wrong(seeds: Sequence[int], orderly: bool = True) -> list[int]:
    wrong = []
    for seed in seeds:
        found, best = checked(*random_rank(seed, orderly)), brute_force(*random_rank(seed, orderly))
        if (math.inf if found is None else found.recompute_s) != pytest.approx(best):
            wrong.append(seed)
    return wrong


def test_no_other_choice_that_fits_is_quicker() -> None:
    assert _wrong(range(600)) == []


def test_the_random_ranks_are_tight_and_loose() -> None:
    ranks = [random_rank(seed) for seed in range(600)]
    found = [RecomputeFront(chunks, alive).within(budget_bytes) for chunks, alive, budget_bytes in ranks]
    again = [c.recompute_s for c in found if c is not None]
    assert all(c.exact for c in found if c is not None)
    assert 30 < found.count(None) < 300 and 60 < again.count(0.0) < 400
    assert sum(len({w.policy for ways in c.chosen for w in ways}) > 1 for c in found if c is not None) > 100


def test_a_rough_choice_fits_and_says_that_it_is_rough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice among too many options for an exact search still fits, is no better, and is not marked `exact`."""
    monkeypatch.setattr(menus, "EXACT", 1)
    slower = 0
    for seed in range(300):
        chunks, alive, budget_bytes = random_rank(seed)
        found = checked(chunks, alive, budget_bytes)
        if found is None:
            continue
        best = brute_force(chunks, alive, budget_bytes)
        assert found.recompute_s >= best - 1e-9
        assert not found.exact or found.recompute_s == pytest.approx(best), seed
        slower += found.recompute_s > best + 1e-9
    assert slower


def random_host(seed: int) -> tuple[Chunks, Alive, int, Alive, float]:
    """Make the same rank with options that move to the host what they save, and a limit there."""
    rng, (chunks, alive, budget_bytes) = random.Random(seed), random_rank(seed)
    rates: dict[RecomputeOptions, RecomputeOption] = {}
    for menu in (menu for chunk in chunks for menu in chunk):
        moved = rng.randint(1, 30)
        peak = Peak(0, rng.randint(0, 20), rng.randint(0, 30))
        rates.setdefault(menu, RecomputeOption("offload", float(rng.randint(0, 9)), peak, moved))
    wider = [[undominated([*menu, rates[menu]], counts_host=True) for menu in chunk] for chunk in chunks]
    on_host = alive.ahead(rng.randint(1, 6))
    most = on_host.kept([sum(rates[menu].host for menu in chunk) for chunk in chunks])
    return wider, alive, budget_bytes, on_host, rng.uniform(0, 1.1) * most


def test_no_other_choice_that_fits_on_both_is_quicker() -> None:
    limited = 0
    for seed in range(400):
        chunks, alive, budget_bytes, on_host, host_bytes = random_host(seed)
        if math.prod(len(menu) for chunk in chunks for menu in chunk) > 4_000:
            continue
        found = RecomputeFront(chunks, alive, counts_host=True).within_both(budget_bytes, on_host, host_bytes)
        best = math.inf
        for ways in itertools.product(*(itertools.product(*chunk) for chunk in chunks)):
            if sum(bytes_of(ways, alive)) <= budget_bytes and host_bytes_of(ways, on_host) <= host_bytes:
                best = min(best, sum(w.recompute_s for chunk in ways for w in chunk))
        assert (math.inf if found is None else found.recompute_s) == pytest.approx(best), seed
        if found is not None:
            assert (found.kept, found.extra) == bytes_of(found.chosen, alive)
            assert host_bytes_of(found.chosen, on_host) <= host_bytes + 0.5
        free = RecomputeFront(chunks, alive).within(budget_bytes)
        limited += free is not None and (found is None or free.recompute_s < found.recompute_s)
    assert limited > 40


def test_dominated_options_are_dropped() -> None:
    none = RecomputeOption("none", 0.0, Peak(20, 20, 30))
    worse = RecomputeOption("selective", 2.0, Peak(10, 12, 40))
    same = RecomputeOption("ops", 2.0, Peak(10, 12, 40))
    full = RecomputeOption("full", 1.0, Peak(4, 10, 40))
    least_kept = RecomputeOption("lean", 3.0, Peak(9, 9, 25))  # saves more, and has a lower peak
    assert undominated([same, worse, full, none, least_kept]) == (none, full, least_kept)


def test_bytes_by_hand() -> None:
    none, full = RecomputeOption("none", 0.0, Peak(20, 22, 30)), RecomputeOption("full", 5.0, Peak(4, 8, 34))
    # one chunk, 3 in flight: saved 3 · 24; the peak is 34 while the first is recomputed, 4 + 30 for the second
    assert bytes_of([(full, none)], Alive(((3,),))) == (72, 10)
    # in reverse order the second is recomputed beside what the first saves: 20 + 34
    assert bytes_of([(none, full)], Alive(((3,),))) == (72, 30)
    # two chunks of 20 and 4, five in flight: 5 · 12 on average; the higher peak is 30 above what its chunk saves
    assert bytes_of([(none,), (full,)], Alive(((5, 5),), 2)) == (60, 30)
    # in a V: 3 of the one and 2 of the other, or 4 and 1
    assert bytes_of([(none,), (full,)], Alive(((3, 2), (4, 1)))) == (84, 30)
    assert bytes_of([(full,), (none,)], Alive(((3, 2), (4, 1)))) == (52, 30)
    # of them, one of the first chunk or two of the second wait for their W, with 7 bytes each
    later = none._replace(peak=none.peak._replace(waiting=7))
    assert bytes_of([(later,), (full,)], Alive(((3, 2), (4, 1)), waiting=((0, 2), (1, 0)))) == (91, 30)
    assert bytes_of([(full,), (later,)], Alive(((3, 2), (4, 1)), waiting=((0, 2), (1, 0)))) == (66, 30)


def test_half_a_stage_recomputes_where_half_does() -> None:
    none, full = RecomputeOption("none", 0.0, Peak(10, 10, 10)), RecomputeOption("full", 1.0, Peak(0, 10, 10))
    found = RecomputeFront([[(none, full)] * 4], Alive(((1,),))).within(20)
    assert found is not None and [w.policy for w in found.chosen[0]] == ["full", "full", "none", "none"]
    assert (found.kept, found.extra) == (20, 0)


# ---- blocks that save less come first ----


def test_the_order_is_not_best_for_blocks_of_any_kind() -> None:
    """The proof needs peaks that shrink no faster than the saved bytes; without that there are counterexamples."""
    assert _wrong(range(600), orderly=False)


@pytest.mark.parametrize("name", MODELS)
def test_blocks_of_models_are_of_that_kind(name: str) -> None:
    """The less an option saves, the further its peak is above what it saves."""
    model = traced(name)
    folded, checked = model.folded, 0
    for tp in (1, 2):
        tensors = Tensors(
            folded,
            Cluster.load("dgx-h100"),
            tp,
            {BATCH: 2, **model.sizes},
            microbatches=4,
            policies=("selective", "ops"),
        )
        sharded = tensors.solve()
        for unit in folded.units:
            runs = itertools.combinations(range(unit.first, unit.first + unit.length + 1), 2)
            for first, after in runs:
                segments = folded.segments[first:after]
                peaks = [block_peak(tensors, sharded, segments, policy, SearchOptions()) for policy in POLICIES]
                ways = [
                    RecomputeOption(policy, float(i), peak)
                    for i, (policy, peak) in enumerate(zip(POLICIES, peaks, strict=True))
                ]
                known = ways if unit.count > 1 else undominated(ways)  # a block by itself has no order
                for a, b in itertools.permutations(known, 2):
                    if a.peak.kept < b.peak.kept:
                        assert a.peak.temporary >= b.peak.temporary, (name, tp, first, after, a, b)
                        checked += 1
    assert checked > 4


@pytest.mark.parametrize("options", [SearchOptions(kernels="fused"), SearchOptions(fp8="mxfp8"), SearchOptions(ep=2)])
def test_a_peak_is_that_of_any_equal_segments(options: SearchOptions) -> None:
    """Walks are kept by kinds of segments; what a kernel or a rank holds of a tensor is said by its name."""
    config = transformers.MixtralConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=8
    )
    with torch.device("meta"):
        model = autoptd.trace(transformers.MixtralForCausalLM(config), seq=32)
    tensors = Tensors(model.folded, Cluster.load("dgx-h100"), 1, {BATCH: 2, **model.sizes}, microbatches=4)
    unit = max(model.folded.units, key=lambda u: u.count)
    blocks = [model.folded.segments[unit.first + i * unit.length :][: unit.length] for i in range(unit.count)]
    assert blocks[0] != blocks[-1]
    first, last = (block_peak(tensors, tensors.solve(), block, "none", options) for block in (blocks[0], blocks[-1]))
    assert first == last != block_peak(tensors, tensors.solve(), blocks[0], "none", SearchOptions())


def test_one_front_serves_every_budget() -> None:
    for seed in range(100):
        chunks, alive, _ = random_rank(seed)
        front = RecomputeFront(chunks, alive)
        most = sum(bytes_of(_first(chunks), alive))
        budgets = [*range(0, most, 7), most]
        found = [front.within(n) for n in budgets]
        assert found == [RecomputeFront(chunks, alive).within(n) for n in budgets]
        seconds = [math.inf if c is None else c.recompute_s for c in found]
        assert seconds == sorted(seconds, reverse=True) and front.within(math.inf) == found[-1]


def test_the_work_that_an_allocator_leaves_room_for() -> None:
    for reserved in (-1, 0, 1, 10**6, 80 * 2**30, 80 * 2**30 + 0.5):
        most = most_allocated(reserved, FRAGMENTATION_LEAST)
        held = [n + allocator_bytes(n, FRAGMENTATION_LEAST) for n in (int(most), int(most) + 1)]
        assert held[0] <= reserved < held[1]
    assert most_allocated(math.inf) == math.inf


# ---- planted bugs ----


def test_planted_bugs_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = menus._assigned
    with monkeypatch.context() as patch:  # those that keep less stand last
        patch.setattr(menus, "_assigned", lambda *args: [tuple(reversed(chunk)) for chunk in honest(*args)])
        with pytest.raises(AssertionError):
            assert _wrong(range(200)) == []
    with monkeypatch.context() as patch:  # blocks of different chunks treated as equal
        patch.setattr(menus, "bytes_of", lambda ways, alive: bytes_of([sum(ways, ())], Alive(((alive.chunks,),))))
        with pytest.raises(AssertionError):
            assert _wrong(range(200)) == []
    with monkeypatch.context() as patch:  # by price, and believed to be the best
        patch.setattr(RecomputeFront, "_all", RecomputeFront._some)
        assert _wrong(range(200))
