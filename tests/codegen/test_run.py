"""Models of uncommon form, planned, emitted and run on all ranks: equal to one process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoptd.api import Parallel
from autoptd.compile.make_plan import make_plan
from autoptd.compile.program import make_program, read_sharding
from autoptd.compile.read import read_model
from autoptd.compile.traced import TracedModel
from autoptd.cost_models.cluster import Cluster
from autoptd.plans.model import Plan
from autoptd.progress import Silent
from autoptd.search.constraints.options import read_constraints
from autoptd.testing.parity import differences, train_alone, train_in_lockstep

WIDTH, SAMPLES, LENGTH = 8, 8, 4


def batches(steps: int = 2) -> list[dict[str, Tensor]]:
    rng = torch.Generator().manual_seed(5)
    return [{"x": torch.randn(SAMPLES, LENGTH, WIDTH, generator=rng, dtype=torch.float64)} for _ in range(steps)]


def traced(model: nn.Module) -> TracedModel:
    inputs = {n: x[:2] for n, x in batches()[0].items()}
    return read_model(model.double(), inputs=inputs, loss=None, seq=None, precision="fp64", progress=Silent())


def trained(model: nn.Module | TracedModel, **mesh: object) -> tuple[Plan, list[str]]:
    """Train under a plan; return the plan, and the differences from one process."""
    source, data = model if isinstance(model, TracedModel) else traced(model), batches()
    sizes = {"dp": 1, "tp": 1, "pp": 1} | mesh
    world = sizes["dp"] * sizes["tp"] * sizes["pp"]  # type: ignore[operator]
    plan = make_plan(
        source,
        world=world,  # type: ignore[arg-type]
        cluster=Cluster.load("dgx-h100"),
        batch=SAMPLES,
        precision="fp64",
        optimizer="sgd",
        constraints=read_constraints({"micro": 1, **sizes}),
        progress=Silent(),
    )
    program = make_program(source, plan, read_sharding(source, plan))
    made = Parallel(plan, source, program, "sgd", {"lr": 0.05}, None, 0)
    found, wanted = (
        train_in_lockstep(made, data),
        train_alone(source.model, data, optimizer="sgd", optimizer_options={"lr": 0.05}),
    )
    wrong = [f"loss {a} {b}" for a, b in zip(found.losses, wanted.losses, strict=True) if abs(a - b) > 1e-12 * abs(b)]
    for mine, theirs in ((found.gradients, wanted.gradients), (found.state, wanted.state)):
        wrong += [f"{n}: {d}" for n, d in differences(mine, theirs).items() if not d <= 1e-11]
    return plan, wrong


class Unknown(nn.Module):
    """Ops without a row in the rule table: an elementwise one, one that splits nowhere, one with a complex result."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.special.erfcx(self.a(x).tanh())
        d = torch.cdist(h, self.b(h) + 2)
        spectrum = torch.fft.rfft(self.c(h), dim=-1).abs()
        return d.square().mean() + spectrum.mean()


class Operators(nn.Module):
    """Python's operators on booleans and integers with a number, and a branch of no width."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.none = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 0)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        shown = ((h > 0) & True) | ((h < -0.5) & self.training) ^ False
        kinds = ((h * 4).long() & 3 | 4 ^ 1) << 1 >> 2
        h = torch.cat((h, self.none(h)), -1).masked_fill(shown, 0.5) * kinds
        nothing = self.none(h).view(h.size(0), h.size(1), 2, 0).transpose(1, 2).reshape(h.size(0), 0)
        return h.square().mean() + nothing.sum()


class Scalars(nn.Module):
    """Parameters of one number, as tensors of no dim."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale, self.shift = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x) * self.scale.reshape(()).unsqueeze(0)) + self.shift.expand(()).unsqueeze(0)
        return h.square().mean()


