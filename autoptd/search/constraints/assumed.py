"""Choices that the cost models know and the runtime does not do: `assume` takes them, and the plan is a prediction.

Imports nothing of torch: the command line reads it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ASSUMABLE = ("attention", "gradients", "kernels", "overlap")
_RUN = {"dp", "p2p"}, {"p2p"}  # what may run beside compute


def only_predicted(name: str, value: object) -> bool:
    """Whether `assume` alone takes this value: no program can be asked for it."""
    match name:
        case "attention":
            return True
        case "gradients":
            return value == "both"
        case "kernels":
            return value == "fused"
        case "overlap":
            return isinstance(value, (list, tuple)) and set(map(str, value)) not in _RUN
    return False


def by_keyword(choices: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Choices as `fix` takes them, and those that `assume` takes."""
    assume = {name: value for name, value in choices.items() if only_predicted(name, value)}
    return {name: value for name, value in choices.items() if name not in assume}, assume


MEANT = {  # a part of their name -> ours; the first that fits counts
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
