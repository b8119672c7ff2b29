"""Pairwise testing: a subset of a grid's cases that covers every pair of values in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations
from typing import Any, TypeVar

Case = TypeVar("Case")


def pairwise(cases: Iterable[Case], values: Callable[[Any], Sequence[Hashable]] = tuple) -> list[Case]:
    """Draw a subset of `cases`, in order, that covers every pair of values that occurs in a case.

    `values` gives a case's values, one per dimension; a tuple is its own. A fault that needs two values together is
    found as surely as by all cases. The draw is greedy: next is the case with most new pairs, the first of several;
    finally cases whose pairs are covered by later ones are dropped.
    """
    cases = list(cases)
    pairs = [set(combinations(enumerate(values(case)), 2)) for case in cases]
    missing, chosen = [set(own) for own in pairs], list[int]()
    while any(missing):
        best = max(range(len(cases)), key=lambda i: len(missing[i]))
        chosen.append(best)
        new = set(missing[best])
        for own in missing:
            own -= new
    had = Counter(pair for i in chosen for pair in pairs[i])
    for i in list(chosen):
        if all(had[pair] > 1 for pair in pairs[i]):
            had.subtract(pairs[i])
            chosen.remove(i)
    return [cases[i] for i in sorted(chosen)]
