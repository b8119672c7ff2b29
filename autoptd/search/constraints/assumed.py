"""Choices that the cost models know and the runtime does not implement: given by `assume`, for predictions only.

Does not import torch, since the command line imports this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ASSUMABLE = ("attention", "dispatch", "fp8", "gradients", "kernels", "overlap", "permutation")
SYSTEM_NAMES = ("megatron", "nemo", "torchtitan")  # `systems.SYSTEMS`
_RUN = (
    {"p2p"},
    {"dp", "p2p"},
    {"p2p", "tp"},
    {"dp", "p2p", "tp"},
)  # sets of communication that the runtime can overlap with compute


def only_predicted(name: str, value: object) -> bool:
    """Return whether no program can run this value, so that only `assume` takes it."""
    match name:
        case "attention" | "fp8" | "permutation":
            return True
        case "dispatch":
            return value in ("slices", "merged")
        case "gradients":
            return value in ("both", "fused")
        case "kernels":
            return value == "fused"
        case "overlap":
            return isinstance(value, (list, tuple)) and set(map(str, value)) not in _RUN
    return False


def by_keyword(choices: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split choices into those for `fix` and those for `assume`."""
    assume = {name: value for name, value in choices.items() if only_predicted(name, value)}
    return {name: value for name, value in choices.items() if name not in assume}, assume


MEANT = {  # part of a name that other frameworks use -> our name; the first match counts
    "virtual": "virtual",
    "chunk": "virtual",
    "interleav": "virtual",
    "sequence": "sequence_parallel",
    "schedule": "schedule",
    "tensor": "tp",
    "pipeline": "pp",
    "context": "cp",
    "checkpoint": "recompute",
    "recomput": "recompute",
    "remat": "recompute",
    "zero": "zero",
    "fsdp": "zero",
    "micro": "micro",
    "mbs": "micro",
    "data_par": "dp",
    "bucket": "bucket_bytes",
    "model_par": "tp",
}
