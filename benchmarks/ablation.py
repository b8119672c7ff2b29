"""Each bound and heuristic of the search switched off in turn: its effect on the plan, the gap and the time.

python -m benchmarks.ablation llama3-70b gpt3-175b --world 64
python -m benchmarks.ablation llama3-8b --world 16
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import autoptd
from autoptd.cost_models.cluster import Cluster
from autoptd.errors import AutoptdError
from autoptd.models.load import load_model
from autoptd.progress import Silent
from autoptd.search.constraints.options import DIMENSIONS, read_constraints
from autoptd.search.planner import Planner
from autoptd.search.sharding.cache import ShardingCache
from autoptd.search.task import Task
from autoptd.search.visit.candidate_queue import OTHER, CandidateQueue, QueueEntry
from autoptd.search.visit.visit import Visit


def _stages_only(visit: Any, entry: Any) -> float:
    entry.stages = visit.costs.stages(entry.candidate)
    return float(entry.bound_s)


def _unrefined(visit: Any, entry: Any) -> float:
    complete = entry.stages.fixed or entry.candidate.pp == 1
    return float("inf") if complete else float(entry.bound_s)


_add = CandidateQueue.add


def _add_to_others(queue: CandidateQueue, entry: QueueEntry) -> None:
    entry.turn = OTHER
    _add(queue, entry)


# Name -> methods of `Visit` or `CandidateQueue`, and their replacements.
SWITCHES: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "all on": {},
    "no bound by work": {"_bound_by_work": lambda visit, entry: entry.bound_s},
    "no contiguous bound": {"_bound_contiguous": _stages_only},
    "no relaxation": {"_bound_relaxed": lambda visit, entry: entry.bound_s},
    "no bound of measured cuts": {"_bound_measured": lambda visit, entry: entry.bound_s},
    "no refinement": {"_refine": _unrefined},
    "no variants that need less memory": {"_enqueue_variants": lambda visit, entry: None},
    "plain meshes not first": {"add": _add_to_others},
    "near the best not first": {"_move_near": lambda queue, best: None},
    "no bound of families": {"_bound_family": lambda visit, entry: entry.bound_s},
}


@contextmanager
def switched(replacements: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace methods within."""
    with ExitStack() as stack:
        for name, method in replacements.items():
            owner = Visit if hasattr(Visit, name) else CandidateQueue
            stack.enter_context(patch.object(owner, name, method))
        yield


def rows(model: autoptd.TracedModel, task: Task) -> Iterator[str]:
    """Yield a line for each switch: step time, gap, candidates cut into stages, CPU seconds, candidate."""
    for name, replacements in SWITCHES.items():
        started = time.process_time()
        with switched(replacements):
            try:
                answer = Planner(task, Silent(), ShardingCache(model.folded)).answer()
            except AutoptdError as error:
                yield f"{name:33} {error.what}"
                continue
        took_s, best = time.process_time() - started, answer.staged
        yield (
            f"{name:33} {best.seconds:9.5g} s/step  gap {100 * answer.gap:5.2f} %  cut {answer.visited:4} of "
            f"{answer.considered:6}  cpu {took_s:6.2f} s  {best.candidate}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ablation", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--world", type=int, default=64)
    parser.add_argument("--cluster", default="dgx-h100")
    parser.add_argument("--search", nargs="*", choices=DIMENSIONS, help="dimensions to search beside meshes (all)")
    parser.add_argument("--time-limit", type=float, default=300.0, metavar="S", help="seconds of one search")
    given = parser.parse_args(arguments)
    constraints, cluster = read_constraints({}).on("cuda"), Cluster.load(given.cluster)
    if given.search is not None:
        constraints = constraints.searching(*given.search)
    for name in given.models:
        model = autoptd.trace(load_model(name)[0])
        task = Task(
            model.folded,
            cluster,
            given.world,
            8 * given.world,
            model.sizes,
            "bf16",
            "adamw",
            constraints,
            time_limit_s=given.time_limit,
        )
        print(f"{name} on {given.world} × {given.cluster}")
        for line in rows(model, task):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
