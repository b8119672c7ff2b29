"""Read a checkpoint into a running rank, whatever plan wrote it."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field

from autoptd.checkpoint import dcp, folder
from autoptd.checkpoint.entries import COUNTS, MOMENTS, Entry, model_entries, optimizer_entry
from autoptd.cost_models.complaints import brief
from autoptd.errors import CheckpointError
from autoptd.runtime.comm import Communicators
from autoptd.runtime.trainer import Trainer

_SHOWN = 12  # tensors named in an error
Known = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def restore(
    path: Path,
    trainer: Trainer,
    still: Collection[str],
    group: dist.ProcessGroup | None,
    *,
    optimizer: bool,
    others: Collection[str] = (),
) -> dict[str, Any]:
    """Fill parameters and, if asked for, the optimizer's state; returns what `progress.pt` holds. A collective.

    others: names of states that it must hold as well. Everything is checked first, and nothing is written where
    something is wrong. Raises CheckpointError on every rank.
    """
    where = folder.find(path)
    manifest = folder.read_manifest(where)
    _check_files(where, manifest, trainer.communicators)
    known = dcp.shapes(where)
    entries = list(model_entries(trainer, still))
    _check_shapes(where, _wanted(trainer, still), known)
    progress = read_progress(where)
    if missing := [name for name in others if name not in progress["others"]]:
        known_others = ", ".join(progress["others"]) or "none"
        raise CheckpointError(
            f"the checkpoint holds no state of {', '.join(missing)}", where=str(where), fix=f"it has: {known_others}"
        )
    if optimizer:
        _check_optimizer(where, progress, trainer)
        states = _states(trainer, known)
        entries += [entry for found in states.values() for entry in found.values()]
    trainer.settle()
    dcp.read(where, entries, group)
    if optimizer:
        _fill_optimizer(trainer, states, progress["optimizer"]["groups"])
    trainer.take_pieces()
    return progress


class _Random(BaseModel):
    seed: int
    step: int


class _Optimizer(BaseModel):
    name: Annotated[str, Field(alias="class")]
    groups: list[dict[str, Any]]


class Progress(BaseModel):
    """What `progress.pt` holds: all that is no tensor of the model."""

    model_config = ConfigDict(strict=True)
    step: Annotated[int, Field(ge=0)]
    random: _Random
    optimizer: _Optimizer
    others: dict[str, Any]
    loss_scale: dict[str, Any] | None = None


def read_progress(where: Path) -> dict[str, Any]:
    """Raises CheckpointError."""
    path = where / folder.PROGRESS
    try:
        found = torch.load(path, weights_only=True)
    except (OSError, *dcp.UNREADABLE) as error:
        said = brief(ascii(str(error))[1:-1])
        raise CheckpointError(
            f"not readable: {type(error).__name__}: {said}", where=str(path), fix="load an older checkpoint"
        ) from error
    return folder.checked(found, Progress, path)


def damage_here(where: Path, c: Communicators) -> str:
    """What is wrong with a checkpoint, of the files that this rank reads, or nothing."""
    try:
        wrong = _damaged(where, folder.read_manifest(where), c)
    except CheckpointError as error:
        return f"{folder.MANIFEST}: {error.what}" if c.rank == 0 else ""
    return wrong[0][1] if wrong else ""


def _damaged(where: Path, manifest: Mapping[str, Any], c: Communicators) -> list[tuple[int, str]]:
    """Place and fault of every damaged file, of those that this rank reads."""
    return [
        (place, text)
        for place, name in enumerate(sorted(manifest["files"]))
        if place % c.world.size == c.world.rank and (text := folder.damage(where, name, manifest["files"][name]))
    ]


def _check_files(where: Path, manifest: Mapping[str, Any], c: Communicators) -> None:
    """Each rank reads some of the files; all of them name the first that is damaged."""
    names = sorted(manifest["files"])
    if lost := sorted({dcp.INDEX, folder.PROGRESS} - set(names)):
        fix = "load an older checkpoint: one of the other step-… folders"
        raise CheckpointError(f"files lacks {', '.join(lost)}", where=str(where / folder.MANIFEST), fix=fix)
    wrong = _damaged(where, manifest, c)
    worst = torch.tensor([len(names) - wrong[0][0] if wrong else 0], dtype=torch.int64, device=c.device)
    first = len(names) - int(c.world.all_reduce(worst, "max"))
    if first < len(names):
        text = next((text for place, text in wrong if place == first), f"{names[first]} is missing or damaged")
        raise CheckpointError(text, where=str(where), fix="load an older checkpoint: one of the other step-… folders")


def _wanted(trainer: Trainer, still: Collection[str]) -> dict[str, tuple[int, ...]]:
    """Of the whole model, not of this rank: what is missing is then refused by all ranks, and nobody waits for one."""
    layout = trainer.layout
    specs = {**layout.parameters, **layout.buffers}
    return {name: tuple(spec.shape) for name, spec in specs.items() if spec.trainable or name in still}


def _check_shapes(where: Path, wanted: Mapping[str, tuple[int, ...]], known: Known) -> None:
    wrong = []
    for name, shape in wanted.items():
        key = f"model.{name}"
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            wrong.append(f"{name}: not in it" + (f"; it has {near[0].removeprefix('model.')}" if near else ""))
        elif known[key][0] != shape:
            wrong.append(f"{name}: {list(known[key][0])} in it, {list(shape)} in the model")
    if wrong:
        more = [f"and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
        lines = [str(where), *wrong[:_SHOWN], *more]
        raise CheckpointError("the checkpoint is of another model", where="\n".join(lines), fix="load it there")


def _check_optimizer(where: Path, progress: Mapping[str, Any], trainer: Trainer) -> None:
    saved, mine = progress["optimizer"], type(trainer.optimizer).__name__
    skip = "load it with optimizer=False to take the parameters alone"
    if saved["class"] != mine:
        raise CheckpointError(f"the checkpoint was trained by {saved['class']}, not {mine}", where=str(where), fix=skip)
    if len(saved["groups"]) != len(trainer.optimizer.param_groups):
        raise CheckpointError(
            f"the checkpoint has {len(saved['groups'])} parameter groups, not {len(trainer.optimizer.param_groups)}",
            where=str(where),
            fix="give the same parameter_groups, or " + skip,
        )


def _states(trainer: Trainer, known: Known) -> dict[int, dict[str, Entry]]:
    """By piece, empty tensors for all that the optimizer kept of it."""
    kept: dict[str, list[tuple[str, str]]] = {}
    for key in known:
        kind, _, rest = key.partition(".")
        if kind in (MOMENTS, COUNTS):
            name, _, leaf = rest.rpartition(".")
            kept.setdefault(name, []).append((kind, leaf))
    found: dict[int, dict[str, Entry]] = {}
    for place, piece in enumerate(trainer.pieces):
        for kind, leaf in kept.get(piece.name, ()):
            dtype = known[f"{kind}.{piece.name}.{leaf}"][1]
            empty = torch.zeros((), dtype=dtype) if kind == COUNTS else torch.zeros_like(piece.param.detach())
            found.setdefault(place, {})[leaf] = optimizer_entry(trainer, piece, leaf, empty)
    return found


def _fill_optimizer(trainer: Trainer, states: Mapping[int, Mapping[str, Entry]], groups: list[dict[str, Any]]) -> None:
    """Through the optimizer's own way of taking state over, which knows where each value belongs."""
    optimizer = trainer.optimizer
    state = optimizer.state_dict()
    numbers = {
        id(param): number
        for group, own in zip(optimizer.param_groups, state["param_groups"], strict=True)
        for param, number in zip(group["params"], own["params"], strict=True)
    }
    state["state"] = {
        numbers[id(trainer.pieces[place].param)]: {
            leaf: entry.flat.view(()) if entry.key.startswith(f"{COUNTS}.") else entry.flat
            for leaf, entry in found.items()
        }
        for place, found in states.items()
    }
    state["param_groups"] = [
        {**saved, "params": own["params"]} for saved, own in zip(groups, state["param_groups"], strict=True)
    ]
    optimizer.load_state_dict(state)
