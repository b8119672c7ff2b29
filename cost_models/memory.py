"""Memory of one rank in bytes by category: model state, activations, and allocations outside tensors.

Let n be the local elements (padding included), c and m the bytes of the compute and the main dtype, g those of a
gradient (m, or c), k the elements of optimizer state per element (2 for adamw, 0 for sgd; `UPDATE_COSTS`), d the ranks
that share the shards, u the elements of gradients that are unsharded at a time before their reduce-scatter, and r those
of gathered parameters:

    ZeRO       parameters          gradients        optimizer
    0          c n                 g n              m n (k + 1)        + 1 is the main copy: none where c is m
    1          c n                 g n              m n (k + 1) / d
    2          c n                 g n / d + g u    m n (k + 1) / d    a bucket is scattered once complete
    3          m n / d + c r       m n / d + g u    m n k / d          the parameters are the main copy; reduced
                                                                       gradients accumulate beside it

(Rajbhandari et al. 2020, ZeRO; stage 3 as in Zhao et al. 2023, PyTorch FSDP.) `shards` below dp replicates the shards
(HSDP). `STATE` is this table; every number, also in `explain`, comes from it.

Besides tensors there is memory that the allocator reserves without using it, memory that the communication library
takes outside the allocator, and the driver's context.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache, lru_cache
from operator import add, attrgetter
from typing import Literal

import sympy

from autoptd.schedule import Alive

COMPUTE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
MAIN_BYTES = {"bf16": 4, "fp16": 4, "fp32": 4, "fp64": 8}
# state per element; of an optimizer whose state depends on a parameter's shape (`UPDATE_COSTS`), the least
MOMENTS = {"adamw": 2, "sgd": 0, "lion": 1, "adafactor": 0, "muon": 1, "custom": 2, "custom-whole": 2}
GRADIENTS = ("main", "compute", "both", "fused")  # as in `layout/execution.py`

# c10/cuda/CUDACachingAllocator.cpp: kRoundLarge; driver allocations of 10 MiB and more are a multiple of it
SEGMENT_BYTES = 2 * 2**20
# Memory reserved beyond the allocated peak, relative to what one step allocates and frees: (max reserved - max
# allocated) ÷ (max allocated - allocated), in MB of four Megatron-LM logs: (6406 - 5670) ÷ (5670 - 3270) = 0.31,
# NVIDIA/Megatron-LM pull 5662; (12906 - 10596) ÷ (10596 - 2713) = 0.29 and (8786 - 8697) ÷ (8697 - 6817) = 0.05, two
# logs in public repositories; (17482 - 12606) ÷ (12606 - 10251) = 2.1 on a full V100, NVIDIA/Megatron-LM issue 60. The
# median is 0.3; 0.35 fits the runs of torchtitan and BLOOM in docs/accuracy.md.
# Before it fails, the allocator returns free segments to the driver; so the least decides whether a plan fits.
FRAGMENTATION, FRAGMENTATION_LEAST = 0.35, 0.05
# Measured ÷ predicted peak bytes of tensors: at most this in 95 % of 38 published runs with other systems' engines
# (docs/accuracy.md). With autoptd's own engine on an H200 it was 0.97 to 1.00 in six runs (docs/gpu.md).
CONFIDENCE, MOST_MEASURED = 0.95, 1.14
HEADROOM = 1 - 1 / MOST_MEASURED  # default share of a device's memory that the prediction leaves free
# github.com/NVIDIA/nccl/issues/1685: NCCL_DEBUG_SUBSYS=ALLOC shows 10485760 bytes per channel and peer received from
CONNECTION_BYTES = 10 * 2**20
# Receiving connections of a channel: one of the ring, one of the tree on average; NCCL's authors in
# github.com/NVIDIA/nccl/issues/986: memory is linear in channels, and a ring has two connections whatever the scale
CONNECTIONS = 2
CHANNELS = 24  # per communicator: NCCL's choice on a DGX A100; 16 on a DGX H100 (quoted from memory)


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank by category. Adding peaks of different times gives an upper bound.

    `overhead`: reserved by the allocator but unused, at least; `communication`: buffers of the communication library;
    `context`: driver and kernels, before the first tensor; `host`: in the host's memory, all others are of the device.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    temporary: int = 0
    communication: int = 0
    overhead: int = 0
    context: int = 0
    host: int = 0

    @property
    def state(self) -> int:
        """Bytes that stay allocated between steps."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def allocated(self) -> int:
        """Bytes of tensors, as in `torch.cuda.max_memory_allocated`."""
        return self.state + self.activations + self.temporary

    @property
    def reserved(self) -> int:
        """Bytes that the allocator usually reserves where the device has them: `torch.cuda.max_memory_reserved`."""
        return self.allocated + allocator_bytes(self.activations + self.temporary)

    @property
    def shown(self) -> int:
        """Bytes that `nvidia-smi` usually shows where the device has them."""
        return self.reserved + self.communication + self.context

    @property
    def needed(self) -> int:
        """Bytes that a device must have."""
        return self.allocated + self.communication + self.overhead + self.context

    def __add__(self, other: Memory) -> Memory:
        return Memory(*map(add, _CATEGORIES(self), _CATEGORIES(other)))

    def to_data(self) -> dict[str, int]:
        """Return category -> bytes of the device."""
        return {name: nbytes for name, nbytes in asdict(self).items() if name != "host"}


