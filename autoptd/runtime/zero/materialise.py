"""Allocation of a rank's tensors: parameters in flat buffers, checked against the layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from autoptd.errors import PlanError
from autoptd.layout.layout import Layout
from autoptd.ops.group import Group
from autoptd.ops.stage import Stage
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.zero.flat_buffer import Sharing
from autoptd.runtime.zero.param_buffers import Buffers


def check_names(stages: Sequence[Stage], layout: Layout, communicators: Communicators) -> None:
    """Raise PlanError unless each stage holds exactly the tensors of the layout, in their local shapes."""
    tp, numbers = layout.mesh.tp, layout.mesh.stages_of(communicators.stage)
    if len(stages) != len(numbers):
        raise PlanError(f"{len(stages)} stages given, but the plan has {len(numbers)} on each pipeline rank")
    for here, stage in zip(numbers, stages, strict=True):
        wrong = []
        for kind, held, specs in (
            ("parameter", dict(stage.named_parameters()), layout.parameters),
            ("buffer", dict(stage.named_buffers()), layout.buffers),
        ):
            planned = {name: spec for name, spec in specs.items() if here in spec.stages}
            wrong += [f"{kind} {name}: in the plan, not in the stage" for name in planned if name not in held]
            for name, x in held.items():
                if name not in planned:
                    wrong.append(f"{kind} {name}: in the stage, not in the plan")
                elif tuple(x.shape) != planned[name].local_shape(tp):
                    local = list(planned[name].local_shape(tp))
                    wrong.append(f"{kind} {name}: {list(x.shape)} in the stage, {local} in the plan")
        if wrong:
            raise PlanError(
                f"stage {here} and the plan hold different tensors",
                where="\n".join(wrong),
                fix="emit the stages again from this plan",
            )


def tied_groups(layout: Layout, communicators: Communicators) -> dict[tuple[int, ...], Group]:
    """Create a group for each set of pipeline ranks that share tied parameters, in the same order on all ranks."""
    sets = sorted({held for spec in layout.parameters.values() if len(held := layout.mesh.holders(spec.stages)) > 1})
    groups = {ranks: communicators.over_stages(ranks) for ranks in sets}
    return {ranks: group for ranks, group in groups.items() if group is not None}


@torch.no_grad()
def materialise(
    stages: Sequence[Stage], layout: Layout, communicators: Communicators, tied: Mapping[tuple[int, ...], Group]
) -> tuple[Buffers, dict[str, Tensor]]:
    """Replace the stages' tensors, which may be on meta, by real ones; tensors with values keep them.

    A tensor of several stages of this rank is allocated once. Returns the flat buffers and all local tensors by name.
    """
    device = communicators.device
    old = {name: held for stage in stages for name, held in stage.named_parameters()}
    holders = [{name for name, _ in stage.named_parameters()} for stage in stages]
    with torch.enable_grad():
        sharing = Sharing(*communicators.within_dp(layout.sharing))
        experts = Sharing(*communicators.within_edp(layout.zero > 0))
        offload = layout.offload[communicators.stage] if layout.offload else 0.0
        buffers = Buffers(old, layout, device, communicators.tp, sharing, tied, holders, experts, offload)
    new: dict[str, nn.Parameter] = dict(buffers.parameters)
    for name, parameter in old.items():
        if name not in new:
            new[name] = nn.Parameter(torch.zeros_like(parameter, device=device), requires_grad=False)
        if not parameter.is_meta:
            buffers.write(name, parameter) if name in buffers.parameters else new[name].copy_(parameter)
    for chunk, stage in enumerate(stages):
        buffers.attach(stage, chunk)
    tensors: dict[str, Tensor] = dict(new)
    for stage in stages:
        replacement = {id(parameter): new[name] for name, parameter in stage.named_parameters()}
        for module in stage.modules():
            for leaf, declared in module._parameters.items():
                if declared is not None:
                    module._parameters[leaf] = replacement[id(declared)]
            for leaf, held in module._buffers.items():
                if held is not None:
                    module._buffers[leaf] = torch.zeros_like(held, device=device) if held.is_meta else held.to(device)
        for name, held in list(stage.named_buffers()):
            if name in tensors:
                owner, _, leaf = name.rpartition(".")
                stage.get_submodule(owner)._buffers[leaf] = tensors[name]
            else:
                tensors[name] = held
    return buffers, tensors
