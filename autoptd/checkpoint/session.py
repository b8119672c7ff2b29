"""Saving and loading the state of a running rank: its parts, and how training resumes from it."""

from __future__ import annotations

import platform
import warnings
import weakref
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from autoptd.checkpoint import folder
from autoptd.checkpoint.entries import model_entries, optimizer_entries, unread_entry
from autoptd.checkpoint.restore import damage_here, restore
from autoptd.checkpoint.saver import Saver
from autoptd.errors import CheckpointError
from autoptd.plans.model import Plan
from autoptd.runtime.comm.handshake import differing
from autoptd.runtime.optimizers.several import described
from autoptd.runtime.trainer import Trainer

_LAST_SAVED: dict[Path, tuple[weakref.ref[Session], int]] = {}  # in each folder, by this process: by whom, what step


class Stateful(Protocol):
    """A further state to save, such as a learning-rate scheduler; the same on all ranks."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


class Session:
    """Checkpoints of a running trainer. Construction is a collective of all ranks of the world.

    untrained: names of frozen parameters and persistent buffers. described: the manifest's fields about the model.
    unread: the model's persistent tensors that no step reads, or meta ones without values; `load` replaces them.
    """

    def __init__(
        self,
        trainer: Trainer,
        plan: Plan,
        untrained: frozenset[str],
        described: Mapping[str, Any],
        unread: dict[str, Tensor] | None = None,
    ) -> None:
        self._trainer, self._plan, self._still, self._described = trainer, plan, untrained, described
        self._unread = {} if unread is None else unread
        self._saver = Saver()
        self._roots = set[Path]()  # folders that have this model's checkpoints alone

    def save(self, root: Path, step: int, others: Mapping[str, Stateful], keep: int | None) -> None:
        """Copy this rank's state and start writing it. `keep`: number of checkpoints to keep, None for all."""
        trainer = self._trainer
        self.wait()
        fix = "call save on all ranks after the same step, with one folder and the same others"
        self._saver.agree("the ranks do not save the same checkpoint", f"step {step}, {root}{_named(others)}", fix)
        root, leave = self._check_folder(root, step)
        trainer.settle()
        entries = [*model_entries(trainer, self._still), *optimizer_entries(trainer)]
        first = trainer.communicators.rank == 0
        entries += [unread_entry(name, x, first) for name, x in self._unread.items() if not x.is_meta]
        groups = [{k: v for k, v in group.items() if k != "params"} for group in trainer.optimizer.param_groups]
        names = [[*group] for group in trainer.update.groups]
        states = {name: other.state_dict() for name, other in others.items()}
        self._compare(states)
        progress = {
            "step": step,
            "batch": self._plan.batch,
            "random": {"seed": trainer.dropout.seed, "step": trainer.dropout.step},
            "optimizer": {"class": described(trainer.optimizer), "groups": groups, "names": names},
            "others": states,
            "loss_scale": trainer.finite.scaling.state_dict() if trainer.finite.scaling is not None else None,
        }
        manifest = {
            **self._described,
            "optimizer": described(trainer.optimizer),
            "versions": {
                "autoptd": version("autoptd"),
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        }
        self._saver.start(root, step, entries, progress, {folder.PLAN: self._plan.to_json()}, manifest, keep, leave)

    def _check_folder(self, given: Path, step: int) -> tuple[Path, frozenset[str]]:
        """Refuse the folder of another model or process, and warn of a checkpoint of this process that is replaced.

        Returns its absolute path, since the process may change its folder before the thread writes; and the names of
        checkpoints of other runs, which are not removed, on rank 0.
        """
        first = self._saver.rank == 0

        def check() -> tuple[Path, frozenset[str]]:
            root = given.absolute()
            if first and root not in self._roots:
                folder.check_model(root, self._described)
            return root, folder.of_other_runs(root) if first else frozenset()

        root, others = self._saver.on_all_ranks(f"save into {given}", check)
        if others and root not in self._roots:
            text = f"has {len(others)} checkpoint(s) of another run, from which this one did not resume"
            warnings.warn(f"{root} {text}: they are left there, whatever `keep` says", stacklevel=5)
        self._roots.add(root)
        writer, last = _LAST_SAVED.get(root, (None, -1))
        if first and last == step and writer is not None and writer() not in (None, self):
            text = "is replaced, which another Parallel of this process saved: give each a folder of its own"
            warnings.warn(f"{root}: the checkpoint of step {step} {text}", stacklevel=5)
        _LAST_SAVED[root] = weakref.ref(self), step
        return root, others

    def _compare(self, states: Mapping[str, Any]) -> None:
        """Warn on rank 0 of states that differ over the ranks: only its own are saved. A collective."""
        c = self._trainer.communicators
        for name in differing(states, c) if c.world.size > 1 else ():
            if c.rank == 0:
                text = f"the state of {name!r} in others differs over the ranks, and rank 0's alone is saved"
                warnings.warn(f"{text}: put what ranks have of their own into one state, by rank", stacklevel=5)

    def wait(self) -> None:
        self._saver.wait()

    def resume(self, root: Path, others: Mapping[str, Stateful]) -> tuple[int, list[str]]:
        """Load the newest undamaged checkpoint. Returns its step (0 if there is none), and the faults of newer ones.

        Also checks that all ranks can write to the folder, so that training does not start if saving would fail.
        """
        self.wait()
        self._saver.on_all_ranks(f"resume from {root}", lambda: folder.try_writing(root, self._saver.rank))
        folder.goes_on_from(root)
        names = [path.name for path in folder.newest_first(root)]
        self._agree_on(root, ", ".join(names) or "nothing")
        damaged: list[str] = []
        for name in names:
            mine = damage_here(root / name, self._trainer.communicators)
            faults = self._saver.reasons(mine)
            if not faults.count:
                return self.load(root / name, others, optimizer=True), damaged
            texts = [text for _, text in faults.first] + faults.more()
            damaged.append(f"{root / name}: {'; '.join(texts)}")
        if damaged:
            fix = "start a new run in another folder"
            raise CheckpointError("all checkpoints are damaged", where="\n".join(damaged), fix=fix)
        return 0, damaged

    def _agree_on(self, path: Path, seen: str) -> None:
        """Raise CheckpointError on all ranks unless all see the same in a folder. A collective."""
        what = f"the ranks do not load the same from {path}"
        self._saver.agree(what, seen, "give the same arguments on all ranks, and a folder that all nodes share")

    def load(self, path: Path, others: Mapping[str, Stateful], *, optimizer: bool) -> int:
        """Load a checkpoint. Returns the step after which it was written."""
        self.wait()
        self._agree_on(path, f"{folder.described(path)}{_named(others)}{'' if optimizer else ', optimizer=False'}")
        changing = self._trainer.changing
        progress = restore(
            path,
            self._trainer,
            self._still,
            self._saver.group,
            optimizer=optimizer,
            others=others.keys(),
            unread=self._unread,
        )
        for name, other in others.items():
            other.load_state_dict(progress["others"][name])
        self._trainer.dropout.seed, self._trainer.dropout.step = (progress["random"][key] for key in ("seed", "step"))
        if self._trainer.finite.scaling is not None and progress.get("loss_scale") is not None:
            self._trainer.finite.scaling.load_state_dict(progress["loss_scale"])
        self._trainer.changing = changing and not optimizer
        folder.goes_on_from(path)
        before, now = progress.get("batch"), self._plan.batch
        if optimizer and before not in (None, now) and progress["step"] and self._trainer.communicators.rank == 0:
            text = f"it was trained in batches of {before} samples, and this plan's have {now}: step {progress['step']}"
            fix = f"start a sampler where its samples end, or state batch={before}"
            warnings.warn(f"{path}: {text} of a sampler is another place in the data; {fix}", stacklevel=5)
        return int(progress["step"])


def _named(others: Mapping[str, Stateful]) -> str:
    return f", others {', '.join(sorted(map(str, others)))}" if others else ""
