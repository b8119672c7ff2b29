"""The model of a command that only plans: its kept trace, or the module, loaded and traced."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from autoptd.models.load import Configuration, configuration_of
from autoptd.trace_cache.folder import TraceFolder, default_folder

if TYPE_CHECKING:
    from torch import nn

    from autoptd.compile.traced import TracedModel
    from autoptd.progress import Progress
    from autoptd.trace_cache.cached import TraceEntry


class ModelToPlan:
    """A model given by its name on the command line, and how to trace it. `name`: a short one."""

    name: str

    def __init__(self, given: str, *, seq: int | None, precision: str, loss_averaging: str, progress: Progress) -> None:
        """Find the kept trace, or load the model. Raises ModelError."""
        self._given, self._progress = given, progress
        self._how: dict[str, Any] = {"seq": seq, "precision": precision, "loss_averaging": loss_averaging}
        self._configuration = configuration_of(given)
        self._entry = self._entry_of(self._configuration)
        self._kept = None if self._entry is None else self._find(self._entry)
        if self._kept is not None and self._configuration is not None:
            self.name = self._configuration.name
        else:
            _, self.name = self._loaded

    def traced(self) -> TracedModel:
        """Return the traced model. Raises what tracing raises."""
        if self._kept is not None:
            return self._kept
        traced = self._trace()
        if self._entry is not None and configuration_of(self._given) == self._configuration:
            self._entry.keep(traced)
        return traced

    @cached_property
    def _loaded(self) -> tuple[nn.Module, str]:
        from autoptd.models.load import load_model

        with self._progress.stage("make the model, without weights"):
            return load_model(self._given)

    def _trace(self) -> TracedModel:
        model, _ = self._loaded
        import autoptd.api

        return autoptd.api.trace(model, progress=self._progress, **self._how)

    def _entry_of(self, configuration: Configuration | None) -> TraceEntry | None:
        """Return where the trace is kept; None for a model that is more than a configuration, or if none are kept."""
        folder = default_folder()
        if configuration is None or folder is None:
            return None
        from autoptd.trace_cache.cached import TraceEntry

        try:
            return TraceEntry(TraceFolder(folder), [configuration.text, configuration.called, self._how])
        except OSError:
            return None

    def _find(self, entry: TraceEntry) -> TracedModel | None:
        with self._progress.stage("look for a kept trace"):
            return entry.find(lambda: self._loaded[0], lambda samples: self._trace().for_batch(samples))
