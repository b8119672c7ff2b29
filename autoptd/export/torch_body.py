"""Template of the program that `autoptd export --to torch` writes. Unfilled, it runs one process, not parallel."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import (  # noqa: F401
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (  # noqa: F401
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

# --- the plan ---

MESH = {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "tp": 1}  # in rank order, tp fastest
MICRO_BATCH = 1  # samples of a microbatch on one data-parallel rank
MICROBATCHES = 1  # per step
SCHEDULE: Any = Schedule1F1B
STAGES: tuple[tuple[str, ...], ...] = ((),)  # modules of each stage; stage k is on pipeline rank k % pp
TENSOR_PARALLEL: dict[str, ParallelStyle] = {}  # by module name, * for any number
GATHERED: tuple[str, ...] = ()  # modules whose sequence-split input is all-gathered once for all submodules
TIED: dict[str, str] = {}  # parameter -> name of the parameter that it is tied to
RECOMPUTED: dict[str, str] = {}  # modules: "full", "selective" (core attention), "ops" (see _policy); or "offload"
SHARDED: tuple[str, ...] = ()  # modules that FSDP gathers one at a time
RESHARD_AFTER_FORWARD = False  # ZeRO-3
REDUCE_EACH_MICROBATCH = False  # ZeRO-2 and 3: gradients stay sharded between microbatches
PARAM_DTYPE: torch.dtype | None = None
REDUCE_DTYPE: torch.dtype | None = None

# --- the program ---


Loss = Callable[[Any, Tensor], Tensor]  # outputs and targets of a microbatch -> their mean loss


@dataclass
class StageModules:
    """This rank's stages (`parts`) and the pipeline schedule that runs them."""

    mesh: DeviceMesh
    parts: list[nn.Module]
    schedule: Any  # None without a pipeline
    loss_fn: Loss

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of this rank's stages, for the optimizer."""
        for part in self.parts:
            yield from part.parameters()


def parallelize(model: nn.Module, loss_fn: Loss, device_type: str = "cuda") -> StageModules:
    """Parallelize `model` in place. Every rank of MESH, one process each, passes the same model, on its device.

    `model` takes one tensor and returns one, or an object whose `.logits` go to `loss_fn`. It may be on meta: then
    initialize its parameters afterwards.
    """
    mesh = init_device_mesh(device_type, tuple(MESH.values()), mesh_dim_names=tuple(MESH))
    pipe = mesh["pp"]
    device = torch.device(device_type, *([torch.accelerator.current_device_index()] if device_type != "cpu" else []))
    parts, stages = [], []
    own = range(pipe.get_local_rank(), len(STAGES), pipe.size())
    for index in own:
        part = cut_stage(model if index == own[-1] else copy.deepcopy(model), index)
        part.register_forward_hook(_tensor_of)
        split_tensors(part, mesh["tp"])
        for pattern, policy in RECOMPUTED.items():
            for name in present(part, (pattern,)):
                recompute(part.get_submodule(name), policy)
        shard_data_parallel(part, mesh)
        parts.append(part)
        if len(STAGES) > 1:
            stages.append(PipelineStage(part, index, len(STAGES), device, group=pipe.get_group()))
    return StageModules(mesh, parts, make_schedule(stages, loss_fn) if stages else None, loss_fn)


def _tensor_of(module: nn.Module, args: Any, output: Any) -> Tensor:
    found: Tensor = output if isinstance(output, Tensor) else output.logits
    return found


def make_schedule(stages: list[PipelineStage], loss_fn: Loss) -> Any:
    """Return SCHEDULE for this rank's stages; it divides gradients by MICROBATCHES."""
    single = SCHEDULE in (Schedule1F1B, ScheduleGPipe)
    return SCHEDULE(stages[0] if single else stages, MICROBATCHES, loss_fn=loss_fn)


def train_step(parallel: StageModules, inputs: Tensor, targets: Tensor) -> Tensor | None:
    """Run forward and backward on this data-parallel rank's samples; return their mean loss on the last pipeline rank.

    `inputs` and `targets`: [MICROBATCHES * MICRO_BATCH, …], the same on all tp and pp ranks. Gradients are means over
    microbatches and dp ranks, so all microbatches must have the same number of targets.
    """
    if parallel.schedule is None:
        return _step_alone(parallel.parts[0], inputs, targets, parallel.loss_fn)
    rank = parallel.mesh["pp"].get_local_rank()
    is_last = rank == (len(STAGES) - 1) % MESH["pp"]
    losses: list[Tensor] = []
    parallel.schedule.step(*([inputs] if rank == 0 else []), target=targets if is_last else None, losses=losses)
    return torch.stack(losses).mean().detach() if is_last else None


def _step_alone(model: nn.Module, inputs: Tensor, targets: Tensor, loss_fn: Loss) -> Tensor:
    losses = []
    for i, (x, y) in enumerate(zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True)):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(REDUCE_EACH_MICROBATCH or i == MICROBATCHES - 1)
        loss = loss_fn(model(x), y) / MICROBATCHES
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def present(model: nn.Module, patterns: tuple[str, ...]) -> list[str]:
    """Return the modules of this stage whose dotted names match a pattern, component by component."""
    names = [name for name, module in model.named_modules() if not isinstance(module, (PassThrough, ZeroEmbedding))]
    split = [pattern.split(".") for pattern in patterns]
    return [name for name in names if any(_matches(name.split("."), pattern) for pattern in split)]


