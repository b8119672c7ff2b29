"""Time and memory of planning from a cold start, tracing included.

Each case is one `autoptd plan` command in a fresh process; memory is the peak resident set of that process. Every
shipped model is planned for every world with the command's default batch and sequence; a model of 126 layers is also
planned with 12, to measure growth in depth. A case that ends with "nothing fits" counts like any other.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from autoptd.models import model_names

WORLDS = (8, 64, 1024, 16384)
CLUSTER = "dgx-h100"
LIMIT_S = 300.0  # a case that takes longer is stopped

# Bars that the figures must meet.
EACH_S, MEDIAN_S, PEAK_BYTES = 10.0, 5.0, 2e9
WORLD_GROWTH, LAYER_GROWTH = 3.0, 1.5
SMALL, LARGE = 64, 16384  # worlds whose times are compared
DEEP, SHALLOW = "llama3-405b", 12  # a model of 126 layers, and the layers of its shallow copy
DEPTH_WORLD = 1024  # both fit on it


@dataclass(frozen=True)
class Case:
    """One `autoptd plan` command; `path`: configuration file of a model that is not shipped, else ""."""

    model: str
    world: int
    cluster: str = CLUSTER
    path: str = ""

    @property
    def command(self) -> list[str]:
        return ["plan", self.path or self.model, "--world", str(self.world), "--cluster", self.cluster, "--json"]


@dataclass(frozen=True)
class Measured:
    """Wall seconds, peak resident bytes, exit code (None if stopped), and the plan or error as JSON data."""

    wall_s: float
    peak_bytes: int
    code: int | None
    answer: Mapping = field(default_factory=dict)

    @property
    def answered(self) -> bool:
        """True if the command printed a plan or an error that explains why there is none."""
        return self.code == 0 or (self.code == 1 and "error" in self.answer)


Results = Mapping[Case, Measured]


def measure(case: Case, limit_s: float = LIMIT_S) -> Measured:
    """Run one case in its own process, stopped after `limit_s`."""
    start = time.monotonic()
    command = [sys.executable, "-m", "autoptd.cli.main", *case.command]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        watch = threading.Timer(limit_s, process.kill)
        watch.start()
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.monotonic() - start
        watch.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
    to_bytes = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes there, KiB on Linux
    code = process.returncode if process.returncode >= 0 else None
    return Measured(wall_s, usage.ru_maxrss * to_bytes, code, _read(output))


def _read(output: bytes) -> Mapping:
    try:
        return json.loads(output or "{}")
    except ValueError:  # stopped while writing
        return {}


def shallow_copy(folder: Path) -> Path:
    """Write the configuration of DEEP with SHALLOW layers to a file; return its path."""
    import autoptd.models

    data = json.loads((Path(autoptd.models.__file__).parent / f"{DEEP}.json").read_text("utf-8"))
    file = folder / f"{DEEP}-{SHALLOW}-layers.json"
    file.write_text(json.dumps(data | {"num_hidden_layers": SHALLOW}), "utf-8")
    return file


# ---- text ----


def heading() -> str:
    return f"{'model':22} {'world':>6} {'seconds':>8} {'GB':>6}   plan"


def line(case: Case, measured: Measured) -> str:
    """`gpt3-175b  64  21.3  0.58   dp 1 tp 8 pp 8 micro 2, 41.2 s a step`."""
    over = "!" if measured.wall_s > EACH_S or measured.peak_bytes > PEAK_BYTES else " "
    figures = f"{measured.wall_s:8.1f} {measured.peak_bytes / 1e9:6.2f} {over}"
    return f"{case.model:22} {case.world:6} {figures} {answer(measured)}"


def answer(measured: Measured) -> str:
    """Return the chosen mesh and its step time, or why there is no plan."""
    plan = measured.answer
    if "mesh" in plan:
        axes = " ".join(f"{a} {n}" for a, n in plan["mesh"].items() if n > 1 or a in ("dp", "tp", "pp"))
        return f"{axes}, {plan['predicted']['step_time_s']:.3g} s a step"
    if "error" in plan:
        error = plan["error"]
        where = error.get("where", "").splitlines()
        return "; ".join([error["what"].split(":")[0], *where[-1:]])
    return "stopped" if measured.code is None else f"exit code {measured.code}"


@dataclass(frozen=True)
class Figure:
    """A figure and its bar, printed as `median  4.2 s  ≤ 5 s  pass`."""

    name: str
    value: float
    bar: float
    unit: str
    note: str = ""

    @property
    def met(self) -> bool:
        return self.value <= self.bar

    def __str__(self) -> str:
        verdict = "pass" if self.met else "MISS"
        text = f"{self.name:34} {self.value:6.2f} {self.unit:2} ≤ {self.bar:g} {self.unit}".rstrip()
        return f"{text:56} {verdict}" + (f"   {self.note}" if self.note else "")


def figures(results: Results) -> Iterator[Figure]:
    """Yield each figure that the results cover, with the case that decides it."""
    shipped = {c: m for c, m in results.items() if not c.path}
    if shipped:
        slowest = max(shipped, key=lambda c: shipped[c].wall_s)
        fullest = max(shipped, key=lambda c: shipped[c].peak_bytes)
        within = sum(m.wall_s <= EACH_S for m in shipped.values())
        note = f"{slowest.model} on {slowest.world}; {within} of {len(shipped)} within"
        yield Figure("slowest case", shipped[slowest].wall_s, EACH_S, "s", note)
        yield Figure("median", median(m.wall_s for m in shipped.values()), MEDIAN_S, "s")
        note = f"{fullest.model} on {fullest.world}"
        yield Figure("largest peak memory", shipped[fullest].peak_bytes / 1e9, PEAK_BYTES / 1e9, "GB", note)
        missing = sum(not m.answered for m in shipped.values())
        yield Figure("no answer", missing, 0, "", "neither a plan nor an error" if missing else "")
    by_name = {(c.model, c.world): m.wall_s for c, m in shipped.items()}
    growth = {m: by_name[m, LARGE] / by_name[m, SMALL] for m, w in by_name if w == LARGE and (m, SMALL) in by_name}
    if growth:
        most = max(growth, key=lambda m: growth[m])
        yield Figure(f"growth from world {SMALL} to {LARGE:,}", growth[most], WORLD_GROWTH, "×", most)
    for case, measured in results.items():
        deep = by_name.get((DEEP, case.world))
        if case.path and deep is not None:
            name = f"growth from {SHALLOW} to 126 layers"
            yield Figure(name, deep / measured.wall_s, LAYER_GROWTH, "×", f"{DEEP} on {case.world:,}")


# ---- running ----


def cases(models: Iterable[str], worlds: Iterable[int], cluster: str = CLUSTER) -> list[Case]:
    return [Case(model, world, cluster) for model in models for world in worlds]


def run(chosen: Sequence[Case], limit_s: float = LIMIT_S) -> dict[Case, Measured]:
    """Measure each case and print its line, then the figures; return the measurements."""
    print("planning from a cold start, tracing included", flush=True)
    print(heading())
    results: dict[Case, Measured] = {}
    with tempfile.TemporaryDirectory() as folder:
        deep = [c for c in chosen if (c.model, c.world) == (DEEP, DEPTH_WORLD)]
        path = str(shallow_copy(Path(folder))) if deep else ""
        shallow = [Case(f"{DEEP}, {SHALLOW} layers", c.world, c.cluster, path) for c in deep]
        for case in [*chosen, *shallow]:
            results[case] = measure(case, limit_s)
            print(line(case, results[case]), flush=True)
    print()
    for figure in figures(results):
        print(figure)
    return results


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.planning", description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=model_names(), metavar="NAME", help="shipped models (all)")
    parser.add_argument("--worlds", nargs="+", type=int, default=WORLDS, metavar="N", help="numbers of devices")
    parser.add_argument("--cluster", default=CLUSTER, help="a shipped name or a TOML file (%(default)s)")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="S", help="seconds until a case is stopped")
    chosen = parser.parse_args(argv)
    run(cases(chosen.models, chosen.worlds, chosen.cluster), chosen.limit)


if __name__ == "__main__":
    main()
