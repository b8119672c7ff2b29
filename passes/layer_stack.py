"""The stack of layers that a model's segments belong to, by their names; other systems cut stages only between layers.

    segments   transformer.wte | h.0.{ln_1,attn} h.0.{ln_2,mlp} | h.1… | … | transformer.ln_f  lm_head
    units      0: before       | 1: layer 0                     | 2    | … | count + 1: after

A unit is everything before the stack, one layer, or everything after the stack.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from autoptd.errors import PlanError
from autoptd.text import ranges

_LAYER = re.compile(r"^(?P<stack>(?:(?!\d+\.)[^.{}]+\.)*)(?P<index>\d+)(?=\.|$)")
_JOINED = re.compile(r"^(?P<stack>(?:(?!\d+\.)[^.{}]+\.)*)\{(?P<parts>.*)\}$")  # a segment in several layers: h.{0,1}


@dataclass(frozen=True)
class LayerStack:
    """The layers of a model.

    path     path of the parent of the numbered modules, "transformer.h"; "" if that is the model itself
    count    number of layers
    owners   unit of each segment: 0 before the stack, 1 + i for layer i, count + 1 after it
    """

    path: str
    count: int
    owners: tuple[int, ...]

    @property
    def inside(self) -> frozenset[int]:
        """The segments that continue a unit."""
        return frozenset(i for i in range(1, len(self.owners)) if self.owners[i] == self.owners[i - 1])


def layer_stack(segments: Sequence[str], model: str, where: str, fix: str) -> LayerStack:
    """Return the layers that segments of these names belong to. Raises PlanError if there are none or several stacks.

    `model`, `where`, `fix`: for the error.
    """
    found = [_LAYER.match(name) for name in segments]
    stacks = Counter(m["stack"] for m in found if m)
    if not stacks:
        raise PlanError(f"no layers are found in {model}: no segment has a name like layers.0", where=where, fix=fix)
    joined = [layer for name in segments for layer in _joined(name)]
    own = {stack: {int(m["index"]) for m in found if m and m["stack"] == stack} for stack in stacks}
    numbers = {stack: own[stack] | {index for of, index in joined if of == stack} for stack in stacks}
    several = sorted(stack for stack in stacks if len(numbers[stack]) > 1)
    if len(several) > 1:
        names = ", ".join(stack.rstrip(".") for stack in several)
        raise PlanError(f"{model} has {len(several)} stacks of layers ({names}), not one", where=where, fix=fix)
    stack = max(stacks, key=lambda s: (len(numbers[s]), stacks[s]))
    indices = [int(m["index"]) if m and m["stack"] == stack else None for m in found]
    known = [i for i in indices if i is not None]
    if list(dict.fromkeys(known)) != list(range(max(known) + 1)):
        raise PlanError(
            f"the layers of {model} are not numbered consecutively from 0: {ranges(known)}", where=where, fix=fix
        )
    if inside := sorted(numbers[stack] - own[stack]):
        raise PlanError(
            f"layer {inside[0]} of {model} has no segment of its own: its ops are joined with those of other layers",
            where=where,
            fix=fix,
        )
    return LayerStack(stack.rstrip("."), max(known) + 1, _owners(indices, max(known) + 2))


def _joined(segment: str) -> list[tuple[str, int]]:
    """Return the layers, each as (stack, number), of a segment that is in several: `h.{0,1}`."""
    found = _JOINED.match(segment)
    heads = [part.partition(".")[0] for part in found["parts"].split(",")] if found else []
    return [(found["stack"], int(head)) for head in heads if found and head.isdecimal()]


def _owners(indices: Sequence[int | None], after: int) -> tuple[int, ...]:
    """Return each segment's unit; segments without a number join the layer before, or an end of the model."""
    last = max(i for i, index in enumerate(indices) if index is not None)
    owners, unit = [], 0
    for i, index in enumerate(indices):
        unit = unit if index is None else index + 1
        owners.append(unit if i <= last else after)
    return tuple(owners)
