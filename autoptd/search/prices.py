"""Seconds of ops and conversions, and bytes of tensors, on one rank of a tp axis."""

from __future__ import annotations

from collections.abc import Mapping

import sympy
import torch
from torch import fx

from autoptd.cost_models.cluster import Cluster
from autoptd.cost_models.collectives import collective_s
from autoptd.cost_models.op_time import OpWork, memory_s, op_s
from autoptd.passes.factors import Strategy
from autoptd.passes.graph import op_call
from autoptd.passes.opcall import Size, Sizes, TensorInfo
from autoptd.passes.placements import B, Placement, Split, conversion
from autoptd.passes.trace import BATCH
from autoptd.passes.work import work

DTYPE_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
# gradient work relative to forward: matmuls compute two products; fused attention recomputes one (Dao 2023)
_BACKWARD = {"matmul": 2.0, "attention": 2.5, "memory": 2.0, "view": 0.0}


class Prices:
    """What things cost on `ranks` ranks of `cluster`, for given sizes."""

    def __init__(self, cluster: Cluster, ranks: int, values: Mapping[sympy.Symbol, int]) -> None:
        self.cluster, self.ranks = cluster, ranks
        self.values = dict(values)
        self.sizes = Sizes(self.values, BATCH)
        self._numbers: dict[Size, int] = {}

    # ---- sizes ----

    def number(self, size: Size) -> int:
        if isinstance(size, int):
            return size
        if size not in self._numbers:
            self._numbers[size] = self.sizes(size)
        return self._numbers[size]

    def nbytes(self, tensor: TensorInfo, placement: Placement = B) -> int:
        """Local bytes of a tensor in a placement."""
        total = tensor.dtype.itemsize
        for size in tensor.shape:
            total *= self.number(size)
        return total // self.ranks if isinstance(placement, Split) else total

    # ---- seconds ----

    def op_seconds(self, node: fx.Node, strategy: Strategy) -> tuple[float, float]:
        """(forward, backward) of one op on one rank, with the collectives of its own implementation."""
        call = op_call(node)
        done = work(call)
        if done.kind == "view":
            return 0.0, 0.0
        whole = sum(self.nbytes(t) for t in call.operands) or 1
        local = sum(self.nbytes(t, p) for t, p in zip(call.operands, strategy.needs, strict=True))
        nbytes = self.number(done.bytes_in) * local / whole
        nbytes += sum(self.nbytes(t, p) for t, p in zip(call.outputs, strategy.gives, strict=True))
        flops = self.number(done.flops) / strategy.ranks
        float_dtypes = [t.dtype for t in (*call.outputs, *call.operands) if t.dtype in DTYPE_NAMES]
        dtype = DTYPE_NAMES[float_dtypes[0]] if float_dtypes else "fp32"
        forward = op_s(self.cluster.device, OpWork(done.kind, flops, nbytes, dtype))
        backward = 0.0
        if any(t.requires_grad for t in call.outputs):
            factor = _BACKWARD[done.kind]
            if done.kind == "matmul":
                factor = float(sum(t.requires_grad for t in call.operands[:2]))
            backward = op_s(self.cluster.device, OpWork(done.kind, flops * factor, nbytes * factor, dtype))
        for name, elements in strategy.collectives:
            forward += self.collective(name, self.number(elements) * 4)
        return forward, backward

    def collective(self, name: str, nbytes: float) -> float:
        return collective_s(name, nbytes, self.cluster, self.ranks, 1)

    def conversion_seconds(self, tensor: TensorInfo, source: Placement, target: Placement) -> tuple[float, float]:
        """(forward, backward) of one conversion."""
        row = conversion(source, target)
        if not row.function:
            return 0.0, 0.0
        whole = self.nbytes(tensor)
        move = memory_s(self.cluster.device, whole / self.ranks) + self.cluster.device.launch_s
        forward = self.collective(row.forward, whole) if row.forward else move
        backward = 0.0
        if tensor.requires_grad:
            backward = self.collective(row.backward, whole) if row.backward else move
        return forward, backward