def _matches(name: list[str], pattern: list[str]) -> bool:
    return len(name) == len(pattern) and all(fnmatchcase(part, p) for part, p in zip(name, pattern, strict=True))


# Pipeline: a stage is the model without the modules of all other stages.


class PassThrough(nn.Module):
    """Stand-in for a module of another stage that returns its first input, the hidden state."""

    def forward(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        return hidden


class ZeroEmbedding(nn.Module):
    """Stand-in for a second embedding, which another stage has already added to the hidden state."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros(())


def cut_stage(model: nn.Module, index: int, stages: Sequence[Sequence[str]] = STAGES) -> nn.Module:
    """Reduce `model` to stage `index`. It must pass one tensor from module to module, from the first embedding on."""
    tables = 0
    for number, names in enumerate(stages):
        for name in names:
            table = isinstance(model.get_submodule(name), nn.Embedding)
            if number != index:
                model.set_submodule(name, ZeroEmbedding() if table and tables else PassThrough())
            tables += table
    return model


# Tensor parallelism: torch's styles, and one more.


class GatherOnce(ParallelStyle):
    """All-gather a module's first tensor, which is split by sequence, once; reduce-scatter its gradient once."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(partial(self._gather, device_mesh), with_kwargs=True)
        return module

    @staticmethod
    def _gather(
        mesh: DeviceMesh, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def whole(x: Tensor) -> Tensor:
            split = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, (Shard(1),), run_check=False)
            gathered: Tensor = split.redistribute(placements=(Replicate(),))
            return gathered

        if args:
            return (whole(args[0]), *args[1:]), kwargs
        name = next(name for name, value in kwargs.items() if isinstance(value, Tensor))
        return args, kwargs | {name: whole(kwargs[name])}


def split_tensors(part: nn.Module, mesh: DeviceMesh) -> None:
    """Apply TENSOR_PARALLEL and GATHERED to this stage's modules, then restore the ties of parameters."""
    if mesh.size() == 1:
        return
    for pattern, style in TENSOR_PARALLEL.items():
        for name in present(part, (pattern,)):
            parallelize_module(part.get_submodule(name), mesh, style)
    for name in present(part, GATHERED):
        parallelize_module(part.get_submodule(name), mesh, GatherOnce())
    for name, source in TIED.items():
        (path, _, leaf), (source_path, _, source_leaf) = name.rpartition("."), source.rpartition(".")
        setattr(part.get_submodule(path), leaf, getattr(part.get_submodule(source_path), source_leaf))


# Recomputation.


def recompute(module: nn.Module, policy: str) -> None:
    """Recompute the module's forward pass in backward, without changing the names of its parameters.

    "offload": keep what it saves in host memory instead.
    """
    if policy == "offload":
        module.forward = partial(_offloaded, module.forward)  # type: ignore[method-assign]
        return
    chosen: dict[str, Any] = {} if policy == "full" else {"context_fn": partial(_contexts, policy)}
    module.forward = partial(checkpoint, module.forward, use_reentrant=False, **chosen)  # type: ignore[method-assign]


def _offloaded(forward: Any, *args: Any, **kwargs: Any) -> Any:
    with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
        return forward(*args, **kwargs)


def _contexts(policy: str) -> Any:
    return create_selective_checkpoint_contexts(partial(_policy, policy, {False: 0, True: 0}))


def _policy(
    policy: str, matmuls: dict[bool, int], context: Any, op: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """Save for backward all but core attention ("selective"), or core attention and every second matmul ("ops")."""
    name = str(op)
    core = any(word in name for word in ("scaled_dot_product", "softmax", "bmm"))
    if policy == "selective":
        saved = not core
    else:
        matmul = ".mm" in name or "addmm" in name
        matmuls[context.is_recompute] += matmul
        saved = core or (matmul and matmuls[context.is_recompute] % 2 == 1)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


# Data parallelism.


def shard_data_parallel(part: nn.Module, mesh: DeviceMesh) -> None:
    """Average gradients over dp; shard parameters, gradients and optimizer state over dp_shard."""
    replicate, shard = MESH["dp_replicate"], MESH["dp_shard"]
    if replicate * shard == 1 and PARAM_DTYPE is None:
        return
    options: dict[str, Any] = {
        "mesh": mesh["dp_replicate", "dp_shard"] if replicate > 1 else mesh["dp_shard"],
        "reshard_after_forward": RESHARD_AFTER_FORWARD,
        "mp_policy": MixedPrecisionPolicy(param_dtype=PARAM_DTYPE, reduce_dtype=REDUCE_DTYPE),
    }
    for name in present(part, SHARDED):
        fully_shard(part.get_submodule(name), **options)
    fully_shard(part, **options)
