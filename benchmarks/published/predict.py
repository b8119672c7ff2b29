"""Prediction of a published run by `autoptd.plan`; no other module of this package calls it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import autoptd
from autoptd.cost_models.cluster import Cluster
from autoptd.cost_models.memory import MOST_MEASURED, Memory, alive
from autoptd.errors import AutoptdError
from autoptd.progress import Silent
from autoptd.search.constraints.assumed import by_keyword
from autoptd.search.constraints.options import Constraints, read_constraints
from autoptd.search.pipeline.block_cost import NONE, BlockCosts
from autoptd.search.pipeline.evaluate import Staged, StageSolution, simulated, timed
from autoptd.search.pipeline.recompute_options import bytes_of
from autoptd.search.pipeline.stage_cost import StageCost
from autoptd.search.planner import Planner, Task
from benchmarks.published.clusters import cluster_of
from benchmarks.published.engines import beside
from benchmarks.published.fix import chunk_counts, fix_of
from benchmarks.published.rows import Row, Unsupported
from benchmarks.published.shapes import Shape, build, shape_of

# fp16 costs the same as bf16: as many bytes and, on every device here, the same rate.
_PRECISION = {"bf16": "bf16", "fp16": "bf16", "fp8": "bf16"}
_TENSORS = ("allocated", "active")  # words of a `peak_memory_kind`
_SURE_TO_FIT = 0.95  # of a device's memory: peaks are predicted to 5 % in the median


@dataclass(frozen=True)
class Prediction:
    """Step seconds, and peak bytes of the fullest of the ranks that the run's memory figure covers.

    `analytic_bytes`: parameters, gradients, optimizer state and activations. `allocated_bytes`: all tensors.
    `reserved_bytes`: plus unused memory of the allocator. `total_bytes`: plus the CUDA context, as nvidia-smi shows it.
    `fits`: true if every rank fits as predicted; `surely`: with `CONFIDENCE`.
    """

    step_time_s: float
    analytic_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    total_bytes: int
    fits: bool
    surely: bool

    def bytes_of(self, kind: str) -> int:
        """Return the figure that a `peak_memory_kind` measures. Raises Unsupported for an unknown kind."""
        for words, value in (
            (("analytic",), self.analytic_bytes),
            (("nvidia-smi",), self.total_bytes),
            (("reserved",), self.reserved_bytes),
            (_TENSORS, self.allocated_bytes),
        ):
            if any(word in kind for word in words):
                return value
        raise Unsupported(f"unknown kind of peak memory {kind!r}")


def counts_tensors(kind: str) -> bool:
    """Return whether a `peak_memory_kind` is that of tensors alone."""
    others = "analytic", "nvidia-smi", "reserved"
    return any(word in kind for word in _TENSORS) and not any(word in kind for word in others)


def predict(row: Row) -> Prediction:
    """Predict a run under its own plan. Raises Unsupported, with the reason, if that is not possible.

    Of a plan whose chunks per rank were not published, the fastest number counts that is sure to fit, or else one.
    """
    shape, cluster = shape_of(row), cluster_of(row)
    found = _found(row, shape, cluster)
    for chunks in chunk_counts(row):
        other = _found(row.model_copy(update={"vpp_chunks_per_stage": chunks}), shape, cluster)
        if other.total_bytes <= _SURE_TO_FIT * cluster.device.memory_bytes and other.step_time_s < found.step_time_s:
            found = other
    return found


def _found(row: Row, shape: Shape, cluster: Cluster) -> Prediction:
    if row.full_recompute_layers_per_stage:
        plan, _ = staged(row)
        return _read(plan.seconds, plan.memory, row, cluster)
    found = _read(*_planned(row, shape, cluster), row, cluster)
    if "natural" in row.moe_routing and row.measured_bytes is not None:
        # the rank that logs its memory is one of many, not the fullest
        average = row.model_copy(update={"moe_routing": "forced balanced"})
        found = replace(_read(*_planned(average, shape, cluster), row, cluster), step_time_s=found.step_time_s)
    return found


def _planned(row: Row, shape: Shape, cluster: Cluster) -> tuple[float, Sequence[Memory]]:
    """Return the predicted seconds of a step, and the memory of each pipeline rank. Raises Unsupported."""
    row.need("precision", "n_gpus", "global_batch_size_seqs", "seq_len_tokens")
    assert row.n_gpus and row.precision and row.seq_len_tokens
    if row.precision not in _PRECISION:
        raise Unsupported(f"unknown precision {row.precision!r}")
    precision, (fix, assume) = _PRECISION[row.precision], by_keyword(fix_of(row, shape))
    try:
        predicted = autoptd.plan(
            traced(shape, row.seq_len_tokens, precision),
            world=row.n_gpus,
            cluster=cluster,
            batch=row.global_batch_size_seqs,
            seq=row.seq_len_tokens,
            precision=precision,
            optimizer="adamw",
            fix=fix,
            assume=assume,
        ).predicted
    except AutoptdError as error:
        raise Unsupported(f"autoptd refuses: {error.what}") from error
    return predicted.step_time_s, [Memory(**memory) for memory in predicted.memory]


@lru_cache(maxsize=2)  # runs are sorted by shape; a trace of a large model takes some 100 MB
def traced(shape: Shape, seq: int, precision: str) -> Any:
    """Return the traced model of a shape, cached for all runs of that shape."""
    trace = getattr(autoptd, "trace", None)
    model = build(shape)
    return model if trace is None else trace(model, seq=seq, precision=precision)


def planner_of(row: Row, constraints: Constraints, cluster: Cluster, time_limit_s: float = math.inf) -> Planner:
    """Return a planner of a run's model, batch and number of devices on this cluster. Raises Unsupported."""
    row.need("precision", "n_gpus", "global_batch_size_seqs", "seq_len_tokens")
    assert row.precision and row.seq_len_tokens and row.n_gpus and row.global_batch_size_seqs
    if row.precision not in _PRECISION:
        raise Unsupported(f"unknown precision {row.precision!r}")
    precision = _PRECISION[row.precision]
    model = traced(shape_of(row), row.seq_len_tokens, precision)
    task = Task(
        model.folded,
        cluster,
        row.n_gpus,
        row.global_batch_size_seqs,
        model.sizes,
        precision,
        "adamw",
        constraints,
        time_limit_s=time_limit_s,
    )
    return Planner(task, Silent(), model.known)


