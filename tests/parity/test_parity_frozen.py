"""Frozen parameters under ZeRO 0 to 3: the numbers of one process, and the predicted bytes."""

from __future__ import annotations

import copy
import math
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoptd.compile.make_plan import make_plan
from autoptd.compile.program import make_program, read_sharding
from autoptd.compile.read import read_model
from autoptd.compile.traced import TracedModel
from autoptd.cost_models.cluster import Cluster
from autoptd.layout.state_bytes import state_bytes
from autoptd.parallel import Parallel
from autoptd.progress import Silent
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import run_lockstep
from autoptd.runtime.zero import flat_buffer as storage
from autoptd.search.constraints.options import read_constraints
from autoptd.testing.parity import Trained, train_alone, train_in_lockstep
from tests.pairwise import pairwise
from tests.parity.parity_check import OPTIONS, complaints
from tests.parity.parity_models import VOCAB, WIDTH, Case, randomised, tokens


class Adapted(nn.Module):
    """Frozen linear layer with a low-rank adapter (Hu et al. 2021, LoRA), and a frozen norm."""

    def __init__(self, rank: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, rank, bias=False), nn.Linear(rank, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + torch.tanh(self.base(y) + self.up(self.down(y)))


class Lora(nn.Module):
    """Frozen tied tables, adapted layers; a frozen layer that every block reads, and an unused frozen parameter."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH).requires_grad_(False)
        self.layers = nn.ModuleList(Adapted() for _ in range(layers))
        self.shared = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3, 5), requires_grad=False)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x) + torch.tanh(self.shared(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Encoded(nn.Module):
    """Frozen encoder, which gets no gradient, a trained decoder on it, and a frozen head behind the decoder."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.encoder = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        for module in (self.table, self.encoder):
            module.requires_grad_(False)
        self.decoder = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCAB).requires_grad_(False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.encoder:
            x = x + torch.tanh(layer(x))
        for layer in self.decoder:
            x = x + torch.tanh(layer(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Quantised(nn.Module):
    """Frozen 8-bit weights with a scale, beside trained ones."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Int8() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Int8(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randint(-99, 99, (WIDTH, WIDTH), dtype=torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.full((WIDTH, 1), 0.003), requires_grad=False)
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(F.linear(x, self.weight.to(x.dtype) * self.scale)) * self.gain


MODELS = {"lora": Lora, "encoded": Encoded, "quantised": Quantised}
WAYS: list[dict[str, Any]] = [
    {"dp": 4},
    {"dp": 2, "tp": 2, "recompute": "full"},
    {"dp": 2, "pp": 2},
    {"dp": 2, "pp": 2, "schedule": "gpipe"},
    {"dp": 2, "pp": 2, "schedule": "interleaved", "virtual": 2},
    {"dp": 2, "pp": 2, "schedule": "zero-bubble", "recompute": "full"},
    {"dp": 2, "pp": 2, "schedule": "zero-bubble-v", "virtual": 2},
    {"dp": 4, "shards": 2, "recompute": "ops"},
]


@cache
def case(name: str) -> Case:
    torch.manual_seed(0)
    ids, labels = tokens()
    model = MODELS[name]()
    if name == "quantised":
        return Case(model.double().train(), {"ids": ids, "labels": labels})
    return Case(randomised(model), {"ids": ids, "labels": labels})


@cache
def source(name: str) -> TracedModel:
    inputs = {n: x[:2] for n, x in case(name).batch.items()}
    return read_model(case(name).model, inputs=inputs, loss=None, seq=None, precision="fp64", progress=Silent())


@cache
def alone(name: str) -> Trained:
    found = case(name)
    batches = [found.batch, {n: x.roll(1, 0) for n, x in found.batch.items()}]
    return train_alone(found.model, batches, optimizer="sgd", optimizer_options=OPTIONS["sgd"])


def made(name: str, fix: dict[str, Any]) -> Parallel:
    world = 1
    for axis in ("dp", "tp", "pp"):
        world *= fix.get(axis, 1)
    plan = make_plan(
        source(name),
        world=world,
        cluster=Cluster.load("dgx-h100"),
        batch=16,
        precision="fp64",
        optimizer="sgd",
        constraints=read_constraints({"micro": 2, "tp": 1, "pp": 1, **fix}),
        progress=Silent(),
    )
    program = make_program(source(name), plan, read_sharding(source(name), plan))
    return Parallel(plan, source(name), program, "sgd", OPTIONS["sgd"], None, 0)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Fill freed storage with values that break any result which reads them."""
    if "bytes" in request.node.name:
        return

    def poison(self: storage.Buffer, bucket: Any) -> None:
        whole = self.whole(bucket)
        whole.untyped_storage().resize_(whole.numel() * whole.itemsize)
        whole.fill_(torch.nan if whole.is_floating_point() else 77)

    monkeypatch.setattr(storage.Buffer, "free", poison)


def frozen(name: str) -> dict[str, Tensor]:
    return {n: p for n, p in case(name).model.named_parameters() if not p.requires_grad}


def values(case: tuple[str, int, int]) -> tuple[object, ...]:
    """Return the values whose pairs the sample of cases must cover."""
    name, way, zero = case
    return name, zero, *(WAYS[way].get(key) for key in ("dp", "tp", "pp", "schedule", "virtual", "recompute", "shards"))


def ids(cases: list[tuple[str, int, int]]) -> list[str]:
    return [f"{name}-{WAYS[way]}-{zero}" for name, way, zero in cases]


# every way under ZeRO 3, and every second one also under another stage, in turn
RUNS = [(name, i, zero) for name in MODELS for i in range(len(WAYS)) for zero in (3, i % 3) if zero == 3 or i % 2]
RUNS = pairwise(RUNS, values)
HELD = pairwise(product(MODELS, range(len(WAYS)), (0, 2, 3)), values)


@pytest.mark.parametrize(("name", "way", "zero"), RUNS, ids=ids(RUNS))
def test_frozen_parameters_train_like_one_process(name: str, way: int, zero: int) -> None:
    parallel = made(name, {**WAYS[way], "zero": zero})
    assert parallel.plan.zero == zero and not parallel.plan.not_runnable
    batch = case(name).batch
    found = train_in_lockstep(parallel, [batch, {n: x.roll(1, 0) for n, x in batch.items()}])
    assert not complaints(name, found, alone(name))
    for key, value in frozen(name).items():
        assert torch.equal(found.state[key], value) and found.state[key].dtype == value.dtype, key


def storages(tensors: Any) -> int:
    """Return the bytes of distinct storages."""
    return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}.values())


@pytest.mark.fault("frozen parameters whole")
@pytest.mark.parametrize(("name", "way", "zero"), HELD, ids=ids(HELD))
def test_bytes_of_frozen_parameters(name: str, way: int, zero: int) -> None:
    """Every rank holds the predicted bytes between steps, and under ZeRO 3 only its shard of each parameter."""
    shared = {key: value for key, value in WAYS[way].items() if zero or key != "shards"}
    parallel = made(name, {**shared, "zero": zero})
    values = parallel.initial_values()

    def body(communicators: Communicators) -> tuple[int, int, int, int, int]:
        mine = copy.copy(parallel)
        mine.start(communicators, values)
        batch = {n: x.chunk(mine.dp_size)[mine.dp_rank] for n, x in case(name).batch.items()}
        mine.train_step(batch)
        mine.eval_step(batch)
        trainer = mine._running
        held = [p for stage in trainer.stages for p in stage.parameters()]
        held += [b.main for b in trainer._buffers._buffers if b.main is not None]
        still = [p for stage in trainer.stages for p in stage.parameters() if not p.requires_grad]
        still += [p.param for p in trainer.frozen_pieces]
        optimized = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
        assert optimized.isdisjoint(map(id, still)) and all(p.grad is None for p in still)
        return communicators.stage, communicators.data.rank, storages(held), storages(still), len(trainer.pieces)

    layout = parallel.layout
    for stage, rank, held, still, _ in run_lockstep(layout.mesh, body):
        assert held == state_bytes(layout, stage, "sgd", rank).parameters
        if zero == 3:
            specs = [s for s in layout.parameters.values() if stage in layout.mesh.holders(s.stages)]
            whole = sum(
                math.prod(s.local_shape(layout.mesh.tp)) * (s.dtype or layout.dtype).itemsize
                for s in specs
                if not s.trainable
            )
            buckets = {s.unit for s in specs if not s.trainable}
            padding = 2 * 3 * len(buckets) * 32 * 8 * layout.mesh.dp  # per class (split over tp or not) and dtype
            assert whole == 0 or still <= (whole + padding) // layout.sharing
    for stage, predicted in enumerate(parallel.plan.predicted.memory):
        most = state_bytes(layout, stage, "sgd", fullest=True)
        found = predicted["parameters"], predicted["gradients"], predicted["optimizer"]
        assert found == (most.parameters, most.gradients, most.optimizer), stage
