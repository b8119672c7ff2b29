"""The bytes that every rank of a program sends, and those of its optimizer's state, against its plan.

The cluster computes in no time and sends 1 GB/s without latency, so that the predicted seconds of a rank's passes and
of the end of its step are its gigabytes: (n - 1)/n of what n ranks gather, reduce or exchange, twice that for an
all-reduce, all of a message. A few numbers per step (counts, the loss, the norm) are not predicted.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import autoptd
from autoptd.cost_models.cluster import Cluster
from autoptd.models.nanogpt import GPTSizes, NanoGPT
from autoptd.plans.model import Plan
from autoptd.runtime.batch import share_of
from autoptd.runtime.comm.threaded import LockstepChannel, LockstepGroup, run_lockstep

SEQ, VOCAB, BATCH = 64, 256, 8
RATE = 1e9
GROUPS: dict[str, Callable[[int], float]] = {  # of the tensor that a call is about, the share that leaves the rank
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "shift": lambda n: 1,
}


def free() -> Cluster:
    """Make the cluster on which only bytes take time."""
    local = Cluster.load("local")
    rates = dict.fromkeys(("fp64", "fp32", "bf16", "fp16"), 1e24)
    matmul = local.device.matmul_flops_per_s.model_copy(update=rates)
    device = {"memory_bytes": 2**40, "memory_bytes_per_s": 1e24, "launch_s": 0.0, "matmul_flops_per_s": matmul}
    level = local.levels[0].model_copy(update={"bytes_per_s": RATE, "latency_s": 1e-18})
    return local.model_copy(update={"device": local.device.model_copy(update=device), "levels": (level,)})


def gpt() -> tuple[NanoGPT, dict[str, Tensor]]:
    torch.manual_seed(0)
    tokens = torch.randint(VOCAB, (BATCH, SEQ + 1))
    batch = {"idx": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
    return NanoGPT(GPTSizes(vocab=VOCAB, max_seq=SEQ, layers=4, heads=8, width=64)), batch


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[int]]:
    """Count the bytes that leave each rank."""
    found: Counter[int] = Counter()

    def counting(call: Any, share: Callable[[int], float], at: int) -> Any:
        def counted(group: LockstepGroup, *args: Any, **kwargs: Any) -> Any:
            found[group.ranks[group.rank]] += round(share(group.size) * args[at].nbytes)
            return call(group, *args, **kwargs)

        return counted

    for name, share in GROUPS.items():
        for spelled in (name, f"{name}_later"):
            if call := getattr(LockstepGroup, spelled, None):
                at = int(spelled in ("all_gather_later", "reduce_scatter_later", "shift_later"))
                monkeypatch.setattr(LockstepGroup, spelled, counting(call, share, at))
    whole = LockstepChannel.send

    def send(channel: LockstepChannel, *xs: Tensor) -> Any:
        found[channel.rank] += sum(x.nbytes for x in xs)
        return whole(channel, *xs)

    monkeypatch.setattr(LockstepChannel, "send", send)
    yield found


def predicted(plan: Plan) -> list[float]:
    """Return the bytes of a step that a plan is priced for, by pipeline rank."""
    found = [0.0] * plan.mesh.pp
    for stage, times in enumerate(plan.predicted.times):
        passes = ("forward_s", "backward_s", "forward_tp_s", "backward_tp_s", "send_forward_s", "send_backward_s")
        seconds = plan.schedule.microbatches * sum(times[name] for name in passes)
        found[plan.route.holder(stage)] += RATE * (seconds + times.get("reduce_s", 0) + times.get("gather_s", 0))
    return found


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "dp, ZeRO 1": (2, {"dp": 2, "zero": 1}),
    "dp, ZeRO 3": (2, {"dp": 2, "zero": 3}),
    "groups of shards": (4, {"dp": 4, "zero": 2, "shards": 2, "micro": 1}),
    "groups of shards over cp": (4, {"dp": 1, "cp": 4, "zero": 1, "shards": 2}),
    "all shards over cp": (4, {"dp": 2, "cp": 2, "zero": 3, "shards": 4}),
    "tp": (2, {"tp": 2}),
    "tp, no sequence parallelism": (2, {"tp": 2, "sequence_parallel": False}),
    "tp, recompute full": (2, {"tp": 2, "recompute": "full"}),
    "tp, recompute ops": (2, {"tp": 2, "recompute": "ops"}),
    "tp, recompute full, gathers again": (2, {"tp": 2, "recompute": "full", "gathers": "again"}),
    "ring": (2, {"cp": 2}),
    "ring of four": (4, {"cp": 4}),
    "ring, recompute full": (2, {"cp": 2, "recompute": "full"}),
    "ulysses": (2, {"cp": 2, "context": "ulysses"}),
    "tied stages": (4, {"dp": 2, "pp": 2, "zero": 1, "micro": 1, "schedule": "1f1b"}),
    "interleaved, ZeRO 3": (4, {"dp": 2, "pp": 2, "zero": 3, "micro": 1, "schedule": "interleaved", "virtual": 2}),
    "zero-bubble, ZeRO 3": (4, {"dp": 2, "pp": 2, "zero": 3, "micro": 1, "schedule": "zero-bubble"}),
    "zero-bubble-v, ZeRO 3": (4, {"dp": 2, "pp": 2, "zero": 3, "micro": 1, "schedule": "zero-bubble-v"}),
    "tp and stages": (4, {"tp": 2, "pp": 2, "micro": 1, "schedule": "1f1b", "recompute": "ops"}),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_ranks_send_what_the_plan_is_priced_for(case: str, precision: str, sent: Counter[int]) -> None:
    (world, pinned), (model, batch) = CASES[case], gpt()
    fix = {"micro": 2, "kernels": "eager", "recompute": "none", **pinned}
    traced = autoptd.trace(model, inputs=batch, precision=precision)
    plan = autoptd.plan(traced, world=world, cluster=free(), batch=BATCH, fix=fix)
    par = autoptd.parallelize(traced, plan=plan, compile=False)
    layout, values = par.layout, par.initial_values()

    def step(communicators: Any) -> int:
        mine = copy.copy(par)
        mine.start(communicators, values)
        communicators.world.all_reduce(torch.zeros(1))
        sent[communicators.rank] = 0
        mine.train_step(share_of(layout.nest.flat(batch), layout.specs, mine.dp_rank, mine.dp_size))
        moments = sum(each["exp_avg"].nbytes for each in mine._running.optimizer.state.values())
        held = 2 + (precision == "bf16" and plan.zero < 3)  # moments, and main copies that do not count as parameters
        whole = plan.predicted.memory[communicators.stage]["optimizer"]
        assert held * moments == pytest.approx(whole, rel=0.01), "the optimizer's state"
        return int(communicators.stage)

    stages = run_lockstep(layout.mesh, step, in_turn=True)
    for rank, stage in enumerate(stages):
        assert predicted(plan)[stage] == pytest.approx(sent[rank], rel=0.035), f"rank {rank} of {plan.mesh}"


@pytest.mark.parametrize("zero", [2, 3])
def test_blocks_are_gathered_and_summed_as_often_as_the_plan_is_priced_for(
    zero: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second for each collective of two ranks, and nothing for bytes: four layers, and what is before and behind."""
    level = free().levels[0].model_copy(update={"bytes_per_s": 1e24, "latency_s": 1.0})
    model, batch = gpt()
    traced = autoptd.trace(model, inputs=batch)
    fix = {"dp": 2, "micro": 4, "zero": zero, "kernels": "eager", "recompute": "none"}
    cluster = free().model_copy(update={"levels": (level,)})
    plan = autoptd.plan(traced, world=2, cluster=cluster, batch=BATCH, fix=fix)
    par = autoptd.parallelize(traced, plan=plan, compile=False)
    layout, values, called = par.layout, par.initial_values(), Counter[str]()

    def counted(name: str, call: Any) -> Any:
        def call_and_count(group: LockstepGroup, *args: Any) -> Any:
            called[name] += group.rank == 0 and args[0].numel() > 8  # not counts
            return call(group, *args)

        return call_and_count

    for name in ("all_gather_later", "reduce_scatter_later"):
        monkeypatch.setattr(LockstepGroup, name, counted(name, getattr(LockstepGroup, name)))

    def step(communicators: Any) -> None:
        mine = copy.copy(par)
        mine.start(communicators, values)
        called.clear()
        mine.train_step(share_of(layout.nest.flat(batch), layout.specs, mine.dp_rank, mine.dp_size))

    run_lockstep(layout.mesh, step, in_turn=True)
    assert called == {"all_gather_later": 6 * (1 if zero == 2 else 2), "reduce_scatter_later": 6}
    assert predicted(plan)[0] / RATE == pytest.approx(called.total())
