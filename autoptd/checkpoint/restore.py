"""Restoration of a running rank's state from a checkpoint, whatever plan wrote it."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autoptd.checkpoint import contents, dcp, folder
from autoptd.checkpoint.entries import COUNTS, MOMENTS, NUMBERS, Entry, model_entries, optimizer_entry, unread_entry
from autoptd.checkpoint.files import LOAD_OLDER
from autoptd.checkpoint.index import Index
from autoptd.checkpoint.progress import check_groups, check_optimizer, read_progress
from autoptd.checkpoint.state_parts import WITHIN, joined, made_in_a_step, parts
from autoptd.cost_models.complaints import brief
from autoptd.errors import CheckpointError
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.optimizers.step import Updated
from autoptd.runtime.trainer import Trainer

_SHOWN = 12  # tensors named in an error


def restore(
    path: Path,
    trainer: Trainer,
    untrained: Collection[str],
    group: dist.ProcessGroup | None,
    *,
    optimizer: bool,
    others: Collection[str] = (),
    unread: dict[str, Tensor] | None = None,
) -> dict[str, Any]:
    """Fill parameters and, if `optimizer`, the optimizer's state; returns the fields of `progress.pt`. A collective.

    others: names of further states that the checkpoint must hold. unread: the model's tensors that the plan does not
    hold, since no step reads them: those of the checkpoint replace them. Everything is checked before anything changes.
    Raises CheckpointError on all ranks if one finds a fault.
    """
    where = folder.find(path)
    manifest = folder.read_manifest(where)
    _check_files(where, manifest, trainer.communicators)
    known = contents.index_of(where, manifest)
    entries = list(model_entries(trainer, untrained))
    kept = {name: torch.empty_like(x, device="cpu") for name, x in (unread or {}).items() if f"model.{name}" in known}
    required = _required(trainer, untrained) | {name: tuple(x.shape) for name, x in kept.items()}
    _check_shapes(where, required, known)
    entries += [unread_entry(name, x, owned=False) for name, x in kept.items()]
    progress = read_progress(where, manifest)
    if missing := [name for name in others if name not in progress["others"]]:
        known_others = brief(", ".join(map(ascii, progress["others"])) or "none")
        raise CheckpointError(
            f"the checkpoint holds no state of {', '.join(missing)}", where=str(where), fix=f"it has: {known_others}"
        )
    if optimizer:
        check_optimizer(where, progress, trainer.optimizer)
        check_groups(where, progress, trainer.update.groups)
        _check_moments(where, known, trainer)
        states = _empty_states(trainer, known)
        made = _made(states, trainer)
        _check_states(where, states, made, trainer)
        entries += [entry for found in states.values() for entry in found.values()]
    _check_types(where, entries, known, trainer)
    trainer.settle()
    trainer.changing = True  # until the caller has restored everything else
    dcp.read(where, known, entries, group)
    _report(where, entries, manifest, trainer.communicators)
    left = [name for name in progress["others"] if name not in others]
    if left and optimizer and trainer.communicators.rank == 0:
        shown = brief(", ".join(map(ascii, left)))
        warnings.warn(f"{where}: the saved state of {shown} is not restored: give others=", stacklevel=5)
    if optimizer and trainer.communicators.rank == 0 and (names := _stepped(known) - _required(trainer, ()).keys()):
        shown = brief(", ".join(sorted(names)))
        warnings.warn(f"{where}: the optimizer's state of {shown} is not restored: frozen now", stacklevel=5)
    if optimizer:
        _fill_optimizer(trainer, states, made, progress["optimizer"]["groups"])
    trainer.take_pieces()
    if unread is not None:
        unread |= kept
    return progress


def damage_here(where: Path, c: Communicators) -> str:
    """Return the first fault among the files of a checkpoint that this rank verifies, or ""."""
    try:
        wrong = _damaged(where, folder.read_manifest(where), c)
    except CheckpointError as error:
        return f"{folder.MANIFEST}: {error.what}" if c.rank == 0 else ""
    return wrong[0][1] if wrong else ""


def _damaged(where: Path, manifest: Mapping[str, Any], c: Communicators) -> list[tuple[int, str]]:
    """Return number and fault of every damaged file. The ranks share out the files between them."""
    return [
        (number, text)
        for number, name in enumerate(sorted(manifest["files"]))
        if number % c.world.size == c.world.rank and (text := folder.damage(where, name, manifest["files"][name]))
    ]


def _check_files(where: Path, manifest: Mapping[str, Any], c: Communicators) -> None:
    """Raise CheckpointError on all ranks, naming the first damaged file, whichever rank verified it."""
    names = sorted(manifest["files"])
    contents.check_listed(where, manifest, folder.PROGRESS)
    wrong = _damaged(where, manifest, c)
    first = _first_of_all(wrong[0][0] if wrong else len(names), len(names), c)
    if first < len(names):
        text = next((text for number, text in wrong if number == first), f"{names[first]} is missing or damaged")
        raise CheckpointError(text, where=str(where), fix=LOAD_OLDER)


def _first_of_all(mine: int, count: int, c: Communicators) -> int:
    """Return the lowest number of all ranks, `count` at most. A collective."""
    worst = torch.tensor([count - mine], dtype=torch.int64, device=c.device)
    return count - int(c.world.all_reduce(worst, "max"))


def _required(trainer: Trainer, untrained: Collection[str]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the whole model's tensors, so that all ranks refuse a missing one and none waits."""
    layout = trainer.layout
    specs = {**layout.parameters, **layout.buffers}
    return {name: tuple(spec.shape) for name, spec in specs.items() if spec.trainable or name in untrained}


