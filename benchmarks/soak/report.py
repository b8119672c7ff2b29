"""The page of a soak."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from datetime import date, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from autoptd.outputs import write_whole
from autoptd.runtime.faults.heartbeat import Timeouts
from benchmarks.soak.faults import KINDS

if TYPE_CHECKING:
    from benchmarks.soak.__main__ import Met

HEAD = """# Soak

`python -m benchmarks.soak --faults {count} --seed {seed} --write docs/soak.md` wrote this page
({date}).

Four processes on one machine (gloo, {cores}, torch {torch})
train a small GPT with dropout under dp 2 × pp 2 with ZeRO 1, a learning-rate schedule and a
sampler. They save every second step, half of the saves beside training. A random fault ends them.
Started again, they go on from the newest whole checkpoint and meet the next fault. Limits: a rank
is silent after {silent:g} s without a heartbeat, and has {grace:g} s to end.

- **{count} faults in {took}; {bad} handled wrongly; {hung} hangs.**
{compared}

Seconds are from the fault until the last of the four processes had ended, or, for a taken port,
until rank 0 had reported it. The bound is 20 s. Damaged files end no process: the job leaves the
checkpoint out, names the file, and goes on from the one before.

| fault | times | median s | most s | handled wrongly |
|---|---|---|---|---|
"""


def write(
    path: Path, met: Sequence[Met], seed: int, limits: Timeouts, seconds: float, differences: Sequence[str] | None
) -> None:
    """`differences`: from the run without faults; None where that is not known yet."""
    bad = [each for each in met if each.wrong]
    text = HEAD.format(
        count=len(met),
        seed=seed,
        date=date.today(),
        cores=f"{platform.machine()}, 2 cores shared with other work",
        torch=torch.__version__,
        silent=limits.silent_s,
        grace=limits.grace_s,
        took=timedelta(seconds=round(seconds)),
        bad=len(bad) or "none",
        hung=sum("hung" in text for each in bad for text in each.wrong) or "no",
        compared=_compared(differences),
    )
    for kind in KINDS:
        mine = [each for each in met if each.fault.kind == kind]
        took = [each.seconds for each in mine if each.seconds is not None]
        middle, most = (f"{statistics.median(took):.1f}", f"{max(took):.1f}") if took else ("", "")
        text += f"| {kind} | {len(mine)} | {middle} | {most} | {sum(bool(each.wrong) for each in mine) or ''} |\n"
    if bad:
        text += "\nHandled wrongly:\n\n" + "".join(f"- {each.fault}: {'; '.join(each.wrong)}\n" for each in bad)
    write_whole(path, text)


def _compared(differences: Sequence[str] | None) -> str:
    if differences is None:
        return "- Not yet compared with a run without faults."
    if differences:
        return f"- **{len(differences)} differences from a run without faults**, the first: {differences[0]}."
    return (
        "- Every loss of every attempt, on every rank, and the parameters at the end equal those of a run\n"
        "  without faults, bit for bit.\n"
        "- The last checkpoint, resumed under dp 2 × tp 2 with ZeRO 3, gives that run's losses within 1e-5."
    )
