"""Training that is asked to stop: by a signal to any rank, or by a time limit; and under torchrun's elastic launch."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from autoptd.errors import RuntimeFault
from autoptd.stopping import StopRequest
from tests.runtime import elastic_training

SCRIPT = Path(elastic_training.__file__)
ROOT = SCRIPT.parents[2]


@contextmanager
def handlers(*names: str) -> Iterator[None]:
    """Put back the handlers of these signals."""
    before = {name: signal.getsignal(getattr(signal, name)) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)


def alone(number: int) -> int:
    return number


def test_a_signal_asks_once_and_then_does_what_it_did() -> None:
    heard: list[int] = []
    with handlers("SIGUSR1"):
        signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
        stop = StopRequest(alone, ["SIGUSR1"], None)
        assert not stop.asked() and stop.exit_code == 0
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.asked() and stop.exit_code == 128 + signal.SIGUSR1 and heard == []
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == [signal.SIGUSR1] and stop.asked()


def test_the_time_limit_ends_with_success() -> None:
    stop = StopRequest(alone, [], 0.05)
    assert not stop.asked()
    time.sleep(0.06)
    assert stop.asked() and stop.exit_code == 0
    assert not StopRequest(alone, [], None).asked()


def test_all_ranks_say_what_one_was_told() -> None:
    answers: list[int] = []

    def others(number: int) -> int:
        answers.append(number)
        return max(number, 2 * signal.SIGTERM)

    stop = StopRequest(others, [], 0.0)
    assert stop.asked() and answers == [1]
    assert stop.exit_code == 128 + signal.SIGTERM, "a part of the work, though this rank's time is over too"


@pytest.mark.parametrize("name", ["SIGKILL", "SIGNONE", "signal"])
def test_a_signal_that_cannot_be_handled_is_refused(name: str) -> None:
    with pytest.raises(RuntimeFault, match=name):
        StopRequest(alone, [name], None)


def test_another_thread_is_refused() -> None:
    seen: list[BaseException] = []

    def ask() -> None:
        try:
            StopRequest(alone, ["SIGUSR1"], None)
        except RuntimeFault as error:
            seen.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert "main thread" in str(seen[0])


def test_a_model_that_runs_saves_what_it_did(tmp_path: Path) -> None:
    with handlers("SIGTERM"):
        par = elastic_training.made(1)
        stop = par.stop_request(signals=["SIGTERM"])
        assert not stop.asked()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.asked() and stop.exit_code == 143
    assert par.stop_request(0.0, signals=[]).asked()


# ---- nodes that come and go ----

STEPS = 40
Lines = list[dict[str, Any]]


class Nodes:
    """Agents of torchrun's elastic launch on this machine, each with one worker, as if on a node of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.agents = folder, list[subprocess.Popen[bytes]]()
        with socket.socket() as free:
            free.bind(("localhost", 0))
            self.port = free.getsockname()[1]

    def start(self) -> int:
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2:4", "--nproc-per-node", "1"]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{self.port}", "--rdzv-id", "test"]
        command += ["--max-restarts", "50", "--rdzv-conf", "last_call_timeout=4", "--monitor-interval", "0.2"]
        command += [str(SCRIPT), str(self.folder / "saved"), str(STEPS), "0.3"]
        env = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONPATH": str(ROOT)}
        with (self.folder / f"node-{len(self.agents)}.txt").open("wb") as told:
            self.agents.append(
                subprocess.Popen(command, stdout=told, stderr=subprocess.STDOUT, env={**os.environ, **env})
            )
        return len(self.agents) - 1

    def kill(self, node: int) -> None:
        """Kill an agent and its worker, as if the node had lost its power."""
        agent = self.agents[node]
        workers = {line["pid"] for line in self.lines() if line["agent"] == agent.pid}
        agent.kill()
        agent.wait()
        for pid in workers:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # one of an earlier round

    def lines(self) -> Lines:
        """Return what all ranks logged, in the order of their rounds."""
        files = sorted((self.folder / "saved-log").glob("*.jsonl"))
        return [json.loads(line) for file in files for line in file.read_text().splitlines() if line.endswith("}")]

    def wait(self, what: str, reached: Callable[[Lines], bool], limit_s: float = 300) -> None:
        until = time.monotonic() + limit_s
        while not reached(self.lines()):
            if time.monotonic() > until:
                told = "\n".join(path.read_text()[-800:] for path in sorted(self.folder.glob("node-*.txt")))
                pytest.fail(f"{what} after {limit_s} s: {self.lines()[-1:]}\n{told}")
            time.sleep(0.2)

    def train_with(self, world: int, more: int = 4) -> None:
        """Wait until so many nodes have done a few steps beyond those of all others."""
        done = max((line["step"] for line in self.lines()), default=0)
        self.wait(f"{world} nodes", lambda lines: any(x["world"] == world and x["step"] >= done + more for x in lines))


@pytest.mark.ranks
@pytest.mark.timeout(900)
def test_nodes_that_come_and_go_lose_nothing_beyond_the_last_save(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    try:
        nodes.start()
        time.sleep(1)  # it has the store
        for _ in range(3):
            last = nodes.start()
        nodes.train_with(4)
        nodes.kill(last)
        nodes.train_with(3)
        late = nodes.start()
        nodes.train_with(4)
        nodes.kill(1)
        nodes.kill(late)
        nodes.train_with(2)
        assert [nodes.agents[k].wait(300) for k in (0, 2)] == [0, 0]
    finally:
        for k, agent in enumerate(nodes.agents):
            if agent.poll() is None:
                nodes.kill(k)
    check(nodes.lines(), elastic_training.alone(STEPS))


def check(lines: Lines, expected: Lines) -> None:
    """Compare the steps of all rounds with those of one process that nothing interrupted."""
    losses = {line["step"]: line["loss"] for line in expected}
    rows = {line["step"]: sorted(line["rows"]) for line in expected}
    rounds: dict[int, Lines] = {}
    for line in lines:
        rounds.setdefault(line["round"], []).append(line)
    assert sorted({line["step"] for line in lines}) == sorted(losses), "every step was done"
    assert [found[0]["world"] for _, found in sorted(rounds.items())] == [4, 3, 4, 2]
    assert len({line["mesh"] for line in lines}) > 2, "each world has a plan of its own"
    done = 0
    for _, found in sorted(rounds.items()):
        start = found[0]["start"]
        assert start <= done < start + elastic_training.SAVE_EVERY, "no step is lost beyond the last save"
        for step in {line["step"] for line in found}:
            mine = [line for line in found if line["step"] == step]
            shares = {tuple(line["rows"]) for line in mine}
            assert sorted(row for share in shares for row in share) == rows[step], "each sample once"
            assert all(abs(line["loss"] / losses[step] - 1) < 1e-6 for line in mine)
        done = max(line["step"] for line in found)
    assert done == len(losses)
    late = [found[0]["start"] for _, found in sorted(rounds.items())]
    joined = max(line["step"] for line in sorted(rounds.items())[1][1])
    assert late[2] == joined, "a node that joins costs no step: the others save before they leave"
