"""Arguments of `forward` that are no plain tensors: containers of tensors, and values that are fixed when planning.

    {"features": {"dense": x, "ids": [a, b]}, "scale": 0.5}
        flat     {"features_dense": x, "features_ids_0": a, "features_ids_1": b}
        nested   the same structure again, with these tensors and the planned value of `scale`

Tracer, program and runtime know flat tensors only. Containers are mappings, dataclasses, lists, and tuples with or
without names.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autoptd.errors import InputsError


@dataclass(frozen=True)
class TensorName:
    """The place of a tensor in a structure, by its name among the flat inputs."""

    name: str


@dataclass(frozen=True)
class Nest:
    """Structures of arguments. `given`: argument -> its example with a `TensorName` for every tensor."""

    given: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @staticmethod
    def of(arguments: Mapping[str, Any]) -> Nest:
        """Return the structures of example arguments. Raises InputsError for values that are no data."""
        used = {str(name) for name, x in arguments.items() if isinstance(x, Tensor)}
        return Nest({n: _names_in(x, str(n), used) for n, x in arguments.items() if not isinstance(x, Tensor)})

    def flat(self, batch: Any) -> Any:
        """Return the tensors of a batch by flat name; a flat batch, and what is no mapping, as it is.

        A batch may leave out fixed values. Raises InputsError for another structure or value than planned.
        """
        if not isinstance(batch, Mapping) or not self.given:
            return batch
        found: dict[str, Any] = {}
        for name, x in batch.items():
            found.update(_tensors(self.given[name], x, str(name)) if name in self.given else [(name, x)])
        return found

    def nested(self, flat: Mapping[str, Tensor], *, fixed: bool = True) -> dict[str, Any]:
        """Return the arguments that hold some tensors, given by flat name. `fixed`: also those that hold none."""
        inside = {slot for x in self.given.values() for slot in _names(x)}
        found: dict[str, Any] = {name: x for name, x in flat.items() if name not in inside}
        for name, x in self.given.items():
            slots = list(_names(x))
            if (slots and slots[0] in flat) or (fixed and not slots):
                found[name] = mapped(x, lambda leaf: flat[leaf.name] if isinstance(leaf, TensorName) else leaf)
        return found


def mapped(x: Any, function: Callable[[Any], Any]) -> Any:
    """Return a structure with `function` applied to every value in it that is no container."""
    parts = parts_of(x)
    if parts is None:
        return function(x)
    return _with_parts(x, {key: mapped(value, function) for key, value in parts.items()})


def _with_parts(x: Any, parts: dict[Any, Any]) -> Any:
    """Return a container like `x` with these parts."""
    if isinstance(x, list):
        return list(parts.values())
    if isinstance(x, tuple):
        return x._make(parts.values()) if hasattr(x, "_make") else tuple(parts.values())
    if type(x) is dict:
        return parts
    made = copy.copy(x)
    for key, value in parts.items():
        if isinstance(x, Mapping):
            made[key] = value
        else:
            object.__setattr__(made, key, value)  # a dataclass, maybe a frozen one
    return made


def parts_of(x: Any) -> dict[Any, Any] | None:
    """Return the parts of a container by key, field or number; None for any other value."""
    if isinstance(x, Mapping):
        return dict(x)
    if isinstance(x, (list, tuple)):
        return dict(enumerate(x))
    if dataclasses.is_dataclass(x) and not isinstance(x, (type, TensorName)):
        return {f.name: getattr(x, f.name) for f in dataclasses.fields(x) if hasattr(x, f.name)}
    return None


def tensors_of(x: Any) -> Iterator[Tensor]:
    """Yield the tensors of a structure, in order."""
    if isinstance(x, Tensor):
        yield x
    for value in (parts_of(x) or {}).values():
        yield from tensors_of(value)


_FIXED = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, slice)


def _names_in(x: Any, path: str, used: set[str]) -> Any:
    """Return a structure with slots for its tensors. Raises InputsError for a value that is no data."""
    parts = parts_of(x)
    if parts is not None:
        return _with_parts(x, {key: _names_in(value, f"{path}.{key}", used) for key, value in parts.items()})
    if isinstance(x, _FIXED):
        return x
    if not isinstance(x, Tensor):
        raise InputsError(
            f"input {path!r} is {type(x).__name__}, neither a tensor nor a container of tensors",
            where=path,
            fix="pass tensors, dicts, lists, tuples or dataclasses of them, and plain values such as flags, which are "
            "fixed when planning; NumPy arrays by torch.from_numpy. Make others, such as a BlockMask, in forward",
        )
    name = re.sub(r"\W", "_", path)
    while name in used:
        name += "_"
    used.add(name)
    return TensorName(name)


def _names(x: Any) -> Iterator[str]:
    """Yield the names of a structure's slots, in order."""
    parts = parts_of(x)
    if isinstance(x, TensorName):
        yield x.name
    for value in (parts or {}).values():
        yield from _names(value)


def _tensors(planned: Any, x: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a structure by flat name. Raises InputsError if it is not the planned one."""
    if isinstance(planned, TensorName):
        yield planned.name, x
        return
    wanted, parts = parts_of(planned), parts_of(x)
    if wanted is None:
        if parts is None and not isinstance(x, Tensor) and type(x) is type(planned) and x == planned:
            return
        raise InputsError(
            f"{path} is {_shown(x)}, but the plan was made for {_shown(planned)}",
            where=path,
            fix=f"plan with {path} = {_shown(x)}: values that are no tensors are fixed when planning; those of a step "
            "are tensors, such as torch.tensor(0.3)"
            if not isinstance(x, Tensor)
            else f"leave {path} out, or plan with a tensor there",
        )
    if parts is None or parts.keys() != wanted.keys():
        have = f"has {', '.join(map(repr, parts))}" if parts is not None else f"is {_shown(x)}"
        raise InputsError(
            f"{path} {have}, but the plan was made for {', '.join(map(repr, wanted))}",
            where=path,
            fix="give the structure of the example inputs",
        )
    if list(parts) != list(wanted):
        raise InputsError(
            f"{path} has its keys in another order than in the example inputs, which forward may go over",
            where=path,
            fix=f"give them as {', '.join(map(repr, wanted))}",
        )
    for key, value in wanted.items():
        yield from _tensors(value, parts[key], f"{path}.{key}")


def _shown(x: Any) -> str:
    return f"a {type(x).__name__}" if isinstance(x, Tensor) or parts_of(x) is not None else repr(x)[:100]
