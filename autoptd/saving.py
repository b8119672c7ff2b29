"""Checkpoints and weights of a running `Parallel`: saving, loading, resuming, and weights for other programs."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from autoptd.boundary import public_methods
from autoptd.errors import CheckpointError
from autoptd.running import RunningRank
from autoptd.stopping import SIGNALS, StopRequest
from autoptd.text import printable

if TYPE_CHECKING:
    from autoptd.checkpoint.session import Session, Stateful


@public_methods
class Saving(RunningRank):
    """The part of `Parallel` that writes and reads files. Every method is collective."""

    def save(
        self,
        directory: str | os.PathLike[str],
        *,
        others: Mapping[str, Stateful] | None = None,
        keep: int | None = None,
        wait: bool = True,
    ) -> None:
        """Write a checkpoint `step-…` into a folder shared by all ranks, and point `latest` to it. Collective.

        It holds parameters, optimizer state, random state, step and plan; `load` reads it under any other plan.

        others: further objects with `state_dict` and `load_state_dict`, by name, such as learning-rate schedulers.
        keep: number of checkpoints to keep, with this one; older ones are removed. None keeps all.
        wait: return once the checkpoint is durable. False: return once this rank's share is copied, and write during
        training; a failure is then raised by the next `save` or by `finish_saving`.
        Raises CheckpointError on every rank.
        """
        if keep is not None and not (isinstance(keep, int) and keep >= 1):
            fix = "give None to keep all checkpoints, or a number from 1 that includes the new one"
            raise CheckpointError(f"keep={keep!r} is no number of checkpoints", where="keep", fix=fix)
        self._unchanging  # noqa: B018  raises RuntimeFault
        with self._with_all(f"saving step {self.step}", "save()"):
            self._session.save(Path(directory), self.step, others or {}, keep)
            if wait:
                self._session.wait()

    def finish_saving(self) -> None:
        """Wait until the last checkpoint is durable. Collective. Raises CheckpointError if it cannot be written."""
        with self._with_all("saving"):
            self._session.wait()

    def load(
        self,
        path: str | os.PathLike[str],
        *,
        others: Mapping[str, Stateful] | None = None,
        optimizer: bool = True,
    ) -> int:
        """Load a checkpoint written under any plan, and return its step. Collective.

        path: the folder that was given to `save`, whose `latest` is loaded, or one `step-…` folder in it.
        others: objects to restore, by the names that `save` was given.
        optimizer: False leaves out the optimizer's state. Step, seed and loss scale are still the checkpoint's.
        Files are checked against their digests first. Raises CheckpointError on every rank.
        """
        with self._with_all("loading", "load()"):
            self._meter.step = self._session.load(Path(path), others or {}, optimizer=optimizer)
        self._evaluators.clear()  # they have copies of what no step reads
        return self.step

    def resume(self, directory: str | os.PathLike[str], *, others: Mapping[str, Stateful] | None = None) -> int:
        """Load the newest complete checkpoint of a folder, if any, and return its step; 0 if there is none. Collective.

        Call it before the training loop, so that the launcher can restart the script at any time. Damaged checkpoints
        are named in a warning and skipped. Raises CheckpointError on every rank if all of them are damaged, belong to
        another model, or the ranks do not share a folder that they can write to; `load` needs read access only.
        """
        with self._with_all("resuming", "resume()"):
            step, damaged = self._session.resume(Path(directory), others or {})
        self._evaluators.clear()
        if damaged and self.rank == 0:
            left_out = printable("; ".join(damaged), keep="")
            warnings.warn(f"skipped {left_out}; resuming from step {step}", stacklevel=2)
        self._meter.step = step
        return step

    def stop_request(self, after_s: float | None = None, *, signals: Iterable[str] = SIGNALS) -> StopRequest:
        """Handle signals from now on, and return a request on which all ranks agree: save and leave once it is `asked`.

        after_s: seconds from now after which it is asked, such as those of the scheduler's limit less those of a save.
        signals: names of those that ask; a second one of the same name does what it did before.
        Raises RuntimeFault for an unknown signal, or outside the main thread.
        """

        def agree(number: int) -> int:
            communicators = self._running.communicators
            with self._with_all("asking whether to stop", "asked()"):
                most = torch.tensor([float(number)], device=communicators.device)
                return int(communicators.world.all_reduce(most, "max"))

        return StopRequest(agree, signals, after_s)

    def export_weights(self, directory: str | os.PathLike[str]) -> None:
        """Write the model's weights into a new folder of safetensors, in the types in which they are trained.

        `from_pretrained(directory)` loads a model of transformers. Any other takes the tensors of `model.safetensors`,
        or of the files that `model.safetensors.index.json` names, by `load_state_dict`. Trained tensors of the loss are
        in `loss.safetensors`. Rank 0 writes, and holds the tensors of one file at a time, at most 5 GB; the others hold
        one tensor. Collective. Raises CheckpointError on every rank.
        """
        from autoptd.checkpoint.huggingface import RunningWeights

        trainer, source, layout = self._unchanging, self._source, self.layout
        model, aliases = source.model, source.folded.traced.aliases
        config = getattr(model, "config", None)
        held = {**layout.parameters, **layout.buffers}
        sizes, loss = dict[str, int](), dict[str, str]()
        for name, x in model.state_dict(keep_vars=True).items():
            if not isinstance(x, Tensor):  # from `get_extra_state`
                continue
            spec = held.get(aliases.get(name, name))
            if source.objective.owns(name):
                loss[name] = name.removeprefix(f"{source.objective.child}.")
            elif name not in aliases or not hasattr(config, "to_dict"):  # transformers ties them again
                dtype = x.dtype if spec is None else spec.dtype or layout.dtype
                sizes[name] = x.numel() * dtype.itemsize

        def whole(name: str) -> Tensor:
            own = aliases.get(name, name)
            return trainer.whole(own) if own in held else self._unheld([name])[name]

        configurations = {}
        if config is not None and hasattr(config, "to_dict"):
            configurations["config.json"] = {**config.to_dict(), "dtype": str(layout.dtype).removeprefix("torch.")}
        generation = getattr(model, "generation_config", None)
        if generation is not None and hasattr(generation, "to_diff_dict"):
            configurations["generation_config.json"] = generation.to_diff_dict()
        with self._with_all("exporting weights", "export_weights()"):
            RunningWeights(trainer.communicators, whole).write(Path(directory), sizes, loss, configurations)

    @cached_property
    def _session(self) -> Session:
        from autoptd.checkpoint.session import Session

        model, layout = self._source.model, self.layout
        names = model.state_dict(keep_vars=True)
        trained = {name for name, spec in layout.parameters.items() if spec.trainable}
        held = {n: list(spec.shape) for n, spec in {**layout.parameters, **layout.buffers}.items() if n in names}
        config = getattr(model, "config", None)
        manifest = {
            "model": self.plan.model,
            "graph_hash": self.plan.graph_hash,
            "tensors": held | {name: list(x.shape) for name, x in self._unread.items()},
            "buffers": [name for name in (*layout.buffers, *self._unread) if name in names],
            "aliases": dict(self._source.folded.traced.aliases),
            "config": config.to_dict() if config is not None and hasattr(config, "to_dict") else None,
        }
        return Session(self._running, self.plan, frozenset(held.keys() - trained), manifest, self._unread)
