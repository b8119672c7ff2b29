"""The places where the host waits are those of the documentation, and each of them occurs."""

from __future__ import annotations

from pathlib import Path

import torch

import autoptd
from autoptd.layout.mesh import Mesh
from tests.parity import test_parity_pictures as pictures
from tests.runtime.fake_device.allowed import ALLOWED, table
from tests.runtime.fake_device.plans import Ask, given, made
from tests.runtime.fake_device.run import Ran, steps
from tests.runtime.fake_device.test_metrics import METRICS

PAGE = Path(__file__).parents[3] / "docs" / "device.md"
ASKS = (
    Ask("mixtral", Mesh(2, ep=2), "fp32"),
    Ask("capacity", Mesh(2, ep=2), "fp32"),
    Ask("two_views", Mesh(2, 1, 2), "fp32"),
    Ask("normed_mlp", Mesh(2), "fp32", fix={"micro": 8}),
    Ask("nanogpt", Mesh(2), "fp32", fix={"offload": 1.0}),
    Ask("nanogpt", Mesh(), "fp32", "adafactor"),
)
MEASURED = Ask("llama", Mesh(2), "fp32")


def test_the_page_lists_every_wait() -> None:
    assert PAGE.read_text("utf-8").endswith(f"\n{table()}\n"), "run: python -m tests.runtime.fake_device.allowed"


def test_every_listed_wait_happens() -> None:
    ran = [steps(made(ask), given(ask, 2), evaluates=True) for ask in ASKS]
    ran.append(steps(made(MEASURED), given(MEASURED, 1), metrics=METRICS))
    ran.append(_of_pictures())
    assert {place for each in ran for rank in each.waits for met in rank for place in met} == set(ALLOWED)


def _of_pictures() -> Ran:
    """Train on pictures of a fixed size, whose batch is on the device in the second step."""
    torch.manual_seed(0)
    parallel = autoptd.parallelize(
        pictures.Captioner(pictures.windows).double(),
        inputs=pictures.batch(1, 2),
        world=2,
        cluster="dgx-h100",
        batch=pictures.SAMPLES,
        precision="fp64",
        fix={"dp": 2, "micro": 2},
        compile=False,
    )
    return steps(parallel, [pictures.batch(2), pictures.batch(3)])
