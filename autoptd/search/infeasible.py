"""Errors of a search without a result: splits that conflict, or the memory that each stage lacks.

Both errors name a remedy. The search collects the facts (`Shortfall`, the splits ILP); this module words them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from autoptd.cost_models.cluster import Cluster
from autoptd.cost_models.memory import CONFIDENCE, HEADROOM
from autoptd.errors import AutoptdError, DoesNotFit
from autoptd.layout.host_memory import host_share, node_ranks
from autoptd.search.memory_filter import MemoryFilter
from autoptd.search.meshes import OFFLOAD, Candidate
from autoptd.search.sharding.problem import SplitProblem

_SHOWN = 4  # stages listed one by one
_NAMED = 4  # clusters with enough memory, the smallest first
_LESS_ON_HOST = "less offload of optimizer state (offload) or activations (recompute), or more ranks"
_GIB = 2**30


# ---- splits ----


class InfeasibleSplit(AutoptdError):
    """No choice of strategies meets all constraints.

    `nodes`: a smallest set of nodes in conflict: without any one of them, the others have a solution. They are fixed
    nodes if the problem without its fixed choices has a solution.
    """

    def __init__(self, what: str, *, nodes: tuple[str, ...], fix: str = "") -> None:
        self.nodes = nodes
        super().__init__(what, where=", ".join(nodes), fix=fix)


def conflict(problem: SplitProblem, possible: Callable[[SplitProblem], bool]) -> InfeasibleSplit:
    """Return the error for an infeasible `problem`, naming a smallest set of nodes that conflict.

    `possible` returns whether a part of the problem has a solution.
    """
    names, fixed = [node.name for node in problem.nodes], list(problem.fixed)
    if not possible(_restricted(problem, names, ())):
        nodes = _smallest(names, lambda kept: possible(_restricted(problem, kept, ())))
        what = "no combination of strategies of these ops is possible"
        return InfeasibleSplit(what, nodes=nodes, fix="plan with fix={'tp': 1}, which splits no op")
    nodes = _smallest(fixed, lambda kept: possible(_restricted(problem, names, kept)))
    choices = ", ".join(f"{problem.called.get(name, name)}={problem.fixed[name]}" for name in nodes)
    if len(nodes) == 1:
        what = f"a split that is fixed cannot be computed with any strategies of the ops: {choices}"
        return InfeasibleSplit(what, nodes=nodes, fix="leave it out")
    return InfeasibleSplit(
        f"these fixed splits contradict each other: {choices}", nodes=nodes, fix="leave one of them out"
    )


def _restricted(problem: SplitProblem, names: Collection[str], fixed: Collection[str]) -> SplitProblem:
    """Return the problem restricted to these nodes, with every tensor of the others available, and these choices."""
    nodes = set(names)
    made = {t for t, name in problem.producer.items() if name in nodes}
    return replace(
        problem,
        nodes=tuple(
            replace(n, choices=tuple(replace(c, needs=tuple(p for p in c.needs if p[0] in made)) for c in n.choices))
            for n in problem.nodes
            if n.name in nodes
        ),
        ties=tuple(pair for pair in problem.ties if set(pair) <= nodes),
        fixed={name: label for name, label in problem.fixed.items() if name in fixed},
    )


def _smallest(items: Sequence[str], possible: Callable[[Sequence[str]], bool]) -> tuple[str, ...]:
    """Return an impossible subset of `items` of which each part is possible (Junker 2004, QuickXplain)."""

    def search(base: list[str], changed: bool, rest: list[str]) -> list[str]:
        if changed and not possible(base):
            return []
        if len(rest) == 1:
            return rest
        half = len(rest) // 2
        first, second = rest[:half], rest[half:]
        of_second = search(base + first, True, second)
        of_first = search(base + of_second, bool(of_second), first)
        return of_first + of_second

    found = set(search([], False, list(items)))
    return tuple(item for item in items if item in found)


# ---- memory ----


@dataclass(frozen=True)
class Shortfall:
    """The memory that a candidate lacks under the cut whose worst stage exceeds its memory least.

    `stages`: names of the first and last segment of each; `missing_bytes`: of a device with its headroom, 0 if a stage
    fits, and `missing_host_bytes` of its host. Devices with `budget_bytes` for state and activations would be enough;
    so would recomputation if `recompute_fits`.
    """

    candidate: Candidate
    stages: tuple[tuple[str, str], ...]
    missing_bytes: tuple[float, ...]
    budget_bytes: float
    recompute_fits: bool
    missing_host_bytes: tuple[float, ...] = ()

    @property
    def worst_bytes(self) -> float:
        """The most that any stage lacks, of its device or its host."""
        return max(*self.missing_bytes, *self.missing_host_bytes, 0.0)

    def device_bytes(self, cluster: Cluster) -> float:
        """Return the memory with which devices would hold every stage that lacks some, headroom and communicators
        included; 0 if none does."""
        c, pools = self.candidate, cluster.pools
        kinds = (pools[c.pools[c.route.holder(k)] if c.pools else 0] for k in range(len(self.missing_bytes)))
        pairs = zip(kinds, self.missing_bytes, strict=True)
        return max((kind.device.memory_bytes + missing for kind, missing in pairs if missing > 0), default=0.0)

    @property
    def is_of_host(self) -> bool:
        """True if every stage fits on its device, and some host lacks memory."""
        return max(self.missing_bytes) <= 0 < max(self.missing_host_bytes, default=0.0)

    def __str__(self) -> str:
        return "\n".join(
            line
            for missing, what in ((self.missing_bytes, ""), (self.missing_host_bytes, " of host memory for each rank"))
            for line in self._lines(missing, what)
        )

    def _lines(self, missing_bytes: Sequence[float], what: str) -> list[str]:
        over = [
            f"stage {k} ({first} … {last}) lacks {missing / _GIB:.2f} GiB{what}"
            for k, ((first, last), missing) in enumerate(zip(self.stages, missing_bytes, strict=False))
            if missing > 0
        ]
        if len(over) > _SHOWN:
            worst = max(missing_bytes) / _GIB
            over[_SHOWN - 1 :] = [f"and {len(over) - _SHOWN + 1} more stages, up to {worst:.2f} GiB{what}"]
        return over

    def error(self) -> DoesNotFit:
        """Return the refusal of this candidate alone."""
        if self.is_of_host:
            over = sum(missing > 0 for missing in self.missing_host_bytes)
            what = f"the host lacks memory for {over} of {len(self.stages)} stages, however the model is cut"
            return DoesNotFit(what, where=str(self), fix=_LESS_ON_HOST)
        over = sum(missing > 0 for missing in self.missing_bytes)
        remedies = ["recompute (recompute='auto')"] if self.recompute_fits else []
        remedies += [
            f"{self.budget_bytes / _GIB:.2f} GiB per device",
            "more stages, a larger tp, or smaller microbatches",
        ]
        what = f"{over} of {len(self.stages)} stages do not fit, however the model is cut"
        return DoesNotFit(what, where=str(self), fix=", or ".join(remedies))


_FITS, _FOUND = "no plan fits", "no plan that fits was found"
_EVERY_CUT = "`exact=True` (--exact), which tries every cut of the model, and takes longer"


def nothing_fits(
    memory: MemoryFilter, world: int, tried: int, closest: Shortfall, fixed: Collection[str], *, all_tried: bool
) -> DoesNotFit:
    """Return the refusal of a whole search. `fixed`: names of choices made by hand that may cost memory; `all_tried`:
    whether every candidate was."""
    device = memory.cluster.device
    if closest.is_of_host:
        return _host_refusal(memory, world, tried, closest, fixed, all_tried=all_tried)
    usable = max(0.0, device.usable_bytes - memory.headroom * device.memory_bytes)
    free = f" if {100 * memory.headroom:.4g} % stays free" if memory.headroom else ""
    if memory.headroom == HEADROOM and "headroom" not in fixed:
        free = f", so that it fits with {CONFIDENCE:.0%} confidence"
    return DoesNotFit(
        f"{_FITS if all_tried else _FOUND}: {tried} meshes considered on {world} × {device.name}, "
        f"which have {usable / _GIB:.1f} GiB each for training{free}",
        where=f"closest: {closest.candidate}\n{closest}",
        fix="; or ".join([*_remedies(memory, world, closest, fixed), *([] if all_tried else [_EVERY_CUT])]),
    )


def _host_refusal(
    memory: MemoryFilter, world: int, tried: int, closest: Shortfall, fixed: Collection[str], *, all_tried: bool
) -> DoesNotFit:
    """Return the refusal of a search whose closest candidate fits on the devices, but not into the hosts' memory."""
    cluster = memory.cluster
    least = min(nbytes for pool in cluster.pools if (nbytes := host_share(pool, world)) is not None)
    needed = (least + max(closest.missing_host_bytes)) * node_ranks(cluster, world)
    remedies = ["a larger world", f"nodes with {math.ceil(needed / _GIB):,} GiB of memory ([device.host] memory_bytes)"]
    moved = {"offload": closest.candidate.offload > 0, "recompute": closest.candidate.recompute == OFFLOAD}
    if held := [name for name, takes in moved.items() if takes and name in fixed]:
        remedies.insert(0, f"fixing less than {', '.join(held)}")
    return DoesNotFit(
        f"{_FITS if all_tried else _FOUND}: {tried} meshes considered on {world} × {cluster.device.name}; the closest "
        "fits on the devices, but needs more host memory than the "
        f"{least * (1 - memory.headroom) / _GIB:,.1f} GiB that each rank may take",
        where=f"closest: {closest.candidate}\n{closest}",
        fix="; or ".join([*remedies, *([] if all_tried else [_EVERY_CUT])]),
    )


