"""Random numbers depend on sample and element only: any plan draws what the plain model draws with the same keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from autoptd.api import Parallel
from autoptd.layout.mesh import Mesh
from autoptd.ops import recompute
from autoptd.ops.dropout import DropoutKey, Elements
from autoptd.runtime import executor
from autoptd.runtime.comm.threaded import run_lockstep
from autoptd.runtime.trainer import Trainer
from autoptd.testing.parity import Trained, differences, train_in_lockstep
from autoptd.verification.copies import copied
from autoptd.verification.plain import draws_of, keyed, one_pass
from tests.parity.parity_check import OPTIONS, Variant, batches, parallel, planned, source, with_files

PLAIN = Variant(bulk=True)
CUBE = Mesh(2, 2, 2)


@cache
def trained(name: str, mesh: Mesh, variant: Variant = PLAIN) -> Trained:
    return train_in_lockstep(parallel(name, planned(name, mesh, variant), "sgd"), batches(name))


@cache
def plain(name: str) -> Trained:
    """Train the user's model on whole batches, under the mode that makes it draw the program's numbers."""
    of = source(name)
    draws, copies = draws_of(of, batches(name)[0]), copied(of.model, of.objective.loss)
    model, objective = copies.model, replace(of.objective, loss=copies.loss)
    stepper, losses, gradients = torch.optim.SGD(model.parameters(), **OPTIONS["sgd"]), [], {}
    for step, batch in enumerate(batches(name)):
        stepper.zero_grad()
        losses.append(one_pass(model, batch, objective, keyed(of, draws, DropoutKey(0, step=step))))
        if step == 0:
            gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        stepper.step()
    return Trained(tuple(losses), (), gradients, {n: x.detach() for n, x in model.state_dict().items()})


def is_plain(name: str, found: Trained) -> bool:
    expected = plain(name)
    tensors = differences(found.gradients, expected.gradients) | differences(found.state, expected.state)
    close = torch.tensor(found.losses).sub(torch.tensor(expected.losses)).abs().max() < 1e-10
    return not found.diverged and bool(close) and max(tensors.values()) <= 1e-10


RUNS = [
    ("noisy", Mesh(1, 2, 1), replace(PLAIN, micro=8)),
    ("noisy", Mesh(2, 1, 1), replace(PLAIN, micro=2)),
    ("noisy", Mesh(1, 1, 2), replace(PLAIN, micro=2, recompute="full")),
    ("noisy", Mesh(1, 4, 2), replace(PLAIN, micro=2, zero=0)),
    ("noisy", CUBE, replace(PLAIN, micro=2, recompute="selective", schedule="gpipe")),
    ("noisy", CUBE, replace(PLAIN, micro=2, recompute="full", schedule="zero-bubble")),
    ("noisy", Mesh(2, 1, 2), replace(PLAIN, micro=2, schedule="interleaved", virtual=2)),
    ("skipped_norms", CUBE, replace(PLAIN, micro=8)),
    ("noisy_tokens", Mesh(4, 2, 1), PLAIN),
    ("noisy_tokens", Mesh(cp=2, tp=2), replace(PLAIN, micro=4)),
    ("noisy_tokens", Mesh(dp=2, pp=2, cp=2), replace(PLAIN, micro=4, recompute="full")),
]


@pytest.mark.parametrize(("name", "mesh", "variant"), RUNS, ids=[f"{n}-{m}-{i}" for i, (n, m, _) in enumerate(RUNS)])
def test_every_plan_draws_what_the_plain_model_draws(name: str, mesh: Mesh, variant: Variant) -> None:
    assert is_plain(name, trained(name, mesh, variant))


def test_every_place_of_samples_is_met() -> None:
    made = parallel("noisy", planned("noisy", Mesh(1, 2, 1), replace(PLAIN, micro=8)), "sgd")
    text = "".join(made.program.files.values())
    draws = re.findall(r"ops\.(uniform|normal|exponential|integers|dropout_mask)\(", text)
    assert set(draws) == {"uniform", "normal", "exponential", "integers", "dropout_mask"}
    assert {"samples=ops.Samples(inner=s)", "samples=ops.Samples(outer=s)", "samples=None"} <= set(
        re.findall(r"samples=(?:ops\.Samples\([^)]*\)|None)", text)
    )
    assert "parts=[tp.part(" in text and "ops.MICROBATCH" not in text


def test_evaluation_drops_no_sample() -> None:
    """Masks of stochastic depth are 1, noise is drawn as in training."""
    made = parallel("noisy_tokens", planned("noisy_tokens", Mesh(), PLAIN), "sgd")
    whole = edited(made, r"ops\.dropout_mask\(\(([^)]*)\), [\d.]+", r"ops.dropout_mask((\1), 0.0")
    assert evaluated(made) == evaluated(whole)
    assert evaluated(made) != evaluated(edited(made, r"rng=self\.dropout", "rng=None"))


def evaluated(made: Parallel) -> float:
    """Return the loss of the first batch without dropout."""

    def body(communicators: object) -> float:
        made.start(communicators, values)  # type: ignore[arg-type]
        return float(made.eval_step(batches("noisy_tokens")[0]))

    values = made.initial_values()
    return run_lockstep(made.layout.mesh, body, timeout_s=60.0)[0]


# ---- planted ----


def edited(made: Parallel, pattern: str, by: str) -> Parallel:
    files = {n: re.sub(pattern, by, text) if n.endswith(".py") else text for n, text in made.program.files.items()}
    assert files != made.program.files, "nothing was planted"
    return with_files(made, files)


@pytest.mark.parametrize(
    ("pattern", "by"),
    [
        pytest.param(r",\s*parts=\[tp\.part\([^)]*\)\]", "", marks=pytest.mark.fault("draws of local positions")),
        pytest.param(r"samples=ops\.Samples\(outer=s\)", "samples=None", marks=pytest.mark.fault("draws that repeat")),
        pytest.param(
            r"ops\.Samples\(inner=s\)", "ops.Samples()", marks=pytest.mark.fault("draws of a rank's own samples")
        ),
        pytest.param(
            r"ops\.Samples\(outer=s\)", "ops.Samples(inner=s)", marks=pytest.mark.fault("draws of a rank's own samples")
        ),
        pytest.param(r"samples=None", "samples=ops.MICROBATCH", marks=pytest.mark.fault("one draw per microbatch")),
        pytest.param(
            r'key=("[^"]*")', r"key=str(self.tp.rank) + \1", marks=pytest.mark.fault("draws differ on replicas")
        ),
        pytest.param(r'key="[^"]*"', 'key="0"', marks=pytest.mark.fault("draws without the op")),
    ],
)
def test_an_edited_key_is_seen(pattern: str, by: str) -> None:
    mesh, variant = CUBE, replace(PLAIN, micro=2)
    made = edited(parallel("noisy", planned("noisy", mesh, variant), "sgd"), pattern, by)
    assert not is_plain("noisy", train_in_lockstep(made, batches("noisy")))


def no_samples(sizes: Iterable[int]) -> Iterator[int]:
    """Yield 0 as the first sample of every microbatch."""
    return (0 for _ in sizes)


def of_the_first_step(self: DropoutKey, key: str, right: Callable[..., int] = DropoutKey.word) -> int:
    return right(replace(self, step=0), key)


def anew_when_run_again(self: Elements, made: Any, dtype: torch.dtype, right: Any = Elements.each) -> torch.Tensor:
    run = getattr(recompute._HERE, "run", None)
    return right(self.again() if run is not None and run.second_run else self, made, dtype)


@pytest.mark.parametrize(
    ("owner", "attribute", "wrong"),
    [
        pytest.param(executor, "accumulate", no_samples, marks=pytest.mark.fault("draws of a rank's own samples")),
        pytest.param(Trainer, "_share_starts", lambda *_: 0, marks=pytest.mark.fault("draws of a rank's own samples")),
        pytest.param(DropoutKey, "word", of_the_first_step, marks=pytest.mark.fault("draws that repeat")),
        pytest.param(Elements, "each", anew_when_run_again, marks=pytest.mark.fault("draws made anew")),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_planted_fault_is_seen(
    owner: object, attribute: str, wrong: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, variant = "noisy", replace(PLAIN, recompute="full", micro=2)
    assert plain(name)
    monkeypatch.setattr(owner, attribute, wrong)
    made = parallel(name, planned(name, CUBE, variant), "sgd")
    assert not is_plain(name, train_in_lockstep(made, batches(name)))


@pytest.mark.fault("draws of local positions")
def test_an_edited_place_of_tokens_is_seen() -> None:
    name, mesh, variant = "noisy_tokens", Mesh(tp=2, cp=2), replace(PLAIN, micro=4)
    made = edited(parallel(name, planned(name, mesh, variant), "sgd"), r"cp\.part\(dim=1\)", "")
    assert not is_plain(name, train_in_lockstep(made, batches(name)))


@pytest.mark.fault("a skipped layer is updated")
def test_an_update_of_a_skipped_layer_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Momentum moves what has a gradient of zero."""
    mesh = Mesh(dp=2)
    assert is_plain("noisy_tokens", trained("noisy_tokens", mesh))
    monkeypatch.setattr(Trainer, "_skipped", lambda *_: False)
    made = parallel("noisy_tokens", planned("noisy_tokens", mesh, PLAIN), "sgd")
    assert not is_plain("noisy_tokens", train_in_lockstep(made, batches("noisy_tokens")))


@pytest.mark.fault("another layer is skipped")
def test_a_selection_of_the_wrong_value_is_seen() -> None:
    mesh, variant = Mesh(dp=2), PLAIN
    made = edited(
        parallel("noisy_tokens", planned("noisy_tokens", mesh, variant), "sgd"),
        r"torch\.where\((\w+), (\w+), (\w+)\)",
        r"torch.where(\1, \3, \2)",
    )
    assert not is_plain("noisy_tokens", train_in_lockstep(made, batches("noisy_tokens")))
