"""Costs of optimizers that update whole parameters at their owners (`layout/owners.py`), before owners are chosen.

    memory          the fullest of d ranks has at most the mean and the largest parameter (Graham 1969, list scheduling)
    state           the most that parameters of so many elements can have
    products        the slowest rank: the mean, or the largest parameter if that is more
    exchange        gradients and values to the owners, new values back: two all-to-alls in the stage's ranks

A rank that holds a parameter by itself updates it without an exchange.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from autoptd.cost_models.memory import UPDATE_COSTS, UpdateCost
from autoptd.passes.fold import Folded
from autoptd.passes.graph import infos
from autoptd.passes.hidden_matrices import hidden_matrices

ROUND_ELEMENTS = 2**23  # as in `runtime/optimizers/whole_tensors.py`


@dataclass(frozen=True)
class WholeLoad:
    """Whole parameters of one stage on its fullest rank; `moved`: elements that all its ranks bring together."""

    kept: int = 0  # elements of the optimizer's state
    moved: int = 0
    owned: int = 0  # of `moved`, those of the fullest owner
    stepped: int = 0  # elements that the slowest rank updates
    flops: float = 0.0

    def __add__(self, other: WholeLoad) -> WholeLoad:
        return WholeLoad(
            self.kept + other.kept,
            self.moved + other.moved,
            self.owned + other.owned,
            self.stepped + other.stepped,
            self.flops + other.flops,
        )

    def temporary_bytes(self, main: int, ranks: int) -> int:
        """Return the bytes during a step: gradients and values at the owner, and a round's buffers, sent and received.

        `main`: bytes per element. `ranks`: those of the stage.
        """
        buffers = 4 * min(ROUND_ELEMENTS, -(-self.moved // ranks))
        return main * (2 * self.owned + buffers)


@dataclass(frozen=True)
class WholeUpdates:
    """The parameters of a model that an optimizer updates as whole tensors, with their shapes."""

    cost: UpdateCost
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def load(self, held: Iterable[tuple[str, int]], width: int, shards: int) -> WholeLoad:
        """Return the load of parameters of equal copies, given as (name, local elements).

        `width`: ranks that hold one copy of the state together. `shards`: those of them that ZeRO shards over.
        """
        alone, together = list[tuple[int, ...]](), list[tuple[int, ...]]()
        for name, local in held:
            if name in self.shapes:
                shape = self.shapes[name]
                numbers = self.cost.elements(shape, True), math.prod(shape), self.cost.flops(shape)
                (alone if shards == 1 and local == numbers[1] else together).append(numbers)
        kept, numel, flops = (sum(column) for column in zip(*alone, strict=True)) if alone else (0, 0, 0)
        if not together:
            return WholeLoad(kept, 0, 0, numel, flops)
        states, sizes, products = zip(*together, strict=True)
        return WholeLoad(
            kept + _most_state(states, sizes, _fullest(sizes, width)),
            sum(sizes),
            _fullest(sizes, width),
            numel + max(-(-sum(sizes) // width), *sizes),
            flops + max(sum(products) / width, *products),
        )


def _most_state(states: Sequence[int], sizes: Sequence[int], elements: int) -> int:
    """Return the most state that parameters of so many elements can have: those with most per element first."""
    total = 0.0
    for state, size in sorted(zip(states, sizes, strict=True), key=lambda pair: -pair[0] / max(1, pair[1])):
        share = min(1.0, elements / max(1, size))
        total, elements = total + share * state, elements - round(share * size)
        if elements <= 0:
            break
    return math.ceil(total)


def _fullest(sizes: Sequence[int], ranks: int) -> int:
    return min(sum(sizes), -(-sum(sizes) // ranks) + max(sizes))


def whole_updates(folded: Folded, optimizer: str) -> WholeUpdates:
    """Return the parameters that an optimizer, by its name in the plan, updates as whole tensors."""
    cost = UPDATE_COSTS[optimizer]
    if cost.whole == "none":
        return WholeUpdates(cost)
    traced = folded.traced
    hidden = hidden_matrices(folded) if cost.whole == "hidden" else None
    nodes = {traced.parameters[node.name]: node for s in folded.segments for node in s.parameters}
    return WholeUpdates(
        cost,
        {
            name: tuple(map(int, infos(node)[0].shape))
            for name, node in nodes.items()
            if name not in traced.frozen and (hidden is None or name in hidden)
        },
    )
