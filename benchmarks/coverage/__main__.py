"""`python -m benchmarks.coverage`: which models of the installed libraries train in parallel at parity.

`python -m benchmarks.coverage mutated` checks models that are mutated at random, one for each of `--seeds`.

Each model runs in a process of its own, forked from one that has imported the libraries. The results file is rewritten
after each model; a model that it holds already is not run again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import signal
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

LIMIT_S = 120.0
DATA = Path(__file__).parents[1] / "data"
RESULTS = {"models": DATA / "coverage.jsonl", "mutated": DATA / "mutated.jsonl"}


def run(cases: Iterable[Any], jobs: int, limit_s: float, only_build: bool = False) -> Iterator[Any]:
    """Yield the outcome of each case, as they finish. A process that dies or takes too long is an outcome as well."""
    from benchmarks.coverage.check import Outcome

    todo, running = iter(cases), {}
    context = multiprocessing.get_context("fork")
    while True:
        while len(running) < jobs and (case := next(todo, None)) is not None:
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(case, only_build, theirs))
            process.start()
            theirs.close()
            running[mine] = case, process, time.monotonic()
        if not running:
            return
        ready = wait(list(running), timeout=1.0)
        for pipe in list(running):
            case, process, began = running[pipe]
            spent = time.monotonic() - began
            if pipe in ready:
                try:
                    found = pipe.recv()
                except EOFError:
                    process.join()
                    what = f"the process ended with code {process.exitcode}"
                    found = Outcome(case.name, case.family, "crashed", what, seconds=spent)
            elif spent > limit_s:
                process.kill()
                found = Outcome(case.name, case.family, "crashed", f"not done in {limit_s:g} s", seconds=spent)
            else:
                continue
            process.join()
            pipe.close()
            del running[pipe]
            yield found


def _child(case: Any, only_build: bool, pipe: Connection) -> None:
    """Check one case, silently."""
    import torch

    from benchmarks.coverage.check import check

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    pipe.send(check(case, only_build))


def line(found: Any) -> str:
    detail = f"{found.difference:.1e}, tp splits {found.split:.0%}" if found.result == "trained" else found.what
    first = next(iter(detail.splitlines()), "")
    return f"{found.result:9} {found.family:15} {found.name:45} {found.seconds:5.1f} s  {first[:150]}"


def write_page(results: Path, to: Path) -> None:
    """Write the document about the results in a file."""
    from benchmarks.coverage.page import page

    rows = [json.loads(row) for row in results.read_text("utf-8").splitlines()]
    to.write_text(page(rows, made(results)), "utf-8")


def made(results: Path) -> str:
    """Return when and with what a results file was made, in words."""
    from importlib.metadata import version

    from benchmarks.coverage.check import FIX

    day = time.strftime("%Y-%m-%d", time.gmtime(results.stat().st_mtime))
    mesh = " × ".join(f"{axis} {n}" for axis, n in FIX.items())
    return f"{day}, torch {version('torch')}, transformers {version('transformers')}, {mesh}"


def all_cases() -> list[Any]:
    from benchmarks.coverage.huggingface import TABLES, heads
    from benchmarks.coverage.libraries import library_cases

    return [*heads(list(TABLES)), *library_cases()]


def mutated(seeds: range) -> list[Any]:
    from benchmarks.coverage.mutated.case import Mutated

    return [Mutated(seed) for seed in seeds]


def seeds(text: str) -> range:
    """Return the seeds from `first:end`."""
    first, _, end = text.partition(":")
    return range(int(first), int(end))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.coverage", description=__doc__.split("\n")[0])
    parser.add_argument("cases", nargs="?", choices=RESULTS, default="models", help="(default: %(default)s)")
    parser.add_argument("--seeds", type=seeds, default="0:200", metavar="A:B", help="of mutated models (%(default)s)")
    parser.add_argument("--only", default="", metavar="PATTERN", help="models whose name or family matches")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes (%(default)s)")
    parser.add_argument(
        "--limit", type=float, default=LIMIT_S, metavar="S", help="seconds for each model (%(default)s)"
    )
    parser.add_argument("--results", type=Path, metavar="FILE", help="where results are kept")
    parser.add_argument("--build", action="store_true", help="only build each model and train it by itself")
    parser.add_argument("--again", default="", metavar="RESULTS", help="run those with these results again, or 'all'")
    parser.add_argument("--page", type=Path, metavar="FILE", help="only write the page about the results there are")
    chosen = parser.parse_args(argv)
    chosen.results = chosen.results or RESULTS[chosen.cases]
    if chosen.page:
        write_page(chosen.results, chosen.page)
        return
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    import autoptd.verification.verdict  # noqa: F401  imported once, before the processes fork

    kept = {}
    if chosen.results.exists():
        kept = {x["name"]: x for x in map(json.loads, chosen.results.read_text("utf-8").splitlines())}
    every = mutated(chosen.seeds) if chosen.cases == "mutated" else all_cases()
    cases = [c for c in every if re.search(chosen.only, f"{c.family} {c.name}", re.IGNORECASE)]
    again = chosen.again.split(",")
    todo = [c for c in cases if c.name not in kept or "all" in again or kept[c.name]["result"] in again]
    for found in run(todo, chosen.jobs, chosen.limit, chosen.build):
        print(line(found), flush=True)
        kept[found.name] = found.data()
        chosen.results.parent.mkdir(exist_ok=True)
        chosen.results.write_text("".join(json.dumps(x) + "\n" for x in kept.values()), "utf-8")


if __name__ == "__main__":
    main()
