"""Numbers of the turns of a loop over samples, `i` in `for i in range(len(x))`, and what a model decides by them.

Loops are traced with few turns. A branch that is the same in all of these, and another in later ones, as
`if i >= 8: break`, is refused; one that differs between the turns makes turns that compute different things.
"""

from __future__ import annotations

import builtins
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

from torch import SymInt, Tensor, nn

from autoptd.errors import UnsupportedOp
from autoptd.passes.loops.only_shown import only_shown

_LATER = 64  # turns after those of the trace for which a comparison is tried
_LAST = 10**6
_LIBRARIES = {"torch", "autoptd", "sympy", "numpy"}  # their code reads numbers for itself


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

    def __bool__(self) -> bool:
        return self._compared(operator.ne, 0)


def _check_reader(frame: FrameType) -> None:
    """Raise UnsupportedOp if a model's code reads the number of a turn as a plain one: what it makes of it for later
    samples is not known."""
    library = str(frame.f_globals.get("__name__")).partition(".")[0]
    if library not in _LIBRARIES and not only_shown(frame):
        raise UnsupportedOp(
            "a loop over samples takes the number of its turn for a plain number, a text or a key",
            fix="compute with it by +, -, *, // and % of whole numbers, and look values up in lists or tensors by it",
        )


def _computes(name: str) -> Any:
    """Return the method of a Turn that computes a whole number, for any turn."""
    plain = getattr(int, name)

    def computed(self: Turn, *others: Any) -> Any:
        value = plain(int.__index__(self), *others)
        if isinstance(value, float) or any(isinstance(x, float) for x in others):
            _check_reader(sys._getframe(1))
        if not isinstance(value, int) or any(isinstance(x, Turn) for x in others):
            return value
        of = self.of
        return Turn.numbered(self.turn, lambda i: plain(of(i), *others), self.turns)  # type: ignore[attr-defined]

    return computed


def _reads(name: str) -> Any:
    """Return the method of a Turn that gives something else than a whole number."""
    plain = getattr(int, name)

    def read(self: Turn, *others: Any) -> Any:
        _check_reader(sys._getframe(1))
        return plain(int.__index__(self), *others)

    return read


_BINARY = ("add", "sub", "mul", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_COMPUTED = (*_BINARY, *(f"r{name}" for name in _BINARY), "neg", "pos", "abs", "invert")
_READ = ("truediv", "rtruediv", "divmod", "rdivmod", "round", "trunc", "floor", "ceil", "float", "int", "hash")
for _name in _COMPUTED:
    setattr(Turn, f"__{_name}__", _computes(f"__{_name}__"))
for _name in (*_READ, "repr", "format"):
    setattr(Turn, f"__{_name}__", _reads(f"__{_name}__"))


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
