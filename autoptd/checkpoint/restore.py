"""Read a checkpoint into a running rank, whatever plan wrote it."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autoptd.checkpoint import contents, dcp, folder
from autoptd.checkpoint.entries import COUNTS, MOMENTS, Entry, model_entries, optimizer_entry
from autoptd.checkpoint.files import ANOTHER
from autoptd.checkpoint.index import Index
from autoptd.checkpoint.progress import check_optimizer, read_progress
from autoptd.cost_models.complaints import brief
from autoptd.errors import CheckpointError
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.trainer import Trainer

_SHOWN = 12  # tensors named in an error


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
    known = contents.index_of(where, manifest)
    entries = list(model_entries(trainer, still))
    _check_shapes(where, _wanted(trainer, still), known)
    progress = read_progress(where, manifest)
    if missing := [name for name in others if name not in progress["others"]]:
        known_others = brief(", ".join(map(ascii, progress["others"])) or "none")
        raise CheckpointError(
            f"the checkpoint holds no state of {', '.join(missing)}", where=str(where), fix=f"it has: {known_others}"
        )
    if optimizer:
        check_optimizer(where, progress, trainer.optimizer)
        _check_moments(where, known, _wanted(trainer, ()))
        states = _states(trainer, known)
        _check_same_kept(where, states, trainer)
        entries += [entry for found in states.values() for entry in found.values()]
    _check_types(where, entries, known, trainer)
    trainer.settle()
    dcp.read(where, known, entries, group)
    _report(where, entries, manifest, trainer.communicators)
    if optimizer:
        _fill_optimizer(trainer, states, progress["optimizer"]["groups"])
    trainer.take_pieces()
    return progress


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
    contents.check_listed(where, manifest, folder.PROGRESS)
    wrong = _damaged(where, manifest, c)
    first = _first_of_all(wrong[0][0] if wrong else len(names), len(names), c)
    if first < len(names):
        text = next((text for place, text in wrong if place == first), f"{names[first]} is missing or damaged")
        raise CheckpointError(text, where=str(where), fix=ANOTHER)


def _first_of_all(mine: int, count: int, c: Communicators) -> int:
    """The lowest number of all ranks; `count` where nobody has a lower one."""
    worst = torch.tensor([count - mine], dtype=torch.int64, device=c.device)
    return count - int(c.world.all_reduce(worst, "max"))


def _wanted(trainer: Trainer, still: Collection[str]) -> dict[str, tuple[int, ...]]:
    """Of the whole model, not of this rank: what is missing is then refused by all ranks, and nobody waits for one."""
    layout = trainer.layout
    specs = {**layout.parameters, **layout.buffers}
    return {name: tuple(spec.shape) for name, spec in specs.items() if spec.trainable or name in still}


def _check_shapes(where: Path, wanted: Mapping[str, tuple[int, ...]], known: Index) -> None:
    wrong = []
    for name, shape in wanted.items():
        key = f"model.{name}"
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            wrong.append(f"{name}: not in it" + (f"; it has {near[0].removeprefix('model.')}" if near else ""))
        elif known[key].shape != shape:
            wrong.append(f"{name}: {list(known[key].shape)} in it, {list(shape)} in the model")
    if wrong:
        more = [f"and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
        lines = [str(where), *wrong[:_SHOWN], *more]
        raise CheckpointError("the checkpoint is of another model", where="\n".join(lines), fix="load it there")


def _check_moments(where: Path, known: Index, trained: Mapping[str, tuple[int, ...]]) -> None:
    """Moments have their parameter's shape, counts are one number."""
    for key, saved in known.items():
        kind, _, rest = key.partition(".")
        name = rest.rpartition(".")[0]
        if kind in (MOMENTS, COUNTS) and name in trained:
            shape = trained[name] if kind == MOMENTS else ()
            if saved.shape != shape or saved.dtype.is_complex:
                told = f"{key} is {saved.dtype} of shape {list(saved.shape)}, not real numbers of {list(shape)}"
                raise CheckpointError(told, where=str(where), fix=ANOTHER)


def _check_types(where: Path, entries: Collection[Entry], known: Index, trainer: Trainer) -> None:
    """Numbers are read as the type that they were saved in, or a wider one; what is not trained may be rounded too."""
    trained = {piece.name for piece in trainer.pieces}
    wrong = []
    for entry in entries:
        kind, _, name = entry.key.partition(".")
        saved, mine = known[entry.key].dtype, entry.flat.dtype
        floats = saved.is_floating_point and mine.is_floating_point
        rounded = name in trained and floats and torch.promote_types(saved, mine) != mine
        if kind == "model" and saved != mine and (rounded or not floats):
            wrong.append(f"{entry.key}: {saved} in it, {mine} in the model")
    _refuse_together(where, "the checkpoint has tensors of other types", wrong, trainer.communicators)


def _check_same_kept(where: Path, states: Mapping[int, Mapping[str, Entry]], trainer: Trainer) -> None:
    """An optimizer keeps the same for all parameters of a group, or nothing for one that it never stepped."""
    place_of = {id(trainer.pieces[place].param): place for place in states}  # a group may be of others, or of none
    wrong = []
    for group in trainer.optimizer.param_groups:
        places = [place_of[id(p)] for p in group["params"] if id(p) in place_of]
        kept = {place: set(states[place]) for place in places}
        whole = set().union(*kept.values())
        for place, leaves in kept.items():
            wrong += [f"{trainer.pieces[place].name}: no {leaf} in it" for leaf in sorted(whole - leaves)]
    _refuse_together(where, "the checkpoint lacks state of the optimizer", wrong, trainer.communicators)


def _refuse_together(where: Path, what: str, wrong: list[str], c: Communicators) -> None:
    """Raise CheckpointError on every rank if something is wrong on one."""
    if _first_of_all(0 if wrong else 1, 1, c) == 0:
        more = [f"and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
        lines = [str(where), *(wrong[:_SHOWN] or ["on another rank"]), *more]
        raise CheckpointError(what, where="\n".join(lines), fix=ANOTHER)


def _report(where: Path, entries: Collection[Entry], manifest: Mapping[str, Any], c: Communicators) -> None:
    """Warn of what nobody verified, and of parameters and moments on this rank that are not finite."""
    if c.rank == 0 and (told := contents.unverified(manifest)):
        warnings.warn(f"{where}: {told}", stacklevel=6)
    if wrong := [text for entry in entries if (text := contents.not_finite(entry.key, entry.flat, manifest))]:
        more = f", and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        warnings.warn(f"{where}: {'; '.join(wrong[:_SHOWN])}{more}", stacklevel=6)


def _states(trainer: Trainer, known: Index) -> dict[int, dict[str, Entry]]:
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
            dtype = known[f"{kind}.{piece.name}.{leaf}"].dtype
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
