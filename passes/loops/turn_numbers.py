"""Numbers of the turns of a loop over samples, `i` in `for i in range(len(x))`, and what a model decides by them.

Loops are traced with few turns. A branch that is the same in all of these, and another in later ones, as
`if i >= 8: break`, is refused; one that differs between the turns makes turns that compute different things.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import SymInt, Tensor, nn

from autoptd.errors import UnsupportedOp

_LATER = 64  # turns after those of the trace for which a comparison is tried
_LAST = 10**6


class Turn(int):
    """A number that a loop computes from the number of its turn: `of` gives it for any turn. `turns`: of the trace."""

    of: Callable[[int], int]
    turns: int

    @staticmethod
    def numbered(turn: int, of: Callable[[int], int], turns: int) -> Turn:
        """Return the number of a turn."""
        made = Turn(of(turn))
        made.turn, made.of, made.turns = turn, of, turns  # type: ignore[attr-defined]
        return made

    def _compared(self, compare: Callable[[Any, Any], bool], other: Any) -> bool:
        if not isinstance(other, (int, float)) or isinstance(other, Turn):
            return compare(int(self), other)
        traced = {compare(self.of(i), other) for i in builtins.range(self.turns)}
        near = builtins.range(int(other) - 1, int(other) + 2) if abs(other) < _LAST else ()
        later = {*builtins.range(self.turns, self.turns + _LATER), _LAST, *(i for i in near if i >= self.turns)}
        if len(traced) == 1 and any(compare(self.of(i), other) not in traced for i in later):
            raise UnsupportedOp(
                "a loop over samples decides by the number of its turn, otherwise for later samples than for the first",
                fix="leave out samples by a mask of all, or cut the batch in the data loader",
            )
        return compare(int(self), other)

    def _computed(self, compute: Callable[[int], Any], other: Any) -> Any:
        if not isinstance(other, int) or isinstance(other, Turn):
            return compute(int(self))
        of = self.of
        return Turn.numbered(self.turn, lambda i: compute(of(i)), self.turns)  # type: ignore[attr-defined]

    def __lt__(self, other: Any) -> bool:
        return self._compared(operator.lt, other)

    def __le__(self, other: Any) -> bool:
        return self._compared(operator.le, other)

    def __gt__(self, other: Any) -> bool:
        return self._compared(operator.gt, other)

    def __ge__(self, other: Any) -> bool:
        return self._compared(operator.ge, other)

    def __eq__(self, other: object) -> bool:
        return self._compared(operator.eq, other)

    def __ne__(self, other: object) -> bool:
        return self._compared(operator.ne, other)

    __hash__ = int.__hash__

    def __bool__(self) -> bool:
        return self._compared(operator.ne, 0)

    def __add__(self, other: Any) -> Any:
        return self._computed(lambda n: n + other, other)

    def __radd__(self, other: Any) -> Any:
        return self._computed(lambda n: other + n, other)

    def __sub__(self, other: Any) -> Any:
        return self._computed(lambda n: n - other, other)

    def __rsub__(self, other: Any) -> Any:
        return self._computed(lambda n: other - n, other)

    def __mul__(self, other: Any) -> Any:
        return self._computed(lambda n: n * other, other)

    def __rmul__(self, other: Any) -> Any:
        return self._computed(lambda n: other * n, other)

    def __floordiv__(self, other: Any) -> Any:
        return self._computed(lambda n: n // other, other)

    def __mod__(self, other: Any) -> Any:
        return self._computed(lambda n: n % other, other)


class Counted(list[Any]):
    """A list with an item for each sample, of the trace: what a model reads of it depends on how many these are."""

    def _refused(self, *unused: object) -> Any:
        raise UnsupportedOp(
            "Python compares, or takes a part of, a list with an item for each sample",
            fix="use tensors with a row for each sample, such as x[:n], or loop over all samples",
        )

    def __getitem__(self, at: Any) -> Any:
        return self._refused() if isinstance(at, slice) and at != slice(None) else list.__getitem__(self, at)

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refused
    __hash__ = None  # type: ignore[assignment]


def turn_zip(*items: Iterable[Any], strict: bool = False) -> Any:
    """Return `zip`, which refuses to leave out numbers of turns."""
    if any(isinstance(x, Counted) for x in items) and len({len(x) for x in items if isinstance(x, (list, tuple))}) > 1:
        Counted()._refused()
    return builtins.zip(*items, strict=strict)


def turn_range(*bounds: Any) -> Any:
    """Return `range`, of sizes up to those of the example with numbers of turns."""
    if not any(isinstance(x, SymInt) for x in bounds):
        return builtins.range(*bounds)
    numbers = builtins.range(*(x.__index__() if isinstance(x, SymInt) else x for x in bounds))
    start, step = numbers.start, numbers.step
    return Counted(Turn.numbered(i, lambda i: start + step * i, len(numbers)) for i in builtins.range(len(numbers)))


def turn_enumerate(samples: int) -> Callable[..., Iterator[tuple[int, Any]]]:
    """Return `enumerate` of so many samples with numbers of turns; that of anything else as it is."""

    def enumerated(items: Iterable[Any], start: int = 0) -> Iterator[tuple[int, Any]]:
        if isinstance(items, Tensor):
            items = list(items)
        if (
            not isinstance(items, (list, tuple))
            or len(items) != samples
            or any(isinstance(x, nn.Module) for x in items)
        ):
            return builtins.enumerate(items, start)
        numbers = (Turn.numbered(i, lambda i: start + i, samples) for i in builtins.range(samples))
        return zip(numbers, items, strict=True)

    return enumerated
