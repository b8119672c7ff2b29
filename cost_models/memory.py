"""Memory of one rank in bytes, by category, and the state that training keeps between steps.

With n local elements (padding included), c and m bytes of the compute and the main dtype, g of a gradient (m, or c),
k moments (2 for adamw, 0 for sgd), d ranks that share what is sharded, u elements of gradients that are whole at a time
before they are scattered, r of parameters that are gathered at a time:

    ZeRO       parameters          gradients        optimizer
    0          c n                 g n              m n (k + 1)        + 1 is the main copy: none where c is m
    1          c n                 g n              m n (k + 1) / d
    2          c n                 g n / d + g u    m n (k + 1) / d    a bucket is scattered once complete
    3          m n / d + c r       m n / d + g u    m n k / d          the main copy is the parameters, and what is
                                                                       summed is added up beside it

(Rajbhandari et al. 2020, ZeRO; stage 3 as in Zhao et al. 2023, PyTorch FSDP.) `shards` below dp replicates the shards
(HSDP). Every number comes from `STATE`, which is this table, and so does what `explain` prints.

Besides what tensors occupy there is what the allocator reserves and does not use, what the communication library takes
past the allocator, and the context of the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache

import sympy

from autoptd.schedule import Alive

COMPUTE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
MAIN_BYTES = {"bf16": 4, "fp16": 4, "fp32": 4, "fp64": 8}
MOMENTS = {"adamw": 2, "sgd": 0}
GRADIENTS = ("main", "compute", "both")  # dtypes that gradients may be kept in

# c10/cuda/CUDACachingAllocator.cpp: kMinBlockSize; a block is a multiple of it
BLOCK_BYTES = 512
# the same: kRoundLarge; what is asked of the driver for allocations of 10 MiB and more is a multiple of it
SEGMENT_BYTES = 2 * 2**20
# Reserved beyond the largest allocation ÷ what one step allocates and frees, (max reserved - max allocated) ÷ (max
# allocated - allocated), in MB of four Megatron-LM logs: (6406 - 5670) ÷ (5670 - 3270) = 0.31, NVIDIA/Megatron-LM pull
# 5662; (12906 - 10596) ÷ (10596 - 2713) = 0.29 and (8786 - 8697) ÷ (8697 - 6817) = 0.05, two logs in public
# repositories; (17482 - 12606) ÷ (12606 - 10251) = 2.1 on a full V100, NVIDIA/Megatron-LM issue 60. The median is 0.3;
# 0.35 fits the runs of torchtitan and BLOOM in docs/accuracy.md.
# The allocator hands free segments back before it fails: whether a plan fits is decided by the least of them.
FRAGMENTATION, FRAGMENTATION_LEAST = 0.35, 0.05
# github.com/NVIDIA/nccl/issues/1685: NCCL_DEBUG_SUBSYS=ALLOC shows 10485760 bytes per channel and peer received from
CONNECTION_BYTES = 10 * 2**20
# Connections of a channel on which it receives: one of the ring, one of the tree on average; NCCL's authors in
# github.com/NVIDIA/nccl/issues/986: memory is linear in channels, and a ring has two connections whatever the scale
CONNECTIONS = 2
CHANNELS = 24  # per communicator: NCCL's choice on a DGX A100; 16 on a DGX H100 (quoted from memory)


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank by category. Peaks of different times may be added: the sum is then an upper bound.

    `overhead` is what the allocator reserves and does not use; `communication` what the communication library takes
    for itself; `context` what driver and kernels take before the first tensor.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    temporary: int = 0
    communication: int = 0
    overhead: int = 0
    context: int = 0

    @property
    def state(self) -> int:
        """What stays from step to step."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def allocated(self) -> int:
        """What tensors occupy: `torch.cuda.max_memory_allocated`."""
        return self.state + self.activations + self.temporary

    @property
    def reserved(self) -> int:
        """With what the allocator holds free: `torch.cuda.max_memory_reserved`."""
        return self.allocated + self.overhead

    @property
    def needed(self) -> int:
        """What a device must have: with as little held free as was seen."""
        return self.total - self.overhead + allocator_bytes(self.activations + self.temporary, FRAGMENTATION_LEAST)

    @property
    def total(self) -> int:
        """What `nvidia-smi` shows."""
        return self.allocated + self.communication + self.overhead + self.context

    def __add__(self, other: Memory) -> Memory:
        return Memory(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def to_data(self) -> dict[str, int]:
        """Category: bytes."""
        return asdict(self)


def padded(numel: int, multiple: int) -> int:
    """`numel` rounded up to a multiple."""
    return -(-numel // multiple) * multiple


# ---- the state, as expressions ----

N, D = sympy.symbols("n d", integer=True, nonnegative=True)  # local elements, shards
U, R = sympy.symbols("u r", integer=True, nonnegative=True)  # elements of whole gradients, of gathered parameters
_C, _M, _G, _K = sympy.symbols("c m g k", integer=True, nonnegative=True)
_MAIN = sympy.Symbol("main", integer=True, nonnegative=True)  # 1 where a main copy is kept beside the compute dtype
_E = sympy.Symbol("e", integer=True, nonnegative=True)  # elements with moments: n / d less padding, which has none

STATE: Mapping[int, Mapping[str, sympy.Expr]] = {
    0: {"parameters": _C * N, "gradients": _G * N, "optimizer": _M * (_K * _E + _MAIN * N)},
    1: {"parameters": _C * N, "gradients": _G * N, "optimizer": _M * (_K * _E + _MAIN * N / D)},
    2: {"parameters": _C * N, "gradients": _G * N / D + _G * U, "optimizer": _M * (_K * _E + _MAIN * N / D)},
    3: {"parameters": _M * N / D + _C * R, "gradients": _M * N / D + _G * U, "optimizer": _M * _K * _E},
}


def formulas(*, precision: str, optimizer: str, zero: int = 0, gradients: str = "main") -> dict[str, sympy.Expr]:
    """Bytes of parameters, gradients and optimizer state in n, d, u and r. Raises ValueError."""
    stepped = {_E: N / D if zero else N}
    found = _expressions(precision, optimizer, zero, gradients)
    return {name: sympy.expand(text.subs(stepped)) for name, text in found.items()}


def _expressions(precision: str, optimizer: str, zero: int, gradients: str) -> dict[str, sympy.Expr]:
    _known("precision", precision, COMPUTE_BYTES)
    _known("optimizer", optimizer, MOMENTS)
    _known("gradient dtype", gradients, GRADIENTS)
    if zero not in STATE:
        raise ValueError(f"ZeRO stage {zero} is not modelled; known: {', '.join(map(str, STATE))}")
    main, compute = MAIN_BYTES[precision], COMPUTE_BYTES[precision]
    values = {
        _C: compute,
        _M: main,
        _G: {"main": main, "compute": compute, "both": main + compute}[gradients],
        _K: MOMENTS[optimizer],
        _MAIN: int(main != compute),
    }
    return {name: sympy.expand(text.subs(values)) for name, text in STATE[zero].items()}


@cache
def _evaluators(precision: str, optimizer: str, zero: int, gradients: str) -> dict[str, Callable[..., float]]:
    found = _expressions(precision, optimizer, zero, gradients)
    return {name: sympy.lambdify((N, D, U, R, _E), text, "math") for name, text in found.items()}


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
) -> Memory:
    """Parameters, gradients and optimizer state of one rank, to the byte.

    `bucket_numels`: local elements of each bucket (one sum when buckets are not known yet). `pad_to`: elements that
    each bucket is padded to a multiple of; left out, the shards under ZeRO and otherwise 1. `shards`: ranks that share
    one copy of what is sharded, dp if left out. `gradients`: kept in the "main" or the "compute" dtype, or in "both".
    `whole_numel`: local elements whose gradients ZeRO 2 and 3 hold whole at a time; `gathered_numel`: whose parameters
    ZeRO 3 does. `stepped`: elements that this rank's optimizer updates; left out, its share with padding. Raises
    ValueError.
    """
    evaluators = _evaluators(precision, optimizer, zero, gradients)
    width = (shards or dp) if zero else 1
    if dp % width:
        raise ValueError(f"{width} shards do not divide {dp} data-parallel ranks")
    multiple = pad_to or width
    if multiple % width:
        raise ValueError(f"buckets padded to {multiple} elements do not divide among {width} ranks")
    numel = sum(padded(n, multiple) for n in bucket_numels)
    own = numel // width if stepped is None else stepped
    return Memory(
        **{name: round(value(numel, width, whole_numel, gathered_numel, own)) for name, value in evaluators.items()}
    )


def optimizer_step_bytes(shard_numel: int, *, precision: str, optimizer: str) -> int:
    """Bytes that one optimizer step reads and writes for the elements that this rank updates.

    Read gradient, main parameter and moments; write main parameter, moments and, where it differs, the compute copy.
    """
    _known("precision", precision, COMPUTE_BYTES)
    _known("optimizer", optimizer, MOMENTS)
    main, compute = MAIN_BYTES[precision], COMPUTE_BYTES[precision]
    touched = main + 2 * main * (1 + MOMENTS[optimizer]) + (compute if compute != main else 0)
    return shard_numel * touched


# ---- in flight ----


def in_flight(stage: int, stages: int, microbatches: int, schedule: str = "1f1b", virtual: int = 1) -> int:
    """Chunks (stages, where each rank has one) whose activations a rank holds at its fullest. Raises ValueError."""
    return alive(stage, stages, microbatches, schedule, virtual).chunks


def alive(stage: int, stages: int, microbatches: int, schedule: str = "1f1b", virtual: int = 1) -> Alive:
    """What a rank holds of its chunks at its fullest. Raises ValueError.

    gpipe          all microbatches (Huang et al. 2019)
    1f1b           the warm-up and the one in work: p - i (Narayanan et al. 2021)
    zero-bubble    p on every stage, since activations stay until the weights' gradient: ZB-H1 (Qi et al. 2023)
    interleaved    the warm-up of 2 (p - i - 1) + (v - 1) p chunks and the one in work, v chunks a rank (Narayanan et
                   al. 2021, section 2.2), all of average size
    zero-bubble-v  2 p - i - 1 of its chunk 0 and i + 1 of its chunk 1 at first, 2 p - i and i while there are forwards,
                   as its lists show: together as many bytes as p of 1F1B, were chunks alike (Qi et al. 2023, section 6)
    """
    if not 0 <= stage < stages:
        raise ValueError(f"stage {stage} is not one of {stages}")
    m, p, i = microbatches, stages, stage
    match schedule:
        case "gpipe":
            return Alive(((m,) * virtual,))
        case "interleaved" if virtual > 1:
            return Alive(((min(m * virtual, 2 * (p - i - 1) + (virtual - 1) * p + 1),) * virtual,), virtual)
        case "1f1b" | "interleaved":
            return Alive(((min(m, p - i),),))
        case "zero-bubble":
            return Alive(((min(m, p),),))
        case "zero-bubble-v":
            return Alive(((min(m, 2 * p - i - 1), min(m, i + 1)), (min(m, 2 * p - i), min(m, i))))
    raise ValueError(f"unknown schedule {schedule!r}; known: 1f1b, gpipe, interleaved, zero-bubble, zero-bubble-v")


# ---- beyond tensors ----


def allocator_bytes(dynamic_bytes: int, fragmentation: float = FRAGMENTATION) -> int:
    """What the caching allocator reserves and does not use, `dynamic_bytes` being what a step allocates and frees."""
    return padded(round(fragmentation * dynamic_bytes), SEGMENT_BYTES)


def communicator_bytes(groups: Sequence[int], channels: int = CHANNELS, connections: int = CONNECTIONS) -> int:
    """NCCL's own buffers for communicators of these numbers of ranks; of one rank there is none."""
    return sum(channels * connections * CONNECTION_BYTES for ranks in groups if ranks > 1)


def _known(what: str, given: str, table: Mapping[str, int] | Sequence[str]) -> None:
    if given not in table:
        raise ValueError(f"unknown {what} {given!r}; known: {', '.join(table)}")
