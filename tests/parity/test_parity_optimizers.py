"""Optimizers that are not elementwise: any plan updates parameters as one process with the same optimizer does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import autoptd
from autoptd.api import Parallel
from autoptd.compile.program import make_program, read_sharding
from autoptd.errors import PlanError
from autoptd.layout.mesh import Mesh
from autoptd.models.nanogpt import GPTSizes, NanoGPT
from autoptd.passes.hidden_matrices import hidden_matrices
from autoptd.runtime.optimizers import groups
from autoptd.runtime.optimizers.groups import ParameterGroup, choose, read_groups
from autoptd.runtime.optimizers.named import NAMED, READS
from autoptd.runtime.optimizers.whole_tensors import WholeTensors
from autoptd.testing.parity import train_alone, train_in_lockstep
from tests.parity.parity_check import Variant, batches, case, complaints, differences, planned, source
from tests.runtime.optimizers.whole_optimizers import Orthogonal

BULK = Variant(bulk=True)
EXACT = 1e-12
# AdamW divides by eps what rounding leaves of a gradient that is zero, as that of a key's bias
MUON = {"lr": 0.02, "momentum": 0.9, "adamw": {"lr": 3e-3, "weight_decay": 0.1, "eps": 1e-5}}


def compared(
    name: str,
    mesh: Mesh,
    variant: Variant,
    optimizer: Any,
    options: dict[str, Any],
    own: Sequence[ParameterGroup] = (),
    steps: int = 3,
    run: Any = None,
) -> tuple[list[str], float]:
    """Train both ways; return complaints, and the largest difference of a parameter."""
    plan, origin = planned(name, mesh, variant), source(name)
    made = Parallel(
        plan,
        origin,
        make_program(origin, plan, read_sharding(origin, plan)),
        optimizer,
        options,
        variant.clip_norm,
        0,
        own,
    )
    found = train_in_lockstep(made, batches(name, steps))
    alone = train_alone(
        case(name).model,
        batches(name, steps),
        loss=case(name).loss,
        optimizer=run or optimizer,
        optimizer_options=options,
        groups=own,
        clip_norm=variant.clip_norm,
        hidden=hidden_matrices(origin.folded),
    )
    return complaints(name, found, alone), max(differences(found.state, alone.state).values())


CASES = [
    ("nanogpt", Mesh(2, 2, 2), replace(BULK, zero=0, clip_norm=0.3), "muon", MUON),
    ("nanogpt", Mesh(2, 2, 2), replace(BULK, zero=3, micro=4), "muon", MUON),
    ("nanogpt", Mesh(2, 2, 2), replace(BULK, zero=1), Orthogonal, {"lr": 0.02}),
    ("nanogpt", Mesh(4, 1, 2), replace(BULK, zero=2, clip_norm=0.3), Orthogonal, {"lr": 0.02}),
    ("llama", Mesh(2, 2, 2), replace(BULK, zero=1, clip_norm=0.3), "adafactor", {"lr": 0.02}),
    ("llama", Mesh(2, 2, 2), replace(BULK, zero=2), "muon", MUON),
    ("llama", Mesh(2, 2, 1, cp=2), replace(BULK, zero=3), Orthogonal, {"lr": 0.02}),
    ("llama", Mesh(8, 1, 1), replace(BULK, zero=1, shards=2), "muon", MUON),
    ("llama", Mesh(1, 4, 2), BULK, "lion", {"lr": 1e-3, "weight_decay": 0.1}),
    ("mixtral", Mesh(dp=4, tp=2, ep=2), replace(BULK, zero=1), Orthogonal, {"lr": 0.02}),
    ("mixtral", Mesh(dp=4, pp=2, ep=2), replace(BULK, zero=3, clip_norm=0.3), "muon", MUON),
    ("mixtral", Mesh(dp=2, tp=2, pp=2, ep=2), replace(BULK, zero=2), "adafactor", {"lr": 0.02}),
    ("mixtral", Mesh(dp=8, ep=4), replace(BULK, zero=0, micro=2), Orthogonal, {"lr": 0.02}),
]


@pytest.mark.parametrize(("name", "mesh", "variant", "optimizer", "options"), CASES)
def test_as_one_process(name: str, mesh: Mesh, variant: Variant, optimizer: Any, options: dict[str, Any]) -> None:
    wrong, worst = compared(name, mesh, variant, optimizer, options)
    assert not wrong and worst <= EXACT, (wrong, worst)


GROUPS = [
    {"names": "*mlp*", "optimizer": "muon", "lr": 0.03},
    {"names": "*norm*", "optimizer": Orthogonal, "momentum": 0.5},
    {"names": ["*embed*"], "lr": 1e-4},
]


def test_each_group_has_its_optimizer() -> None:
    names = [n for n, p in case("llama").model.named_parameters() if p.requires_grad]
    mesh, options = Mesh(2, 2, 2), {"lr": 3e-3, "weight_decay": 0.1}
    wrong, worst = compared("llama", mesh, BULK, "adamw", options, read_groups(GROUPS, names))
    assert not wrong and worst <= EXACT, (wrong, worst)


class Local(Orthogonal):
    """The fault: it orthogonalises each rank's elements."""

    elementwise = True


