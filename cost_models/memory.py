"""Memory of one rank in bytes, by category, and the state that training keeps between steps.

    parameters   numel * compute dtype                       2 in bf16 and fp16, 4 in fp32, 8 in fp64
    gradients    numel * main dtype                          the main-grad buffer: 4, in fp64 8
    optimizer    numel * main dtype * copies / shards        main copy (none where compute is the main dtype)
                                                             + 2 moments (adamw) or none (sgd); shards = dp under ZeRO 1

Buffers are cut into buckets, each padded so that every shard is equal (Rajbhandari et al. 2020 for ZeRO).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

COMPUTE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
MAIN_BYTES = {"bf16": 4, "fp16": 4, "fp32": 4, "fp64": 8}
MOMENTS = {"adamw": 2, "sgd": 0}


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank by category. Peaks of different times may be added: the sum is then an upper bound."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    temporary: int = 0
    communication: int = 0
    overhead: int = 0

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    def __add__(self, other: Memory) -> Memory:
        return Memory(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def to_data(self) -> dict[str, int]:
        """Category: bytes."""
        return asdict(self)


def padded(numel: int, multiple: int) -> int:
    """`numel` rounded up to a multiple."""
    return -(-numel // multiple) * multiple


def model_state(
    bucket_numels: Sequence[int],
    *,
    precision: str,
    optimizer: str,
    zero: int = 0,
    dp: int = 1,
    pad_to: int | None = None,
) -> Memory:
    """Parameters, gradients and optimizer state of one rank.

    `bucket_numels`: local elements of each bucket (one sum when buckets are not known yet). `pad_to`: elements that
    each bucket is padded to a multiple of; left out, dp under ZeRO 1 and otherwise 1. Raises ValueError.
    """
    _known("precision", precision, COMPUTE_BYTES)
    _known("optimizer", optimizer, MOMENTS)
    if zero not in (0, 1):
        raise ValueError(f"ZeRO stage {zero} is not modelled; known: 0, 1")
    multiple = pad_to or (dp if zero else 1)
    shards = dp if zero else 1
    if multiple % shards:
        raise ValueError(f"buckets padded to {multiple} elements do not divide among {shards} ranks")
    numel = sum(padded(n, multiple) for n in bucket_numels)
    main, compute = MAIN_BYTES[precision], COMPUTE_BYTES[precision]
    copies = MOMENTS[optimizer] + (main != compute)
    return Memory(
        parameters=numel * compute,
        gradients=numel * main,
        optimizer=numel // shards * main * copies,
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


def in_flight(stage: int, stages: int, microbatches: int) -> int:
    """Microbatches whose activations a stage of a 1F1B schedule holds at its fullest (Narayanan et al. 2021)."""
    if not 0 <= stage < stages:
        raise ValueError(f"stage {stage} is not one of {stages}")
    return min(microbatches, stages - stage)


def _known(what: str, given: str, table: Mapping[str, int]) -> None:
    if given not in table:
        raise ValueError(f"unknown {what} {given!r}; known: {', '.join(table)}")
