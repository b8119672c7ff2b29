"""Blocks: layers of several sorts are blocks of their own, and equal ones share a class."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autoptd
from autoptd.passes import blocks
from autoptd.passes.blocks import find_blocks, owned_by_blocks
from autoptd.testing.parity import differences, train_alone, train_in_lockstep
from tests.passes.test_fold import WIDTH, Block, Stack, folded

WIDE = 3 * WIDTH  # of the MLP in layers of the other sort


def period(*widths: int, times: int = 2) -> Stack:
    """Return layers whose MLPs have these widths, several times in turn."""
    torch.manual_seed(0)
    return Stack([Block(hidden=n) for _ in range(times) for n in widths]).double()


def layers(model: Stack) -> list[tuple[int, int]]:
    """Return (layer, first equal layer) of each block that is a whole layer."""
    found = folded(model)
    paths = owned_by_blocks(found)[1]
    whole = [b for b in find_blocks(found) if paths[b.first]]
    return [(int(paths[b.first].split(".")[1]), int(paths[b.like].split(".")[1])) for b in whole]


def test_each_layer_of_a_period_is_a_block() -> None:
    found = layers(period(16, 16, WIDE, times=3))
    assert found == [(0, 0), (1, 0), (2, 2), (3, 0), (4, 0), (5, 2), (6, 0), (7, 0), (8, 2)]


def test_equal_layers_are_blocks_as_before() -> None:
    assert layers(period(16, times=4)) == [(0, 0), (1, 0), (2, 0), (3, 0)]


def test_parameters_are_owned_by_their_layer() -> None:
    owned, _ = owned_by_blocks(folded(period(16, WIDE)))
    assert owned["blocks.3.up.weight"] == owned["blocks.2.up.weight"] == "up.weight"


def test_blocks_cover_the_units() -> None:
    found = folded(period(16, 16, WIDE, times=3))
    covered = [i for b in find_blocks(found) for i in b.inside(0, len(found.segments))]
    assert covered == list(range(len(found.segments)))


def differs(model: Stack, recompute: str, pp: int = 2) -> dict[str, float]:
    rng = torch.Generator().manual_seed(1)
    batches = [{"x": torch.randn(4, 5, 4, generator=rng, dtype=torch.float64)} for _ in range(2)]
    source = autoptd.trace(model, inputs=batches[0], precision="fp64")
    fix = {"tp": 2, "pp": pp, "dp": 2 // pp, "micro": 2, "recompute": recompute}
    asked = {"world": 4, "cluster": "local", "batch": 4, "precision": "fp64", "optimizer": "sgd"}
    made = autoptd.parallelize(source, fix=fix, optimizer_options={"lr": 0.1}, **asked)
    ours = train_in_lockstep(made, batches)
    alone = train_alone(model, batches, optimizer="sgd", optimizer_options={"lr": 0.1})
    return {n: d for n, d in differences(ours.state, alone.state).items() if not d <= 1e-10}


@pytest.mark.parametrize("recompute", ["none", "full", "ops"])
def test_layers_of_several_sorts_train_as_one_process(recompute: str) -> None:
    assert differs(period(16, 16, WIDE, times=3), recompute) == {}


class Tied(nn.Module):
    """A layer of three products, of which the last has the weight of the first, or that of the second."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.c = self.b if number % 2 else self.a

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.a(x).tanh()
        x = x * self.b(x).sigmoid()
        return x + F.gelu(self.c(x))


def tied() -> Stack:
    return Stack([Tied(number) for number in range(4)])


class Pair(nn.Module):
    """A layer of two products."""

    def __init__(self, up: nn.Linear, down: nn.Linear) -> None:
        super().__init__()
        self.products = nn.ModuleList([up, down])

    def forward(self, x: Tensor) -> Tensor:
        up, down = self.products
        x = x + up(x).tanh()
        return x * down(x).sigmoid()


def swapped() -> Stack:
    """Return layers that share one product, and own the second of theirs and the first in turn."""
    shared, *owned = (nn.Linear(WIDTH, WIDTH) for _ in range(6))
    return Stack([Pair(*((own, shared) if k % 2 else (shared, own))) for k, own in enumerate(owned)])


class Decayed(Block):
    """A layer that adds the squares of the first layer's parameters, which are its own in the first layer alone."""

    def __init__(self, first: list[nn.Module]) -> None:
        super().__init__()
        first.append(self)
        self.decayed = first[:1]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(p.square().sum() for p in self.decayed[0].parameters())


def decayed() -> Stack:
    first: list[nn.Module] = []
    return Stack([Decayed(first) for _ in range(4)])


@pytest.mark.fault("layers that tie otherwise")
@pytest.mark.parametrize(("recompute", "pp"), [("none", 1), ("none", 2), ("full", 2)])
@pytest.mark.parametrize("made", [tied, decayed, swapped], ids=lambda made: made.__name__)
def test_layers_that_tie_other_weights_are_no_equal_blocks(made: Callable[[], Stack], recompute: str, pp: int) -> None:
    torch.manual_seed(0)
    assert differs(made().double(), recompute, pp) == {}


def test_a_block_of_another_sort_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that differ in a number alone get the program of the first layer."""
    model = Stack([Block(eps=eps) for _ in range(3) for eps in (1e-5, 0.5)]).double()
    assert differs(model, "none") == {}
    from autoptd.codegen import blocks as written

    def confused(found: object) -> list[blocks.LayerBlock]:
        return [replace(b, like=b.unit.first) for b in find_blocks(found)]  # type: ignore[arg-type]

    monkeypatch.setattr(written, "find_blocks", confused)
    assert differs(model, "none") != {}


class Sorted(Block):
    """A layer that ends with one of two results of an op."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sort(-1).values


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_layers_that_end_with_one_of_several_results(recompute: str) -> None:
    torch.manual_seed(0)
    assert differs(Stack([Sorted() for _ in range(5)]).double(), recompute, 1) == {}


def other_first() -> Stack:
    """Return equal layers after one of another sort, as of a mixture whose first layer is dense."""
    torch.manual_seed(0)
    return Stack([Block(hidden=WIDE), *(Block() for _ in range(3))]).double()


def test_a_fixed_policy_applies_to_layers_that_do_not_repeat() -> None:
    inputs = {"x": torch.ones(4, 5, 4, dtype=torch.float64)}
    asked = {"world": 1, "cluster": "local", "batch": 4, "precision": "fp64", "fix": {"recompute": "full"}}
    plan = autoptd.plan(other_first(), inputs=inputs, **asked)
    again = {plan.segments[i] for stage in plan.stages for i in stage.recompute}
    assert again == {name for name in plan.segments if name.startswith("blocks.")}


def test_a_layer_that_does_not_repeat_is_recomputed_as_in_one_process() -> None:
    assert differs(other_first(), "full") == {}
