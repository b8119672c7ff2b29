"""Many dotted names as few lines: layer numbers folded into ranges.

h.0.fc.weight, h.1.fc.weight, h.2.fc.weight  ->  h.{0..2}.fc.weight
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod


def fold_names(names: Iterable[str]) -> list[str]:
    """Names that differ only in their numbers become one line each; numbers count as numbers in the order."""
    return [line for line, _ in fold_table((name, "") for name in names)]


def fold_table(table: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """`(name, text)` rows, folded among those of equal text: `h.{0..95}.fc.weight` with `S1`."""
    groups: dict[tuple[tuple[str | None, ...], str], list[tuple[int, ...]]] = {}
    for name, text in sorted(table, key=lambda row: natural(row[0])):
        parts = name.split(".")
        template = tuple(None if part.isdecimal() else part for part in parts)
        numbers = tuple(int(part) for part in parts if part.isdecimal())
        groups.setdefault((template, text), []).append(numbers)
    return [(line, text) for (template, text), indices in groups.items() for line in _lines(template, indices)]


def natural(name: str) -> list[tuple[int, str]]:
    """Sort key: `h.2` before `h.10`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


def ranges(numbers: Iterable[int]) -> str:
    """`0, 2, 3, 4` -> `0,2..4`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}..{b}" for a, b in runs)


def _lines(template: tuple[str | None, ...], indices: list[tuple[int, ...]]) -> Iterator[str]:
    """One line if the numbers are a full grid; otherwise one per value of the first number."""
    columns = [sorted(set(column)) for column in zip(*indices, strict=True)]
    if prod(map(len, columns)) == len(set(indices)):
        folds = iter("{" + ranges(column) + "}" if len(column) > 1 else str(column[0]) for column in columns)
        yield ".".join(next(folds) if part is None else part for part in template)
        return
    at = template.index(None)
    for value in columns[0]:
        fixed = (*template[:at], str(value), *template[at + 1 :])
        yield from _lines(fixed, [index[1:] for index in indices if index[0] == value])