def staged(row: Row) -> tuple[Staged, Cluster]:
    """Return a run's plan as `Staged`, to be timed under other constants, and its cluster. Raises Unsupported."""
    cluster = cluster_of(row)
    fix, assume = by_keyword(fix_of(row, shape_of(row)))
    planner = planner_of(row, read_constraints(fix, assume=assume), cluster)
    try:
        plan = planner.predict(planner.candidates()[0])
    except AutoptdError as error:
        raise Unsupported(f"autoptd refuses: {error.what}") from error
    counts = row.full_recompute_layers_per_stage
    return (recomputing(plan, counts, cluster) if counts else plan), cluster


def recomputing(plan: Staged, counts: Sequence[int], cluster: Cluster) -> Staged:
    """Return a plan of one chunk per rank in which the first `counts[k]` layers of stage k are recomputed in full."""
    cuts, c = plan.solution.boundaries, plan.candidate
    if len(counts) != len(cuts):
        raise Unsupported(f"recomputed layers of {len(counts)} stages, not {len(cuts)}")
    policies, memory = list[dict[int, str]](), list[Memory]()
    for rank, (run, count) in enumerate(zip(cuts, counts, strict=True)):
        chunks = plan.chunks.on(rank)
        blocks = BlockCosts(chunks)
        cost, layers = StageCost(chunks, blocks, cluster.device), list(blocks.within(*run))
        again = [block for block in layers if chunks.folded.segments[block[0]].name.startswith("blocks.")][:count]
        chosen = [blocks.option(block, "full" if block in again else NONE) for block in layers]
        kept, extra = bytes_of([chosen], alive(rank, c.pp, c.microbatches, c.schedule, c.virtual))
        policies.append({segment: "full" for block in again for segment in block})
        memory.append(cost.memory(chunks.state([run], cuts), plan.chunks.update_bytes([run]), kept, extra))
    return simulated(timed(plan.chunks, StageSolution(cuts, tuple(policies)), tuple(memory)))


def _read(step_time_s: float, tensors: Sequence[Memory], row: Row, cluster: Cluster) -> Prediction:
    ranks = [found + beside(row, found.parameters) for found in tensors]
    memory_bytes, needed = cluster.device.memory_bytes, max(m.needed for m in ranks)
    covered = [ranks[i] for i in _stages(row.peak_memory_kind, len(ranks))]
    return Prediction(
        step_time_s=step_time_s,
        analytic_bytes=max(m.state + m.activations for m in covered),
        allocated_bytes=max(m.allocated for m in covered),
        reserved_bytes=max(min(m.reserved, memory_bytes) for m in covered),
        total_bytes=max(min(m.shown, memory_bytes) for m in covered),
        fits=needed <= memory_bytes,
        surely=needed * MOST_MEASURED <= memory_bytes,
    )


def _stages(kind: str, count: int) -> tuple[int, ...]:
    """Return the stages that a memory figure of this kind covers.

    Megatron logs on its last rank, nanotron on its first one, which is in the first stage (`log_memory` in logging.py,
    `log_throughput` in helpers.py at e24d2483, whose scripts/scaling_benchmarks.py made the published runs).
    """
    if "nanotron" in kind:
        return (0,)
    if "first/last" in kind:
        return (0, count - 1)
    return (count - 1,) if "logging rank" in kind else tuple(range(count))
