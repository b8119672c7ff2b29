"""Series of cases to time, smallest first: once a case would take too long, all larger ones of its series are skipped.

Shapes are those of transformer layers: m is tokens, n and k are widths, some of them split by tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from autoptd.cost_models.memory import optimizer_step_bytes
from autoptd.profile.record import ITEMSIZE, Case

Dtype = str
KIB, MIB = 1 << 10, 1 << 20
MEMORY_OPS = {"copy": 2, "add": 3, "layer_norm": 2, "softmax": 2, "gelu": 2}  # tensors that each reads and writes
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")

_SQUARES = {
    "cuda": {
        "bf16": (512, 1024, 2048, 4096, 8192, 16384),
        "fp16": (2048, 4096, 8192),
        "fp32": (1024, 2048, 4096),
        "fp64": (1024, 2048, 4096),
    },
    "cpu": {
        "fp32": (128, 256, 512, 1024, 2048),
        "bf16": (256, 512, 1024),
        "fp64": (256, 512, 1024),
        "fp16": (128, 256, 512),
    },
}
# (m, n, k): layers of widths 4096 and 8192, their shards under tp 2 to 16, few tokens, a head with an odd vocabulary
_LAYERS = {
    "cuda": (
        *((8192, n, 4096) for n in (512, 1024, 2048, 6144, 14336)),
        *((8192, 4096, k) for k in (128, 256, 512, 1024, 2048, 14336)),
        (8192, 1024, 8192),
        (8192, 8192, 1024),
        (16384, 768, 768),
        (16384, 3072, 768),
        (16384, 768, 3072),
        (8192, 1600, 1600),
        (8192, 6400, 1600),
        *((m, 8192, 8192) for m in (16, 128, 512, 1024, 2048)),
        (8192, 50257, 768),
        (8192, 50304, 768),
    ),
    "cpu": (
        *((512, n, 512) for n in (64, 128, 256, 2048)),
        *((512, 512, k) for k in (64, 128, 256, 2048)),
        *((m, 512, 512) for m in (1, 16, 64)),
    ),
}
# (batch, m, n, k): scores and their product with the values
_BATCHED = {
    "cuda": (
        (128, 2048, 2048, 64),
        (128, 2048, 64, 2048),
        (64, 2048, 2048, 128),
        (64, 2048, 128, 2048),
        (512, 512, 512, 64),
    ),
    "cpu": ((16, 128, 128, 64), (16, 128, 64, 128), (16, 256, 256, 64), (16, 256, 64, 256)),
}
# heads × samples by head size, at the shortest length; longer ones have fewer, for the same number of tokens
_ATTENTION = {
    "cuda": ("bf16", {64: 512, 128: 256}, (512, 1024, 2048, 4096, 8192, 16384)),
    "cpu": ("fp32", {64: 16, 128: 8}, (128, 256, 512, 1024)),
}
_MEMORY = {
    "cuda": ("bf16", tuple(MIB << i for i in range(0, 12, 2))),
    # no larger: above 32 MiB the C library maps fresh memory for each tensor, and page faults dominate the time
    "cpu": ("fp32", tuple(64 * KIB << i for i in range(0, 10, 2))),
}
_COPIED = (16 * MIB, 64 * MIB, 256 * MIB)
_UPDATED = (1 << 20, 1 << 22, 1 << 24)  # elements
MESSAGES = (8 * KIB, 64 * KIB, 256 * KIB, *(MIB << i for i in range(0, 14, 2)))


def op_series(kind: str) -> Iterator[tuple[Case, ...]]:
    """Yield the series of one device, of kind "cpu" or "cuda"; those that the constants need most come first."""
    dtype, _, _ = _ATTENTION[kind]
    yield (Case(family="launch", op="add", dtype="fp32"),)
    if kind == "cuda":  # on a CPU the host is the device
        yield (Case(family="dispatch", op="step", dtype="bf16"),)
    squares = {d: tuple(_linear(d, n, n, n) for n in sizes) for d, sizes in _SQUARES[kind].items()}
    yield squares.pop(dtype)
    yield from _attention(kind)
    yield from _memory(kind)
    yield from squares.values()
    yield tuple(sorted((_linear(dtype, *shape) for shape in _LAYERS[kind]), key=lambda case: case.flops))
    yield tuple(
        Case(family="matmul", op="bmm", dtype=dtype, batch=b, m=m, n=n, k=k)  # type: ignore[arg-type]
        for b, m, n, k in _BATCHED[kind]
    )


def host_series(kind: str) -> Iterator[tuple[Case, ...]]:
    """Yield the series of copies between a device and its host, and of updates there; none where the host is the
    device."""
    for op in ("to_host", "from_host") if kind == "cuda" else ():
        yield tuple(Case(family="host", op=op, dtype="fp32", n=n // 4, bytes_moved=n) for n in _COPIED)
    if kind == "cuda":
        moved = {n: optimizer_step_bytes(n, precision="bf16", optimizer="adamw") for n in _UPDATED}
        yield tuple(Case(family="host", op="step", dtype="fp32", n=n, bytes_moved=moved[n]) for n in _UPDATED)


def _linear(dtype: Dtype, m: int, n: int, k: int) -> Case:
    return Case(family="matmul", op="linear", dtype=dtype, m=m, n=n, k=k)  # type: ignore[arg-type]


def _attention(kind: str) -> Iterator[tuple[Case, ...]]:
    dtype, heads, lengths = _ATTENTION[kind]
    for head_size, most in heads.items():
        for backward in (False, True):
            yield tuple(
                Case(
                    family="attention",
                    op="causal",
                    dtype=dtype,  # type: ignore[arg-type]
                    batch=max(1, most * lengths[0] // length),
                    m=length,
                    n=length,
                    k=head_size,
                    backward=backward,
                )
                for length in lengths
            )


def _memory(kind: str) -> Iterator[tuple[Case, ...]]:
    dtype, sizes = _MEMORY[kind]
    for op, tensors in MEMORY_OPS.items():
        yield tuple(
            Case(family="memory", op=op, dtype=dtype, n=size // ITEMSIZE[dtype], bytes_moved=size * tensors)  # type: ignore[arg-type]
            for size in sizes
        )


def network_series(world: int, node_ranks: int, dtype: Dtype) -> Iterator[tuple[Case, ...]]:
    """Yield series of collectives within the node, over all ranks, and over one rank of each node, and of messages.

    Yields nothing for a single rank.
    """
    nodes = world // node_ranks
    groups = [(node_ranks, 1), (world, 1), (nodes, node_ranks)] if nodes > 1 else [(world, 1)]
    groups = [group for group in dict.fromkeys(groups) if group[0] > 1]
    distances = [stride for ranks, stride in groups if ranks * stride <= world and (ranks, stride) != (world, 1)]
    if world > 1:
        yield from (_sizes("p2p", "send", dtype, 2, stride) for stride in distances or [1])
    yield from chain.from_iterable(
        (_sizes("collective", name, dtype, ranks, stride) for ranks, stride in groups) for name in COLLECTIVES
    )


def _sizes(family: str, op: str, dtype: Dtype, ranks: int, stride: int) -> tuple[Case, ...]:
    unit = ITEMSIZE[dtype] * ranks * ranks  # an all-to-all splits each rank's part among the ranks
    return tuple(
        Case(family=family, op=op, dtype=dtype, bytes_moved=-(-size // unit) * unit, ranks=ranks, stride=stride)  # type: ignore[arg-type]
        for size in MESSAGES
    )
