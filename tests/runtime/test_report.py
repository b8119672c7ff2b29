"""The progress line of training: its numbers are those of the steps since the previous line."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest
import torch
from torch import nn

import autoptd
from autoptd.errors import RuntimeFault
from autoptd.runtime import report
from autoptd.runtime.comm.threaded import CPU
from autoptd.runtime.report import Meter


def test_rates_are_means_since_the_last_report(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(report.time, "perf_counter", lambda: now[0])
    meter = Meter(units=1000.0, flops=2e12, peak_flops_per_s=1e13)
    now[0] = 500.0  # planning, loading
    meter.restart()
    for seconds in (1.0, 3.0):
        now[0] += seconds
        meter.count()
    first = meter.report(torch.tensor(2.5), torch.tensor(0.75), 3e-4, CPU)
    assert (first.step, first.seconds, first.units_per_s, first.mfu) == (2, 2.0, 500.0, 0.1)
    now[0] += 0.5
    meter.count()
    second = meter.report(torch.tensor(2.5), torch.tensor(0.75), 3e-4, CPU)
    assert (second.step, second.seconds) == (3, 0.5)
    assert str(second) == "step      3  loss 2.5000  |g| 0.75  lr 0.0003  0.5 s  2k tokens/s  MFU 40.0%"
    assert second.to_data()["loss"] == 2.5 and second.memory_bytes == 0
    assert second.to_data()["tokens_per_s"] == 2000.0
    now[0] += 0.5
    meter.count()
    with meter.paused(CPU):
        now[0] += 60.0  # an evaluation
    assert meter.report(torch.tensor(2.5), torch.tensor(0.75), 3e-4, CPU).seconds == 0.5


def test_evaluations_do_not_count_as_training(monkeypatch: pytest.MonkeyPatch) -> None:
    paused = list[str]()

    class Recording(AbstractContextManager[None]):
        def __exit__(self, *error: object) -> None:
            paused.append("evaluated")

    monkeypatch.setattr(Meter, "paused", lambda meter, device: Recording())
    parallel = autoptd.parallelize(
        nn.Linear(8, 4), world=1, inputs={"input": torch.ones(4, 8)}, loss=lambda out: out.pow(2).mean(), batch=4
    )
    parallel.train_step({"input": torch.ones(4, 8)})
    assert not paused
    parallel.eval_step({"input": torch.ones(4, 8)})
    parallel.evaluate([{"input": torch.ones(4, 8)}], {"sum": lambda out, batch: out.sum(-1)})
    parallel.predict([{"input": torch.ones(4, 8)}], {"sum": lambda out, batch: out.sum(-1)})
    assert len(paused) == 3


def test_a_running_program_reports() -> None:
    model = nn.Linear(8, 4)
    inputs = {"input": torch.ones(4, 8)}
    parallel = autoptd.parallelize(
        model,
        world=1,
        inputs=inputs,
        loss=lambda out: out.pow(2).mean(),
        batch=4,
        precision="fp32",
        optimizer_options={"lr": 0.25},
    )
    assert repr(parallel).startswith("<Parallel Linear on 1 × ") and "samples/s>" in repr(parallel)
    with pytest.raises(RuntimeFault, match="before the first step"):
        parallel.report()
    steps = [float(parallel.train_step(inputs)) for _ in range(3)]
    found = parallel.report()
    assert found.step == parallel.step == 3 and found.loss == steps[-1] and found.learning_rate == 0.25
    assert found.grad_norm > 0 and found.seconds > 0
    assert found.units_per_s == pytest.approx(4 / found.seconds)
    assert repr(parallel).endswith("samples/s, rank 0, step 3>")
    assert found.unit == "samples" and "samples/s" in str(found), "a model without a sequence has no tokens"
    assert found.to_data()["samples_per_s"] == found.units_per_s and "tokens_per_s" not in found.to_data()
    assert [len(batch) for batch in parallel.sampler(9)] == [4, 4]


class Pictures(nn.Module):
    """A classifier of pictures; a flat one has no convolution."""

    def __init__(self, flat: bool) -> None:
        super().__init__()
        self.read = nn.Linear(6 * 8, 4) if flat else nn.Conv2d(3, 4, 3, padding=1)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x - 0.5) / 0.25
        y = self.read(x.flatten(2)).mean(1) if isinstance(self.read, nn.Linear) else self.read(x).mean((2, 3))
        return self.head(y)


@pytest.mark.parametrize("flat", [False, True])
def test_pictures_count_in_pixels_too(flat: bool) -> None:
    x, y = torch.rand(4, 3, 6, 8), torch.tensor([0, 1, 0, 1])
    asked = {"inputs": {"x": x[:2]}, "loss": nn.CrossEntropyLoss(), "targets": y[:2], "precision": "fp32"}
    par = autoptd.parallelize(Pictures(flat), world=1, batch=4, **asked)  # type: ignore[arg-type]
    par.train_step({"x": x, "targets": y})
    found = par.report()
    if flat:
        assert found.pixels_per_s == 0 and "pixels" not in str(found) and "pixels_per_s" not in found.to_data()
    else:
        assert found.pixels_per_s == pytest.approx(found.units_per_s * 6 * 8)
        assert found.to_data()["pixels_per_s"] == found.pixels_per_s and " pixels/s" in str(found)
