"""Trackers of a run's numbers: anything with `log` and `close`. Rank 0 alone logs.

A tracker opens what it writes to with its first numbers, so that other ranks open nothing.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from autoptd.boundary import public_methods
from autoptd.errors import InputsError
from autoptd.outputs import make_folder


class Tracker(Protocol):
    """Receiver of a run's numbers."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the numbers of a step, by name."""

    def close(self) -> None:
        """Write what is left. `log` is not called any more."""


@public_methods
class RunTracker:
    """Several trackers of one run, which log on rank 0, as `par.tracker` returns it."""

    def __init__(self, rank: int, *trackers: Tracker) -> None:
        self._trackers = trackers if rank == 0 else ()

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Log numbers and tensors of one element, on rank 0. Not collective. Raises InputsError for other values."""
        if self._trackers:
            numbers = {name: _number(name, value) for name, value in values.items() if name != "step"}
            for tracker in self._trackers:
                tracker.log(step, numbers)

    def close(self) -> None:
        """Close all trackers."""
        for tracker in self._trackers:
            tracker.close()

    def __enter__(self) -> RunTracker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        fix = "log numbers and tensors of one element"
        raise InputsError(f"{name!r} is {type(value).__name__}, not a number", where=name, fix=fix) from error


class Console:
    """A line of text for each step."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        print(f"step {step:6}  " + "  ".join(f"{name} {value:.4g}" for name, value in values.items()), flush=True)

    def close(self) -> None: ...


class JsonLines:
    """A file with a JSON object for each step, to which a resumed run appends. Texts stand for infinity and NaN."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        make_folder(self._path.parent)
        finite = {name: value if math.isfinite(value) else str(value) for name, value in values.items()}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **finite}) + "\n")

    def close(self) -> None: ...


class TensorBoard:
    """Scalars in a folder, which `tensorboard --logdir` shows. Raises InputsError if that is not installed."""

    def __init__(self, folder: str | Path) -> None:
        _installed("tensorboard")
        self._folder = str(folder)

    @cached_property
    def _writer(self) -> Any:
        return importlib.import_module("torch.utils.tensorboard").SummaryWriter(self._folder)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if "_writer" in vars(self):
            self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases. Keywords are those of `wandb.init`. Raises InputsError if wandb is not installed."""

    def __init__(self, **options: Any) -> None:
        self._wandb, self._options = _installed("wandb"), options

    @cached_property
    def _run(self) -> Any:
        return self._wandb.init(**self._options)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        if "_run" in vars(self):
            self._run.finish()


class MLflow:
    """A run of MLflow. Keywords are those of `mlflow.start_run`. Raises InputsError if mlflow is not installed."""

    def __init__(self, **options: Any) -> None:
        self._mlflow, self._options = _installed("mlflow"), options

    @cached_property
    def _run(self) -> Any:
        return self._mlflow.start_run(**self._options)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(values), step=step, run_id=self._run.info.run_id)

    def close(self) -> None:
        if "_run" in vars(self):
            self._mlflow.end_run()


def _installed(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        fix = f"install it: pip install {name}; or log into a file with JsonLines"
        raise InputsError(f"the package {name} is not installed", where="tracker", fix=fix) from error
