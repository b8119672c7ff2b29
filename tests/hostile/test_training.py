"""Models with names that Python parses differently, or not at all, train as on one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import autoptd
from autoptd.plans.model import Plan
from autoptd.testing.parity import differences, train_alone, train_in_lockstep

from .hostile_models import LENGTH, MARK, PAYLOADS, WIDTH, model_of

NAMED = {
    "private to a class": ("__m", "__p", "__b", "__C", "__s", "x_2"),
    "normalised alike": ("ﬁ", "fi", "ﬀ", "ff", "ﬁ", "block"),
    "keywords": ("class", "None", "lambda", "import", "def", "input"),
    "of emitted lines": ("ops", "torch", "spare", "Stage", "range", "i"),
    "numbers": ("07", "7", "²", "3d", "00", "s2"),
    "calls": (
        PAYLOADS["call"],
        PAYLOADS["call in a docstring"],
        PAYLOADS["comment"],
        PAYLOADS["call on a line"],
        PAYLOADS["call in an f-string"],
        "x",
    ),
}


@pytest.mark.parametrize("given", NAMED.values(), ids=NAMED)
def test_it_trains(given: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names = dict(zip(("module", "parameter", "buffer", "class", "stack", "input"), given, strict=True))
    model = model_of(names, blocks=4).double()
    batches = [{names["input"]: torch.randn(4, LENGTH, WIDTH, dtype=torch.float64)} for _ in range(2)]
    made = autoptd.parallelize(
        model,
        world=4,
        inputs={n: x[:2] for n, x in batches[0].items()},
        precision="fp64",
        cluster="dgx-h100",
        batch=4,
        fix={"tp": 2, "pp": 2, "micro": 1},
        optimizer="sgd",
        optimizer_options={"lr": 0.05},
    )
    assert Plan.from_json(made.plan.to_json()) == made.plan
    found = train_in_lockstep(made, batches)
    wanted = train_alone(model, batches, optimizer="sgd", optimizer_options={"lr": 0.05})
    assert found.losses == pytest.approx(wanted.losses, rel=1e-12)
    off = differences(found.state, wanted.state)
    assert off.keys() == {n for n, _ in model.named_parameters()} | {n for n, _ in model.named_buffers()}
    assert max(off.values()) < 1e-11
    assert not (tmp_path / MARK).exists()
