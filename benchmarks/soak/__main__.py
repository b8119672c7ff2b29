"""`python -m benchmarks.soak --faults 200 --write docs/soak.md`: one fault after the other against one training.

Four processes train. A fault drawn at random ends them; they are started again, go on from the newest whole checkpoint,
and meet the next fault. Of each it is checked that

    every process has ended within 20 s of the fault, and each that could still speak named the first cause,
    training went on from the last durable step,

and in the end that every loss of every attempt, and the parameters, are to the bit those of a run without faults.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import socket
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from autoptd.checkpoint import folder, session  # noqa: F401  the second is loaded before processes are forked off
from autoptd.runtime.faults.heartbeat import Timeouts
from benchmarks.soak import report
from benchmarks.soak.faults import FILES, KINDS, SAVE_EVERY, Fault, damage, draw
from benchmarks.soak.launch import Outcome, free_port, launch
from benchmarks.soak.worker import PLANS, Job, Run, make_jobs

MICROBATCHES = 4


@dataclass(frozen=True)
class Met:
    """A fault, and what was wrong with how it was met; `seconds` until the last rank had ended."""

    fault: Fault
    seconds: float | None
    wrong: tuple[str, ...]


class Soak:
    """The state of the training that goes on through all faults."""

    def __init__(self, jobs: list[Job], home: Path, limits: Timeouts, rng: random.Random) -> None:
        self.jobs, self.home, self.limits, self.rng = jobs, home, limits, rng
        self.root = home / "checkpoints"
        self.losses: list[dict[int, str]] = []
        self.durable = 0
        self._launches = 0

    def run(self, job: int = 0, ends_with: int | None = None, **given: object) -> Outcome:
        self._launches += 1
        notes, port = self.home / f"notes-{self._launches}", given.pop("port", None) or free_port()
        run = replace(Run(self.root, notes, port, self.limits), **given)  # type: ignore[arg-type]
        return launch(self.jobs[job], run, ends_with)

    def meet(self, fault: Fault) -> Met:
        wrong: list[str] = []
        before = folder.newest_first(self.root)
        if fault.kind == "port taken":
            return self._meet_port(fault)
        if fault.kind in FILES:
            name = damage(fault, self.root, self.rng)
            outcome = self.run(steps=2)
            warned = any("skipped " in said for said in outcome.said)
            expected = before[1] if warned else before[0]
            if not any(name in said for said in outcome.said) and name not in (folder.MANIFEST, folder.LATEST):
                wrong.append(f"{name} is not named")
            if outcome.codes != [0] * 4:
                wrong.append(f"did not go on: exit codes {outcome.codes}")
        else:
            expected = before[0] if before else None
            outcome = self.run(fault=fault, steps=8)
            wrong += self._ending(fault, outcome)
        wrong += self._going_on(expected, outcome)
        return Met(fault, outcome.seconds, tuple(wrong))

    def _going_on(self, expected: Path | None, outcome: Outcome) -> list[str]:
        step = 0 if expected is None else int(expected.name.partition("-")[2].partition(".")[0])
        self.losses += outcome.losses
        wrong = [] if set(outcome.resumed) == {step} else [f"resumed {outcome.resumed}, not {step}"]
        newest = folder.newest_first(self.root)
        latest = int(newest[0].name.partition("-")[2].partition(".")[0]) if newest else 0
        if latest < outcome.durable:
            wrong.append(f"step {outcome.durable} was durable, latest is {latest}")
        return wrong

    def _ending(self, fault: Fault, outcome: Outcome) -> list[str]:
        if outcome.seconds is None:
            return ["the fault did not happen"]
        wrong = [f"ranks {outcome.hung} hung"] if outcome.hung else []
        mute = fault.kind.startswith("kill") or fault.kind == "SIGSTOP"
        for rank, said in enumerate(outcome.said):
            if not (mute and rank == fault.rank) and not re.search(fault.told, said, re.MULTILINE):
                wrong.append(f"rank {rank} does not name the cause: {' / '.join(said.splitlines()[-3:])}")
        return wrong

    def _meet_port(self, fault: Fault) -> Met:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            outcome = self.run(port=taken.getsockname()[1], ends_with=0)
        good = re.search(fault.told, outcome.said[0]) and outcome.seconds is not None and outcome.seconds < 20
        return Met(fault, outcome.seconds, () if good else (f"said {outcome.said[0][-600:]!r}",))

    def compare(self) -> list[str]:
        """With a run that meets no fault, in one go; and the last checkpoint under another plan."""
        here = folder.newest_first(self.root)[0]
        step = int(here.name.partition("-")[2].partition(".")[0])
        end = step + 2 * SAVE_EVERY
        last = self.run(until=end, saves=False)
        other = self.run(job=1, until=end, saves=False)
        kept, self.root = self.root, self.home / "elsewhere"
        whole = self.run(until=end, saves=False)
        self.root = kept
        expected = whole.losses[0]
        wrong = [
            f"step {at}: loss {float.fromhex(text)} instead of {float.fromhex(expected[at])}"
            for losses in [*self.losses, *last.losses]
            for at, text in losses.items()
            if at <= end and text != expected[at]
        ]
        if len({*last.digests, *whole.digests}) != 1 or len(last.digests) != 4:
            wrong.append(f"parameters differ: {last.digests} instead of {whole.digests}")
        far = [
            f"under another plan, step {at}: loss {float.fromhex(text)} instead of {float.fromhex(expected[at])}"
            for at, text in other.losses[0].items()
            if abs(float.fromhex(text) - float.fromhex(expected[at])) > 1e-5 * abs(float.fromhex(expected[at]))
        ]
        return wrong + far + ([] if len(other.losses[0]) == end - step else ["the other plan did not run"])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--each", action="store_true", help="one fault of each kind, in order")
    parser.add_argument("--limits", type=json.loads, default={}, help='{"silent_s": 3}, see autoptd.parallelize')
    parser.add_argument("--write", type=Path, help="a page with the results")
    asked = parser.parse_args()
    rng = random.Random(asked.seed)
    home, began = Path(tempfile.mkdtemp(prefix="soak-")), time.time()
    soak = Soak(make_jobs(), home, Timeouts.of(asked.limits), rng)
    soak.run(steps=4)
    met: list[Met] = []
    kinds = list(KINDS) if asked.each else [rng.choice(KINDS) for _ in range(asked.faults)]
    for number, kind in enumerate(kinds):
        met.append(soak.meet(draw(kind, rng, 4, MICROBATCHES)))
        took = "" if met[-1].seconds is None else f"{met[-1].seconds:.1f} s"
        print(f"{number + 1:4} {met[-1].fault}  {took}  {'; '.join(met[-1].wrong) or 'ok'}", flush=True)
        if asked.write is not None:
            report.write(asked.write, met, asked.seed, soak.limits, time.time() - began, None)
    differences = soak.compare()
    print("\n".join(differences) or f"every loss and parameter is that of a run without faults ({next(iter(PLANS))})")
    if asked.write is not None:
        report.write(asked.write, met, asked.seed, soak.limits, time.time() - began, differences)
    shutil.rmtree(home)
    failed = Counter(bool(each.wrong) for each in met)[True]
    print(f"{len(met)} faults, {failed} not as they should be, {len(differences)} differences")
    return 1 if failed or differences else 0


if __name__ == "__main__":
    sys.exit(main())
