"""Independent questions to the planner, answered in as many processes as the machine has cores.

Processes are forked: they share the traced model, and what the search has worked out about it so far. Where processes
cannot be forked safely, questions are answered in turn. The answers are the same.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing.connection import wait
from threading import Thread
from typing import TypeVar, cast

import torch

from autoptd.progress import Progress

_Question = TypeVar("_Question")
_Answer = TypeVar("_Answer")
_asked: Callable[[int], object] | None = None  # in a forked process: it answers the question of this number


def answered(
    progress: Progress,
    name: str,
    answer: Callable[[_Question], _Answer],
    questions: Sequence[_Question],
    processes: int | None = None,
) -> list[_Answer]:
    """Return the answer to each question, in their order; `name` is that of the step for `progress`.

    `processes`: at most so many; default: one per core. Raises what `answer` raises.
    """
    found: list[_Answer] = []
    with progress.stage(name):
        count = min(len(questions), cores() if processes is None else processes)
        forked = _forked(answer, questions, count) if count > 1 and _can_fork() else iter(())
        with suppress(BrokenProcessPool):  # such as when the system is short of memory: the others in turn
            _collect(progress, found, forked, len(questions))
        _collect(progress, found, (answer(question) for question in questions[len(found) :]), len(questions))
    return found


def _collect(progress: Progress, found: list[_Answer], answers: Iterable[_Answer], of: int) -> None:
    for one in answers:
        found.append(one)
        progress.count(len(found), of)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _can_fork() -> bool:
    """Return whether a forked process can go on: without a device in use, and without macOS's own threads."""
    unsafe = sys.platform == "darwin" or torch.cuda.is_initialized() or multiprocessing.current_process().daemon
    return not unsafe and "fork" in multiprocessing.get_all_start_methods()


def _forked(answer: Callable[[_Question], _Answer], questions: Sequence[_Question], count: int) -> Iterator[_Answer]:
    """Yield the answers of forked processes. Raises BrokenProcessPool if one of these ends."""
    context = multiprocessing.get_context("fork")  # functions and questions reach the processes unpickled
    pool = ProcessPoolExecutor(count, context, _begin, (lambda index: answer(questions[index]),))
    try:
        for found in pool.map(_answer, range(len(questions))):
            yield cast(_Answer, found)
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(asked: Callable[[int], object]) -> None:
    """Set a forked process up: it ends without a word when the user interrupts, or when its parent ends."""
    global _asked
    _asked = asked
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # not those of a display, whose lock may have been held
    torch.set_num_threads(1)  # the threads of torch's operators do not survive a fork
    Thread(target=_end_with, args=(multiprocessing.parent_process(),), daemon=True).start()


def _end_with(parent: multiprocessing.process.BaseProcess) -> None:
    wait([parent.sentinel])
    os._exit(1)


def _answer(index: int) -> object:
    assert _asked is not None
    return _asked(index)
