"""Evaluation of a running `Parallel`: metrics with a value of each sample, the same under every plan."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from autoptd.boundary import public_methods
from autoptd.caller_modes import without_anomalies
from autoptd.codegen.emit import load_stage
from autoptd.compile.evaluation import EvaluationProgram, check_evaluates, make_evaluation
from autoptd.compile.layout import named_values
from autoptd.errors import AutoptdError, InputsError
from autoptd.layout.size_conditions import Conditions
from autoptd.ops.stage import Stage, stage_axes
from autoptd.ops.tp_axis import Axis
from autoptd.passes.objectives.metrics import Metric, Metrics
from autoptd.planned_reads import Reader, functions_of, methods_of, names_in
from autoptd.read_values import TensorValue
from autoptd.running import RunningRank
from autoptd.runtime.comm.handshake import check_same_program
from autoptd.runtime.evaluation.evaluator import Evaluator
from autoptd.runtime.evaluation.sampler import EvaluationSampler
from autoptd.runtime.initialise import values_for

_EXACT = 2**53  # whole numbers below it are exact in float64
Found = TypeVar("Found")


class EvaluationPrograms:
    """The programs of the metrics that were evaluated so far, one for each set of metrics, and what the check of
    evaluation steps said.

    Ranks that are threads share them, and trace one at a time.
    """

    def __init__(self) -> None:
        self._found: dict[Hashable, Any] = {}
        self._tracing = threading.Lock()

    def of(self, key: Hashable, make: Callable[[], Found]) -> Found:
        """Return what `make` returned for this key, such as the program of some metrics. Raises what it raised."""
        with self._tracing:
            if key not in self._found:
                try:
                    with without_anomalies():
                        self._found[key] = make()
                except AutoptdError as error:
                    self._found[key] = error
            found = self._found[key]
        if isinstance(found, AutoptdError):
            raise found
        return found  # type: ignore[no-any-return]


@public_methods
class Evaluating(RunningRank):
    """The part of `Parallel` that evaluates. Methods are collective, except `eval_sampler`."""

    _programs: EvaluationPrograms
    _evaluators: dict[Hashable, tuple[Metrics, Evaluator]]

    def eval_step(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the mean loss over the global batch without an update; `batch` as in `train_step`. Collective.

        It is that of the model in eval mode, under `no_grad`. Raises InputsError, with the line, if the model computes
        it in another way than in training, but for what is dropped and for running statistics.
        """
        trainer = self._unchanging
        with self._not_training():
            conditions = self._programs.of("eval_step", self._check_evaluates)
            with self._calling("eval_step()"):
                return trainer.eval_step(batch, conditions)

    def evaluate(self, batches: Iterable[Mapping[str, Any]], metrics: Mapping[str, Metric]) -> dict[str, Tensor]:
        """Return the mean of each metric over all samples of some batches, float64, on every rank. Collective.

        batches: this dp rank's shares, as in `train_step`, of any number and size: `eval_sampler` gives each sample to
        one rank, once. metrics: functions of (outputs of the model, batch) that return a value of each sample, a tensor
        [samples, …]. They are traced like the model; so are the numbers that they read.

        The values are those of one process, summed in float64 in the order of the samples. Raises InputsError or
        UnsupportedOp for a metric that is no value of each sample, PlanError for outputs that the plan's stages cannot
        compute.
        """
        values = self._values(batches, metrics)
        return {name: x.mean(0) for name, x in values.items()}

    def predict(self, batches: Iterable[Mapping[str, Any]], values: Mapping[str, Metric]) -> dict[str, Tensor]:
        """Return values of all samples of some batches, [samples, …] each, on the host of every rank. Collective.

        Arguments are those of `evaluate`. Samples are in the order of the batches, and within a batch in that of the
        dp ranks; with `eval_sampler`, that of the data.
        """
        found = self._values(batches, values)
        metrics = self._evaluator(values)[0]
        for name, x in found.items():
            if not metrics.found[name].dtype.is_floating_point and x.numel() and float(x.abs().max()) >= _EXACT:
                raise InputsError(
                    f"{name!r} has whole numbers of 2^53 and more, which are not returned exactly",
                    where=f"values[{name!r}]",
                    fix="return smaller numbers, such as indices, or two halves of each",
                )
        return {name: x.to(metrics.found[name].dtype) for name, x in found.items()}

    def eval_sampler(self, samples: int, batch: int | None = None) -> EvaluationSampler:
        """Return a sampler of this rank's share of all samples, each once, for `DataLoader(data, batch_sampler=…)`.

        samples: size of the data set. batch: size of a global batch. Default: the plan's.
        """
        return EvaluationSampler(samples, batch or self.plan.batch, self.dp_rank, self.dp_size)

    def _check_evaluates(self) -> Conditions:
        self._check_model()
        return check_evaluates(self._source)

    def _check_model(self) -> None:
        """Raise InputsError if the model has changed, but for its modes: an evaluation has its own."""
        self._planned.check(modes=False)

    def _values(self, batches: Iterable[Mapping[str, Any]], functions: Mapping[str, Metric]) -> dict[str, Tensor]:
        """Return the values of all samples, float64 [samples, …]."""
        with self._not_training():
            return self._values_of(batches, functions)

    def _values_of(self, batches: Iterable[Mapping[str, Any]], functions: Mapping[str, Metric]) -> dict[str, Tensor]:
        metrics, evaluator = self._evaluator(functions)
        found, left = list[Tensor](), iter(batches)
        batch = next(left, None)
        while True:
            with self._calling("evaluate() or predict()"):
                rows = evaluator.rows(batch)
            if rows is None:
                break
            found.append(rows)
            batch = None if batch is None else next(left, None)
        if not found:
            raise InputsError("there is no sample to evaluate", where="batches", fix="give at least one batch")
        parts = torch.cat(found).split([metrics.found[name].width for name in metrics.functions], 1)
        named = zip(metrics.functions, parts, strict=True)
        return {name: part.reshape(len(part), *metrics.found[name].shape) for name, part in named}

    def _evaluator(self, functions: Mapping[str, Metric]) -> tuple[Metrics, Evaluator]:
        """Return the evaluation of some metrics on this rank. A collective the first time."""
        if not isinstance(functions, Mapping) or not functions or not all(map(callable, functions.values())):
            raise InputsError(
                "metrics are no mapping of functions", where="metrics", fix="give {'accuracy': lambda out, batch: …}"
            )
        trainer, key = self._unchanging, tuple((name, _identity(f)) for name, f in functions.items())
        if key not in self._evaluators:
            self._check_model()
            objective = self._source.objective
            made = self._programs.of(
                key, lambda: make_evaluation(self._source, self.plan, Metrics.of(objective, functions))
            )
            with self._calling("evaluate() or predict() of other metrics"):
                check_same_program(made.program.files, trainer.communicators)
                self._evaluators[key] = made.metrics, self._started(made)
        return self._evaluators[key]

    def _started(self, made: EvaluationProgram) -> Evaluator:
        trainer, layout, model = self._running, made.layout, made.source.model
        c = trainer.communicators
        with torch.device("meta"):
            axes = stage_axes(layout, c.cp, c.ep, c.dp)
            held = layout.mesh.stages_of(c.stage)
            stages: list[Stage] = [
                load_stage(made.program, index)(Axis(c.tp), trainer.dropout, **axes) for index in held
            ]

        def values(names: Sequence[str]) -> dict[str, Tensor]:
            stored = {n: self._weights[n].whole() for n in names if self._weights is not None and n in self._weights}
            stored |= {n: x for n, x in self._unread.items() if n in names and not x.is_meta}
            rest = [n for n in names if n not in stored]
            return {**values_for(model, rest, self._seed, named_values(made.source)), **stored}

        shared = frozenset(made.source.folded.traced.buffers.values())
        return Evaluator(stages, layout, trainer, made.metrics.width, values, shared, self._check_model)


