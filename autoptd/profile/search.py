"""The constants with which a model comes closest to measured times, in the mean of |log(predicted / measured)|.

A point that is off by half and one that is off by double count alike, large and small times too, and a few outliers do
not move the answer. The models themselves are evaluated, so that nothing here has to be changed when they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

Error = Callable[[float], float]
_GOLDEN = (math.sqrt(5) - 1) / 2


def mean_error(pairs: Iterable[tuple[float, float]]) -> float:
    """Mean of |log(predicted / measured)|."""
    errors = [abs(math.log(max(predicted, 1e-15) / measured)) for predicted, measured in pairs]
    return sum(errors) / len(errors)


def best_rate(error: Error, low: float, high: float) -> float:
    """The x between `low` and `high`, both above 0, of least error: a grid in log x, then golden sections."""
    step = math.log(high / low) / 12
    least, most = _around(error, [low * math.exp(step * i) for i in range(13)])
    return math.exp(_sections(lambda x: error(math.exp(x)), math.log(least), math.log(most)))


def best_of(error: Error, grid: Sequence[float]) -> float:
    """The x of least error near the points of a rising `grid`, which may begin with 0."""
    return _sections(error, *_around(error, grid), steps=10)


def best_two(
    error: Callable[[float, float], float], low: float, high: float, grid: Sequence[float]
) -> tuple[float, float]:
    """(x, y) of least error: x a rate between `low` and `high`, y near `grid`; for each y the best x is taken."""
    best_x: dict[float, float] = {}

    def of_y(y: float) -> float:
        best_x[y] = best_rate(lambda x: error(x, y), low, high)
        return error(best_x[y], y)

    y = best_of(of_y, grid)
    return best_x.get(y) or best_rate(lambda x: error(x, y), low, high), y


def _around(error: Error, grid: Sequence[float]) -> tuple[float, float]:
    """The neighbours of the best point of a grid."""
    errors = [error(x) for x in grid]
    best = errors.index(min(errors))
    return grid[max(0, best - 1)], grid[min(len(grid) - 1, best + 1)]


def _sections(error: Error, low: float, high: float, steps: int = 14) -> float:
    """The least of a function that falls and then rises between `low` and `high`."""
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
    """To significant digits: no measurement has more."""
    return float(f"{value:.{digits}g}")
