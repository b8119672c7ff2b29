"""Optimality of the search, checked against every plan of small tasks and every candidate of large ones.

`python -m benchmarks.optimality` draws random small tasks (`tests/search/random_tasks.py`) and simulates every
candidate, cut into stages and recomputation choice, independently of the search (`tests/search/every_plan.py`). With
`--shipped`, it solves the splits and the cut of every candidate of a shipped model and simulates its step, without
pruning. Seconds of searching and simulating are CPU time.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autoptd import TracedModel, trace
from autoptd.cost_models.cluster import Cluster
from autoptd.errors import AutoptdError, DoesNotFit, PlanError
from autoptd.models import load_model
from autoptd.progress import Silent
from autoptd.search.constraints.options import DIMENSIONS, read_constraints
from autoptd.search.planner import Planner, Task

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "search"))
from every_plan import least_seconds
from random_tasks import random_task

EQUAL = 1e-9  # relative difference up to which two step times count as equal
SHIPPED = ("gpt2", "bert-large", "vit-large", "llama3-8b")
SAMPLES = 8  # per device and step


@dataclass(frozen=True)
class Compared:
    """One task: step time of the search's plan and of the best of all `plans`, infinite if nothing fits."""

    name: str
    found_s: float
    best_s: float
    gap: float
    plans: int
    search_cpu_s: float
    all_cpu_s: float
    chosen: str = ""
    considered: int = 0
    dimensions: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return self.best_s < math.inf

    @property
    def excess(self) -> float:
        """Relative excess of the search's step time over the best; negative if it beats every enumerated plan."""
        if self.found_s == self.best_s:
            return 0.0
        return self.found_s / self.best_s - 1 if self.fits else -math.inf

    @property
    def proved(self) -> bool:
        """True if the reported gap covers the true one."""
        return self.excess <= 0 or self.found_s * (1 - self.gap) <= self.best_s * (1 + EQUAL)

    def __str__(self) -> str:
        if not self.fits:
            times = "nothing fits" if self.found_s == math.inf else "plan found although nothing fits"
        else:
            times = f"{self.found_s:11.5g} {self.best_s:11.5g} {100 * self.excess:+8.3f} {100 * self.gap:7.2f}"
        cpu = f"{self.search_cpu_s:7.2f} {self.all_cpu_s:8.2f}"
        return f"{self.name:38} {self.considered:6} {self.plans:7} {times:40} {cpu}   {self.chosen}".rstrip()


HEADING = (
    f"{'task':38} {'cands':>6} {'plans':>7} {'search s':>11} {'best s':>11} {'% more':>8} {'gap %':>7}  "
    f"{'cpu s':>8} {'all s':>8}   chosen"
)


def searched(task: Task, model: TracedModel) -> tuple[float, float, str, float]:
    """Run the search; return (step seconds, gap, candidate, CPU seconds)."""
    started = time.process_time()
    try:
        answer = Planner(task, Silent(), model.known).answer()
    except DoesNotFit:
        return math.inf, 0.0, "", time.process_time() - started
    spent = time.process_time() - started
    return answer.staged.seconds, answer.gap, str(answer.staged.candidate), spent


def small(seed: int, effort: int | None = None) -> Compared | None:
    """Compare the search with every plan of a random small task; None for a world that no mesh fills."""
    model, task = random_task(seed)
    task = replace(task, effort=effort)
    planner = Planner(task, Silent(), model.known)
    try:
        considered = len(planner.space())
    except PlanError:
        return None
    found_s, gap, chosen, search_cpu_s = searched(task, model)
    started = time.process_time()
    best_s, plans = least_seconds(planner)
    all_cpu_s = time.process_time() - started
    dimensions = tuple(sorted(task.constraints.searched))
    name = f"{seed} {model.name} on {task.world} {'+'.join(dimensions)}"
    return Compared(name, found_s, best_s, gap, plans, search_cpu_s, all_cpu_s, chosen, considered, dimensions)


