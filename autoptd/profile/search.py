"""Minimisation of mean |log(predicted / measured)| over one or two constants of a cost model.

A prediction of half the time and one of double count the same, as do large and small times, and a few outliers hardly
change the result. The cost models themselves are evaluated, so nothing here changes when they do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

Error = Callable[[float], float]
_GOLDEN = (math.sqrt(5) - 1) / 2


def mean_error(pairs: Iterable[tuple[float, float]]) -> float:
    """Return the mean of |log(predicted / measured)|."""
    errors = [abs(math.log(max(predicted, 1e-15) / measured)) for predicted, measured in pairs]
    return sum(errors) / len(errors)


def best_rate(error: Error, low: float, high: float) -> float:
    """Return the x of least error between `low` and `high`, both above 0: a grid in log x, then golden sections."""
    step = math.log(high / low) / 12
    least, most = _around(error, [low * math.exp(step * i) for i in range(13)])
    return math.exp(_sections(lambda x: error(math.exp(x)), math.log(least), math.log(most)))


def best_of(error: Error, grid: Sequence[float]) -> float:
    """Return the x of least error within an ascending `grid`, which may begin with 0."""
    return _sections(error, *_around(error, grid), steps=10)


def best_two(
    error: Callable[[float, float], float], low: float, high: float, grid: Sequence[float]
) -> tuple[float, float]:
    """Return the (x, y) of least error: x between `low` and `high`, y within `grid`, with the best x for each y."""
    best_x: dict[float, float] = {}

    def of_y(y: float) -> float:
        best_x[y] = best_rate(lambda x: error(x, y), low, high)
        return error(best_x[y], y)

    y = best_of(of_y, grid)
    return best_x.get(y) or best_rate(lambda x: error(x, y), low, high), y


def _around(error: Error, grid: Sequence[float]) -> tuple[float, float]:
    """Return the neighbours of the best point of a grid."""
    errors = [error(x) for x in grid]
    best = errors.index(min(errors))
    return grid[max(0, best - 1)], grid[min(len(grid) - 1, best + 1)]


def _sections(error: Error, low: float, high: float, steps: int = 14) -> float:
    """Return the minimum of a unimodal function between `low` and `high`, by golden-section search."""
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = error(left), error(right)
    tried = {left: at_left, right: at_right, low: error(low), high: error(high)}
    for _ in range(steps):
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = tried[left] = error(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = tried[right] = error(right)
    return min(tried, key=lambda x: tried[x])


def rounded(value: float, digits: int = 4) -> float:
    """Round to significant digits; no measurement has more than four."""
    return float(f"{value:.{digits}g}")
