"""Baseline: the same training written by hand with PyTorch's own parts, for any mesh of (pp, dp, tp).

    tp    DTensor: `parallelize_module` with column and row parallel layers, and `loss_parallel`
    pp    `torch.distributed.pipelining`: a stage per rank, `Schedule1F1B`
    dp    "ddp": DistributedDataParallel; "ddp+zero": with ZeroRedundancyOptimizer; "fsdp": `fully_shard` by block,
          without resharding parameters between forward and backward

The code follows PyTorch's tutorials on these parts; gradient clipping uses the norm over all axes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from autoptd.layout.mesh import Mesh
from benchmarks.runtime.model import LAYERS, TIMED, Decoder, mean_cross_entropy

Step = Callable[[Mapping[str, Tensor]], tuple[Tensor, Tensor]]


def program(mesh: Mesh, dp: str, options: Mapping[str, Any], values: Mapping[str, Tensor], m: int) -> Step:
    """Return a function that trains one step on this rank's batch and returns (loss, gradient norm), each 0-dim.

    The loss is that of this rank's samples; only the last stage has it. `values`: parameters of the whole model. `m`:
    number of microbatches, 1 without pipeline stages.
    """
    device_mesh = init_device_mesh("cpu", (mesh.pp, mesh.dp, mesh.tp), mesh_dim_names=("pp", "dp", "tp"))
    rank = device_mesh.get_local_rank("pp")
    share = LAYERS // mesh.pp
    model = Decoder(TIMED, range(rank * share, (rank + 1) * share), first=rank == 0, last=rank == mesh.pp - 1)
    model.load_state_dict({name: values[name] for name in model.state_dict()})
    if mesh.tp > 1:
        _split(model, device_mesh["tp"])
    wrapped: nn.Module = model
    if dp == "fsdp":
        for block in model.blocks.values():
            fully_shard(block, mesh=device_mesh["dp"], reshard_after_forward=False)
        fully_shard(model, mesh=device_mesh["dp"], reshard_after_forward=False)
    elif mesh.dp > 1:
        wrapped = nn.parallel.DistributedDataParallel(model, process_group=device_mesh.get_group("dp"))
    parameters = list(model.parameters())
    if dp == "ddp+zero":
        optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(
            parameters, torch.optim.AdamW, process_group=device_mesh.get_group("dp"), **options
        )
    else:
        optimizer = torch.optim.AdamW([{"params": group} for group in _by_mesh(parameters)], **options)
    run = _pipelined(wrapped, device_mesh, m) if mesh.pp > 1 else _alone(wrapped, m)

    def step(batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        if mesh.tp > 1:
            with loss_parallel():
                loss = run(batch)
        else:
            loss = run(batch)
        norm = _clip(parameters, device_mesh if mesh.pp > 1 else None)
        optimizer.step()
        return loss, norm

    return step


def _split(model: Decoder, tp: DeviceMesh) -> None:
    """Split layers over tp as Megatron-LM does (Shoeybi et al. 2019), with replicated hidden states between them."""
    plan: dict[str, Any] = {}
    if model.tokens is not None:
        plan["tokens"] = RowwiseParallel(input_layouts=Replicate())
    if model.head is not None:
        plan["head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, tp, plan)
    for block in model.blocks.values():
        layers = {f"attention.{name}": ColwiseParallel() for name in ("q", "k", "v")}
        layers |= {f"perceptron.{name}": ColwiseParallel() for name in ("gate", "up")}
        rows = {name: RowwiseParallel() for name in ("attention.out", "perceptron.down")}
        parallelize_module(block, tp, {**layers, **rows})


def _alone(model: nn.Module, m: int) -> Callable[[Mapping[str, Tensor]], Tensor]:
    assert m == 1, m

    def run(batch: Mapping[str, Tensor]) -> Tensor:
        loss = mean_cross_entropy(model(batch["tokens"]), batch["targets"])
        loss.backward()
        return loss.detach()

    return run


def _pipelined(model: nn.Module, mesh: DeviceMesh, m: int) -> Callable[[Mapping[str, Tensor]], Tensor]:
    rank, last = mesh.get_local_rank("pp"), mesh["pp"].size() - 1
    stage = PipelineStage(model, rank, last + 1, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, m, loss_fn=mean_cross_entropy)

    def run(batch: Mapping[str, Tensor]) -> Tensor:
        losses: list[Tensor] = []
        given = (batch["tokens"],) if rank == 0 else ()
        if rank == last:
            schedule.step(*given, target=batch["targets"], losses=losses, return_outputs=False)
        else:
            schedule.step(*given)
        return torch.stack(losses).mean().detach() if losses else torch.zeros(())

    return run


def _by_mesh(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters by device mesh, None for plain tensors: torch's foreach functions do not mix them."""
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for p in parameters:
        groups.setdefault(p.device_mesh if isinstance(p, DTensor) else None, []).append(p)
    return list(groups.values())


def _clip(parameters: list[nn.Parameter], pipeline: DeviceMesh | None) -> Tensor:
    """Scale the gradients so that their norm over all axes is at most 1; return the norm before scaling."""
    norms = []
    for group in _by_mesh(parameters):
        norm = nn.utils.get_total_norm([p.grad for p in group if p.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    norm = torch.stack(norms).norm()
    if pipeline is not None:
        norm = norm**2
        torch.distributed.all_reduce(norm, group=pipeline.get_group("pp"))
        norm = norm.sqrt()
    for group in _by_mesh(parameters):
        nn.utils.clip_grads_with_norm_(group, 1.0, norm)
    return norm
