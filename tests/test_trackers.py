"""Trackers take the numbers of a run on rank 0, and say what is missing before the first step."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import autoptd
from autoptd.errors import InputsError
from autoptd.trackers import Console, JsonLines, MLflow, RunTracker, TensorBoard, Tracker, WeightsAndBiases

VALUES = {"loss": torch.tensor(0.5), "rate": 2, "bad": float("nan")}


class Kept:
    """A tracker of a user's."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.said.append((step, dict(values)))

    def close(self) -> None:
        self.said.append("closed")


def test_rank_0_alone_logs_numbers() -> None:
    kept: Tracker = Kept()
    for rank in (1, 0):
        with RunTracker(rank, kept) as tracker:
            tracker.log(3, {"step": 3, "loss": torch.tensor(0.5), "rate": 2})
    assert isinstance(kept, Kept) and kept.said == [(3, {"loss": 0.5, "rate": 2.0}), "closed"]
    assert all(type(x) is float for x in kept.said[0][1].values())
    with pytest.raises(InputsError, match="'each' is Tensor, not a number"):
        RunTracker(0, kept).log(4, {"each": torch.zeros(2)})


def test_a_file_of_lines_goes_on(tmp_path: Path) -> None:
    for step in (1, 2):
        with RunTracker(0, JsonLines(tmp_path / "runs" / "log.jsonl")) as tracker:
            tracker.log(step, VALUES)
    lines = (tmp_path / "runs" / "log.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": step, "loss": 0.5, "rate": 2.0, "bad": "nan"} for step in (1, 2)
    ]
    RunTracker(1, JsonLines(tmp_path / "none")).log(1, VALUES)
    assert not (tmp_path / "none").exists()


def test_a_line_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    RunTracker(0, Console()).log(12, VALUES)
    assert capsys.readouterr().out == "step     12  loss 0.5  rate 2  bad nan\n"


def test_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    writer = SimpleNamespace(add_scalar=lambda *x: said.append(x), close=lambda: said.append("closed"))
    monkeypatch.setitem(sys.modules, "tensorboard", SimpleNamespace())
    module = SimpleNamespace(SummaryWriter=lambda folder: said.append(folder) or writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    RunTracker(1, TensorBoard("runs/a")).log(1, VALUES)
    assert said == []
    with RunTracker(0, TensorBoard("runs/a")) as tracker:
        tracker.log(3, {"loss": 0.5, "rate": 2})
    assert said == ["runs/a", ("loss", 0.5, 3), ("rate", 2.0, 3), "closed"]


def test_weights_and_biases(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    run = SimpleNamespace(log=lambda values, step: said.append((step, values)), finish=lambda: said.append("closed"))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **options: said.append(options) or run))
    with RunTracker(0, WeightsAndBiases(project="p")) as tracker:
        tracker.log(3, {"loss": 0.5})
    assert said == [{"project": "p"}, (3, {"loss": 0.5}), "closed"]


def test_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    module = SimpleNamespace(
        start_run=lambda **options: said.append(options) or SimpleNamespace(info=SimpleNamespace(run_id="r")),
        log_metrics=lambda values, step, run_id: said.append((step, values, run_id)),
        end_run=lambda: said.append("closed"),
    )
    monkeypatch.setitem(sys.modules, "mlflow", module)
    with RunTracker(0, MLflow(run_name="n")) as tracker:
        tracker.log(3, {"loss": 0.5})
    assert said == [{"run_name": "n"}, (3, {"loss": 0.5}, "r"), "closed"]


@pytest.mark.parametrize(
    ("package", "make"), [("tensorboard", lambda: TensorBoard("x")), ("wandb", WeightsAndBiases), ("mlflow", MLflow)]
)
def test_a_missing_package_is_an_error_with_its_name(package: str, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputsError, match=f"the package {package} is not installed") as caught:
        make()
    assert f"pip install {package}" in caught.value.fix


def test_a_run_logs_its_report_and_its_losses() -> None:
    kept, x = Kept(), torch.randn(8, 4)
    par = autoptd.parallelize(
        nn.Linear(4, 2),
        world=1,
        inputs={"input": x[:2]},
        loss=lambda out: {"loss": out.square().mean(), "size": out.abs().mean()},
        batch=8,
        precision="fp32",
    )
    with par.tracker(kept) as tracker:
        par.train_step({"input": x})
        tracker.log(par.step, {**par.report().to_data(), **par.losses})
    step, values = kept.said[0]
    assert step == 1 and {"loss", "size", "grad_norm", "samples_per_s"} <= values.keys()
