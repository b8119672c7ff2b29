"""Batches that dp and microbatches do not divide: every sample counts once, as on one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.models.nanogpt import GPTSizes, NanoGPT
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import run_lockstep
from autoptd.testing.parity import differences, train_alone, train_in_lockstep

SIZES = GPTSizes(vocab=66, max_seq=8, width=24, layers=4, heads=4)
CLOSE = 1e-9


def model() -> NanoGPT:
    torch.manual_seed(0)
    return NanoGPT(SIZES).double()


def batches(samples: int) -> list[dict[str, Tensor]]:
    """Return two batches whose samples have unequal numbers of tokens that count."""
    generator = torch.Generator().manual_seed(samples)
    found = []
    for _ in range(2):
        tokens = torch.randint(SIZES.vocab, (samples, 9), generator=generator)
        counted = torch.arange(8) < torch.randint(1, 9, (samples, 1), generator=generator)
        found.append({"idx": tokens[:, :-1], "targets": tokens[:, 1:].masked_fill(~counted, -1)})
    return found


@pytest.mark.parametrize(
    ("world", "samples", "fix"),
    [
        (6, 23, {"dp": 6, "tp": 1, "pp": 1}),
        (6, 23, {"dp": 3, "tp": 1, "pp": 2, "micro": 2, "zero": 2}),
        (4, 13, {"dp": 2, "tp": 2, "pp": 1, "micro": 4, "zero": 3}),
        (3, 31, {"dp": 1, "tp": 1, "pp": 3, "micro": 4}),
        (4, 15, {"dp": 2, "tp": 1, "pp": 2, "micro": 2, "schedule": "interleaved", "virtual": 2}),
        (4, 11, {"dp": 4, "tp": 1, "pp": 1, "zero": 3, "micro": 3}),
        (5, 7, {"dp": 5, "tp": 1}),
    ],
    ids=str,
)
def test_every_sample_counts_once(world: int, samples: int, fix: dict[str, Any]) -> None:
    options = {"lr": 0.1, "momentum": 0.9}
    found = autoptd.parallelize(
        model(),
        world=world,
        batch=samples,
        cluster="dgx-h100",
        precision="fp64",
        seq=8,
        optimizer="sgd",
        optimizer_options=options,
        fix=fix,
    )
    plan, given = found.plan, batches(samples)
    padded = plan.mesh.dp * plan.micro * plan.schedule.microbatches
    assert samples < padded and any(f"as long as with {padded}" in note for note in plan.notes)
    alone = train_alone(model(), given, optimizer="sgd", optimizer_options=options)
    trained = train_in_lockstep(found, given)
    assert trained.losses == pytest.approx(alone.losses, rel=CLOSE)
    assert max(differences(trained.state, alone.state).values()) < CLOSE


def test_the_padding_is_weighed() -> None:
    """Six devices share 32 samples, and not two of them, which would divide them."""
    with torch.device("meta"):
        wide = NanoGPT(GPTSizes(vocab=512, max_seq=512, layers=4, heads=8, width=512))
    plan = autoptd.plan(wide, world=6, batch=32, seq=512, cluster="dgx-h100", fix={"pp": 1, "tp": 1})
    assert plan.mesh.dp == 6 and plan.micro * plan.schedule.microbatches == 6
    assert plan.predicted.tokens_per_s == pytest.approx(32 * 512 / plan.predicted.step_time_s)
    free = autoptd.plan(wide, world=6, batch=32, seq=512, cluster="dgx-h100")
    assert free.predicted.step_time_s <= plan.predicted.step_time_s * (1 + 1e-9)


class Whitened(nn.Module):
    """Weighs samples by advantages whose variance is taken about their mean: counts in two rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, advantages: Tensor) -> Tensor:
        centred = advantages - advantages.mean()
        whitened = centred * torch.rsqrt(centred.square().mean() + 1e-8)
        return (self.down(torch.tanh(self.up(x))).squeeze(-1) * whitened).mean()


@pytest.mark.parametrize("zero", [0, 3])
def test_microbatches_that_only_fill_up_an_evaluation_count_nothing(zero: int) -> None:
    """A rank of fewer microbatches runs its last one again with ZeRO 3, beside those of the other ranks."""
    model = Whitened().double()
    x, advantages = torch.randn(7, 6, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    par = autoptd.parallelize(
        model,
        world=2,
        batch=8,
        cluster="dgx-h100",
        precision="fp64",
        inputs={"x": x[:2], "advantages": advantages[:2]},
        fix={"dp": 2, "micro": 1, "zero": zero},
    )
    values = par.initial_values()

    def evaluated(c: Communicators) -> float:
        mine = copy.copy(par)
        mine.start(c, values)
        rows = slice(0, 4) if c.dp.rank == 0 else slice(4, 7)
        return float(mine.eval_step({"x": x[rows], "advantages": advantages[rows]}))

    losses = run_lockstep(par.layout.mesh, evaluated)
    assert losses == [pytest.approx(float(model(x, advantages)), rel=CLOSE)] * 2
