"""The traced model: its graph with the loss, normalised and folded into segments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import sympy
from torch import nn

from autoptd.errors import AutoptdError
from autoptd.layout.size_conditions import SAMPLES, Conditions, all_hold
from autoptd.passes.evaluation.difference import Difference, differ_for_one
from autoptd.passes.fold import Folded
from autoptd.passes.trace.loss import Objective
from autoptd.passes.trace.traced import SEQUENCE, Traced
from autoptd.search.sharding.cache import ShardingCache


@dataclass(frozen=True)
class TracedModel:
    """A traced and folded model: the result of `autoptd.trace`, which `plan` and `parallelize` take for the module.

    It serves many plans: `known` caches the results of one search (legal strategies, sharded models) for the next,
    keyed by everything that they depend on. The module must not change in between.
    """

    module: Callable[[], nn.Module] = field(compare=False, repr=False)  # loads it, if that was not needed yet
    name: str
    folded: Folded
    graph_hash: str
    sizes: Mapping[sympy.Symbol, int]  # of every symbol except b
    precision: str
    known: ShardingCache = field(compare=False, repr=False)
    again: Callable[[int], TracedModel] = field(compare=False, repr=False)  # trace it with so many samples
    notes: tuple[str, ...] = ()  # notes about the given module, for its plans
    # trace it in eval mode with metrics as its objective; find where its loss in eval mode parts from that of a program
    # in which nothing is dropped. None if the trace was read from a file
    evaluated: Callable[[Objective], TracedModel] | None = field(default=None, compare=False, repr=False)
    parted: Callable[[], Difference | Conditions] | None = field(default=None, compare=False, repr=False)

    def for_batch(self, samples: int) -> TracedModel:
        """Return the model as its code runs for a step of so many samples: traced again if it branches on them.

        Raises what `read_model` does.
        """
        if all_hold(self.folded.traced.conditions, samples):
            return self
        return self.again(samples)

    def for_one(self, traces: Callable[[], tuple[Traced, Traced]]) -> TracedModel:
        """Return the model for a step of one sample too, if its code computes the same there whatever branch it takes.

        traces: for any number of samples, and for one alone.
        """
        traced = self.folded.traced
        with suppress(AutoptdError):  # there is no trace for one sample
            if not differ_for_one(*traces()):
                conditions = tuple(c.or_for(1) if c.names == {SAMPLES} else c for c in traced.conditions)
                folded = replace(self.folded, traced=replace(traced, conditions=conditions))
                return replace(self, folded=folded, known=ShardingCache(folded))
        return self

    @property
    def model(self) -> nn.Module:
        """The module, with that of the loss if it is trained."""
        return self.module()

    @property
    def objective(self) -> Objective:
        """The loss, and how it is called."""
        return self.folded.traced.objective

    @property
    def loss_averaging(self) -> str:
        """The samples that a loss which is no sum over samples is computed from, one of `AVERAGINGS`."""
        return self.folded.traced.averaging

    @property
    def updates(self) -> tuple[str, ...]:
        """The buffers that a step updates, sorted."""
        return tuple(sorted(self.folded.traced.buffers[name] for name in self.folded.updates.values))

    @property
    def seq(self) -> int | None:
        """Tokens of a sample; None if the model has no sequence."""
        return self.sizes.get(SEQUENCE)


def check_loss(source: TracedModel, dp: object, microbatches: float) -> None:
    """Raise the error recorded at tracing for a loss that cannot be split, unless dp and microbatches are 1."""
    refused = source.folded.loss_form.refused
    if refused and not (dp == 1 and microbatches == 1):
        raise refused[0]
