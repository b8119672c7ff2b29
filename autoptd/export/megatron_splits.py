"""Differences between the plan's placements and those of Megatron-LM's tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping

from autoptd.layout.placements import Split, parse_placement
from autoptd.passes.fold import Folded
from autoptd.passes.sharding.expert_regions import expert_parameters
from autoptd.passes.sharding.megatron_splits import MegatronSplits, ParameterSplit
from autoptd.plans.model import Plan
from autoptd.text import fold_table

_SHOWN = 8


def split_differences(plan: Plan, graph: Folded, theirs: MegatronSplits) -> list[str]:
    """Return a sentence per folded group of parameters with other placements."""
    apart = expert_parameters(graph)  # experts have arguments of their own
    placed: Mapping[str, ParameterSplit] = {n: p for n, p in theirs.parameters.items() if n not in apart}
    rows = [
        (name, f"{text}: Megatron-LM's is {_joined(str(placed[name]))}")
        for name, text in plan.splits.parameters.items()
        if name in placed and _joined(text) != _joined(str(placed[name]))
    ]
    lines = [f"{name} is {text}" for name, text in fold_table(dict.fromkeys(rows))]
    return [*lines[:_SHOWN], f"and {len(lines) - _SHOWN} more placements"] if len(lines) > _SHOWN else lines


def _joined(text: str) -> str:
    """Return a placement without the groups of joined projections, which Megatron-LM orders in its own way."""
    match parse_placement(text):
        case Split(dim):
            return f"S{dim}"
        case _:
            return "B"
