"""Figures of a comparison: errors, rank correlation, regret."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Errors:
    """Relative errors, predicted ÷ measured − 1, of `count` pairs."""

    count: int
    median: float  # of the absolute errors
    p90: float  # 90th percentile of the absolute errors
    mean: float  # signed


def error(predicted: float, measured: float) -> float:
    """Return the relative error; 0.1 is 10 % too much."""
    return predicted / measured - 1


def errors(pairs: Sequence[tuple[float, float]]) -> Errors | None:
    """Return the error statistics of (predicted, measured) pairs; None without pairs."""
    if not pairs:
        return None
    signed = np.array([error(p, m) for p, m in pairs])
    absolute = np.abs(signed)
    return Errors(len(pairs), float(np.median(absolute)), float(np.percentile(absolute, 90)), float(signed.mean()))


def ranks(values: Sequence[float]) -> np.ndarray:
    """Return the rank of each value, from 1; equal values share the mean of their ranks."""
    array = np.asarray(values, dtype=float)
    below = (array[:, None] > array[None, :]).sum(axis=1)
    equal = (array[:, None] == array[None, :]).sum(axis=1)
    return np.asarray(below + (equal + 1) / 2)


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Return Spearman's rank correlation (Pearson's of the ranks); 0 if all values of one side are equal."""
    x, y = (r - r.mean() for r in (ranks(a), ranks(b)))
    spread = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return float((x * y).sum()) / spread if spread else 0.0


def regret(predicted_s: Sequence[float], measured_s: Sequence[float]) -> float:
    """Return measured time of the plan predicted fastest ÷ best measured time − 1; ties count with the slowest."""
    best = min(predicted_s)
    picked = max(m for p, m in zip(predicted_s, measured_s, strict=True) if p == best)
    return picked / min(measured_s) - 1
