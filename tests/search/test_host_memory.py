"""Host memory is a limit: of the optimizer state and the activations that a plan keeps there."""

from __future__ import annotations

import json
import random
import threading
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor

import autoptd
from autoptd.cost_models.cluster import Cluster, HostMemory
from autoptd.cost_models.memory import MOST_MEASURED, alive
from autoptd.errors import DoesNotFit, PlanFileError
from autoptd.layout.host_memory import host_share, host_state_bytes, pinned_bytes
from autoptd.models.nanogpt import GPTSizes, NanoGPT
from autoptd.ops import offload as module
from autoptd.plans.model import Plan
from autoptd.schedule import Alive, step_lists
from autoptd.search.memory_filter import MemoryFilter
from autoptd.search.meshes import Candidate
from autoptd.testing.parity import train_in_lockstep

GIB = 2**30
SIZES = GPTSizes(vocab=512, max_seq=256, layers=8, heads=8, width=1024)
ONE_RANK = {"dp": 2, "tp": 1, "pp": 1, "micro": 32, "zero": 1, "schedule": "1f1b"}
LINKED = {"to_bytes_per_s": 4e12, "from_bytes_per_s": 4e12}  # faster than to compute anything twice


@pytest.fixture(scope="module")
def gpt() -> autoptd.TracedModel:
    return autoptd.trace(NanoGPT(SIZES), seq=256)


def cluster(memory_gib: float, host_gib: float | None, **rates: float) -> Cluster:
    """Return nodes of eight devices, whose host has so much memory for each of two ranks."""
    base = Cluster.of("H100-SXM5-80GB", 8, 450e9, 50e9)
    whole = None if host_gib is None else int(2 * host_gib * GIB)
    host = HostMemory(memory_bytes=whole, **rates)  # type: ignore[arg-type]
    device = base.device.model_copy(update={"memory_bytes": int(memory_gib * GIB), "host": host})
    return base.model_copy(update={"device": device})


def planned(gpt: autoptd.TracedModel, memory_gib: float, host_gib: float | None, rates: Any = None, **fix: Any) -> Plan:
    return autoptd.plan(gpt, world=2, cluster=cluster(memory_gib, host_gib, **(rates or {})), batch=64, fix=fix)


def policies(plan: Plan) -> list[str]:
    return [policy for stage in plan.stages for policy in plan.policies(stage).values()]


# ---- bytes ----


def test_pinned_memory_is_a_power_of_two() -> None:
    assert [pinned_bytes(n) for n in (0, 1, 2, 3, 4096, 4097)] == [0, 1, 2, 4, 4096, 8192]
    assert pinned_bytes(int(20.4 * GIB)) == 32 * GIB


def test_state_on_the_host_by_hand() -> None:
    """Two buffers: main copies and gradients of 3 and 5 float32 in 16 and 32 bytes each; moments of 8 elements."""
    assert host_state_bytes([3, 5], precision="bf16", optimizer="adamw") == 2 * (16 + 32) + 4 * 2 * 8
    assert host_state_bytes([3, 5], precision="fp64", optimizer="sgd") == 2 * (32 + 64)


def test_a_node_s_memory_is_shared_by_its_ranks() -> None:
    known = cluster(80.0, 4.0)
    assert [host_share(known, world) for world in (64, 8, 2)] == [GIB, GIB, 4 * GIB]
    assert host_share(cluster(80.0, None), 64) is None and host_share(Cluster.load("local"), 2) is None
    assert host_share(Cluster.load("dgx-h100"), 64) == 2e12 / 8


@pytest.mark.parametrize(("kind", "virtual"), [("1f1b", 1), ("gpipe", 1), ("zero-bubble-v", 2)])
def test_one_microbatch_more_has_buffers_than_is_in_flight(kind: str, virtual: int) -> None:
    """The buffers of a microbatch are free once the device has read them back, when the next ones are already
    allocated: no moment of the action lists has more of them."""
    for ranks, microbatches in ((2, 3), (3, 6), (2, 1)):
        for rank, actions in enumerate(step_lists(kind, ranks, microbatches, virtual)):
            counted, held, late = alive(rank, ranks, microbatches, kind, virtual), [0] * virtual, None
            for action in actions:
                if action.kind == "F":
                    held[action.chunk] += 1
                    assert counted.ahead(microbatches).covers(held)
                elif action.kind == ("W" if "bubble" in kind else "B"):
                    if late is not None:
                        held[late] -= 1  # the device is one pass behind
                    late = action.chunk


