"""Metrics are evaluated on a GPU as training steps are: no stray tensor, no wait that is not listed, no race."""

from __future__ import annotations

import pytest

from autoptd.layout.mesh import Mesh
from tests.parity.test_parity_metrics import energy, right
from tests.runtime.fake_device.allowed import too_often
from tests.runtime.fake_device.plans import Ask, given, made
from tests.runtime.fake_device.run import steps

METRICS = {"energy": energy, "right": right}
ASKS = (
    Ask("llama", Mesh(2, 1, 2), "fp32", fix={"overlap": ["dp", "p2p"]}),
    Ask("llama", Mesh(2, 2), "fp32", fix={"zero": 3}),
    Ask("llama", Mesh(1, 1, 2), "fp32", fix={"schedule": "interleaved", "virtual": 2}),
)


@pytest.mark.parametrize("ask", ASKS, ids=str)
def test_metrics_of_each_sample(ask: Ask) -> None:
    ran = steps(made(ask), given(ask, 1), metrics=METRICS)
    assert ran.losses[-2] > 0
    for met in ran.waits:
        assert not [text for step in met for text in too_often(step)]
