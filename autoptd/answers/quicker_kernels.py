"""Quicker kernels for the dearest of a plan: what they would take, by the cost models that the plan was predicted from.

    unfused attention     one fused kernel over the same scores; without the mask's or dropout's own work
    slow products         the same FLOPs and bytes at the rate of the best shape: without part-filled tiles and waves,
                          short inner dims, or rows that cannot be loaded 16 bytes at a time
    waiting for the host  no waiting, as if a graph of kernels were launched at once

Nothing here changes the plan. A saving is that of the kernels alone: an average device has it in each step, while a
plan for the quicker kernels may save more, such as memory and recomputation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import fx

from autoptd.answers.op_costs import WAITING, WRITTEN, KernelRun, OpCosts
from autoptd.cost_models.op_time import OpWork, op_s
from autoptd.passes.analysis.attention import form_of
from autoptd.passes.graph import op_name

ALL = "all modules"
_LEAST = 0.005  # of a step: less is not worth a line
_SLOW = 1.15  # of the time at the best rate: products slower than that are named
_ITEMSIZE = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
_OPS = 6  # named of unfused attention


@dataclass(frozen=True)
class QuickerKernel:
    """A row of `OpCosts`, the cause of its slowness, and what another kernel would take, in seconds of a step."""

    module: str
    kernel: str
    cause: str
    instead: str
    now_s: float
    then_s: float

    @property
    def saved_s(self) -> float:
        """Seconds of a step on an average device that it would save."""
        return self.now_s - self.then_s

    def to_data(self) -> dict[str, Any]:
        """Return the fields as JSON data."""
        return {**asdict(self), "saved_s": self.saved_s}


def quicker_kernels(costs: OpCosts) -> list[QuickerKernel]:
    """Return the kernels of which quicker ones would save most, the largest saving first."""
    by_row: dict[tuple[str, str], list[KernelRun]] = {}
    for run in costs.runs:
        by_row.setdefault((run.module, run.kernel), []).append(run)
    found = list(_waiting(costs))
    for runs in by_row.values():
        found += _attention(runs) if any(_attends(run) for run in runs) else _product(runs)
    return sorted((q for q in found if q.saved_s >= _LEAST * costs.step_s), key=lambda q: -q.saved_s)


def _attends(run: KernelRun) -> bool:
    return run.work.attends or run.kernel == WRITTEN


def _waiting(costs: OpCosts) -> Iterator[QuickerKernel]:
    rows = [row for row in costs.rows if row.kernel == WAITING]
    if rows and costs.runs:
        launched, device = sum(sum(row.kernels.values()) for row in costs.rows), costs.runs[0].device
        yield QuickerKernel(
            rows[0].module if len(rows) == 1 else ALL,
            WAITING,
            f"the host takes {device.dispatch_s * 1e6:.3g} µs for each of {launched:,.0f} kernels",
            "launching all kernels as one graph",
            sum(row.seconds for row in rows),
            0.0,
        )


# --- attention ----------------------------------------------------------------------------------------------------


def _attention(runs: Sequence[KernelRun]) -> Iterator[QuickerKernel]:
    runs = [run for run in runs if run.work.attends] or runs  # without a bias that other ops compute
    now_s, first = sum(run.seconds for run in runs), runs[0]
    if first.facts.work.kind != "attention":
        products = [run for run in runs if _scores_product(run)]
        if not products:
            return
        then_s = sum(_fused_s(run) for run in products)
        yield QuickerKernel(first.module, first.kernel, _scores_text(runs), "one fused kernel", now_s, then_s)
        return
    form = form_of(first.facts.call, ring="ring" in first.kernel)
    plain = replace(form, mask=None, dropped=False)
    if form.kernel(first.device.kind) == "fused" or plain.kernel(first.device.kind) != "fused":
        return
    then_s, firsts = 0.0, dict[tuple[fx.Node, str], OpWork]()
    for run in runs:
        if firsts.setdefault((run.node, run.step_pass), run.work) is run.work:  # one of the op's several kernels
            kernels = run.chunks.tensors.fused_attention(run.node, run.strategy)[run.step_pass == "backward"]
            then_s += run.times * sum(op_s(run.device, work) for work in kernels)
    whys = (form.why(first.device.kind), replace(form, dropped=False).why(first.device.kind))
    cause = "; ".join(dict.fromkeys(filter(None, whys)))
    yield QuickerKernel(first.module, first.kernel, cause, "the flash kernel", now_s, then_s)


def _scores_product(run: KernelRun) -> bool:
    """Return whether a kernel is the forward product of queries and keys in attention written as ops."""
    return run.work.kind == "matmul" and not run.work.backward and run.facts.loops is not None and run.facts.keys == "n"


def _fused_s(run: KernelRun) -> float:
    """Return the seconds of a fused kernel in place of attention: in the pass of its product, and in backward."""
    work = run.work
    assert work.m and work.n and work.k
    fused = OpWork(
        "attention",
        2 * work.flops,  # the second product has as many
        2.0 * work.batch * (work.m + work.n) * work.k * _ITEMSIZE[work.dtype],  # queries and results, keys and values
        work.dtype,
        work.m,
        work.n,
        work.k,
        work.batch,
        implementation=run.chunks.method.attention,
    )
    seconds = op_s(run.device, fused)
    if run.step_pass == "forward":
        seconds += op_s(run.device, replace(fused, flops=2.5 * fused.flops, nbytes=2 * fused.nbytes, backward=True))
    return run.times * seconds


def _scores_text(runs: Sequence[KernelRun]) -> str:
    names = list(dict.fromkeys(op_name(run.node) for run in runs))
    more = " …" if len(names) > _OPS else ""
    read = sorted({name for run in runs for name in _parameters(run)})
    also = f", and reads {', '.join(read)} there" if read else ""
    return f"the model's code computes scores as tensors ({', '.join(names[:_OPS])}{more}){also}"


def _parameters(run: KernelRun) -> Iterator[str]:
    """Yield the last parts of the names of the parameters that an op reads, as they are or through views."""
    ops, parameters = run.chunks.tensors.workbook.ops, run.chunks.folded.traced.parameters
    for node in run.node.all_input_nodes:
        while node in ops and ops[node].work.kind == "view":
            node = node.all_input_nodes[0]
        if node.name in parameters:
            yield parameters[node.name].rpartition(".")[2]


# --- products -----------------------------------------------------------------------------------------------------


def _product(runs: Sequence[KernelRun]) -> Iterator[QuickerKernel]:
    products = [run for run in runs if run.work.kind == "matmul"]
    now_s, best_s = sum(run.seconds for run in products), sum(map(_best_s, products))
    if not products or now_s < _SLOW * best_s:
        return
    worst = max(products, key=lambda run: run.seconds - _best_s(run))
    yield QuickerKernel(worst.module, worst.kernel, _shape_text(worst), "the rate of the best shape", now_s, best_s)


def _best_s(run: KernelRun) -> float:
    return run.times * op_s(run.device, replace(run.work, m=None, n=None, k=None, odd=False))


def _shape_text(run: KernelRun) -> str:
    work = run.work
    count = f"{work.batch} of " if work.batch > 1 else ""
    text = f"{count}{work.m} × {work.k} times {work.k} × {work.n}"
    split, tp = run.facts.split_factor(run.strategy), run.strategy.ranks
    if split is not None and not run.work.backward:
        role = run.facts.roles[split]
        text += f", {role if role != 'batch' else 'their number'} split over tp {tp}"
    elif split is not None:
        text += f", split over tp {tp}"
    return f"rows of an odd length: {text}" if work.odd else text
