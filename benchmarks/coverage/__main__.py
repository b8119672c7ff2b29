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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

LIMIT_S = 120.0
DATA = Path(__file__).parents[1] / "data"
RESULTS = {"models": DATA / "coverage.jsonl", "mutated": DATA / "mutated.jsonl"}


def run(cases: Iterable[Any], jobs: int, limit_s: float, checked: Callable[[Any], Any]) -> Iterator[Any]:
    """Yield the outcome of each case, as they finish. A process that dies or takes too long is an outcome as well."""
    from benchmarks.coverage.check import Outcome

    todo, running = iter(cases), {}
    context = multiprocessing.get_context("fork")
    while True:
        while len(running) < jobs and (case := next(todo, None)) is not None:
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(case, checked, theirs))
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


def _child(case: Any, checked: Callable[[Any], Any], pipe: Connection) -> None:
    """Check one case, silently."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    pipe.send(checked(case))


def line(found: Any) -> str:
    detail = f"{found.difference:.1e}, tp splits {found.split:.0%}" if found.result == "trained" else found.what
    first = next(iter(detail.splitlines()), "")
    return f"{found.result:9} {found.family:15} {found.name:45} {found.seconds:5.1f} s  {first[:150]}"


def write_page(results: Path, to: Path) -> None:
    """Write the document about the results in a file, and in those of other meshes beside it."""
    from benchmarks.coverage.check import FIX
    from benchmarks.coverage.page import page

    names = {p: p.stem.removeprefix(f"{results.stem}-") for p in sorted(results.parent.glob(f"{results.stem}-*.jsonl"))}
    others = {made(p, dict(re.findall(r"([a-z]+)(\d+)", name))): read(p) for p, name in names.items()}
    to.write_text(page(read(results), made(results, FIX), others), "utf-8")


def read(results: Path) -> list[dict[str, Any]]:
    """Return the results in a file, none if it does not exist."""
    return [json.loads(row) for row in results.read_text("utf-8").splitlines()] if results.exists() else []


def of_mesh(results: Path, mesh: Mapping[str, int]) -> Path:
    """Return the file for results on another mesh: `coverage-cp2-tp2.jsonl`."""
    name = "-".join([results.stem, *(f"{axis}{n}" for axis, n in mesh.items())])
    return results.with_name(f"{name}{results.suffix}")


def made(results: Path, mesh: Mapping[str, Any]) -> str:
    """Return when and with what a results file was made, in words."""
    from importlib.metadata import version

    day = time.strftime("%Y-%m-%d", time.gmtime(results.stat().st_mtime))
    axes = " × ".join(f"{axis} {n}" for axis, n in mesh.items())
    return f"{day}, torch {version('torch')}, transformers {version('transformers')}, {axes}"


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


def mesh(text: str) -> dict[str, int]:
    """Return the mesh from `cp=2,tp=2`."""
    return {axis.strip(): int(n) for axis, _, n in (part.partition("=") for part in text.split(","))}


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
    parser.add_argument(
        "--fix", type=mesh, metavar="cp=2,tp=2", help="run on another mesh, and keep its results in a file of its own"
    )
    parser.add_argument("--build", action="store_true", help="only build each model and train it by itself")
    parser.add_argument("--again", default="", metavar="RESULTS", help="run those with these results again, or 'all'")
    parser.add_argument("--page", type=Path, metavar="FILE", help="only write the page about the results there are")
    chosen = parser.parse_args(argv)
    usual = RESULTS[chosen.cases]
    chosen.results = chosen.results or (of_mesh(usual, chosen.fix) if chosen.fix else usual)
    if chosen.page:
        write_page(chosen.results, chosen.page)
        return
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    import autoptd.verification.verdict  # noqa: F401  imported once, before the processes fork
    from benchmarks.coverage.check import check

    kept = {x["name"]: x for x in read(chosen.results)}
    every = mutated(chosen.seeds) if chosen.cases == "mutated" else all_cases()
    cases = [c for c in every if re.search(chosen.only, f"{c.family} {c.name}", re.IGNORECASE)]
    again = chosen.again.split(",")
    todo = [c for c in cases if c.name not in kept or "all" in again or kept[c.name]["result"] in again]
    checked = partial(check, only_build=chosen.build, free=not chosen.fix, fix=chosen.fix)
    for found in run(todo, chosen.jobs, chosen.limit, checked):
        print(line(found), flush=True)
        kept[found.name] = found.data()
        chosen.results.parent.mkdir(exist_ok=True)
        chosen.results.write_text("".join(json.dumps(x) + "\n" for x in kept.values()), "utf-8")


if __name__ == "__main__":
    main()
