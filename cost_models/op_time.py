"""Time of one kernel on one device.

Memory-bound ops move their bytes at the sustained rate of the device's memory. Products are modelled by tile and wave
quantisation (NVIDIA 2023, "Matrix Multiplication Background User's Guide"): a result of M × N is cut into tiles of
m × n, which run in waves, one per multiprocessor at a time; a tile iterates over K after a prologue that takes as long
as `k_overhead` steps. If tiles are few and K is long, K is cut too (split-K), and the parts are summed through memory:

    t = waves · 2 m n (K / splits + k_overhead) / (sustained flop/s of a multiprocessor · rate of the tile)
    waves = ceil(batch · ceil(M / m) · ceil(N / n) · splits / multiprocessors)

The time of its bytes is a lower bound. The fastest (tile, splits) is taken, as a tuned library does. Operands of 16
bits whose rows have an odd number of elements, such as logits over 50,257 words, cannot be loaded 16 bytes at a time:
they take slow kernels (`ODD_FLOPS_PER_S`).

Fused attention (Dao 2023, FlashAttention-2, sections 3.1 and 3.2) has a tile for each head and block of queries, which
goes over the keys, and in the backward pass for each head and block of keys, which goes over the queries. A tile is on
one multiprocessor, so few heads × samples × blocks leave others idle. With n tiles that go over s keys on average, of
which the longest goes over l, on M multiprocessors, and starting takes as long as o keys:

    t = ceil(n / M) · (s + o)                     tiles are equal: they run in waves
    t = max(n / M · (s + o), l + o)               a causal mask: blocks above the diagonal are skipped, and the longest
                                                  tiles come first (Shah et al. 2024, FlashAttention-3; Zadouri et al.
                                                  2026, FlashAttention-4), so that all multiprocessors end together

in units of the time of a tile's step over one key.

Elements that are added up by index (`index_add`, `scatter_add`, the gradient of indexing) take an atomic operation
each, whatever their size: a kernel takes added / `additions_per_s` at least (`memory_kernel_s`).

Every kernel takes `launch_s` in addition. All functions are pure functions of numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache

from autoptd.cost_models.cluster import AttentionRates, Device
from autoptd.cost_models.memory import COMPUTE_BYTES, MAIN_BYTES, optimizer_step_bytes

KINDS = ("matmul", "attention", "memory", "rows")
# rows and columns of a tile, and the fraction of the best tile's rate that it sustains: smaller ones read more per flop
# (NVIDIA 2023, figure 4: arithmetic intensity m n / (m + n) against what the multiprocessor's shared memory delivers)
TILES = (
    (256, 128, 1.0),
    (128, 256, 1.0),
    (128, 128, 0.93),
    (64, 128, 0.8),
    (128, 64, 0.8),
    (64, 64, 0.65),
    (32, 64, 0.4),
)
SPLITS = (1, 2, 4, 8, 16)
# 3.8e12 flops of a head's three products (16384 tokens, 768 wide, 50257 words) in bf16 took 30.8 ms on an H200 (cutlass
# kernels for operands of any alignment, torch 2.11.0+cu130), and 4.8 ms as padded by inductor; 2026-11-26
ODD_FLOPS_PER_S = 1.37e14
ATTENTION_BLOCK = 128  # queries and keys of a block of fused attention


@dataclass(frozen=True)
class OpWork:
    """Work of one kernel (or several equal ones) on one rank.

    `nbytes`: read and written. `dtype`: of its operands ("bf16", …). `launches`: kernels, 0 if it is part of another.
    Products: `batch` × (`m` × `k` times `k` × `n`) if known. Attention: `batch` heads, `m` queries, `n` keys, head size
    `k`; flops count the whole square even if `causal`. `part`: the op of the graph of which this is one of many
    kernels; the host dispatches the op once, and each kernel takes `launch_s`. `groups`: "m" or "k" if the product is
    grouped: the extent that counts the rows of each of its `batch` matrices. `place`: "experts" for ops on rows
    of experts, "ahead" for those that order rows for experts, "behind" for those that restore the order of rows behind
    experts, or add up those of a token. `rows`: queries and keys of each kernel of attention that runs in several.
    `added`: elements that are added up by index, and `counted` the bytes
    that they move if another kernel's `nbytes` has them: their additions then take what is left of their time. `odd`:
    rows of an operand or of the result of a product have an odd number of elements. `origin`: name of the node of the
    graph that it is a part of.
    """

    kind: str
    flops: float
    nbytes: float
    dtype: str
    m: int | None = None
    n: int | None = None
    k: int | None = None
    batch: int = 1
    causal: bool = False
    backward: bool = False
    launches: int = 1
    implementation: str = ""  # of attention; "" is the device's default one
    part: str = ""
    groups: str = ""
    place: str = ""
    rows: int = 0
    added: float = 0.0
    counted: float = 0.0
    odd: bool = False
    origin: str = field(default="", compare=False)

    @property
    def attends(self) -> bool:
        """True for attention or a part of it."""
        return "attention" in (self.kind, self.part)


def matmul_s(device: Device, work: OpWork) -> float:
    """Return the seconds of a (batched) matmul, without launch; if m, n or k is unknown, at the best rate."""
    rate = device.matmul_flops_per_s.of(work.dtype) * device.matmul_fraction(work.dtype)
    if work.odd and work.dtype in ("bf16", "fp16"):
        rate = min(rate, ODD_FLOPS_PER_S)
    bytes_s = memory_s(device, work.nbytes)
    if work.m is None or work.n is None or work.k is None or device.multiprocessors is None:
        return max(work.flops / rate, bytes_s)
    steps, extra_bytes = _best_tiling(
        work.batch, work.m, work.n, work.k, device.multiprocessors, device.k_overhead, memory_s(device, 1.0) * rate
    )
    return max(steps / rate + memory_s(device, extra_bytes), bytes_s)


@lru_cache(maxsize=65536)
def _best_tiling(
    batch: int, m: int, n: int, k: int, multiprocessors: int, k_overhead: float, flops_per_byte: float
) -> tuple[float, float]:
    """Return (flops that the device does in the same time at its best rate, bytes moved to sum the splits)."""
    best, least = (math.inf, 0.0), math.inf
    for rows, columns, share in TILES:
        tiles = batch * -(-m // rows) * -(-n // columns)
        for splits in SPLITS:
            if splits > 1 and k // splits < 8 * 32:
                break
            waves = -(-tiles * splits // multiprocessors)
            flops = waves * multiprocessors * 2 * rows * columns * (k / splits + k_overhead) / share
            extra = 8.0 * batch * m * n * splits if splits > 1 else 0.0  # fp32 parts, written and read
            total = flops + extra * flops_per_byte
            if total < least:
                best, least = (flops, extra), total
            if waves > 4:
                break
    return best


def attention_s(device: Device, work: OpWork) -> float:
    """Return the seconds of fused attention, without launch: flops of its matmuls, bytes of q, k, v and output only."""
    rates = device.attention.get(work.implementation) or _usual_rates(device)
    flops = work.flops
    if work.m and work.n and work.k:
        share = _unmasked_share(work, rates)
        overhead = device.head_overhead if rates.head_overhead is None else rates.head_overhead
        flops *= share * (1 + overhead / work.k) * _tiles_slowdown(device.multiprocessors, work, rates, share)
    fraction = rates.backward if work.backward else rates.forward
    compute_s = flops / (device.matmul_flops_per_s.of(work.dtype) * fraction)
    return max(compute_s, memory_s(device, work.nbytes))


def _unmasked_share(work: OpWork, rates: AttentionRates) -> float:
    """Return the share of the scores that a kernel computes: under a causal mask, blocks on and below the diagonal."""
    if not work.causal or not work.m or not work.n:
        return 1.0
    blocks = -(-max(work.m, work.n) // (ATTENTION_BLOCK if work.backward else rates.rows))
    return (blocks + 1) / (2 * blocks)


def executed_flops(device: Device, work: OpWork) -> float:
    """Return the floating-point operations that a kernel executes: those of attention without what the mask skips."""
    if work.kind != "attention":
        return work.flops
    return work.flops * _unmasked_share(work, device.attention.get(work.implementation) or _usual_rates(device))


def _usual_rates(device: Device) -> AttentionRates:
    """Return the rates of implementations of fused attention that the device does not name."""
    forward, backward = device.attention_sustained, device.attention_backward_sustained or device.attention_sustained
    # not validated, since it is called for every kernel
    return AttentionRates.model_construct(forward=forward.fraction, backward=backward.fraction)


def _tiles_slowdown(multiprocessors: int | None, work: OpWork, rates: AttentionRates, share: float) -> float:
    """Return the time of the tiles of attention relative to that of their flops spread over all multiprocessors.

    `share`: of the scores that the mask leaves."""
    if multiprocessors is None:
        return 1.0
    assert work.m and work.n
    rows, start = (ATTENTION_BLOCK, rates.backward_start) if work.backward else (rates.rows, rates.start)
    along, across = (work.n, work.m) if work.backward else (work.m, work.n)
    steps = share * across  # of a tile, on average
    if work.rows:  # of several kernels, each with a part of the scores
        steps *= along / (work.rows * work.launches)
        along = work.rows
    tiles = work.batch * -(-along // rows)
    if work.causal and not work.rows:
        busy = max(tiles / multiprocessors * (steps + start), across + start)
    else:
        busy = -(-tiles // multiprocessors) * (steps + start)
    return busy / (work.batch * along / rows * steps / multiprocessors)


def memory_s(device: Device, nbytes: float) -> float:
    """Return the seconds to move `nbytes` (reads plus writes) through device memory, without launch."""
    return nbytes / (device.memory_bytes_per_s * device.memory_sustained.fraction)


def host_update_s(device: Device, numel: int, precision: str, optimizer: str) -> float:
    """Return the seconds of an optimizer step on the host: gradients go there, and new parameters come back."""
    host, step_bytes = device.host, optimizer_step_bytes(numel, precision=precision, optimizer=optimizer)
    there_s, back_s = MAIN_BYTES[precision] / host.to_bytes_per_s, COMPUTE_BYTES[precision] / host.from_bytes_per_s
    return numel * (there_s + back_s) + step_bytes / host.step_bytes_per_s


def memory_kernel_s(device: Device, work: OpWork) -> float:
    """Return the seconds of a memory-bound kernel, without launch: of its arithmetic, its bytes or its additions."""
    added_s = work.added / device.additions_per_s if device.additions_per_s else 0.0
    added_s = max(0.0, added_s - memory_s(device, work.counted))
    if work.kind == "rows":
        sustained = device.rows_sustained or device.memory_sustained
        return max(work.nbytes / (device.memory_bytes_per_s * sustained.fraction), added_s)
    # elementwise arithmetic on half-precision operands runs in fp32
    rate = device.matmul_flops_per_s.of("fp64" if work.dtype == "fp64" else "fp32")
    return max(work.flops / rate, memory_s(device, work.nbytes), added_s)


def op_s(device: Device, work: OpWork) -> float:
    """Return the seconds of one op, with launch. Raises ValueError for an unknown kind or precision."""
    if work.flops < 0 or work.nbytes < 0:
        raise ValueError(f"flops and bytes of an op cannot be negative: {work}")
    if work.flops == 0 and work.nbytes == 0 and work.added == 0:
        return 0.0
    match work.kind:
        case "matmul":
            busy_s = matmul_s(device, work)
        case "attention":
            busy_s = attention_s(device, work)
        case "memory" | "rows":
            busy_s = memory_kernel_s(device, work)
        case _:
            raise ValueError(f"unknown kind of op {work.kind!r}; known: {', '.join(KINDS)}")
    return busy_s + (1 if work.groups else work.launches) * device.launch_s  # grouped ones run on several streams
