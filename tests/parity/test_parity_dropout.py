"""Dropout: the same numbers on every run, under every cut and with recompute; agreed on where tensors are whole."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from parity_check import Variant, batches, parallel, planned
from parity_models import DROPOUT

from autoptd.lockstep import Trained, differences, train_in_lockstep
from autoptd.runtime.mesh import Mesh

PLAIN = Variant(bulk=True)


@cache
def trained(name: str, mesh: Mesh, variant: Variant = PLAIN, seed: int = 0, again: int = 0) -> Trained:
    """`again` only tells runs apart."""
    return train_in_lockstep(parallel(name, planned(name, mesh, variant), "sgd", seed=seed), batches(name))


def apart(one: Trained, other: Trained) -> float:
    losses = torch.tensor(one.losses), torch.tensor(other.losses)
    tensors = differences(one.state, other.state) | differences(one.gradients, other.gradients)
    return max(*tensors.values(), float((losses[0] - losses[1]).abs().max()))


@pytest.mark.parametrize("mesh", [Mesh(2, 2, 2), Mesh(1, 4, 2)], ids=str)
@pytest.mark.parametrize("name", DROPOUT)
def test_a_run_repeats_to_the_bit_and_recompute_replays_it(name: str, mesh: Mesh) -> None:
    one = trained(name, mesh)
    assert not one.diverged, "ranks drew different numbers for a tensor that both hold whole"
    assert apart(one, trained(name, mesh, again=1)) == 0
    assert apart(one, trained(name, mesh, replace(PLAIN, recompute="full"))) < 1e-12


@pytest.mark.parametrize("name", DROPOUT)
def test_the_cut_into_stages_plays_no_part(name: str) -> None:
    assert apart(trained(name, Mesh(1, 2, 4)), trained(name, Mesh(1, 2, 1))) < 1e-10
    assert apart(trained(name, Mesh(2, 1, 4)), trained(name, Mesh(2, 1, 1))) < 1e-10
    assert apart(trained(name, Mesh(2, 1, 4)), trained(name, Mesh(2, 1, 4), replace(PLAIN, zero=0))) < 1e-12


@pytest.mark.parametrize("name", DROPOUT)
def test_the_schedule_plays_no_part(name: str) -> None:
    mesh = Mesh(1, 2, 2)
    for changed in ({"schedule": "gpipe"}, {"schedule": "interleaved", "virtual": 2}, {"schedule": "zero-bubble"}):
        assert apart(trained(name, mesh), trained(name, mesh, replace(PLAIN, **changed))) < 1e-10, changed


@pytest.mark.parametrize("name", DROPOUT)
def test_seed_and_dropout_matter(name: str) -> None:
    plain = train_in_lockstep(
        parallel(name.partition("_")[0], planned(name.partition("_")[0], Mesh(2, 2, 2), PLAIN), "sgd"),
        batches(name.partition("_")[0]),
    )
    assert apart(trained(name, Mesh(2, 2, 2)), plain) > 1e-4
    assert apart(trained(name, Mesh(2, 2, 2)), trained(name, Mesh(2, 2, 2), seed=1)) > 1e-4


def test_every_step_and_microbatch_and_dp_rank_draws_anew() -> None:
    """All samples alike and nothing learnt: what differs comes from dropout alone."""
    name = "nanogpt_dropout"
    one = {n: x[15:].expand(16, *x.shape[1:]) for n, x in batches(name)[0].items()}
    losses = {}
    for mesh in (Mesh(1, 1, 2), Mesh(2, 1, 1)):
        made = parallel(name, planned(name, mesh, PLAIN), "sgd")
        made._optimizer_options = {"lr": 0.0}
        losses[mesh] = train_in_lockstep(made, [one, one]).losses
        assert losses[mesh][0] != losses[mesh][1]
    halves = [{n: x[:8] for n, x in one.items()}]
    made = parallel(name, planned(name, Mesh(1, 1, 2), PLAIN), "sgd")
    assert made.layout.microbatches == 8
    # were both dp ranks to draw the same numbers, the mean over both would be that over one
    half = replace(made.layout, microbatches=4)
    made.__dict__["layout"] = half
    assert abs(train_in_lockstep(made, halves).losses[0] - losses[Mesh(2, 1, 1)][0]) > 1e-6
    assert abs(train_in_lockstep(made, halves).losses[0] - losses[Mesh(1, 1, 2)][0]) > 1e-6
