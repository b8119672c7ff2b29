"""Questions answered in forked processes have the answers that they have in turn, whatever happens to the processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from autoptd.answers.in_processes import answered
from autoptd.answers.query import PlanQuery
from autoptd.errors import DoesNotFit
from autoptd.progress import Silent

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked there, and read in /proc")


class Counts(Silent):
    """A progress that keeps its counts."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def count(self, done: int, of: int) -> None:
        self.seen.append((done, of))


def test_plans_are_those_made_in_turn(asked: PlanQuery):
    asked.plan()  # the search knows something, and has used its solver, before processes are forked
    worlds = [asked.with_changes(world=world) for world in (1, 2, 4, 8)]
    progress = Counts()
    found = answered(progress, "plan", PlanQuery.plan, worlds, processes=2)
    assert found == [query.plan() for query in worlds]
    assert progress.seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_one_process_answers_by_itself_and_several_do_not():
    questions = [0.2, 0.0, 0.0]

    def answer(seconds: float) -> tuple[float, int]:
        time.sleep(seconds)
        return seconds, os.getpid()

    for processes in (1, 2):
        found = answered(Silent(), "sleep", answer, questions, processes)
        assert [seconds for seconds, _ in found] == questions
        others = {pid for _, pid in found} - {os.getpid()}
        assert len(others) == (0 if processes == 1 else 2)


def test_an_error_is_that_of_its_question(asked: PlanQuery):
    small = asked.with_memory(2**20)
    with pytest.raises(DoesNotFit) as alone:
        small.plan()
    with pytest.raises(DoesNotFit) as forked:
        answered(Silent(), "plan", PlanQuery.plan, [asked, small, asked], processes=2)
    assert str(forked.value) == str(alone.value)


def test_questions_of_a_process_that_ends_are_answered_in_turn():
    mine = os.getpid()

    def answer(number: int) -> int:
        if os.getpid() != mine and number == 2:
            os.kill(os.getpid(), signal.SIGKILL)  # as a system does that is short of memory
        return number**2

    assert answered(Silent(), "square", answer, range(5), processes=2) == [0, 1, 4, 9, 16]


def test_none_is_forked_beside_a_device(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert answered(Silent(), "ask", lambda _: os.getpid(), range(3), processes=3) == [os.getpid()] * 3


def test_processes_end_with_their_parent(tmp_path: Path):
    def answer(number: int) -> None:
        (tmp_path / str(os.getpid())).touch()
        time.sleep(30)

    parent = multiprocessing.get_context("fork").Process(
        target=answered, args=(Silent(), "sleep", answer, range(2), 2), daemon=False
    )
    parent.start()
    _wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
    parent.kill()
    parent.join()
    _wait_until(lambda: not any(_runs(int(path.name)) for path in tmp_path.iterdir()))


def _wait_until(holds) -> None:
    until_s = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
