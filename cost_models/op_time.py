"""Time of one op on one device, by the roofline (Williams et al. 2009).

    t = max(flops / sustained flop/s, bytes / sustained bytes/s) + launch

Matmuls run at the matrix units' rate for their precision, attention at the fraction of it that fused attention reaches,
everything else at the plain fp32 (or fp64) rate. An op that neither computes nor moves anything (a view) takes no time.
All functions are pure on numbers, so that a caller may evaluate its symbolic sizes first.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoptd.cost_models.cluster import Device

KINDS = ("matmul", "attention", "memory")


@dataclass(frozen=True)
class OpWork:
    """What one op does on one rank: flops, bytes read and written, precision of its operands ("bf16", …).

    `m`, `n`, `k` are the local sizes of a matmul (m×k times k×n) where known, for models that depend on shape.
    """

    kind: str
    flops: float
    nbytes: float
    dtype: str
    m: float | None = None
    n: float | None = None
    k: float | None = None


def matmul_s(
    device: Device,
    flops: float,
    nbytes: float,
    dtype: str,
    m: float | None = None,
    n: float | None = None,
    k: float | None = None,
) -> float:
    """Seconds of a (batched) matmul, without launch. All shapes sustain one fraction of the peak."""
    compute_s = flops / (device.matmul_flops_per_s.of(dtype) * device.matmul_sustained.fraction)
    return max(compute_s, memory_s(device, nbytes))


def attention_s(device: Device, flops: float, nbytes: float, dtype: str) -> float:
    """Seconds of fused attention, without launch: flops of both matmuls, bytes of q, k, v and output only."""
    compute_s = flops / (device.matmul_flops_per_s.of(dtype) * device.attention_sustained.fraction)
    return max(compute_s, memory_s(device, nbytes))


def memory_s(device: Device, nbytes: float) -> float:
    """Seconds to move `nbytes` (reads plus writes) through device memory, without launch."""
    return nbytes / (device.memory_bytes_per_s * device.memory_sustained.fraction)


def op_s(device: Device, work: OpWork) -> float:
    """Seconds of one op, with launch. Raises ValueError for an unknown kind or precision."""
    if work.flops < 0 or work.nbytes < 0:
        raise ValueError(f"an op cannot do less than nothing: {work}")
    if work.flops == 0 and work.nbytes == 0:
        return 0.0
    match work.kind:
        case "matmul":
            busy_s = matmul_s(device, work.flops, work.nbytes, work.dtype, work.m, work.n, work.k)
        case "attention":
            busy_s = attention_s(device, work.flops, work.nbytes, work.dtype)
        case "memory":
            # elementwise arithmetic on half-precision operands runs in fp32
            rate = device.matmul_flops_per_s.of("fp64" if work.dtype == "fp64" else "fp32")
            busy_s = max(work.flops / rate, memory_s(device, work.nbytes))
        case _:
            raise ValueError(f"unknown kind of op {work.kind!r}; known: {', '.join(KINDS)}")
    return busy_s + device.launch_s
