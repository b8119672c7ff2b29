"""The objective of an evaluation: metrics of a model's outputs, with a value of each sample.

    batch ──► model ──► outputs ──► metric_i(outputs, batch) ──► [samples, …]
                                                                      └─► rows: all metrics of a sample, float64

Traced, such a graph ends with the rows of its samples in place of a loss. What holds for losses holds for metrics: the
proof that samples stay apart, and the splits over tp and cp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from autoptd.errors import InputsError
from autoptd.passes.trace.loss import Objective

Metric = Callable[[Any, Mapping[str, Any]], Tensor]


@dataclass(frozen=True)
class MetricValue:
    """Type and shape of one metric's value of a sample."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def width(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Metrics(Objective):
    """Metrics in place of a loss. `found`: what the traced ones return, by name; the trace fills it in."""

    functions: Mapping[str, Metric] = field(default_factory=dict)
    found: dict[str, MetricValue] = field(default_factory=dict, compare=False)

    @staticmethod
    def of(objective: Objective, functions: Mapping[str, Metric]) -> Metrics:
        """Return metrics of the batches that an objective's loss takes."""
        first = next(iter(functions.values()))
        return Metrics(first, targets=objective.targets, nest=objective.nest, functions=dict(functions))

    @property
    def width(self) -> int:
        """Numbers in the row of a sample."""
        return sum(value.width for value in self.found.values())

    def of_outputs(self, out: Any, batch: Mapping[str, Tensor], loss: Callable[..., Tensor] | None) -> Tensor:
        """Return the rows of a batch's samples, float64 [samples, width]. Raises InputsError naming a wrong metric."""
        self.found.clear()
        given, rows = self.nest.nested(batch), list[Tensor]()
        for name, metric in self.functions.items():
            value = metric(out, given)
            _check(name, value, rows)
            self.found[name] = MetricValue(value.dtype, tuple(int(n) for n in value.shape[1:]))
            rows.append(value.detach().to(torch.float64).reshape(value.shape[0], self.found[name].width))
        return rows[0] if len(rows) == 1 else torch.cat(rows, 1)


def _check(name: str, value: object, rows: list[Tensor]) -> None:
    where = f"metrics[{name!r}]"
    if not isinstance(value, Tensor):
        raise InputsError(
            f"the metric {name!r} returned {type(value).__name__}, not a tensor",
            where=where,
            fix="return a tensor with one value of each sample, [samples, …], without .item() or numpy",
        )
    if value.is_complex() or value.ndim == 0:
        what = "complex numbers" if value.is_complex() else "one number for all samples"
        raise InputsError(
            f"the metric {name!r} returned {what}",
            where=where,
            fix="return one value of each sample, [samples, …]: reduce over all dims but the first, as by .mean(-1); "
            "the mean over samples is taken for you",
        )
    if not all(isinstance(n, int) for n in value.shape[1:]) or (
        rows and not statically_known_true(value.shape[0] == rows[0].shape[0])
    ):
        raise InputsError(
            f"the metric {name!r} returned {list(map(str, value.shape))}: not a fixed number of values of each sample",
            where=where,
            fix="return [samples, …] whose other dims do not depend on the batch: sum over tokens, and return the "
            "number of tokens as another metric",
        )