def shipped(name: str, world: int, cluster: str, seq: int | None = None, dimensions: Sequence[str] = ()) -> Compared:
    """Compare the search with every candidate of a shipped model, each with its own splits ILP and best cut."""
    module, _ = load_model(name)
    model = trace(module, seq=seq)
    constraints = read_constraints({}).searching(*dimensions)
    task = Task(model.folded, Cluster.load(cluster), world, SAMPLES * world, model.sizes, "bf16", "adamw", constraints)
    found_s, gap, chosen, search_cpu_s = searched(task, model)
    planner, started = Planner(replace(task, effort=None), Silent(), model.known), time.process_time()
    best_s, simulated = math.inf, 0
    considered = planner.space()
    for candidate in considered:
        try:
            best_s = min(best_s, planner.predict(candidate).seconds)
            simulated += 1
        except AutoptdError:
            continue
    all_cpu_s = time.process_time() - started
    title = f"{name} on {world} × {cluster} {'+'.join(dimensions)}"
    return Compared(
        title, found_s, best_s, gap, simulated, search_cpu_s, all_cpu_s, chosen, len(considered), tuple(dimensions)
    )


def summary(results: Sequence[Compared]) -> Iterator[str]:
    """Yield the report: tasks where the search is optimal, the worst excess, and counts per dimension."""
    fitting = [r for r in results if r.fits]
    equal = [r for r in results if abs(r.excess) <= EQUAL or r.excess < 0]
    yield (
        f"{len(results)} tasks, {len(fitting)} of which fit: {len(equal)} optimal, "
        f"worst excess {100 * max((r.excess for r in fitting), default=0.0):+.4f} %; "
        f"reported gap too small: {sum(not r.proved for r in results)}"
    )
    plans = sum(r.plans for r in results)
    search_s, all_s = (sum(getattr(r, n) for r in results) for n in ("search_cpu_s", "all_cpu_s"))
    yield f"{plans:,} plans simulated in {all_s:.0f} CPU seconds; the search took {search_s:.0f}"
    counts = Counter(dimension for r in results for dimension in r.dimensions or ("nothing",))
    good = Counter(dimension for r in equal for dimension in r.dimensions or ("nothing",))
    if counts.keys() - {"nothing"}:
        yield "searched: " + ", ".join(f"{name} {good[name]}/{n}" for name, n in sorted(counts.items()))


def run(results: Iterable[Compared | None]) -> bool:
    """Print a line per result, then the summary; return True if every plan is optimal and every gap large enough."""
    print(HEADING, flush=True)
    done = []
    for result in results:
        if result is not None:
            verdict = "" if result.excess <= EQUAL and result.proved else "   NOT OPTIMAL"
            print(f"{result}{verdict}", flush=True)
            done.append(result)
    print("\n".join(summary(done)))
    return all(r.excess <= EQUAL and r.proved for r in done)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.optimality", description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=300, metavar="N", help="random small tasks (300)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="first seed (0)")
    parser.add_argument("--effort", type=int, metavar="N", help="cuts simulated beyond the first (no limit)")
    parser.add_argument("--shipped", nargs="*", metavar="NAME", help=f"shipped models ({', '.join(SHIPPED)})")
    parser.add_argument("--world", type=int, default=64, metavar="N", help="devices, for shipped models (64)")
    parser.add_argument("--cluster", default="dgx-h100", help="of shipped models (%(default)s)")
    parser.add_argument("--search", nargs="*", default=(), choices=DIMENSIONS, help="beside meshes, of shipped models")
    chosen = parser.parse_args(argv)
    if chosen.shipped is not None:
        names = chosen.shipped or SHIPPED
        return not run(shipped(n, chosen.world, chosen.cluster, dimensions=chosen.search) for n in names)
    return not run(small(seed, chosen.effort) for seed in range(chosen.first, chosen.first + chosen.seeds))


if __name__ == "__main__":
    sys.exit(main())
