"""The training state of a running rank: its elements of every parameter and of the optimizer's moments.

    model.<parameter>              at full precision (float32 if the model trains in less); also persistent buffers
    optimizer.<parameter>.<key>    the optimizer's state of it: of the parameter's shape if the update is elementwise
    counts.<parameter>.<key>       0-dim: number of optimizer steps it has taken
    numbers.<parameter>.<key>      0-dim: a state that is a Python number

A state that is a tensor made of others has a key for each: `exp_avg-codes` (`state_parts.py`).

Names and shapes are those of the unsharded model and do not depend on mesh, stages, buckets or shards. Each element has
one owner, the rank that counts it towards the gradient norm; owners write, all ranks read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autoptd.checkpoint.state_parts import WITHIN, parts
from autoptd.errors import CheckpointError
from autoptd.layout.layout import TensorSpec
from autoptd.layout.regions import Ints, Region, regions_of
from autoptd.runtime.optimizers.step import Updated
from autoptd.runtime.trainer import Trainer
from autoptd.runtime.zero.param_buffers import ParameterShard

MOMENTS, COUNTS, NUMBERS = "optimizer", "counts", "numbers"
_NUMBERS = {int: torch.int64, float: torch.float64, bool: torch.bool}


@dataclass(frozen=True)
class Entry:
    """A rank's elements [n] of a tensor, and the boxes of the whole tensor (shape `whole`) that they fill."""

    key: str
    whole: Ints
    flat: Tensor
    regions: tuple[Region, ...]
    owned: bool


def model_entries(trainer: Trainer, untrained: Collection[str]) -> Iterator[Entry]:
    """Yield trained parameters, then this rank's tensors of `untrained` (names of frozen parameters and buffers)."""
    sharded = [piece for piece in trainer.frozen_pieces if piece.name in untrained]
    for piece in (*trainer.pieces, *sharded):
        yield _of_piece(trainer, piece, f"model.{piece.name}", piece.param.detach())
    c, shared = trainer.communicators, trainer.layout.parameters if trainer.layout.zero == 3 else {}
    for name, local in trainer.tensors.items():
        if name in untrained and name not in shared:
            spec = trainer.layout.spec(name)
            copies = c.edp if spec.ep > 1 else c.data
            first = c.stage == c.mesh.holder(spec.stages[0]) and copies.rank == 0
            owned = first and trainer.layout.counts(spec, c.tp.rank)
            flat = local.detach().view(-1)
            yield Entry(f"model.{name}", spec.shape, flat, _regions(trainer, spec, 0, flat.numel()), owned)


def unread_entry(name: str, x: Tensor, owned: bool) -> Entry:
    """Return the entry of a tensor of the model that no step reads, whole."""
    shape = tuple(x.shape)
    return Entry(f"model.{name}", shape, x.reshape(-1), (Region((0,) * len(shape), shape, 0, shape),), owned)


def optimizer_entries(trainer: Trainer) -> Iterator[Entry]:
    """Yield the optimizer's state of each parameter that it has stepped. Raises CheckpointError for other objects."""
    for updated in trainer.update.updated:
        for key, value in parts(trainer.optimizer.state.get(updated.param, {})):
            yield optimizer_entry(trainer, updated, key, value)


def optimizer_entry(trainer: Trainer, updated: Updated, key: str, value: object) -> Entry:
    """Return the entry of a tensor or number of the optimizer.

    The owner of a parameter's first element writes its numbers and 0-dim tensors. Raises CheckpointError for a state
    that no plan could read: of another class, or of a flat piece and of another shape.
    """
    name, piece = updated.name, updated.piece
    kind, tensor = COUNTS, value
    if type(value) in _NUMBERS:
        kind, tensor = NUMBERS, torch.tensor(value, dtype=_NUMBERS[type(value)])
    plain = isinstance(tensor, Tensor) and type(tensor) in (Tensor, torch.nn.Parameter)
    fits = piece is None or not plain or tensor.dim() == 0 or tensor.shape == updated.param.shape  # type: ignore[attr-defined]
    if not (isinstance(key, str) and key.replace(WITHIN, "_").isidentifier() and plain and fits):
        held = f"of shape {list(tensor.shape)}" if plain else f"a {type(value).__name__}"  # type: ignore[attr-defined]
        raise CheckpointError(
            f"the optimizer's state {key!r} of {name} is {held}, which another plan could not read",
            where="optimizer",
            fix="keep the state in plain tensors and numbers, under names",
        )
    assert isinstance(tensor, Tensor)
    if tensor.dim() == 0:
        owned = updated.saved and (piece is None or (piece.start == 0 and _has_first_part(trainer, piece)))
        return Entry(f"{kind}.{name}.{key}", (), tensor.view(1), (Region((), (), 0, ()),), owned)
    if piece is not None:
        return _of_piece(trainer, piece, f"{MOMENTS}.{name}.{key}", tensor)
    shape = tuple(tensor.shape)
    box = Region((0,) * len(shape), shape, 0, shape)
    return Entry(f"{MOMENTS}.{name}.{key}", shape, tensor.reshape(-1), (box,), updated.saved)


def _has_first_part(trainer: Trainer, piece: ParameterShard) -> bool:
    c = trainer.communicators
    return trainer.layout.parameters[piece.name].part(c.mesh, c.rank) == (0, 0)


def _of_piece(trainer: Trainer, piece: ParameterShard, key: str, flat: Tensor) -> Entry:
    spec = trainer.layout.parameters[piece.name]
    boxes = _regions(trainer, spec, piece.start, piece.start + flat.numel())
    return Entry(key, spec.shape, flat, boxes, piece.counts)


def _regions(trainer: Trainer, spec: TensorSpec, start: int, stop: int) -> tuple[Region, ...]:
    c = trainer.communicators
    return regions_of(spec, c.mesh, c.rank, start, stop)


def copied(entries: Sequence[Entry]) -> list[Entry]:
    """Return the owned entries with their values copied to the CPU, so that training may continue."""
    device = torch.device("cpu")
    return [Entry(e.key, e.whole, e.flat.detach().to(device, copy=True), e.regions, True) for e in entries if e.owned]
