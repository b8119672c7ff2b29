"""A plan as a table for any other framework: each parameter's placement on every mesh axis, and its stages.

dp  B: replicated (gradients are averaged)     F: a shard of the flattened tensor (ZeRO-3, over dp and cp together)
cp  as dp
tp  the plan's placement, `autoptd.layout.placements`
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from autoptd.export.layers import modules_of
from autoptd.plans.model import Plan

FORMAT = "autoptd-export"


def mapping(plan: Plan) -> dict[str, Any]:
    """Return the table as JSON data.

    A parameter's stages are those with a segment whose modules hold it: several for a shared tensor, none for a
    parameter that no segment's name covers.
    """
    copies = "F" if plan.zero == 3 else "B"
    axes = ["pp", "dp", "cp", "tp"]  # rank = ((pp * dp_size + dp) * cp_size + cp) * tp_size + tp
    return {
        "format": FORMAT,
        "version": 1,
        "model": plan.model,
        "graph_hash": plan.graph_hash,
        "mesh": {"axes": axes, "sizes": [getattr(plan.mesh, axis) for axis in axes], "ep": plan.mesh.ep},
        "batch": {"samples": plan.batch, "micro": plan.micro, "microbatches": plan.schedule.microbatches},
        "sizes": dict(plan.sizes),
        "precision": plan.precision,
        "optimizer": plan.optimizer,
        "schedule": {"kind": plan.schedule.kind, "chunks_per_rank": plan.schedule.virtual},
        "zero": {"level": plan.zero, "ranks": (plan.method.shards or plan.mesh.dp * plan.mesh.cp) if plan.zero else 1},
        "method": asdict(plan.method),
        "stages": [
            {
                "rank": plan.route.holder(k),
                "segments": list(plan.segments[stage.first : stage.last + 1]),
                "recomputed": {plan.segments[i]: policy for i, policy in plan.policies(stage).items()},
            }
            for k, stage in enumerate(plan.stages)
        ],
        "parameters": {
            name: {"dp": copies, "cp": copies, "tp": text, "stages": stages}
            for (name, text), stages in zip(
                sorted(plan.splits.parameters.items()), _stages(plan, sorted(plan.splits.parameters)), strict=True
            )
        },
    }


def _stages(plan: Plan, names: list[str]) -> list[list[int]]:
    """Return the stages of each parameter, found by the longest module path of a segment that begins its name."""
    owners: dict[str, list[int]] = {}
    for k, stage in enumerate(plan.stages):
        for segment in plan.segments[stage.first : stage.last + 1]:
            for path in modules_of(segment):
                found = owners.setdefault(path, [])
                found += [k] if k not in found else []
    rows = []
    for name in names:
        parts = name.split(".")
        prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
        rows.append(next((owners[prefix] for prefix in prefixes if prefix in owners), []))
    return rows
