"""How long planning takes from a cold start, the trace included, and how much memory it needs.

Each case is the command a person would type, in a fresh process; memory is the peak resident set of that process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One `autoptd plan`."""

    model: str
    world: int
    batch: int
    seq: int | None = None
    cluster: str = "dgx-h100"

    @property
    def command(self) -> list[str]:
        words = ["plan", self.model, "--world", str(self.world), "--batch", str(self.batch), "--cluster", self.cluster]
        return [*words, *(["--seq", str(self.seq)] if self.seq else []), "--json"]


@dataclass(frozen=True)
class Measured:
    """Wall seconds, peak resident bytes, exit code, and the plan or error as data."""

    wall_s: float
    peak_bytes: int
    code: int
    answer: dict


CASES = (
    Case("gpt3-175b", world=64, batch=512, seq=2048),
    Case("gpt2", world=8, batch=64, seq=1024),
    Case("llama3-8b", world=8, batch=64, seq=4096),
    Case("llama3-70b", world=64, batch=512, seq=4096),
)


def measure(case: Case) -> Measured:
    """Run one case in a process of its own."""
    start = time.monotonic()
    with subprocess.Popen([sys.executable, "-m", "autoptd.cli", *case.command], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    wall_s = time.monotonic() - start
    to_bytes = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes there, KiB on Linux
    return Measured(wall_s, usage.ru_maxrss * to_bytes, process.returncode, json.loads(output or "{}"))


def line(case: Case, measured: Measured) -> str:
    """`gpt3-175b  64  21.3 s  2.1 GB  dp 1 tp 8 pp 8, 41.2 s a step`."""
    mesh = measured.answer.get("mesh")
    if mesh:
        step_s = measured.answer["predicted"]["step_time_s"]
        answer = f"dp {mesh['dp']} tp {mesh['tp']} pp {mesh['pp']}, {step_s:.3g} s a step"
    else:
        answer = measured.answer.get("error", {}).get("what", f"exit code {measured.code}")
    return f"{case.model:12} {case.world:6} {measured.wall_s:8.1f} s {measured.peak_bytes / 1e9:6.2f} GB   {answer}"
