"""Form of a forward pass that reads sums over the batch: which there are, and what stands in for them in evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import fx

from autoptd.errors import UnsupportedOp

Evaluation = Literal["running", "batch", "unknown"]
IN_EVALUATION = "in evaluation"  # in the meta of a sum over samples: its `Evaluation`
ORDER: tuple[Evaluation, ...] = ("running", "batch", "unknown")  # the last one that any sum has is that of a model
_KEY = "batch_statistics"  # in the graph's meta


@dataclass(frozen=True)
class BatchStatistics:
    """Sums over the batch that samples read. `op`, `where`: the user's op that has the first of them, and its place.

    `evaluation`: what samples read in evaluation: "running" statistics; those of the evaluated "batch", as of norms
    without running ones; or "unknown", as the eval mode of a module that computes them by hand was not traced.
    `replaced`: running statistics stand in for some there, if only for those that are known from inputs alone.
    """

    count: int = 0
    op: str = ""
    where: str = ""
    evaluation: Evaluation = "running"
    replaced: bool = False

    @property
    def over_dp(self) -> bool:
        """Return whether the forward pass is another in evaluation, or sums over dp ranks."""
        return self.count > 0 or self.replaced

    def refusal(self) -> UnsupportedOp:
        """Return the error for several microbatches in a step."""
        return UnsupportedOp(
            f"{self.op} normalises samples by statistics over the batch: with several microbatches per step, those of "
            "the first would need samples of the others",
            where=self.where,
            fix="use one microbatch per step, fix={'micro': batch / dp}, or leave micro out; or use GroupNorm or "
            "LayerNorm; or put it in eval mode, where it uses its running statistics",
        )


def batch_statistics(graph: fx.GraphModule) -> BatchStatistics:
    """Return the statistics of a normalised graph."""
    found = graph.meta.get(_KEY)
    return found if isinstance(found, BatchStatistics) else BatchStatistics()


def store(graph: fx.GraphModule, statistics: BatchStatistics) -> None:
    graph.meta[_KEY] = statistics
