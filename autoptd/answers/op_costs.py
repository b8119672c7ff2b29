"""Time of a plan's step by module and kernel, from the costs that the plan was predicted from.

All numbers are of one step and an average device: a sum over the pipeline ranks, divided by their number. They are
those of `search/pipeline/chunk_cost.py`, taken apart by the op that each kernel belongs to (`OpWork.origin`):

    kernels         forward, backward and recomputed kernels of every segment, at their modelled seconds
    waiting         what a segment takes longer than its kernels, because the host launches too many (`dispatch_s`)
    communication   exposed collectives of the tp, cp and ep axes, within segments
    gradients       adding the gradients of a microbatch to their buffers

    sum of all rows of a pipeline rank = its compute + recomputation + tp communication in `predicted.time_s`

The rest of the step is data-parallel communication, the optimizer, copies to the host, and waiting in the pipeline.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import fx

from autoptd.answers.reprice import chunks_of
from autoptd.compile.traced import TracedModel
from autoptd.cost_models.cluster import Device
from autoptd.cost_models.op_time import OpWork, executed_flops, op_s
from autoptd.passes.analysis.attention import form_of
from autoptd.passes.analysis.dataflow import is_quadratic
from autoptd.passes.fold import Segment
from autoptd.passes.graph import is_getitem, module_path
from autoptd.passes.rules.factors import Strategy
from autoptd.passes.sharding.sharding import ops_of
from autoptd.plans.model import Plan
from autoptd.search.meshes import OFFLOAD
from autoptd.search.pipeline.chunk_cost import ChunkCosts
from autoptd.search.sharding.kind_cost import work_s
from autoptd.search.sharding.op_table import OpFacts, Workbook

PASSES = ("forward", "backward", "recompute")
WRITTEN = "attention, unfused"
WAITING = "wait for the host"
COMMUNICATION = "communication"
GRADIENTS = "adding gradients"
EVERYWHERE = "(model)"


@dataclass
class _Sums:
    """Sums over a step of each pipeline rank."""

    seconds: dict[tuple[int, str], float] = field(default_factory=lambda: defaultdict(float))  # (pipeline rank, pass)
    kernels: Counter[str] = field(default_factory=Counter)  # by pass
    flops: float = 0.0
    nbytes: float = 0.0
    flop_s: float = 0.0
    byte_s: float = 0.0


@dataclass(frozen=True)
class OpCost:
    """Cost of the equal kernels of a module in one step, on an average device.

    `module`: its path, with `*` for numbers that differ among equal layers. `kernel`: what runs. Seconds of each pass;
    `by_rank`: of all passes, on a device of each pipeline rank. `kernels`: launches by pass. `flops`: executed ones,
    `nbytes`: those that move through device memory. `of_peak`, `of_bandwidth`: achieved rates relative to the device's
    peak for the operands' precision and to its memory bandwidth, both as in the datasheet.
    """

    module: str
    kernel: str
    forward_s: float
    backward_s: float
    recompute_s: float
    by_rank: tuple[float, ...]
    kernels: Mapping[str, float]
    flops: float
    nbytes: float
    of_peak: float
    of_bandwidth: float

    @property
    def seconds(self) -> float:
        """Seconds of all passes."""
        return self.forward_s + self.backward_s + self.recompute_s

    @property
    def passes(self) -> str:
        """The passes in which it runs: some of `F`, `B` and `R`."""
        times = (self.forward_s, self.backward_s, self.recompute_s)
        return "".join(letter for letter, value in zip("FBR", times, strict=True) if value)

    def to_data(self) -> dict[str, Any]:
        """Return the row as JSON data."""
        return {
            "module": self.module,
            "kernel": self.kernel,
            "seconds": self.seconds,
            **{f"{name}_s": getattr(self, f"{name}_s") for name in PASSES},
            "by_rank_s": list(self.by_rank),
            "kernels": dict(self.kernels),
            "flops": self.flops,
            "bytes": self.nbytes,
            "of_peak": self.of_peak,
            "of_bandwidth": self.of_bandwidth,
        }


@dataclass(frozen=True)
class KernelRun:
    """A kernel of a segment, how often an average device runs it in a step, and the facts of its op."""

    work: OpWork
    facts: OpFacts
    node: fx.Node
    strategy: Strategy
    module: str
    kernel: str
    times: float
    step_pass: str  # of PASSES
    chunks: ChunkCosts  # of its pipeline rank

    @property
    def device(self) -> Device:
        """The device that it runs on."""
        return self.chunks.cluster.device

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.times * op_s(self.device, self.work)


@dataclass(frozen=True)
class OpCosts:
    """The rows of a step, the dearest first, and the kernels that they consist of.

    `step_s`: the predicted step. `ideal_s`: the model's FLOPs at the devices' peak, which is the MFU's share of it.
    """

    rows: tuple[OpCost, ...]
    runs: tuple[KernelRun, ...]
    step_s: float
    ideal_s: float

    @property
    def rest_s(self) -> float:
        """Seconds of the step outside of all rows, on an average device."""
        return self.step_s - sum(row.seconds for row in self.rows)

    def share(self, row: OpCost) -> float:
        """Return the share of a row in the step."""
        return row.seconds / self.step_s if self.step_s else 0.0


def op_costs(plan: Plan, traced: TracedModel) -> OpCosts:
    """Return where the time of a step goes. Raises PlanFileError for the plan of another model."""
    chunks, _ = chunks_of(plan, traced)
    names = _OpNames(chunks)
    sums: dict[tuple[str, str], _Sums] = {}
    counted: Counter[tuple[int, int, str]] = Counter()  # (pipeline rank, first equal segment, policy) -> segments
    m, ranks = plan.schedule.microbatches, plan.mesh.pp
    segments, ends = traced.folded.segments, chunks.tensors.workbook.facts.block_ends
    firsts: dict[tuple[str, bool], int] = {}  # of each kind, the first that ends a block, and the first that does not
    for stage, part in enumerate(plan.stages):
        rank, policies = plan.route.holder(stage), plan.policies(part)
        for i in range(part.first, part.last + 1):
            counted[rank, firsts.setdefault((segments[i].kind, i in ends), i), policies.get(i, "")] += 1
        adding_s = m * chunks.on(rank).accumulation_s(chunks.on(rank).numel(part.first, part.last))
        if adding_s:
            sums.setdefault((EVERYWHERE, GRADIENTS), _Sums()).seconds[rank, "backward"] += adding_s
    runs: list[KernelRun] = []
    for (rank, i, policy), alike in counted.items():
        own, times = chunks.on(rank), m * alike
        for key, name, seconds, works in _parts(own, names, i, policy):
            found = sums.setdefault(key, _Sums())
            found.seconds[rank, name] += times * seconds
            for work in works:
                found.kernels[name] += times * (0 if work.part else work.launches)
                _count(found, own.cluster.device, work, times)
                if node := names.op(segments[i].kind, work):
                    facts = own.tensors.workbook.ops[node]
                    runs.append(KernelRun(work, facts, node, names.strategies[node], *key, times / ranks, name, own))
    rows = [_row(*key, found, ranks) for key, found in sums.items()]
    return OpCosts(
        rows=tuple(sorted(rows, key=lambda row: (-row.seconds, row.module, row.kernel))),
        runs=tuple(runs),
        step_s=plan.predicted.step_time_s,
        ideal_s=plan.predicted.mfu * plan.predicted.step_time_s,
    )


def _count(found: _Sums, device: Device, work: OpWork, times: int) -> None:
    flops = executed_flops(device, work)
    found.flops += times * flops
    found.nbytes += times * work.nbytes
    found.flop_s += times * flops / device.matmul_flops_per_s.of(work.dtype)
    found.byte_s += times * work.nbytes / device.memory_bytes_per_s


def _row(module: str, kernel: str, found: _Sums, ranks: int) -> OpCost:
    by_rank = tuple(sum(found.seconds[rank, name] for name in PASSES) for rank in range(ranks))
    forward, backward, recompute = (sum(found.seconds[rank, name] for rank in range(ranks)) / ranks for name in PASSES)
    whole = sum(by_rank)
    return OpCost(
        module=module,
        kernel=kernel,
        forward_s=forward,
        backward_s=backward,
        recompute_s=recompute,
        by_rank=by_rank,
        kernels={name: found.kernels[name] / ranks for name in PASSES if found.kernels[name]},
        flops=found.flops / ranks,
        nbytes=found.nbytes / ranks,
        of_peak=found.flop_s / whole if whole else 0.0,
        of_bandwidth=found.byte_s / whole if whole else 0.0,
    )


# --- one segment --------------------------------------------------------------------------------------------------

_Part = tuple[tuple[str, str], str, float, list[OpWork]]  # (module, kernel), pass, seconds, kernels


def _parts(chunks: ChunkCosts, names: _OpNames, segment: int, policy: str) -> Iterator[_Part]:
    """Yield the seconds of one microbatch in a segment, which a policy recomputes; "" for none."""
    kind = chunks.folded.segments[segment].kind
    cost, whole = chunks.sharded.costs[kind], chunks.segment(segment)
    work = cost.work
    yield from _kernels(chunks, names, kind, "forward", work.forward)
    yield from _kernels(chunks, names, kind, "backward", work.backward)
    own = (names.common(kind), COMMUNICATION)
    if whole.forward_tp_s:
        yield own, "forward", whole.forward_tp_s, []
    if whole.backward_tp_s:
        yield own, "backward", whole.backward_tp_s, []
    if policy in ("", OFFLOAD):
        return
    again = work.recomputed[policy, segment in chunks.tensors.workbook.facts.block_ends].works
    yield from _kernels(chunks, names, kind, "recompute", again)
    exposed_s = chunks.added_s(segment, policy)[1] - work_s(chunks.cluster.device, again)
    if exposed_s > 1e-12:
        yield own, "recompute", exposed_s, []


def _kernels(chunks: ChunkCosts, names: _OpNames, kind: str, name: str, works: Iterable[OpWork]) -> Iterator[_Part]:
    """Yield the kernels of one pass, and the time in which the device waits for the host to launch them."""
    device, works = chunks.cluster.device, tuple(works)
    total_s = 0.0
    for work in works:
        seconds = op_s(device, work)
        total_s += seconds
        yield names.of(kind, work), name, seconds, [work]
    if (waiting_s := work_s(device, works) - total_s) > 1e-12:
        yield (names.common(kind), WAITING), name, waiting_s, []


class _OpNames:
    """Names of modules and kernels of the works of a plan."""

    def __init__(self, chunks: ChunkCosts) -> None:
        self._chunks, folded = chunks, chunks.folded
        self.nodes: dict[str, dict[str, fx.Node]] = {}
        self.strategies: dict[fx.Node, Strategy] = {}
        self._modules: dict[tuple[str, str], str] = {}
        self._common: dict[str, str] = {}
        alike: dict[str, list[Segment]] = {}
        for segment in folded.segments:
            alike.setdefault(segment.kind, []).append(segment)
        for kind, first in folded.representatives.items():
            outside = (*first.receives, *first.parameters, *first.prelude)
            self.nodes[kind] = {node.name: node for node in (*outside, *first.nodes)}
            chosen = chunks.sharded.sharding.kinds[kind].strategies
            self.strategies |= {node: chosen[i] for i, node in ops_of(first)}
            for i, node in enumerate(first.nodes):
                self._modules[kind, node.name] = _pattern([module_path(s.nodes[i]) for s in alike[kind]])
        patterns = sorted({name for name in self._modules.values() if "*" in name})
        for key, name in self._modules.items():
            self._modules[key] = next((p for p in patterns if _is_layer_of(name, p)), name) or EVERYWHERE
        for kind, first in folded.representatives.items():
            paths = [self._modules[kind, node.name] for _, node in ops_of(first)]
            self._common[kind] = _common_path(paths)

    def common(self, kind: str) -> str:
        """Return the innermost module that holds all ops of a kind of segment."""
        return self._common[kind]

    def op(self, kind: str, work: OpWork) -> fx.Node | None:
        """Return the op that a kernel is a part of; None for a conversion of a parameter or an input."""
        node = self.nodes[kind].get(work.origin)
        while node is not None and is_getitem(node):  # one of several results
            node = node.all_input_nodes[0]
        return node if node in self._chunks.tensors.workbook.ops else None

    def of(self, kind: str, work: OpWork) -> tuple[str, str]:
        """Return (module, kernel) of a kernel of a kind of segment."""
        book = self._chunks.tensors.workbook
        node = self.op(kind, work)
        module = self._modules.get((kind, work.origin), self._common[kind])
        facts = None if node is None else book.ops[node]
        return module, _kernel(work, facts, book, self._chunks, self._chunks.cluster.device)


def _kernel(work: OpWork, facts: OpFacts | None, book: Workbook, chunks: ChunkCosts, device: Device) -> str:
    """Return the name of what runs."""
    made = {"compiled": "compiled", "fused": "hand-fused", "eager": "eager"}[book.kernels]
    if facts is None:
        return f"{made} pointwise"
    call = facts.call
    if work.attends:
        form = form_of(call, ring=chunks.method.cp > 1 and chunks.method.context == "ring")
        ring = "ring " if form.ring else ""
        names = {"fused": "flash attention", "efficient": "efficient attention", "written": WRITTEN}
        return ring + names[form.kernel(device.kind)]
    if facts.work.kind != "attention" and any(is_quadratic(t.shape) for t in (*call.operands, *call.outputs)):
        return WRITTEN
    if work.kind == "matmul":
        grouped = "grouped " if work.groups and work.launches == 1 else ""
        return f"{grouped}{work.dtype} GEMM{' per expert' if work.groups and work.launches > 1 else ''}"
    if work.kind == "rows":
        return f"{made} reduction"
    return "lookup" if facts.is_lookup else f"{made} pointwise"


def _pattern(paths: list[str]) -> str:
    """Return a path with `*` where those of equal segments differ."""
    parts = [path.split(".") for path in paths]
    if len({len(each) for each in parts}) > 1:
        return paths[0]
    return ".".join(each[0] if len(set(each)) == 1 else "*" for each in zip(*parts, strict=True))


def _is_layer_of(path: str, pattern: str) -> bool:
    """Return whether a path is one of a pattern's, with numbers in the place of `*`."""
    return fnmatchcase(path, pattern) and bool(re.fullmatch(re.escape(pattern).replace(r"\*", r"(\d+|\*)"), path))


def _common_path(paths: list[str]) -> str:
    """Return the path of the innermost module that holds all modules."""
    parts = [path.split(".") for path in dict.fromkeys(paths) if path != EVERYWHERE]
    shared = []
    for each in zip(*parts, strict=False):
        if len(set(each)) > 1:
            break
        shared.append(each[0])
    return ".".join(shared) or EVERYWHERE
