"""`python -m benchmarks.soak --faults 200 --write docs/soak.md`: random faults, one after the other, in one training.

Four processes train. A random fault ends them; restarted, they resume from the newest complete checkpoint and meet the
next fault.

For each fault the benchmark checks that

    every process ended within 20 s, and each that could still write reported the first cause,
    training resumed from the last durable step,

and at the end that every loss of every attempt, and the parameters, equal those of a run without faults bit for bit.
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

from autoptd.checkpoint import folder, session  # noqa: F401  session: imported before processes fork
from autoptd.runtime.faults.heartbeat import Timeouts
from benchmarks.soak import report
from benchmarks.soak.faults import FILES, KINDS, SAVE_EVERY, Fault, damage, draw
from benchmarks.soak.launch import Outcome, free_port, launch
from benchmarks.soak.worker import PLANS, Job, Run, make_jobs

MICROBATCHES = 4


@dataclass(frozen=True)
class Handled:
    """A fault that was injected, and what went wrong in handling it; `seconds`: until the last rank ended."""

    fault: Fault
    seconds: float | None
    wrong: tuple[str, ...]


class Soak:
    """State of the training that continues through all faults."""

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

    def inject(self, fault: Fault) -> Handled:
        wrong: list[str] = []
        before = folder.newest_first(self.root)
        if fault.kind == "port taken":
            return self._inject_taken_port(fault)
        if fault.kind in FILES:
            name = damage(fault, self.root, self.rng)
            outcome = self.run(steps=2)
            warned = any("skipped " in output for output in outcome.output)
            expected = before[1] if warned else before[0]
            if not any(name in output for output in outcome.output) and name not in (folder.MANIFEST, folder.LATEST):
                wrong.append(f"damaged {name} is not reported")
            if outcome.codes != [0] * 4:
                wrong.append(f"did not train on: exit codes {outcome.codes}")
        else:
            expected = before[0] if before else None
            outcome = self.run(fault=fault, steps=8)
            wrong += self._check_ending(fault, outcome)
        wrong += self._check_resumed(expected, outcome)
        return Handled(fault, outcome.seconds, tuple(wrong))

    def _check_resumed(self, expected: Path | None, outcome: Outcome) -> list[str]:
        step = 0 if expected is None else int(expected.name.partition("-")[2].partition(".")[0])
        self.losses += outcome.losses
        wrong = [] if set(outcome.resumed) == {step} else [f"resumed from steps {outcome.resumed}, not {step}"]
        newest = folder.newest_first(self.root)
        latest = int(newest[0].name.partition("-")[2].partition(".")[0]) if newest else 0
        if latest < outcome.durable:
            wrong.append(f"step {outcome.durable} was durable, but the newest checkpoint is of {latest}")
        return wrong

    def _check_ending(self, fault: Fault, outcome: Outcome) -> list[str]:
        if outcome.seconds is None:
            return ["the fault did not occur"]
        wrong = [f"ranks {outcome.hung} hung"] if outcome.hung else []
        silent = fault.kind.startswith("kill") or fault.kind == "SIGSTOP"
        for rank, output in enumerate(outcome.output):
            if not (silent and rank == fault.rank) and not re.search(fault.cause_pattern, output, re.MULTILINE):
                wrong.append(f"rank {rank} does not report the cause: {' / '.join(output.splitlines()[-3:])}")
        return wrong

    def _inject_taken_port(self, fault: Fault) -> Handled:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            outcome = self.run(port=taken.getsockname()[1], ends_with=0)
        named = re.search(fault.cause_pattern, outcome.output[0])
        good = named and outcome.seconds is not None and outcome.seconds < 20
        return Handled(fault, outcome.seconds, () if good else (f"rank 0 wrote {outcome.output[0][-600:]!r}",))

    def compare(self) -> list[str]:
        """Compare with an uninterrupted run without faults, and resume the last checkpoint under another plan."""
        newest = folder.newest_first(self.root)[0]
        step = int(newest.name.partition("-")[2].partition(".")[0])
        end = step + 2 * SAVE_EVERY
        last = self.run(until=end, saves=False)
        other = self.run(job=1, until=end, saves=False)
        root, self.root = self.root, self.home / "elsewhere"
        whole = self.run(until=end, saves=False)
        self.root = root
        expected = whole.losses[0]
        wrong = [
            f"step {at}: loss {float.fromhex(text)} instead of {float.fromhex(expected[at])}"
            for losses in [*self.losses, *last.losses]
            for at, text in losses.items()
            if at <= end and text != expected[at]
        ]
        if len({*last.digests, *whole.digests}) != 1 or len(last.digests) != 4:
            wrong.append(f"parameters differ: {last.digests} instead of {whole.digests}")
        deviating = [
            f"under another plan, step {at}: loss {float.fromhex(text)} instead of {float.fromhex(expected[at])}"
            for at, text in other.losses[0].items()
            if abs(float.fromhex(text) - float.fromhex(expected[at])) > 1e-5 * abs(float.fromhex(expected[at]))
        ]
        return wrong + deviating + ([] if len(other.losses[0]) == end - step else ["the other plan did not run"])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--faults", type=int, default=20, help="number of random faults (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the random faults (%(default)s)")
    parser.add_argument("--each", action="store_true", help="one fault of each kind, in order")
    parser.add_argument("--limits", type=json.loads, default={}, help='{"silent_s": 3}, see autoptd.parallelize')
    parser.add_argument("--write", type=Path, help="write a page with the results there")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    home, began = Path(tempfile.mkdtemp(prefix="soak-")), time.time()
    soak = Soak(make_jobs(), home, Timeouts.of(arguments.limits), rng)
    soak.run(steps=4)
    handled: list[Handled] = []
    kinds = list(KINDS) if arguments.each else [rng.choice(KINDS) for _ in range(arguments.faults)]
    for number, kind in enumerate(kinds):
        handled.append(soak.inject(draw(kind, rng, 4, MICROBATCHES)))
        took = "" if handled[-1].seconds is None else f"{handled[-1].seconds:.1f} s"
        print(f"{number + 1:4} {handled[-1].fault}  {took}  {'; '.join(handled[-1].wrong) or 'ok'}", flush=True)
        if arguments.write is not None:
            report.write(arguments.write, handled, arguments.seed, soak.limits, time.time() - began, None)
    differences = soak.compare()
    print("\n".join(differences) or f"losses and parameters equal those of a run without faults ({next(iter(PLANS))})")
    if arguments.write is not None:
        report.write(arguments.write, handled, arguments.seed, soak.limits, time.time() - began, differences)
    shutil.rmtree(home)
    failed = Counter(bool(each.wrong) for each in handled)[True]
    print(f"{len(handled)} faults, {failed} handled wrongly, {len(differences)} differences")
    return 1 if failed or differences else 0


if __name__ == "__main__":
    sys.exit(main())
