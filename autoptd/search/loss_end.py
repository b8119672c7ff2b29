"""Cost of the end of a loss that is computed once per step, from all samples of the batch (`whole_batch.py`).

    all-reduce     rows of b samples, float64, over the data axis
    compute        forward, and twice as much backward, of the outer function at b samples
    memory         every result of the forward pass, the gradients of the largest, and three vectors of rows

Every rank with the last stage computes all of it: its share of the step does not shrink with dp or tp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sympy

from autoptd.cost_models.cluster import Cluster
from autoptd.cost_models.collectives import collective_s
from autoptd.cost_models.op_time import OpWork, op_s
from autoptd.passes.analysis.flops import work
from autoptd.passes.graph import infos, is_getitem, nbytes, op_call
from autoptd.passes.losses.loss_form import LossForm
from autoptd.passes.opcall import Sizes
from autoptd.passes.trace.traced import BATCH
from autoptd.search.meshes import Candidate

_VECTORS, _ITEM = 3, 8  # own rows, those of all ranks, their gradients; bytes of a float64
_BACKWARD = 2  # gradients of both operands


@dataclass(frozen=True)
class LossEnd:
    """Device seconds of an outer function, forward and backward, and bytes that it holds meanwhile."""

    ops: tuple[OpWork, ...] = ()
    held_bytes: int = 0
    rows_bytes: int = 0


def loss_end(form: LossForm, sizes: Mapping[sympy.Symbol, int]) -> LossEnd:
    """Return the end of a loss for a batch of these sizes; nothing if the loss reads no rows of all samples."""
    if form.outer is None or not form.rows:
        return LossEnd()
    size, held, largest, ops = Sizes(sizes), 0, 0, list[OpWork]()
    for node in form.outer.nodes:
        if node.op != "call_function" or is_getitem(node):
            continue
        op = work(op_call(node))
        if op.kind == "view":
            continue
        moved, made = size(op.bytes_in) + size(op.bytes_out), sum(size(nbytes(t)) for t in infos(node))
        held, largest = held + made, max(largest, made)
        kind = "matmul" if op.kind == "matmul" else "memory"
        dtype = "fp64" if infos(node)[0].dtype.itemsize == _ITEM else "fp32"
        ops.append(OpWork(kind, size(op.flops), moved, dtype))
        ops.append(OpWork(kind, _BACKWARD * size(op.flops), _BACKWARD * moved, dtype, backward=True))
    rows = _ITEM * sizes[BATCH] * form.row_width
    return LossEnd(tuple(ops), held + 2 * largest + _VECTORS * rows, rows)


def loss_end_s(end: LossEnd, c: Candidate, cluster: Cluster) -> float:
    """Return the seconds of a step in the end of its loss."""
    if not end.ops:
        return 0.0
    summed_s = collective_s("all_reduce", end.rows_bytes, cluster, c.dp * c.cp, c.tp, c.world)
    return summed_s + sum(op_s(cluster.device, op) for op in end.ops)
