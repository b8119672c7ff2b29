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
from torch import Tensor, nn

import autoptd
from autoptd.cost_models.cluster import Cluster
from autoptd.models.nanogpt import GPTSizes, NanoGPT
from autoptd.plans.model import Plan
from autoptd.runtime.batch import share_of
from autoptd.runtime.comm.threaded import LockstepChannel, LockstepGroup, run_lockstep

SEQ, VOCAB, BATCH = 64, 256, 8
RATE = 1e9
EXPOSED = {"overlap": ["p2p"]}  # nothing hides communication over dp
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


class PostNorm(nn.Module):
    """Layers that end in a norm, whose gradient is a partial value on tp; the first ones have none, if `frozen`."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, 64)
        self.ups = nn.ModuleList(nn.Linear(64, 256) for _ in range(4))
        self.downs = nn.ModuleList(nn.Linear(256, 64) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(4))
        self.head = nn.Linear(64, VOCAB)
        for part in (self.tokens, *(parts[:2] for parts in (self.ups, self.downs, self.norms))):
            part.requires_grad_(not frozen)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(idx)
        for up, down, norm in zip(self.ups, self.downs, self.norms, strict=True):
            x = norm(x + down(torch.relu(up(x))))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


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
    "messages whole": (4, {"tp": 2, "pp": 2, "schedule": "1f1b", "sequence_parallel": False}),
    "messages in slices": (4, {"tp": 2, "pp": 2, "schedule": "1f1b", "sequence_parallel": False, "sends": "slices"}),
}
PARTIAL: dict[str, dict[str, Any]] = {
    "whole": {},
    "slices": {"sends": "slices"},
    "slices, interleaved": {"sends": "slices", "schedule": "interleaved", "virtual": 2},
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_ranks_send_what_the_plan_is_priced_for(case: str, precision: str, sent: Counter[int]) -> None:
    (world, pinned), (model, batch) = CASES[case], gpt()
    compare_bytes(model, batch, world, pinned, precision, sent)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("way", PARTIAL)
def test_partial_gradients_are_priced_as_they_are_sent(way: str, frozen: bool, sent: Counter[int]) -> None:
    fix = {"tp": 2, "pp": 2, "schedule": "1f1b", "sequence_parallel": False, **PARTIAL[way]}
    compare_bytes(PostNorm(frozen), gpt()[1], 4, fix, "fp32", sent)


@pytest.mark.parametrize(("frozen", "parts"), [(False, (1, 2)), (True, (1, 0))])
def test_a_partial_gradient_is_sent_whole_between_nodes(frozen: bool, parts: tuple[int, int]) -> None:
    """Nodes of two ranks that gather in almost no time: an activation is sent as slices, its gradient whole."""
    (level,) = free().levels
    inside = level.model_copy(update={"name": "inside", "ranks": 2, "bytes_per_s": 1e6 * RATE})
    cluster = free().model_copy(update={"levels": (inside, level)})
    fix = {"tp": 2, "pp": 2, "micro": 2, "schedule": "1f1b", "sequence_parallel": False, "sends": "slices"}
    fix |= {"cuts": ["ups.2"]}
    traced = autoptd.trace(PostNorm(frozen), inputs=gpt()[1], precision="fp32")
    first, last = autoptd.plan(traced, world=4, cluster=cluster, batch=BATCH, fix=fix).predicted.times
    slice_s = first["send_forward_s"]
    assert slice_s == pytest.approx(2 * SEQ * 64 * 4 / 2 / RATE, rel=1e-4)
    assert (slice_s, last["send_backward_s"]) == pytest.approx(tuple(part * slice_s for part in parts), rel=1e-4)


def compare_bytes(
    model: nn.Module, batch: dict[str, Tensor], world: int, pinned: dict[str, Any], precision: str, sent: Counter[int]
) -> Plan:
    """Compare the bytes that each rank sends in a step with those that its plan is priced for; return the plan."""
    fix = {**EXPOSED, "micro": 2, "kernels": "eager", "recompute": "none", "context": "ring", **pinned}
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
    whole = sum(predicted(plan)[stage] for stage in stages)  # those that receive slices gather them
    assert whole == pytest.approx(sent.total(), rel=0.035)
    for rank, stage in enumerate(stages):
        if plan.method.sends == "whole":
            assert predicted(plan)[stage] == pytest.approx(sent[rank], rel=0.035), f"rank {rank} of {plan.mesh}"
    return plan


@pytest.mark.parametrize("zero", [2, 3])
def test_blocks_are_gathered_and_summed_as_often_as_the_plan_is_priced_for(
    zero: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second for each collective of two ranks, and nothing for bytes: four layers, and what is before and behind."""
    level = free().levels[0].model_copy(update={"bytes_per_s": 1e24, "latency_s": 1.0})
    model, batch = gpt()
    traced = autoptd.trace(model, inputs=batch)
    fix = {**EXPOSED, "dp": 2, "micro": 4, "zero": zero, "kernels": "eager", "recompute": "none"}
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
