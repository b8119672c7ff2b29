"""The page of a soak."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from autoptd.outputs import write_whole
from autoptd.runtime.faults.heartbeat import Timeouts
from benchmarks.soak.faults import KINDS

if TYPE_CHECKING:
    from benchmarks.soak.__main__ import Met

HEAD = """# Soak

What `python -m benchmarks.soak --faults {count} --seed {seed} --write docs/soak.md` found. Four processes on one
machine (gloo, {cores}, torch {torch}) train a small GPT with dropout under dp 2 × pp 2 with ZeRO 1, a learning-rate
schedule and a sampler, and save every second step, half of the saves beside training. A fault drawn at random ends
them; started again, they go on from the newest whole checkpoint and meet the next one. Limits: no heartbeat for
{silent:g} s, {grace:g} s to end.

- **{count} faults in {took}; {bad} were not met as they should be; {hung} hangs.**
- {compared}

Seconds are from the fault until the last of the four processes had ended; the bound is 20 s. Of damaged files there is
no such time: the job leaves the checkpoint out, names the file, and goes on from the one before. Of a taken port: until
rank 0 had said so.

| fault | times | median s | most s | not as it should be |
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
        text += "\nNot as they should be:\n\n" + "".join(f"- {each.fault}: {'; '.join(each.wrong)}\n" for each in bad)
    write_whole(path, text)


def _compared(differences: Sequence[str] | None) -> str:
    if differences is None:
        return "Not yet compared with a run without faults."
    if differences:
        return f"**{len(differences)} differences from a run without faults**, the first: {differences[0]}."
    return (
        "Every loss of every attempt, on every rank, and the parameters at the end are to the bit those of a run"
        " without faults; the last checkpoint, resumed under dp 2 × tp 2 with ZeRO 3, gives its losses within 1e-5."
    )
