"""Random choices from a seed, each noted in words."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


@dataclass
class Draw:
    """A source of choices. `notes` says in words what was chosen; `spice` is the share of unusual choices."""

    random: random.Random
    notes: list[str] = field(default_factory=list)
    spice: float = 0.4

    @classmethod
    def of(cls, seed: int, attempt: int) -> Draw:
        return cls(random.Random(f"{seed}/{attempt}"))

    def one(self, *options: T) -> T:
        return self.random.choice(options)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def odd(self) -> bool:
        """Return whether something unusual is done here."""
        return self.chance(self.spice)

    def named(self, table: Mapping[str, T], title: str = "") -> T:
        """Return an entry of a table, and note its name."""
        name = self.random.choice(list(table))
        self.notes.append(f"{title}{name}")
        return table[name]

    def some(self, options: Sequence[T], at_most: int) -> list[T]:
        """Return a few different options, in their order."""
        chosen = self.random.sample(range(len(options)), self.random.randint(0, min(at_most, len(options))))
        return [options[i] for i in sorted(chosen)]


@dataclass(frozen=True)
class Shape:
    """Sizes of one model: any of them may be odd, prime or one."""

    width: int
    heads: int
    groups: int  # of heads that share keys and values; divides `heads`
    head: int
    hidden: int
    words: int
    tokens: int
    layers: int

    @classmethod
    def drawn(cls, draw: Draw) -> Shape:
        heads = draw.one(1, 2, 3, 4, 4, 4, 6)
        width = draw.one(16, 24, 32, 32, 32, 17, 20, 30, 37)
        shape = cls(
            width=width,
            heads=heads,
            groups=draw.one(*(n for n in range(1, heads + 1) if heads % n == 0)),
            head=draw.one(4, 6, 8, 8, 8, 10, 2),
            hidden=draw.one(32, 64, 64, 48, 41, 1, 27),
            words=draw.one(7, 11, 29, 40, 40, 64),
            tokens=draw.one(1, 5, 7, 8, 12, 12, 16),
            layers=draw.one(1, 2, 2, 2, 3, 4),
        )
        draw.notes.append(str(shape).replace("Shape", ""))
        return shape
