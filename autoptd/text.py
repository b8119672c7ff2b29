"""Text for people: strings of files with control characters escaped, and many dotted names folded into few lines.

h.0.fc.weight, h.1.fc.weight, h.2.fc.weight  ->  h.{0..2}.fc.weight
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from math import prod

_NUMBERS, _DIGITS = 16, 18  # number parts per name, digits per number; further parts compare as text


def printable(text: str, keep: str = "\n") -> str:
    r"""Escape every character that is not printable: `\x1b` for an escape, `\u202e` for a bidirectional override,
    `\ud800` for a surrogate. Characters in `keep` stay as they are; `keep=""` returns a single line.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def wrapped(text: str, width: int, indent: int = 0) -> str:
    """Return lines of at most `width` columns, broken between words; those that go on are indented."""
    lines = (textwrap.wrap(line, width, subsequent_indent=" " * indent) or [""] for line in text.split("\n"))
    return "\n".join("\n".join(parts) for parts in lines)


def fold_names(names: Iterable[str]) -> list[str]:
    """Fold names that differ only in their numbers into one line each, in natural order."""
    return [line for line, _ in fold_table((name, "") for name in names)]


def fold_table(table: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Fold the names of `(name, text)` rows with equal text: `h.{0..95}.fc.weight` with `S1`."""
    groups: dict[tuple[tuple[str | None, ...], str], list[tuple[int, ...]]] = {}
    for name, text in sorted(table, key=lambda row: natural(row[0])):
        parts = [number for number, _ in natural(name)]
        template = tuple(None if n >= 0 else part for n, part in zip(parts, name.split("."), strict=True))
        numbers = tuple(n for n in parts if n >= 0)
        groups.setdefault((template, text), []).append(numbers)
    return [(line, text) for (template, text), indices in groups.items() for line in _lines(template, indices)]


def natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts `h.2` before `h.10`."""
    left, key = _NUMBERS, []
    for part in name.split("."):
        is_number = left > 0 and part.isascii() and part.isdecimal() and len(part) <= _DIGITS
        left -= is_number
        key.append((int(part), "") if is_number else (-1, part))
    return key


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as ranges: `0, 2, 3, 4` -> `0,2..4`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}..{b}" for a, b in runs)


def _lines(template: tuple[str | None, ...], indices: list[tuple[int, ...]]) -> Iterator[str]:
    """Yield one line if the numbers form a full grid; otherwise split by the first number."""
    columns = [sorted(set(column)) for column in zip(*indices, strict=True)]
    if prod(map(len, columns)) == len(set(indices)):
        folds = iter("{" + ranges(column) + "}" if len(column) > 1 else str(column[0]) for column in columns)
        yield ".".join(next(folds) if part is None else part for part in template)
        return
    at = template.index(None)
    rest: dict[int, list[tuple[int, ...]]] = {}
    for index in indices:
        rest.setdefault(index[0], []).append(index[1:])
    for value in columns[0]:
        yield from _lines((*template[:at], str(value), *template[at + 1 :]), rest[value])