_CATEGORIES = attrgetter(*(field.name for field in fields(Memory)))  # the bytes of all


def padded(numel: int, multiple: int) -> int:
    """Return `numel` rounded up to a multiple."""
    return -(-numel // multiple) * multiple


# ---- optimizers ----


@dataclass(frozen=True)
class UpdateCost:
    """Costs of one optimizer's update. `whole`: the parameters that it updates as whole tensors.

    State is counted in elements of the main dtype, for a parameter of n elements, whose matrices have r rows and c
    columns: `2 n` are Adam's two moments, `n/r + n/c` Adafactor's two vectors.

    Muon multiplies a matrix of r ≤ c (else its transpose) in each of 5 Newton-Schulz iterations: X Xᵀ and its product
    with X take 2 r² c FLOPs each, the square of X Xᵀ 2 r³ (Jordan et al. 2024, Muon), in bfloat16 in torch 2.13.
    """

    state: str  # of a parameter
    matrices: str = ""  # of those that it updates as whole tensors and that have two dims or more; "": as others
    whole: Literal["none", "hidden", "all"] = "none"
    iterations: int = 0  # Newton-Schulz iterations for each of these matrices

    def elements(self, shape: Sequence[int], whole: bool) -> int:
        """Return the elements of state of a parameter, which is updated as a whole tensor or not."""
        text = self.matrices if whole and len(shape) > 1 and self.matrices else self.state
        return state_elements(text, shape)

    def flops(self, shape: Sequence[int]) -> int:
        """Return the FLOPs of the products in the update of a whole parameter."""
        if len(shape) < 2 or not self.iterations:
            return 0
        rows, columns = sorted(shape[-2:])
        return self.iterations * math.prod(shape[:-2]) * (4 * rows**2 * columns + 2 * rows**3)

    @property
    def moments(self) -> int:
        """Elements of state per element of a parameter that is not updated as a whole tensor."""
        return state_elements(self.state, (1,))


def state_elements(text: str, shape: Sequence[int]) -> int:
    """Return the value of an expression such as `2 n` or `n/r + n/c` for a parameter. Raises ValueError."""
    n, (rows, columns) = math.prod(shape), (1, 1, *shape)[-2:]
    values = {"n": n, "n/r": n // max(1, rows), "n/c": n // max(1, columns), "0": 0}
    total = 0
    for term in text.split(" + "):
        factor, _, symbol = term.rpartition(" ")
        if symbol not in values:
            raise ValueError(f"unknown term {term!r} in {text!r}; known: {', '.join(values)}")
        total += int(factor or 1) * values[symbol]
    return total


UPDATE_COSTS: Mapping[str, UpdateCost] = {
    "adamw": UpdateCost("2 n"),
    "sgd": UpdateCost("0"),
    "lion": UpdateCost("n"),
    "adafactor": UpdateCost("n", "n/r + n/c", "all"),
    "muon": UpdateCost("2 n", "n", "hidden", 5),
    # of one's own: as much state as AdamW
    "custom": UpdateCost("2 n"),
    "custom-whole": UpdateCost("2 n", whole="all"),
}


# ---- the state, as expressions ----

N, D = sympy.symbols("n d", integer=True, nonnegative=True)  # local elements, shards
U, R = sympy.symbols("u r", integer=True, nonnegative=True)  # elements of unsharded gradients, of gathered parameters
_C, _M, _G, K = sympy.symbols("c m g k", integer=True, nonnegative=True)
_MAIN = sympy.Symbol("main", integer=True, nonnegative=True)  # 1 if there is a main copy besides the compute dtype's
_E = sympy.Symbol("e", integer=True, nonnegative=True)  # elements with moments: n / d without padding
_H = sympy.Symbol("h", integer=True, nonnegative=True)  # of n / d, elements whose main copy is in host memory

STATE: Mapping[int, Mapping[str, sympy.Expr]] = {
    0: {"parameters": _C * N, "gradients": _G * N, "optimizer": _M * (K * _E + _MAIN * (N - _H))},
    1: {"parameters": _C * N, "gradients": _G * N, "optimizer": _M * (K * _E + _MAIN * (N / D - _H))},
    2: {"parameters": _C * N, "gradients": _G * N / D + _G * U, "optimizer": _M * (K * _E + _MAIN * (N / D - _H))},
    3: {"parameters": _M * N / D + _C * R, "gradients": _M * N / D + _G * U, "optimizer": _M * K * _E},
}


def formulas(*, precision: str, optimizer: str, zero: int = 0, gradients: str = "main") -> dict[str, sympy.Expr]:
    """Return the bytes of parameters, gradients and optimizer state in n, d, u and r. Raises ValueError."""
    stepped = {_E: N / D if zero else N}
    _known("optimizer", optimizer, MOMENTS)
    uniform = UPDATE_COSTS[optimizer].whole == "none" or not UPDATE_COSTS[optimizer].matrices
    found = _expressions(precision, MOMENTS[optimizer] if uniform else K, zero, gradients)
    return {name: sympy.expand(text.subs(stepped | {_H: 0})) for name, text in found.items()}


def _expressions(precision: str, moments: int | sympy.Symbol, zero: int, gradients: str) -> dict[str, sympy.Expr]:
    _known("precision", precision, COMPUTE_BYTES)
    _known("gradient dtype", gradients, GRADIENTS)
    if zero not in STATE:
        raise ValueError(f"ZeRO stage {zero} is not modelled; known: {', '.join(map(str, STATE))}")
    main, compute = MAIN_BYTES[precision], COMPUTE_BYTES[precision]
    values = {
        _C: compute,
        _M: main,
        _G: {"main": main, "compute": compute, "both": main + compute, "fused": main}[gradients],
        K: moments,
        _MAIN: int(main != compute),
    }
    return {name: sympy.expand(text.subs(values)) for name, text in STATE[zero].items()}


@cache
def _evaluators(precision: str, moments: int, zero: int, gradients: str) -> dict[str, Callable[..., float]]:
    found = _expressions(precision, moments, zero, gradients)
    return {name: sympy.lambdify((N, D, U, R, _E, _H), text, "math") for name, text in found.items()}


def model_state(
    bucket_numels: Sequence[int],
    *,
    precision: str,
    optimizer: str,
    zero: int = 0,
    dp: int = 1,
    pad_to: int | None = None,
    shards: int | None = None,
    gradients: str = "main",
    whole_numel: int = 0,
    gathered_numel: int = 0,
    stepped: int | None = None,
    kept: int | None = None,
    on_host: int = 0,
) -> Memory:
    """Return parameters, gradients and optimizer state of one rank, to the byte.

    `bucket_numels`: local elements of each bucket (their sum if buckets are not known yet). `pad_to`: each bucket is
    padded to a multiple of it; by default the number of shards under ZeRO, else 1. `shards`: ranks that share one
    sharded copy, by default dp. `gradients`: of `GRADIENTS`, the dtype of stored gradients. `whole_numel`: local
    elements whose gradients ZeRO 2 and 3 hold unsharded at a time. `gathered_numel`: those whose parameters ZeRO 3
    holds gathered at a time. `stepped`: elements that this rank's optimizer updates; by default its shard with padding.
    `kept`: elements of the optimizer's state; by default its moments for each of these. `on_host`: elements of this
    rank's shard whose main copy is in host memory, where the state of these is too. Raises ValueError.
    """
    _known("optimizer", optimizer, MOMENTS)
    evaluators = _evaluators(precision, MOMENTS[optimizer] if kept is None else 1, zero, gradients)
    width = (shards or dp) if zero else 1
    if dp % width:
        raise ValueError(f"{width} shards do not divide {dp} data-parallel ranks")
    multiple = pad_to or width
    if multiple % width:
        raise ValueError(f"buckets padded to {multiple} elements are not divisible by {width} ranks")
    numel = sum(padded(n, multiple) for n in bucket_numels)
    own = kept if kept is not None else numel // width - on_host if stepped is None else stepped
    values = numel, width, whole_numel, gathered_numel, own, on_host
    return Memory(**{name: round(value(*values)) for name, value in evaluators.items()})


def optimizer_step_bytes(shard_numel: int, *, precision: str, optimizer: str, kept: int | None = None) -> int:
    """Return the bytes that one optimizer step reads and writes for the elements that this rank updates.

    It reads gradient, main parameter and state, and writes main parameter and state. If the compute copy is separate,
    another kernel reads the main parameter again and writes the copy. `kept`: elements of state, by default the moments
    of each element.
    """
    _known("precision", precision, COMPUTE_BYTES)
    _known("optimizer", optimizer, MOMENTS)
    main, compute = MAIN_BYTES[precision], COMPUTE_BYTES[precision]
    state = MOMENTS[optimizer] * shard_numel if kept is None else kept
    return shard_numel * (3 * main + (main + compute if compute != main else 0)) + 2 * main * state


def step_gradient_bytes(shard_numel: int, precision: str, gradients: str, zero: int, by_hand: bool = False) -> int:
    """Return the bytes that kernels on reduced gradients read and write before the optimizer: their norm, and their
    scaling by the clip coefficient; in fp16, their division by the loss scale; of gradients in the compute type, which
    ZeRO 3 does not keep, a copy in the main type, and its rounding back after the step.

    `by_hand`: one kernel divides and copies, and nothing is rounded back (Apex, multi_tensor_scale; quoted from
    memory)."""
    main, compute = MAIN_BYTES[precision], COMPUTE_BYTES[precision]
    narrow = gradients == "compute" and zero < 3 and compute != main
    moved = 3 * main
    if precision == "fp16" and not (by_hand and narrow):
        moved += 2 * main
    if narrow:
        moved += (1 if by_hand else 2) * (compute + main)
    return moved * shard_numel


def accumulation_bytes(
    numel: int,
    precision: str,
    gradients: str,
    zero: int = 0,
    microbatches: int = 1,
    shards: int = 1,
    by_hand: bool = False,
) -> float:
    """Return the average bytes that adding the gradients of one of a step's microbatches to the buffer moves.

    A gradient is read in the compute type; the first of a step is copied to the buffer, later ones are added. With ZeRO
    2 and 3 each is copied to a bucket, whose reduced shard is copied or added to the step's. "fused" gradients are
    added by the products that compute them (Megatron-LM, gradient accumulation fusion), so nothing is left to move.
    `by_hand`: so are those in the main type, and autograd keeps the first of those in the compute type without a copy.
    """
    compute, main = COMPUTE_BYTES[precision], MAIN_BYTES[precision]
    width, added = compute if gradients == "compute" else main, 2 - 1 / microbatches
    if gradients == "fused":
        return 0.0
    if by_hand:
        return 0.0 if gradients == "main" else numel * (1 - 1 / microbatches) * (compute + 2 * width)
    if zero < 2:
        return numel * (compute + added * width)
    held = main if zero == 3 else width
    return numel * (compute + width + (width + added * held) / shards)


# ---- in flight ----


def in_flight(stage: int, stages: int, microbatches: int, schedule: str = "1f1b", virtual: int = 1) -> int:
    """Return the peak number of chunks in flight on a rank (stages, if each rank has one). Raises ValueError."""
    return alive(stage, stages, microbatches, schedule, virtual).chunks


@lru_cache(maxsize=65536)
def alive(stage: int, stages: int, microbatches: int, schedule: str = "1f1b", virtual: int = 1) -> Alive:
    """Return the in-flight microbatches per chunk at each candidate peak of a rank. Raises ValueError.

    gpipe          all microbatches (Huang et al. 2019)
    1f1b           the warm-up and the current one: p - i (Narayanan et al. 2021)
    zero-bubble    p on every stage, since activations stay until the weight gradients: ZB-H1 (Qi et al. 2023)
    interleaved    the warm-up of 2 (p - i - 1) + (v - 1) p chunks and the current one, with v chunks per rank
                   (Narayanan et al. 2021, section 2.2), all of average size
    zero-bubble-v  2 p - i - 1 of its chunk 0 and i + 1 of its chunk 1 at first, 2 p - i and i in the steady state:
                   as many bytes as p of 1F1B if chunks are equal (Qi et al. 2023, section 6). Its action lists show
                   one between B and W until the end of a step, then all of fewer. In zero-bubble it is i + 1 there
    """
    if not 0 <= stage < stages:
        raise ValueError(f"stage {stage} is not below the number of stages, {stages}")
    m, p, i = microbatches, stages, stage
    match schedule:
        case "gpipe":
            return Alive(((m,) * virtual,))
        case "interleaved" if virtual > 1:
            return Alive(((min(m * virtual, 2 * (p - i - 1) + (virtual - 1) * p + 1),) * virtual,), virtual)
        case "1f1b" | "interleaved":
            return Alive(((min(m, p - i),),))
        case "zero-bubble":
            return Alive(((min(m, p),),), waiting=((min(m, i + 1),),))
        case "zero-bubble-v":
            rows = ((min(m, 2 * p - i - 1), min(m, i + 1)), (min(m, 2 * p - i), min(m, i)))
            if (left := m - p + 1) < 2 or not i:
                return Alive(rows, waiting=((0, 1), (1, 0)))
            late = min(i, max(0, left - p + i))
            return Alive((*rows, (min(p, left), late)), waiting=((0, 1), (1, 0), (min(i + 1, left), late)))
    raise ValueError(f"unknown schedule {schedule!r}; known: 1f1b, gpipe, interleaved, zero-bubble, zero-bubble-v")


# ---- outside tensors ----


def allocator_bytes(dynamic_bytes: int, fragmentation: float = FRAGMENTATION) -> int:
    """Return the bytes that the caching allocator reserves but does not use; a step allocates `dynamic_bytes`."""
    return padded(round(fragmentation * dynamic_bytes), SEGMENT_BYTES)


def most_allocated(reserved_bytes: float, fragmentation: float = FRAGMENTATION) -> float:
    """Return the most bytes that a step may allocate of those that the caching allocator may reserve."""
    if not math.isfinite(reserved_bytes):
        return reserved_bytes
    # with k segments held beside them: as many bytes as need no more of these, and leave room for them
    k = math.floor((fragmentation * reserved_bytes - 0.5) / (1 + fragmentation) / SEGMENT_BYTES)
    segments = (k * SEGMENT_BYTES, (k + 1) * SEGMENT_BYTES)
    most = max(math.floor(min((held + 0.5) / fragmentation, reserved_bytes - held)) for held in segments)
    return most if most + allocator_bytes(most, fragmentation) <= reserved_bytes else most - 1  # rounded the other way


def communicator_bytes(groups: Sequence[int], channels: int = CHANNELS, connections: int = CONNECTIONS) -> int:
    """Return the bytes of NCCL's buffers for communicators of these sizes; one rank needs none."""
    return sum(channels * connections * CONNECTION_BYTES for ranks in groups if ranks > 1)


def _known(what: str, given: str, table: Mapping[str, int] | Sequence[str]) -> None:
    if given not in table:
        raise ValueError(f"unknown {what} {given!r}; known: {', '.join(table)}")