def _remedies(memory: MemoryFilter, world: int, closest: Shortfall, fixed: Collection[str]) -> list[str]:
    remedies = ["recompute (leave fix['recompute'] out)"] if closest.recompute_fits else []
    everything, state = "parameters, gradients and optimizer state", memory.state(1)
    if closest.candidate.offload:
        everything, state = "parameters and gradients", replace(state, optimizer=0)
    if (least := memory.least_world(state.state)) > world:
        remedies.append(f"a world of at least {least}: {everything} alone are {state.state / _GIB:,.1f} GiB")
    elif least:
        remedies.append("a larger world, or a shorter sequence")
    everything_there = closest.candidate._replace(offload=1.0)
    if closest.candidate.offload and "offload" not in fixed and not memory.fits_host(everything_there):
        needed = memory.least_host_bytes(everything_there) / (1 - memory.headroom)
        whole = math.ceil(needed * node_ranks(memory.cluster, world) / _GIB)
        remedies.append(f"nodes with more than {whole:,} GiB of memory, for all of the optimizer state")
    costly = set(fixed) - ({"headroom"} if memory.headroom <= HEADROOM else set())  # dropped, it costs no less
    if costly:
        remedies.append(f"fixing less than {', '.join(sorted(costly))}")
    free_bytes = memory.headroom * memory.cluster.device.memory_bytes
    if "headroom" not in costly and max(closest.missing_bytes) * (1 - memory.headroom) <= free_bytes:
        remedies.append("fixing headroom to 0: then it fits as predicted, but may run out of memory")
    if not (needed := closest.device_bytes(memory.cluster)):
        return remedies
    shipped = [(Cluster.load(name).device, name) for name in Cluster.names()]
    alike = sorted((d.memory_bytes, name) for d, name in shipped if d.kind == memory.cluster.device.kind)
    larger = [name for size, name in alike if size >= needed]
    more = f" and {len(larger) - _NAMED} more" if len(larger) > _NAMED else ""
    which = f" ({', '.join(larger[:_NAMED])}{more})" if larger else ""
    return [*remedies, f"devices of {math.ceil(10 * needed / _GIB) / 10:.1f} GiB{which}"]