@dataclass(frozen=True, eq=False)
class _Same:
    """An object by its identity, which is kept alive so that no other object takes its place."""

    held: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.held is self.held

    def __hash__(self) -> int:
        return id(self.held)


def _identity(metric: Any) -> Hashable:
    """Return a key of a metric: equal if a trace would be, as of a lambda made in each epoch."""
    top = functions_of(metric)
    reader = Reader(top)
    read = [*reader.of_functions(metric)]
    roots = [each.value for each in read if isinstance(each.value, nn.Module)]
    modules = dict.fromkeys(m for root in (metric, *roots) if isinstance(root, nn.Module) for m in root.modules())
    names = names_in((*reader.functions.values(), *methods_of(modules)))
    read += (each for i, module in enumerate(modules) for each in reader.of_module(str(i), module, names))
    read += reader.of_functions(None)
    codes = tuple(f.__code__ for f in (*top, *reader.functions.values()))
    own = None if isinstance(metric, FunctionType | MethodType | partial) else _Same(metric)
    return own, codes, tuple((each.name, _noted(each.value)) for each in read)


def _noted(value: Any) -> Hashable:
    if isinstance(value, TensorValue):
        return _Same(value.of), value.key
    if isinstance(value, MethodType):
        return _Same(value.__self__), _noted(value.__func__)
    if isinstance(value, FunctionType):
        return value.__code__
    if isinstance(value, partial):  # whose arguments are read values of their own
        return None
    return _Same(value) if isinstance(value, nn.Module) or callable(value) else repr(value)