def test_interleaved_chunks_count_by_average_size() -> None:
    assert Alive(((3, 3),), 2).ahead(8) == Alive(((4, 4),), 2)
    assert Alive(((4, 4),), 2).ahead(2) == Alive(((4, 4),), 2), "no more than a step has"
    assert set(Alive(((2, 1),)).ahead(2).rows) == {(2, 1), (2, 2)}


@pytest.mark.parametrize("fix", [{}, {"tp": 2, "dp": 1}, {"pp": 2, "dp": 1, "schedule": "gpipe"}], ids=str)
def test_activations_are_the_copies_that_the_program_makes(
    fix: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fullest rank's, each in a power of two. The first block of a later stage counts what it received too."""
    sizes = GPTSizes(vocab=66, max_seq=8, width=24, layers=4, heads=4)
    mesh = {"dp": 2, "tp": 1, "pp": 1, "zero": 1, "schedule": "1f1b", "micro": 2, "offload": 0, "kernels": "eager"}
    made = autoptd.parallelize(
        autoptd.trace(NanoGPT(sizes), seq=8, precision="fp32"),
        world=2,
        batch=4 if fix.get("dp") == 1 else 8,
        cluster="dgx-h100",
        precision="fp32",
        fix={**mesh, **fix, "recompute": "offload"},
    )
    copied: dict[int, list[int]] = defaultdict(list)
    honest = module._to_host

    def noted(x: Tensor) -> Tensor:
        copied[threading.get_ident()].append(x.nbytes)
        return honest(x)

    monkeypatch.setattr(module, "_to_host", noted)
    tokens = torch.randint(66, (made.plan.batch, 9), generator=torch.Generator().manual_seed(1))
    train_in_lockstep(made, [{"idx": tokens[:, :-1], "targets": tokens[:, 1:]}])
    assert made.plan.schedule.microbatches == 2, "both have buffers at the end"
    per_rank = [sum(map(pinned_bytes, sizes)) for sizes in copied.values()]
    assert max(per_rank) == made.plan.predicted.host[0]
    assert len(made.plan.predicted.host) == made.plan.mesh.pp


# ---- the search ----


def test_state_is_on_the_host_as_far_as_it_has_room(gpt: autoptd.TracedModel) -> None:
    """Nothing fits with little of either memory, and the refusal names the host's."""
    free, room = planned(gpt, 3.2, None), planned(gpt, 3.2, 1.1)
    assert any(free.method.offload) and free.predicted.step_time_s == room.predicted.step_time_s
    assert room.predicted.host == free.predicted.host and max(room.predicted.host) * MOST_MEASURED <= 1.1 * GIB
    with pytest.raises(DoesNotFit, match="nodes with more than 2 GiB of memory"):
        planned(gpt, 3.2, 0.3)


def test_a_host_without_room_leaves_other_plans(gpt: autoptd.TracedModel) -> None:
    """The best of the plans that the host has enough for is found where it has too little for the best of all."""
    found = {gib: planned(gpt, 3.6, gib) for gib in (None, 0.3, 0.0001)}
    assert any(found[None].method.offload) and not any(found[0.0001].method.offload)
    for gib, plan in found.items():
        assert max(plan.predicted.host, default=0) * MOST_MEASURED <= (gib or 80.0) * GIB
    times = [plan.predicted.step_time_s for plan in found.values()]
    assert times[0] < times[1] <= times[2]


def test_stages_are_cut_so_that_the_host_has_room(gpt: autoptd.TracedModel) -> None:
    fix = {"dp": 1, "tp": 1, "pp": 2, "micro": 16, "schedule": "1f1b", "offload": [0.0, 1.0], "bucket_bytes": 4_000_000}
    rates = {**LINKED, "step_bytes_per_s": 1e14}
    free = planned(gpt, 80.0, None, rates, **fix)
    tight = planned(gpt, 80.0, free.predicted.host[1] * 0.8 * MOST_MEASURED / GIB, rates, **fix)
    lengths = [plan.stages[1].last - plan.stages[1].first for plan in (free, tight)]
    assert lengths[0] > lengths[1] and tight.predicted.host[1] <= 0.8 * free.predicted.host[1]
    assert tight.predicted.step_time_s > free.predicted.step_time_s


@pytest.mark.parametrize(
    ("fix", "held"), [({"offload": 1.0}, "offload"), ({"recompute": "offload"}, "recompute")], ids=str
)
def test_a_fixed_plan_that_the_host_has_no_room_for_is_refused(
    gpt: autoptd.TracedModel, fix: dict[str, Any], held: str
) -> None:
    plan = planned(gpt, 80.0, 8.0, **{**ONE_RANK, **fix})
    needed = max(plan.predicted.host) / GIB
    with pytest.raises(DoesNotFit, match="needs more host memory than") as refusal:
        planned(gpt, 80.0, needed * 0.9, **{**ONE_RANK, **fix})
    assert "of host memory for each rank" in refusal.value.where
    assert f"fixing less than {held}" in refusal.value.fix and "[device.host] memory_bytes" in refusal.value.fix
    planned(gpt, 80.0, needed * MOST_MEASURED * 1.001, **{**ONE_RANK, **fix})
    planned(gpt, 80.0, needed * 0.9, **{**ONE_RANK, **fix}, memory="ignore")


def test_fewer_blocks_move_where_the_host_has_less_room(gpt: autoptd.TracedModel) -> None:
    found = [planned(gpt, 5.0, gib, LINKED, **ONE_RANK, offload=0) for gib in (None, 3.0, 1.5, 0.5, 0.05)]
    moved = [policies(plan).count("offload") for plan in found]
    assert moved[0] == moved[1] > moved[2] > moved[3] > moved[4] == 0
    times = [plan.predicted.step_time_s for plan in found]
    assert times[0] == times[1] < times[2] < times[3] < times[4]
    for plan, gib in zip(found[1:], (3.0, 1.5, 0.5, 0.05), strict=True):
        assert max(plan.predicted.host, default=0) * MOST_MEASURED <= gib * GIB


# ---- the plan ----


def test_the_plan_says_what_is_on_the_host_and_whether_it_was_checked(gpt: autoptd.TracedModel) -> None:
    fix = {**ONE_RANK, "offload": 1.0}
    known, unknown, without = planned(gpt, 80.0, 8.0, **fix), planned(gpt, 80.0, None, **fix), planned(gpt, 80.0, 8.0)
    assert any("which has 16.0 GiB" in note for note in known.notes)
    assert any("was not checked" in note for note in unknown.notes)
    assert not any("host" in note for note in without.notes)
    assert "on host" in known.explain() and "on host" not in without.explain()
    assert f"{known.predicted.host[0] / GIB:.2f}" in known.explain()
    needed = sum(known.predicted.memory[0].values())
    assert needed == known.predicted.memory_bytes, "the host's bytes are not the device's"


def test_files_without_it_are_read(gpt: autoptd.TracedModel) -> None:
    plan = planned(gpt, 80.0, 8.0, **ONE_RANK, offload=1.0)
    data = json.loads(plan.to_json())
    assert Plan.from_json(plan.to_json()).predicted.host == plan.predicted.host
    del data["predicted"]["host"]
    del data["cluster"]["device"]["host"]["memory_bytes"]
    old = Plan.from_json(json.dumps(data))
    assert old.predicted.host == () and "on host" not in old.explain()
    assert "host" not in json.loads(old.to_json())["predicted"]
    data["predicted"]["host"] = [1, 2]
    with pytest.raises(PlanFileError, match=r"predicted\.host: has 2 entries; one per stage is 1"):
        Plan.from_json(json.dumps(data))


def test_the_filter_drops_no_candidate_that_fits(gpt: autoptd.TracedModel) -> None:
    """Its bytes are never above those of a plan."""
    rng, known = random.Random(0), cluster(80.0, None)
    for _ in range(6):
        fix = {"tp": rng.choice([1, 2]), "zero": rng.choice([0, 1, 2]), "offload": 0.5, "dp": 2}
        fix |= {"bucket_bytes": rng.choice([1_000_000, 2**30])}
        plan = autoptd.plan(gpt, world=4, cluster=known, batch=16, fix={**fix, "recompute": "full"})
        c = Candidate(plan.mesh.dp, plan.mesh.tp, plan.mesh.pp, 1, 1, plan.zero, "full", offload=0.5)
        least = MemoryFilter(gpt.folded, known, "bf16", "adamw").least_host_bytes(c)
        assert 0 < least <= max(plan.predicted.host)
