"""More mistakes that parity must detect: randomness, initial values, buffers, and sizes that tp does not divide."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

import autoptd
from autoptd import parallel as running
from autoptd.errors import PlanError
from autoptd.layout.mesh import Mesh
from autoptd.models.nanogpt import GPTSizes, NanoGPT
from autoptd.ops import library as ops
from autoptd.runtime import trainer
from autoptd.testing.parity import Trained, differences, train_in_lockstep
from tests.parity.parity_check import Variant, alone, batches, check, complaints, parallel, planned, with_files

BULK = Variant(bulk=True)
Patch = pytest.MonkeyPatch

# ---- dropout: changed keys, whatever generates the numbers ----


def trained(mesh: Mesh, variant: Variant = BULK, steps: int = 2) -> Trained:
    name = "nanogpt_dropout"
    made = parallel(name, planned(name, mesh, variant), "sgd")
    return train_in_lockstep(made, batches(name, steps))


def apart(one: Trained, other: Trained) -> float:
    losses = (abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))
    return max(*differences(one.state, other.state).values(), *losses)


def spoil(patch: Patch, suffix: Callable[[], str], change: Callable[[Any], Any] = lambda rng: rng) -> None:
    """Append a suffix to every key, and change its randomness."""
    for name in ("dropout", "attention"):
        whole = getattr(ops, name)

        def spoilt(*args: Any, whole: Any = whole, **named: Any) -> Any:
            if named.get("rng") is not None:
                named = {**named, "key": named["key"] + suffix(), "rng": change(named["rng"])}
            return whole(*args, **named)

        patch.setattr(ops, name, spoilt)


def rank() -> int:
    """Return the rank of this thread."""
    return int(threading.current_thread().name.removeprefix("rank "))


@pytest.mark.fault("masks differ on replicas")
def test_replicas_that_draw_for_themselves_are_caught(monkeypatch: Patch) -> None:
    whole = Variant()
    assert not trained(Mesh(1, 2, 1), whole).diverged
    spoil(monkeypatch, lambda: f"/{rank() % 2}")
    assert trained(Mesh(1, 2, 1), whole).diverged


@pytest.mark.fault("masks by stage")
def test_masks_that_know_their_stage_are_caught(monkeypatch: Patch) -> None:
    assert apart(trained(Mesh(1, 1, 2)), trained(Mesh())) < 1e-10
    spoil(monkeypatch, lambda: f"/{rank()}")
    assert apart(trained(Mesh(1, 1, 2)), trained(Mesh())) > 1e-6


@pytest.mark.fault("masks drawn anew")
def test_recomputation_that_draws_anew_is_caught(monkeypatch: Patch) -> None:
    """The loss of the first step is unchanged: only the gradients differ."""
    again = replace(BULK, recompute="full")
    assert apart(trained(Mesh(), again), trained(Mesh())) < 1e-12
    numbers = count()
    in_backward = threading.local()
    whole = torch.autograd.backward

    def backward(*args: Any, **named: Any) -> Any:
        in_backward.on = True
        try:
            return whole(*args, **named)
        finally:
            in_backward.on = False

    monkeypatch.setattr(torch.autograd, "backward", backward)
    spoil(monkeypatch, lambda: f"/{next(numbers)}" if getattr(in_backward, "on", False) else "")
    assert apart(trained(Mesh(), again), trained(Mesh())) > 1e-6


@pytest.mark.fault("masks that repeat")
def test_masks_that_are_the_same_in_every_step_are_caught(monkeypatch: Patch) -> None:
    """The batch is repeated and the learning rate is 0: losses of two steps differ by dropout only."""
    name = "nanogpt_dropout"
    made = parallel(name, planned(name, Mesh(), BULK), "sgd")
    made._optimizer_options = {"lr": 0.0}
    same = batches(name, 1) * 2
    one, other = train_in_lockstep(made, same).losses
    assert one != other
    spoil(monkeypatch, lambda: "", lambda rng: replace(rng, step=0))
    one, other = train_in_lockstep(made, same).losses
    assert one == other


# ---- first values, buffers ----


@pytest.mark.fault("values by cut")
def test_first_values_that_depend_on_the_cut_are_caught(monkeypatch: Patch) -> None:
    with torch.device("meta"):
        model = NanoGPT(GPTSizes(vocab=64, max_seq=16, width=32, layers=2, heads=4))
    made = autoptd.parallelize(model, world=2, batch=4, precision="fp32", fix={"pp": 2}, seed=3)

    def same() -> bool:
        whole = made.initial_values()
        parts = {**made.initial_values({0}), **made.initial_values({1})}
        return whole.keys() == parts.keys() and all(torch.equal(x, parts[name]) for name, x in whole.items())

    assert same()
    whole = running.values_for
    monkeypatch.setattr(
        running, "values_for", lambda model, names, seed, extra: whole(model, names, seed + len(names), extra)
    )
    assert not same()


@pytest.mark.fault("buffers of another stage")
@pytest.mark.parametrize("name", ["layers.3.scale", "layers.3.shift"])
def test_a_buffer_that_lost_its_values_is_seen(name: str) -> None:
    """One buffer is in checkpoints, one is not."""
    made = parallel("oddities", planned("oddities", Mesh(1, 1, 2), BULK), "sgd")
    values = made.initial_values()
    assert not complaints("oddities", train_in_lockstep(made, batches("oddities")), alone("oddities", "sgd"))
    made.__dict__["initial_values"] = lambda stages=None: values | {name: torch.zeros_like(values[name])}
    wrong = complaints("oddities", train_in_lockstep(made, batches("oddities")), alone("oddities", "sgd"))
    assert any(c.startswith("loss of step 0") for c in wrong)


# ---- what does not divide ----


@pytest.mark.fault("key heads of a neighbour")
def test_key_heads_of_other_queries_are_seen() -> None:
    """Two key heads on four ranks: each serves four queries in a row, not every other one."""
    name = "llama_2_kv"
    made = parallel(name, planned(name, Mesh(1, 4, 1), BULK), "sgd")
    pattern = r"tp\.own_keys\((\w+), 8\)"
    other = r"\1[:, tp.rank % 2, None]"
    files = {n: re.sub(pattern, other, text) for n, text in made.program.files.items()}
    assert files != made.program.files
    found = train_in_lockstep(with_files(made, files), batches(name))
    assert complaints(name, found, alone(name, "sgd"))


@pytest.mark.fault("a vocabulary that does not divide")
def test_a_vocabulary_that_does_not_divide_is_not_split() -> None:
    """Tables are never padded: a fixed split is refused; otherwise the table is placed another way."""
    with torch.device("meta"):
        model = NanoGPT(GPTSizes(vocab=63, max_seq=16, width=32, layers=2, heads=4))
    asked: dict[str, Any] = {"world": 2, "batch": 4, "precision": "fp32"}
    with pytest.raises(PlanError, match=r"63|S0"):
        autoptd.plan(model, **asked, fix={"tp": 2, "splits": {"tokens.weight": "S0"}})
    assert autoptd.plan(model, **asked, fix={"tp": 2}).splits.parameters["tokens.weight"] != "S0"


@pytest.mark.fault("experts by another group")
def test_experts_that_another_rank_counts_too_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts are split over tp like all parameters; each element is counted by one rank."""
    mesh, variant = Mesh(2, 2, 1), Variant()
    assert check("mixtral", mesh, variant, "sgd") == []
    whole = trainer.squared_norm

    def per_group(pieces: Any) -> Tensor:
        experts = [piece for piece in pieces if "experts" in piece.name]
        assert experts
        return whole(pieces) + whole(experts)

    monkeypatch.setattr(trainer, "squared_norm", per_group)
    assert any(line.startswith("norm of step") for line in check("mixtral", mesh, variant, "sgd"))