class Spectral(nn.Module):
    """A filter of complex numbers, whose parameter is not at an even element of its flat buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.shift = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(1))
        self.filter = nn.Parameter(torch.randn(LENGTH // 2 + 1, WIDTH, 2))
        self.b = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.fft.rfft(self.a(x) + self.shift, dim=1) * torch.view_as_complex(self.filter)
        y = self.b(torch.fft.irfft(h, n=LENGTH, dim=1))
        return torch.view_as_complex(y[..., 1:7].unflatten(-1, (3, 2)).contiguous()).abs().mean()


@pytest.mark.parametrize("mesh", [{"dp": 2, "zero": 3}, {"tp": 2, "pp": 2}], ids=str)
def test_complex_numbers_of_any_place_in_memory(mesh: dict[str, int]) -> None:
    torch.manual_seed(0)
    _, wrong = trained(Spectral(), **mesh)
    assert wrong == []


@pytest.mark.parametrize("mesh", [{"tp": 2, "dp": 2}, {"pp": 2}], ids=str)
def test_operators_with_numbers_and_tensors_without_elements(mesh: dict[str, int]) -> None:
    torch.manual_seed(0)
    _, wrong = trained(Operators(), **mesh)
    assert wrong == []


@pytest.mark.parametrize("mesh", [{"tp": 2, "dp": 2}, {"pp": 2}], ids=str)
def test_shapes_of_no_dim(mesh: dict[str, int]) -> None:
    torch.manual_seed(0)
    _, wrong = trained(Scalars(), **mesh)
    assert wrong == []


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"tp": 2, "dp": 2, "pp": 2}], ids=str)
def test_unknown_ops_run_right_and_are_reported(mesh: dict[str, int]) -> None:
    torch.manual_seed(0)
    plan, wrong = trained(Unknown(), **mesh)
    assert not wrong
    notes = [n for n in plan.notes if n.startswith("no row in the rule table")]
    for op in ("special_erfcx", "cdist", "fft"):
        assert any(op in n for n in notes), notes
    assert any("special_erfcx" in n and "replicated" not in n for n in notes)


class Block(nn.Module):
    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.register_buffer("table", torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x) * self.table.cos()).relu())


class Stack(nn.Module):
    """Blocks, and a loss without weights; optionally the first output is read a second time at the end."""

    def __init__(self, blocks: Sequence[nn.Module], skip: bool = False) -> None:
        super().__init__()
        self.embed, self.blocks, self.skip = nn.Linear(WIDTH, WIDTH), nn.ModuleList(blocks), skip

    def forward(self, x: Tensor) -> Tensor:
        h = first = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return (h * first if self.skip else h).square().mean()


def shared() -> list[nn.Module]:
    return [Block()] * 4


STACKS = {
    "equal": lambda: Stack([Block() for _ in range(4)]),
    "alternating": lambda: Stack([Block(16 if i % 2 else 24) for i in range(4)]),
    "skip": lambda: Stack([Block() for _ in range(12)], skip=True),
    "shared": lambda: Stack(shared()),
}
MESHES = [{"tp": 2, "pp": 2}, {"dp": 2, "pp": 4}, {"pp": 4, "recompute": "full"}, {"tp": 2, "dp": 2, "zero": 1}]


@cache
def stack(name: str) -> TracedModel:
    torch.manual_seed(0)
    return traced(STACKS[name]())


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", STACKS)
def test_stacks(name: str, mesh: dict[str, object]) -> None:
    assert not trained(stack(name), **mesh)[1]


def test_a_stage_may_hold_nothing_but_the_loss() -> None:
    torch.manual_seed(0)
    plan, wrong = trained(STACKS["equal"](), pp=6)
    assert not wrong
    assert plan.stages[-1].first == plan.stages[-1].last == len(plan.segments) - 1


class InPlace(nn.Module):
    """Writes in place that functionalisation rewrites, on split tensors too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).mul_(3.0)
        h[:, 0] = 0.5
        h[:, :, 1:3] *= 2
        y = self.b(h)
        y[:, 1] = x[:, 1]
        return F.mse_loss(y, x)


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_writes_in_place(mesh: dict[str, int]) -> None:
    torch.manual_seed(0)
    assert not trained(InPlace(), **mesh)[1]
