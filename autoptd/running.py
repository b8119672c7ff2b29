"""The state that the parts of `Parallel` share: its plan, its model, and the trainer of a running rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any

from torch import Tensor

from autoptd.boundary import public_methods
from autoptd.compile.traced import TracedModel
from autoptd.errors import RuntimeFault
from autoptd.layout.layout import Layout
from autoptd.planned_model import PlannedModel
from autoptd.plans.model import Plan
from autoptd.runtime.comm.interfaces import Watcher
from autoptd.runtime.faults.rank_status import PendingComm
from autoptd.runtime.initialise import values_for
from autoptd.runtime.lazy_tensor import Stored
from autoptd.runtime.report import Meter
from autoptd.runtime.trainer import Trainer


@public_methods
class RunningRank(ABC):
    """A planned model, and its trainer once this rank runs."""

    plan: Plan
    _source: TracedModel
    _planned: PlannedModel
    _weights: Mapping[str, Stored] | None
    _seed: int
    _meter: Meter
    _evaluators: dict[Any, Any]

    @property
    @abstractmethod
    def layout(self) -> Layout:
        """Mesh, microbatches, and the placement of each tensor."""

    @property
    @abstractmethod
    def _running(self) -> Trainer: ...

    @property
    def _unchanging(self) -> Trainer:
        """The trainer between steps. Raises RuntimeFault if a step or a load ended while it changed parameters."""
        trainer = self._running
        if trainer.changing:
            raise RuntimeFault(
                f"step {self.step + 1} was ended while it changed parameters and buffers, by an interrupt, an error, "
                "or a load: some are new, others of the step before",
                where=f"rank {trainer.communicators.rank}",
                fix="load a checkpoint (load or resume); stop_request() ends a run between steps",
            )
        return trainer

    @property
    def _watch(self) -> Watcher:
        return self._running.communicators.watch

    @property
    def rank(self) -> int:
        """Rank of this process in the world."""
        return self._running.communicators.rank

    @property
    def dp_rank(self) -> int:
        """Index of this rank's share of the global batch, 0 to `dp_size` - 1."""
        return self._running.communicators.dp.rank

    @property
    def dp_size(self) -> int:
        """Number of shares that the global batch is split into."""
        return self.plan.mesh.dp

    @property
    def step(self) -> int:
        """Number of steps done."""
        return self._meter.step

    @cached_property
    def _unread(self) -> dict[str, Tensor]:
        """The model's persistent tensors that no step reads and no rank holds, whole; on meta where none has values.

        They are those of the weights, else the model's own, and those of a checkpoint once one is loaded.
        """
        stored, aliases = self._weights or {}, self._source.folded.traced.aliases
        held = {*self.layout.parameters, *self.layout.buffers, *aliases}
        names = self._source.model.state_dict(keep_vars=True)
        own = {name: x.detach() for name, x in names.items() if isinstance(x, Tensor) and name not in held}
        return {name: stored[name].whole().to(x.dtype) if name in stored else x for name, x in own.items()}

    def _unheld(self, names: Collection[str]) -> dict[str, Tensor]:
        """Return whole tensors of the model that no rank holds, by name."""
        found = {name: x for name in names if (x := self._unread.get(name)) is not None and not x.is_meta}
        return {**values_for(self._source.model, [n for n in names if n not in found], self._seed), **found}

    def _not_training(self) -> AbstractContextManager[None]:
        """Return a context whose time does not count as that of steps in `Parallel.report`."""
        return self._meter.paused(self._running.communicators.device)

    @contextmanager
    def _calling(self, method: str) -> Iterator[None]:
        """Watch a method that all ranks call, in the same order as others."""
        watch = self._watch
        with watch, watch.status.within(method):
            yield

    @contextmanager
    def _with_all(self, doing: str, method: str = "") -> Iterator[None]:
        """Watch a collective outside of training steps, with no time limit."""
        watch = self._watch
        watch.status.leave(doing)
        try:
            with self._calling(method), PendingComm(watch.status, "with", ()):
                yield
        finally:
            watch.status.leave()