@pytest.mark.fault("whole tensors wanted")
@pytest.mark.parametrize("mesh", [Mesh(1, 2, 1), Mesh(2, 1, 1), Mesh(2, 2, 2)], ids=str)
def test_pieces_orthogonalised(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table takes it for elementwise; by its own claim it is refused."""
    with pytest.raises(PlanError, match="updates pieces of a parameter otherwise"):
        choose(Local, {"lr": 0.02})
    monkeypatch.setattr(groups, "READS", {**READS, Local: "elementwise"})
    wrong, worst = compared("llama", mesh, BULK, Local, {"lr": 0.02}, run=Orthogonal)
    assert wrong and worst > 1e-4


@pytest.mark.fault("whole tensors wanted")
@pytest.mark.parametrize("mesh", [Mesh(1, 2, 1), Mesh(4, 1, 1), Mesh(2, 2, 2)], ids=str)
def test_own_part_orthogonalised(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner takes its own elements only, such as its tp shard of a matrix."""
    fill = WholeTensors._fill

    def own(self: WholeTensors, out: Tensor, moved: Any, flat: Tensor) -> None:
        fill(self, out, moved, flat if moved.part.rank == self._rank else torch.zeros_like(flat))

    monkeypatch.setattr(WholeTensors, "_fill", own)
    wrong, _ = compared("llama", mesh, BULK, Orthogonal, {"lr": 0.02})
    assert wrong


@pytest.mark.fault("new values stay at the owner")
def test_values_not_sent_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WholeTensors, "_send_back", lambda *_: None)
    wrong, _ = compared("llama", Mesh(2, 2, 1), BULK, "muon", MUON)
    assert wrong


@pytest.mark.fault("embeddings by the matrices' optimizer")
def test_head_and_embeddings_are_not_hidden() -> None:
    hidden = hidden_matrices(source("llama").folded)
    shapes = {n: p.ndim for n, p in case("llama").model.named_parameters()}
    left = {n for n, ndim in shapes.items() if ndim == 2} - hidden
    assert len(left) == 2 and any("embed" in n for n in left) and any("head" in n for n in left)
    assert not any("embed" in n or "wte" in n or "head" in n for n in hidden_matrices(source("nanogpt").folded))
    assert NAMED["muon"].rest == "adamw"


def test_narrow_gradients() -> None:
    """Owners get gradients that are kept in bfloat16 in float32, as flat pieces do."""
    model, ids = NanoGPT(GPTSizes(vocab=64, max_seq=8, width=32, layers=2, heads=4)), torch.arange(16 * 8).view(16, 8)
    batch = {"idx": ids % 64, "targets": ids % 7}
    losses = []
    for fix in ({"dp": 1, "tp": 1, "pp": 1}, {"dp": 2, "tp": 2, "pp": 2, "zero": 1, "micro": 4}):
        par = autoptd.parallelize(
            model,
            world=math.prod(fix[axis] for axis in ("dp", "tp", "pp")),
            cluster="dgx-h100",
            batch=16,
            seq=8,
            fix={**fix, "gradients": "compute"},
            optimizer="muon",
            optimizer_options=MUON,
        )
        losses.append(train_in_lockstep(par, [batch] * 6).losses)
    assert losses[0][-1] < losses[0][0] - 0.1
    assert losses[1] == pytest.approx(losses[0], abs=0.03)


class Scaled(torch.nn.Module):
    """A layer with a parameter of no dims."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = torch.nn.Linear(4, 4), torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.scale - x).square().mean()


@pytest.mark.parametrize("optimizer", ["adafactor", "muon", torch.optim.Adafactor])
def test_parameters_without_dims(optimizer: Any) -> None:
    torch.manual_seed(0)
    model, steps = Scaled().double(), [{"x": torch.randn(4, 4, dtype=torch.float64)} for _ in range(3)]
    options = {"lr": 0.02}
    made = autoptd.parallelize(
        model,
        world=2,
        cluster="dgx-h100",
        batch=4,
        inputs={"x": steps[0]["x"][:2]},
        precision="fp64",
        optimizer=optimizer,
        optimizer_options=options,
        fix={"dp": 2, "micro": 2},
    )
    expected = train_alone(model, steps, optimizer=optimizer, optimizer_options=options)
    found = train_in_lockstep(made, steps)
    assert max(differences(found.state, expected.state).values()) < EXACT
