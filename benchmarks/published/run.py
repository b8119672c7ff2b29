"""Prediction of many runs on one or more processes; runs of one shape form a batch and share its trace."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import TypeVar

import torch

from benchmarks.published.compare import Outcome, outcome_of
from benchmarks.published.predict import Prediction, predict
from benchmarks.published.rows import Row, Unsupported
from benchmarks.published.shapes import shape_of

Found = TypeVar("Found")

# A run on which the planner raises one of these counts as skipped, with the error shown; other runs are compared.
_FAULTS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def run(
    rows: Sequence[Row],
    jobs: int = 1,
    predict: Callable[[Row], Prediction] = predict,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> list[Outcome]:
    """Return the outcome of every run in the given order; call `progress(done, of)` after each batch."""
    work = partial(_outcomes, predict=predict)
    found: dict[str, Outcome] = {}
    for outcomes in each(work, batches(rows), jobs):
        found |= {o.row.id: o for o in outcomes}
        progress(len(found), len(rows))
    return [found[row.id] for row in rows]


def each(
    work: Callable[[list[Row]], list[Found]], batches: list[list[Row]], jobs: int
) -> Iterable[list[Found]] | Iterator[list[Found]]:
    """Yield `work(batch)` for each batch in order, computed by `jobs` processes."""
    if jobs == 1 or len(batches) < 2:
        yield from map(work, batches)
        return
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield from pool.map(work, batches)


def batches(rows: Iterable[Row]) -> list[list[Row]]:
    """Group runs that share a trace; the batches expected to take longest are first."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(_trace_key(row), []).append(row)
    return sorted(found.values(), key=lambda batch: -(batch[0].n_layers or 0) - len(batch))


def _trace_key(row: Row) -> str:
    try:
        return f"{shape_of(row)} {row.seq_len_tokens} {row.precision}"
    except Unsupported:
        return row.id


def _outcomes(rows: list[Row], predict: Callable[[Row], Prediction]) -> list[Outcome]:
    return [_outcome(row, predict) for row in rows]


def _outcome(row: Row, predict: Callable[[Row], Prediction]) -> Outcome:
    try:
        return outcome_of(row, predict)
    except _FAULTS as error:
        return Outcome(row, None, f"fault: {type(error).__name__}: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def show_progress(done: int, of: int) -> None:
    """Print `\\r123 of 471 runs`, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r{done} of {of} runs", end="\n" if done == of else "", file=sys.stderr, flush=True)
