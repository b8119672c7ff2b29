"""A resumed fp16 run continues with its loss scale, also after a first step that was skipped."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import autoptd


def made() -> autoptd.Parallel:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    inputs = {"input": torch.zeros(2, 8, dtype=torch.float16)}
    return autoptd.parallelize(model, world=1, inputs=inputs, loss=squares, batch=4, precision="fp16")


def squares(out: Tensor) -> Tensor:
    return out.float().square().mean()


def test_the_scale_is_saved(tmp_path: Path) -> None:
    one, other = made(), made()
    one.train_step({"input": torch.full((4, 8), 6e4, dtype=torch.float16)})
    assert one.skipped and one.loss_scale is not None and one.loss_scale.scale == 2.0**15
    one.save(tmp_path)
    assert other.load(tmp_path) == 1
    assert other.loss_scale == one.loss_scale
    good = {"input": torch.ones(4, 8, dtype=torch.float16)}
    for _ in range(2):
        assert one.train_step(good) == other.train_step(good)
    assert not one.skipped and one.loss_scale.steps_without_overflow == 2