def _check_shapes(where: Path, required: Mapping[str, tuple[int, ...]], known: Index) -> None:
    saved = [key.removeprefix("model.") for key in known if key.startswith("model.")]
    wrong = [f"{name}: not in the model" for name in saved if name not in required]
    for name, shape in required.items():
        key = f"model.{name}"
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            wrong.append(f"{name}: not in it" + (f"; it has {near[0].removeprefix('model.')}" if near else ""))
        elif known[key].shape != shape:
            wrong.append(f"{name}: {list(known[key].shape)} in it, {list(shape)} in the model")
    if wrong:
        more = [f"and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
        lines = [str(where), *wrong[:_SHOWN], *more]
        fix = "load it with the model that it was saved from"
        raise CheckpointError("the checkpoint is of another model", where="\n".join(lines), fix=fix)


def _stepped(known: Index) -> set[str]:
    """Return the parameters whose optimizer state a checkpoint holds."""
    keys = (key.partition(".") for key in known)
    return {rest.rpartition(".")[0] for kind, _, rest in keys if kind in (MOMENTS, COUNTS, NUMBERS)}


def _check_moments(where: Path, known: Index, trainer: Trainer) -> None:
    """Raise CheckpointError unless counts are 0-dim, and the moments of elementwise updates like their parameters."""
    trained = _required(trainer, ())
    for key, saved in known.items():
        kind, _, rest = key.partition(".")
        name = rest.rpartition(".")[0]
        if kind in (MOMENTS, COUNTS, NUMBERS) and name in trained:
            shape = trained[name] if kind == MOMENTS else ()
            free = kind == MOMENTS and name in trainer.update.whole
            if (saved.shape != shape and not free) or saved.dtype.is_complex:
                what = f"{key} is {saved.dtype} of shape {list(saved.shape)}, not real numbers of shape {list(shape)}"
                raise CheckpointError(what, where=str(where), fix=LOAD_OLDER)


def _check_types(where: Path, entries: Collection[Entry], known: Index, trainer: Trainer) -> None:
    """Raise CheckpointError if a type differs, unless a floating-point tensor becomes wider or is not trained."""
    trained = {piece.name for piece in trainer.pieces}
    wrong = []
    for entry in entries:
        kind, _, name = entry.key.partition(".")
        saved, mine = known[entry.key].dtype, entry.flat.dtype
        floats = saved.is_floating_point and mine.is_floating_point
        rounded = name in trained and floats and torch.promote_types(saved, mine) != mine
        if kind == "model" and saved != mine and (rounded or not floats):
            wrong.append(f"{entry.key}: {saved} in it, {mine} in the model")
    _refuse_on_all_ranks(where, "the checkpoint has tensors of other types", wrong, trainer.communicators)


def _made(states: Mapping[int, Mapping[str, Entry]], trainer: Trainer) -> dict[int, dict[str, Any]]:
    """Return states that the optimizer makes, by a parameter's index, where a checkpoint has parts of states."""
    found = {}
    for i, leaves in states.items():
        if any(WITHIN in leaf for leaf in leaves):
            updated = trainer.update.updated[i]
            found[i] = made_in_a_step(trainer.optimizer, updated.param, trainer.layout.parameters[updated.name].shape)
    return found


def _check_states(
    where: Path, states: Mapping[int, Mapping[str, Entry]], made: Mapping[int, Mapping[str, Any]], trainer: Trainer
) -> None:
    """Raise CheckpointError unless parameters of a group have the same optimizer state, or none if never stepped.

    The state of whole parameters may depend on their shape. States in parts are as the optimizer makes them (`made`).
    """
    updated = trainer.update.updated
    places = {id(updated[i].param): i for i in states}  # a group may hold other parameters, or none of these
    wrong = []
    for group in trainer.optimizer.param_groups:
        alike: dict[object, list[int]] = {}
        for i in (places[id(p)] for p in group["params"] if id(p) in places):
            shape = trainer.layout.parameters[updated[i].name].shape
            alike.setdefault(shape if updated[i].piece is None else None, []).append(i)
        for found in alike.values():
            expected = set().union(*(states[i] for i in found))
            wrong += [
                f"{updated[i].name}: no {leaf} in it" for i in found for leaf in sorted(expected - set(states[i]))
            ]
    for i, state in made.items():
        held = [(leaf, entry.whole) for leaf, entry in sorted(states[i].items())]
        mine = sorted((leaf, tuple(getattr(value, "shape", ()))) for leaf, value in parts(state))
        if held != mine:
            both = (", ".join(f"{leaf} {list(shape)}" for leaf, shape in each) for each in (held, mine))
            wrong.append(f"{updated[i].name}: {' in it, '.join(both)} in the optimizer")
    _refuse_on_all_ranks(where, "the checkpoint lacks state of the optimizer", wrong, trainer.communicators)


def _refuse_on_all_ranks(where: Path, what: str, wrong: list[str], c: Communicators) -> None:
    """Raise CheckpointError on all ranks if one has found something wrong. A collective."""
    if _first_of_all(0 if wrong else 1, 1, c) == 0:
        more = [f"and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
        lines = [str(where), *(wrong[:_SHOWN] or ["on another rank"]), *more]
        raise CheckpointError(what, where="\n".join(lines), fix=LOAD_OLDER)


def _report(where: Path, entries: Collection[Entry], manifest: Mapping[str, Any], c: Communicators) -> None:
    """Warn of parts that could not be verified, and of parameters and moments on this rank that are not finite."""
    if c.rank == 0 and (text := contents.unverified(manifest)):
        warnings.warn(f"{where}: {text}", stacklevel=6)
    if wrong := [text for entry in entries if (text := contents.not_finite(entry.key, entry.flat, manifest))]:
        more = f", and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        warnings.warn(f"{where}: {'; '.join(wrong[:_SHOWN])}{more}", stacklevel=6)


def _empty_states(trainer: Trainer, known: Index) -> dict[int, dict[str, Entry]]:
    """Return zeros for the saved state of each parameter that is updated here, by its index and the state's key.

    Moments of the saved parameter's type follow the parameter, which may be wider here; all else keeps its own type.
    """
    saved: dict[str, list[tuple[str, str]]] = {}
    for key in known:
        kind, _, rest = key.partition(".")
        if kind in (MOMENTS, COUNTS, NUMBERS):
            name, _, leaf = rest.rpartition(".")
            saved.setdefault(name, []).append((kind, leaf))
    found: dict[int, dict[str, Entry]] = {}
    for i, updated in enumerate(trainer.update.updated):
        for kind, leaf in saved.get(updated.name, ()):
            held, like = known[f"{kind}.{updated.name}.{leaf}"], updated.param.detach()
            dtype = like.dtype if held.dtype == known[f"model.{updated.name}"].dtype else held.dtype
            if kind == NUMBERS:
                empty: Any = torch.zeros((), dtype=held.dtype).item()
            elif kind == COUNTS:
                empty = torch.zeros((), dtype=held.dtype)
            elif updated.piece is None:
                empty = torch.zeros(held.shape, dtype=dtype, device=like.device)
            else:
                empty = torch.zeros_like(like, dtype=dtype)
            found.setdefault(i, {})[leaf] = optimizer_entry(trainer, updated, leaf, empty)
    return found


def _fill_optimizer(
    trainer: Trainer,
    states: Mapping[int, Mapping[str, Entry]],
    made: Mapping[int, Mapping[str, Any]],
    groups: list[dict[str, Any]],
) -> None:
    """Load state and options with the optimizer's own `load_state_dict`, which puts each value on its device.

    It also casts them to the parameter's type, so those of another one are put back: training goes on bit for bit.
    """
    optimizer = trainer.optimizer
    state = optimizer.state_dict()
    numbers = {
        id(param): number
        for group, own in zip(optimizer.param_groups, state["param_groups"], strict=True)
        for param, number in zip(group["params"], own["params"], strict=True)
    }
    state["state"] = {}
    for i, found in states.items():
        updated = trainer.update.updated[i]
        values = {leaf: _value(entry, updated) for leaf, entry in found.items()}
        state["state"][numbers[id(updated.param)]] = joined(values, made[i]) if i in made else values
    state["param_groups"] = [
        {**saved, "params": own["params"]} for saved, own in zip(groups, state["param_groups"], strict=True)
    ]
    optimizer.load_state_dict(state)
    for i in states:
        param = trainer.update.updated[i].param
        loaded = optimizer.state[param]
        for leaf, value in state["state"][numbers[id(param)]].items():
            if type(value) is Tensor and leaf in loaded and loaded[leaf].dtype != value.dtype:
                loaded[leaf] = value.to(loaded[leaf].device)


def _value(entry: Entry, updated: Updated) -> Any:
    """Return the state that a filled entry holds: a number, or a tensor of a piece's or of its own shape."""
    kind = entry.key.partition(".")[0]
    if kind == NUMBERS:
        return entry.flat.item()
    return entry.flat.view(entry.whole) if kind == COUNTS or updated.piece is None else entry.flat
