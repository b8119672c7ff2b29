"""Run a command in a process of its own that may take ten seconds and two gigabytes, and report how it ended.

Processes are forked from a server that has imported torch and transformers once: a case costs what the command does.
"""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import re
import resource
import time
import traceback
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from autoptd.testing.process_pool import PRELOADED

LONGEST_S = 10.0
MOST_BYTES = 2 * 10**9
_PATIENCE_S = 60.0
# The server is that of the pools of processes too, which may be first to start it.
PRELOADED += [
    "autoptd.cli.main",
    "autoptd.compile",
    "autoptd.explain.timeline",
    "autoptd.explain.plan",
    "autoptd.answers.query",
    "autoptd.verification.verdict",
    "autoptd.cli.export",
    "transformers",
    "transformers.models.gpt2.modeling_gpt2",
    # what torch imports to export a model
    "numpy.ma",
    "sympy.codegen.ast",
    "torch._export.passes.replace_with_hop_pass_util",
    "torch._inductor.fx_passes.dedupe_symint_uses",
    "torch._subclasses.schema_check_mode",
    "torch.fx.experimental.validator",
]


@dataclass(frozen=True)
class Ended:
    """Outcome of a command: exit code, output, and time and memory beyond those of an idle process."""

    code: int | None  # None: it was killed, or died
    out: str = ""
    err: str = ""
    seconds: float = 0.0
    peak_bytes: int = 0

    @property
    def within(self) -> bool:
        """Return whether the command ended by itself, within its time and memory."""
        return self.code is not None and self.seconds < LONGEST_S and self.peak_bytes < MOST_BYTES

    @property
    def flaw(self) -> str:
        """Return what is wrong with the outcome; "" for a readable answer or a single readable error of autoptd."""
        if not self.within:
            return f"{self.seconds:.1f} s, {self.peak_bytes / 1e9:.1f} GB, code {self.code}: {self.err[-2000:]}"
        if not plain(self.out + self.err):
            return f"not printable: {(self.out + self.err)[:2000]!r}"
        if "Traceback" in self.err or "unexpected " in self.err:
            return f"a traceback: {self.err[-2000:]}"
        if self.code == 2 and not self.err:  # with --json, errors go to stdout
            return "" if list(json.loads(self.out)) == ["error"] else f"not one error: {self.out[-2000:]!r}"
        error = re.sub(r"^warning: .*\n", "", self.err)
        if self.code == 2 and not (
            re.findall(r"^autoptd: ", error, re.MULTILINE) == ["autoptd: "] and error.startswith("autoptd")
        ):
            return f"not one error: {self.err[-2000:]!r}"
        return ""


def plain(text: str) -> bool:
    """Return whether a terminal shows the text unchanged."""
    return all(c.isprintable() or c == "\n" for c in text)


def refused(*argv: str | Path) -> str:
    """Return the error of a command that must refuse its input."""
    ended = run(*argv)
    assert not ended.flaw, ended.flaw
    assert ended.code == 2, ended
    return ended.err


def run(*argv: str | Path) -> Ended:
    """Run one command of autoptd."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    mine, theirs = context.Pipe(duplex=False)
    worker = context.Process(target=_work, args=(theirs, [str(word) for word in argv]), daemon=True)
    worker.start()
    theirs.close()
    try:
        return mine.recv() if mine.poll(_PATIENCE_S) else Ended(None, err="no end", seconds=_PATIENCE_S)
    except EOFError:
        return Ended(None, err="the process died")
    finally:
        worker.kill()
        worker.join()


def _work(pipe: Connection, argv: Sequence[str]) -> None:
    import autoptd.cli.main

    os.environ["OMP_NUM_THREADS"] = "1"
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + 2 * MOST_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (2 * int(LONGEST_S),) * 2)
    out, err = io.StringIO(), io.StringIO()
    start = time.process_time()
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code: int | None = autoptd.cli.main.main(argv)
    except BaseException:  # noqa: BLE001  whatever left the command is the finding
        code = None
        err.write(traceback.format_exc())
    took_s = time.process_time() - start  # processor time: independent of the load of the machine
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    pipe.send(Ended(code, out.getvalue(), err.getvalue(), took_s, peak))
