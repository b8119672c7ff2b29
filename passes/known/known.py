"""All replacements of what models call, while a model is traced, and while it is run as verification's reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from autoptd.passes.known.delta_rule import DELTA_RULES
from autoptd.passes.known.flex_attention import dense_flex_attention, eager_flex_attention
from autoptd.passes.known.gated_recurrences import GATED
from autoptd.passes.known.numpy_functions import NUMPY
from autoptd.passes.known.python_random import fractions_drawn_by_torch
from autoptd.passes.known.recurrence import layer_by_layer
from autoptd.passes.known.replace import (
    casts_that_change_nothing,
    checks_without_reading,
    replaced_functions,
    run_as_eager,
)
from autoptd.passes.known.scans import SCANS
from autoptd.passes.known.seeds import refuse_seeds


@contextmanager
def written_to_trace(model: nn.Module) -> Iterator[None]:
    """Let the model call functions that can be traced, and whose random numbers are keyed."""
    with (
        replaced_functions(model, NUMPY | SCANS | GATED | DELTA_RULES),
        casts_that_change_nothing(),
        checks_without_reading(),
        dense_flex_attention(),
        refuse_seeds(model),
        run_as_eager(),
        _drawn(model),
    ):
        yield


@contextmanager
def drawn_as_traced(model: nn.Module) -> Iterator[None]:
    """Let the model run as it is written, but draw what its trace draws."""
    with replaced_functions(model, NUMPY), eager_flex_attention(), _drawn(model):
        yield


@contextmanager
def _drawn(model: nn.Module) -> Iterator[None]:
    with fractions_drawn_by_torch(model), layer_by_layer():
        yield
