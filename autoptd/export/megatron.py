"""A plan as arguments of Megatron-LM's `pretrain_gpt.py`, and what of the plan they cannot express.

Arguments and their rules: megatron/training/arguments.py (`_add_distributed_args`, `_add_training_args`,
`validate_args`) of Megatron-LM with Megatron-Core 0.15; the layout string: `parse_str_to_list` of
megatron/core/transformer/pipeline_parallel_layer_layout.py. Both number ranks alike: tp fastest, then cp, dp, pp.

    E  embedding   t  a layer   L  final norm, output layer and loss   |  next stage   x*n, (…)*n  n times
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import nn

from autoptd.cost_models.memory import COMPUTE_BYTES, MAIN_BYTES
from autoptd.errors import PlanError
from autoptd.export.layers import (
    Layers,
    collectives_differ,
    is_sequence_parallel,
    read_layers,
    recomputed,
    whole_layers,
)
from autoptd.export.megatron_model import Argument, shape_arguments
from autoptd.export.megatron_splits import split_differences
from autoptd.export.roles import check_names
from autoptd.passes.fold import Folded
from autoptd.passes.sharding.megatron_splits import megatron_splits
from autoptd.plans.model import Plan
from autoptd.text import printable

_LEFT = "--lr and its schedule, --clip-grad (1.0 by default), --train-iters, data, tokenizer and checkpoints"


@dataclass(frozen=True)
class Megatron:
    """Arguments in order, environment variables (None: unset), and differences from the plan."""

    title: str
    arguments: tuple[Argument, ...]
    environment: tuple[tuple[str, str | None], ...]
    differs: tuple[str, ...]

    def to_text(self) -> str:
        """Return bash code that sets `MEGATRON_ARGS` and the environment."""
        lines = [f"# {printable(text, keep='')}" for text in (self.title, *(f"differs: {d}" for d in self.differs))]
        lines += [f"# left to you: {_LEFT}"]
        lines += [f"unset {k}" if v is None else f"export {k}={v}" for k, v in self.environment]
        lines += ["MEGATRON_ARGS=(", *(f"    {name} {shlex.quote(value)}".rstrip() if value else f"    {name}"
                  for name, value in self.arguments), ")"]  # fmt: skip
        return "\n".join(lines) + "\n"

    def to_data(self) -> dict[str, Any]:
        return {
            "arguments": [part for pair in self.arguments for part in pair if part],
            "environment": dict(self.environment),
            "differs": list(self.differs),
            "left_to_you": _LEFT,
        }


def megatron(plan: Plan, model: nn.Module | None = None, graph: Folded | None = None) -> Megatron:
    """Return the closest arguments, and a sentence for each property of the plan that they do not express.

    With the model (it may be on meta) they include its sizes, and with its graph (`autoptd.trace(model).folded`)
    placements are compared. Raises PlanError for plans without a counterpart: fp64, no or several stacks of layers, a
    stage without a whole layer.
    """
    if plan.precision == "fp64":
        raise PlanError("Megatron-LM trains in bf16, fp16 or fp32, not in fp64", where="precision", fix="plan in bf16")
    layers = read_layers(plan)
    sizes: list[Argument] = []
    differs = ["no model was given: the model's sizes are left to you"]
    if model is not None:
        if plan.mesh.tp > 1:
            check_names(plan, model)
        sizes, differs = shape_arguments(model)
    compressed, lines = _placements(plan, graph)
    differs += lines
    parts = [
        _padded(sizes, plan.mesh.tp),
        _parallel(plan, layers, compressed, bool(_expert_placements(plan, model)) or plan.mesh.ep > 1),
        _pipeline(plan, layers),
        _batch(plan),
        _data_parallel(plan),
    ]
    parts += [_recompute(plan, layers), _kernels(plan), _experts(plan, model)]
    found = [item for part in parts for item in part]
    return Megatron(
        title=f"{plan.model} on {plan.world} × {plan.cluster.name}: {plan.mesh}",
        arguments=(*sizes, *(item for item in found if isinstance(item, tuple))),
        environment=_environment(plan),
        differs=(*layers.moved, *(item for item in found if isinstance(item, str)), *differs),
    )


Items = Iterator[Argument | str]  # arguments and differences


def _placements(plan: Plan, graph: Folded | None) -> tuple[bool, list[str]]:
    """Return whether the model has compressed projections, whose number of collectives differs, and the differences."""
    if plan.mesh.tp == 1:
        return False, []
    if graph is None:
        return False, ["the model was not traced: placements are not compared"]
    try:
        theirs = megatron_splits(graph)
    except PlanError as error:
        return False, [f"placements are not compared: {error.what}"]
    return theirs.compressed, split_differences(plan, graph, theirs)


def _parallel(plan: Plan, layers: Layers, compressed: bool, experts: bool) -> Items:
    mesh = plan.mesh
    yield "--tensor-model-parallel-size", str(mesh.tp)
    yield "--pipeline-model-parallel-size", str(mesh.pp)
    if mesh.cp > 1:
        yield "--context-parallel-size", str(mesh.cp)
        yield "--cp-comm-type", "a2a" if plan.method.context == "ulysses" else "p2p"
    sequence = is_sequence_parallel(plan, layers)
    if sequence:
        yield "--sequence-parallel", ""
    elif experts and mesh.tp > 1:  # megatron/core/transformer/moe/moe_layer.py raises otherwise
        yield "--sequence-parallel", ""
        yield "hidden states are whole on every tp rank: Megatron-LM trains experts with sequence parallelism only"
    overlap = set(plan.method.overlap)
    if "tp" in overlap and mesh.tp > 1:
        if sequence:
            yield "--tp-comm-overlap", ""
        else:
            yield "tensor-parallel all-reduces overlap compute: Megatron-LM needs sequence parallelism for that"
    if mesh.tp > 1 and not compressed and not mesh.etp:  # with etp 1 no tokens of experts travel over tp
        usual = {"all_gather": 2.0, "reduce_scatter": 2.0} if sequence else {"all_reduce": 2.0}
        yield from collectives_differ(plan, layers, usual, "Megatron-LM's")
    if sequence and plan.method.gathers == "kept":
        yield "tp-gathered inputs are saved for backward: Megatron-LM re-gathers them in backward, for less memory"


def layout(layers: Layers) -> str:
    """Return the layout string of all stages, in the model's order: `Et*3|(t*4|)*6,t*3L`."""
    stages = []
    for k in range(len(layers.bounds) - 1):
        count = len(layers.layers_of(k))
        text = "" if count == 0 else "t" if count == 1 else f"t*{count}"
        first, last = layers.stage_of(0) == k, layers.stage_of(layers.count + 1) == k
        stages.append("E" * first + text + "L" * last)
    runs = [(text, len(list(group))) for text, group in groupby(stages[:-1])]
    pieces = [f"({text}|)*{n}," if n > 1 else f"{text}|" for text, n in runs]
    return "".join(pieces) + stages[-1]


def _pipeline(plan: Plan, layers: Layers) -> Items:
    mesh, schedule = plan.mesh, plan.schedule
    if mesh.pp == 1:
        return
    if not is_even(layers):
        yield "--pipeline-model-parallel-layout", layout(layers)
    elif schedule.virtual > 1:
        yield "--num-virtual-stages-per-pipeline-rank", str(schedule.virtual)
    overlapped = "p2p" in plan.method.overlap
    if schedule.virtual > 1:
        if schedule.microbatches % mesh.pp:  # megatron/core/pipeline_parallel/schedules.py raises otherwise
            raise PlanError(
                f"{schedule.microbatches} microbatches are not a multiple of pp {mesh.pp}, as Megatron-LM requires",
                where="schedule.microbatches",
                fix=f"plan with a batch of a multiple of {mesh.dp * plan.micro * mesh.pp} samples",
            )
        if not overlapped and mesh.pp == 2:
            yield "P2P does not overlap compute: Megatron-LM must overlap it for interleaved chunks on 2 pipeline ranks"
        elif not overlapped:
            yield "--no-overlap-p2p-communication", ""
    elif overlapped:
        yield "P2P between stages overlaps compute: that of Megatron-LM's 1F1B does not"
    if schedule.kind in ("gpipe", "zero-bubble"):
        yield f"the schedule is {schedule.kind}: Megatron-LM runs 1F1B, with the same gradients"
    if mesh.tp > 1 and plan.method.sends == "whole" and not is_sequence_parallel(plan, layers):
        yield "--no-scatter-gather-tensors-in-pipeline", ""


def is_even(layers: Layers) -> bool:
    """Return whether all stages have equally many layers, the first the embedding and the last the head."""
    stages = len(layers.bounds) - 1
    ends = layers.stage_of(0) == 0 and layers.stage_of(layers.count + 1) == stages - 1
    return ends and len({len(layers.layers_of(k)) for k in range(stages)}) == 1


def _batch(plan: Plan) -> Items:
    whole = plan.mesh.dp * plan.micro * plan.schedule.microbatches
    yield "--micro-batch-size", str(plan.micro)
    yield "--global-batch-size", str(whole)
    if whole != plan.batch:
        yield f"the batch is {plan.batch}: Megatron-LM takes whole microbatches on every rank, {whole} samples"
    if seq := plan.sizes.get("s"):
        yield "--seq-length", str(seq)
    else:
        yield "--seq-length is left to you: the plan has no sequence length"
    if plan.loss_averaging == "global":  # without it, every microbatch counts alike, however many labels it ignores
        yield "--calculate-per-token-loss", ""


def _data_parallel(plan: Plan) -> Items:
    method, dp = plan.method, plan.mesh.dp
    if plan.precision in ("bf16", "fp16"):
        yield f"--{plan.precision}", ""
    zero = _zero(plan)
    if plan.optimizer == "adamw":
        yield "--optimizer", "adam"
    elif plan.optimizer == "sgd":
        yield "--optimizer", "sgd"
        yield "--sgd-momentum", "0"  # by default 0.9, and its state
        yield "--weight-decay", "0"  # by default 0.01, as of AdamW
    else:
        named = "your own" if plan.optimizer.startswith("custom") else plan.optimizer
        yield f"the optimizer is {named}: --optimizer is left to you"
    if zero:
        yield "--use-distributed-optimizer", ""
    if zero > 1:
        yield "--use-megatron-fsdp", ""
        yield "--data-parallel-sharding-strategy", "optim_grads" if zero == 2 else "optim_grads_params"
        yield "--no-gradient-accumulation-fusion", ""
        yield "--ckpt-format", "fsdp_dtensor"
    if plan.zero > zero and dp * plan.mesh.cp > 1:
        yield f"ZeRO-{plan.zero} with sgd: Megatron-LM shards with Adam only, so each rank holds all, in more memory"
    yield from _shards(plan)
    yield from _offload(plan)
    if "dp" in method.overlap and dp * plan.mesh.cp > 1:
        yield "--overlap-grad-reduce", ""
        if zero:
            yield "--overlap-param-gather", ""
        if method.bucket_bytes:
            table = COMPUTE_BYTES if method.gradients == "compute" else MAIN_BYTES
            yield "--ddp-bucket-size", str(max(1, method.bucket_bytes // table[plan.precision]))
    elif method.bucket_bytes and dp * plan.mesh.cp > 1:
        yield f"buckets have {method.bucket_bytes} bytes: without overlap Megatron-LM reduces all gradients at once"
    if plan.precision == "bf16" and method.gradients == "compute":
        yield "--grad-reduce-in-bf16", ""
    if plan.precision == "fp16" and method.gradients == "compute":
        yield "gradients are in fp16: Megatron-LM accumulates and reduces them in float32"
    if plan.precision == "bf16" and method.gradients == "both":
        yield "gradients have a bf16 and a float32 buffer: Megatron-LM has only the float32 one"


def _zero(plan: Plan) -> int:
    """Return the stage of ZeRO that Megatron-LM runs: distrib_optimizer.py takes Adam only."""
    return 0 if plan.optimizer == "sgd" else plan.zero


def _shards(plan: Plan) -> Items:
    shards, copies = plan.method.shards, plan.mesh.dp * plan.mesh.cp  # both systems shard over dp and cp together
    if _zero(plan) and shards not in (0, copies):
        yield "--num-distributed-optimizer-instances", str(copies // shards)


def _offload(plan: Plan) -> Items:
    shares, copies = plan.method.offload, plan.mesh.dp * plan.mesh.cp
    if not any(shares):
        return
    if plan.optimizer == "sgd":
        yield "a part of the optimizer state is on the host: Megatron-LM offloads only that of Adam"
        return
    yield "--optimizer-cpu-offload", ""
    yield "--optimizer-offload-fraction", f"{max(shares):g}"
    yield "--use-precision-aware-optimizer", ""  # `validate_args` asks for it, and for Adam with sharded state
    if not plan.zero:
        yield "--use-distributed-optimizer", ""
    if len(set(shares)) > 1:
        listed = ", ".join(f"{share:g}" for share in shares)
        yield f"{listed} of the optimizer state is on the host, by pipeline rank: Megatron-LM takes one number"
    if plan.optimizer != "adamw" or (not plan.zero and copies > 1):
        yield "a part of the optimizer state is on the host: Megatron-LM offloads only the sharded state of Adam"


def _recompute(plan: Plan, layers: Layers) -> Items:
    segments = recomputed(plan)
    if not segments:
        return
    if "offload" in segments.values():
        yield "activations of some layers are planned in host memory: --cpu-offloading-num-layers is not given"
        segments = {i: policy for i, policy in segments.items() if policy != "offload"}
    units = {layers.owners[i] for i in segments}
    inside = {unit - 1 for unit in units if 1 <= unit <= layers.count}
    policies = sorted(set(segments.values()))
    if len(policies) > 1:
        yield f"recomputation is {' and '.join(policies)} by segment: Megatron-LM has one policy, here whole layers"
    if units - {i + 1 for i in inside}:
        yield "modules before or after the layers are recomputed too: Megatron-LM recomputes only layers"
    if not inside:
        return
    if policies == ["full"] or len(policies) > 1:
        yield from _whole_layers(plan, layers, inside)
        return
    yield "--recompute-granularity", "selective"
    if policies == ["ops"]:
        yield "ops are recomputed by kind (every second matmul): Megatron-LM recomputes core attention instead"
    if missing := layers.count - len(inside):
        yield f"{missing} layers are not recomputed: --recompute-granularity selective applies to all layers"


def _whole_layers(plan: Plan, layers: Layers, inside: set[int]) -> Items:
    if partial := len(inside - whole_layers(plan, layers).keys()):
        count = "1 layer is" if partial == 1 else f"{partial} layers are"
        yield f"{count} recomputed in part: Megatron-LM recomputes whole layers"
    yield "--recompute-granularity", "full"
    if len(inside) == layers.count:
        yield "--recompute-method", "uniform"
        yield "--recompute-num-layers", "1"
        return
    counts = [len(inside.intersection(layers.layers_of(k))) for k in range(len(layers.bounds) - 1)]
    yield "--recompute-method", "block"
    yield "--recompute-num-layers", str(max(counts))
    sizes = [min(max(counts), len(layers.layers_of(k))) for k in range(len(counts))]
    if counts != sizes:
        yield f"recomputed layers per stage are {_listed(counts)}: Megatron-LM takes one number, here the largest"


def _listed(counts: list[int]) -> str:
    """Return counts with runs folded: `8, 6, 2 × 5, 0`."""
    runs = [(value, len(list(group))) for value, group in groupby(counts)]
    return ", ".join(f"{value} × {n}" if n > 1 else str(value) for value, n in runs)


def _kernels(plan: Plan) -> Items:
    method = plan.method
    # as torch does, Transformer Engine takes cuDNN's kernels on Hopper and later devices, else FlashAttention
    yield "--attention-backend", {"torch": "auto", "cudnn": "fused"}.get(method.attention, "flash")
    if method.attention == "triton":
        yield "attention is planned with the Triton kernels of FlashAttention 1: Megatron-LM's are newer"
    if method.kernels != "fused":
        yield f"{method.kernels} kernels are planned: Megatron-LM's are fused by hand, so times will differ"
    if "logits" in plan.partial:
        yield "logits are planned in chunks of the vocabulary: here they are whole, which takes more memory"
    elif method.loss == "kept":
        yield "the logits and their gradient are both held: Megatron-LM writes the gradient in place, for less memory"


def _padded(sizes: list[Argument], tp: int) -> Items:
    """Yield the padding of the vocabulary, by default to 128 rows per tp rank."""
    vocabulary = int(dict(sizes).get("--vocab-size", 0))
    if vocabulary % tp:
        rows = -(-vocabulary // (128 * tp)) * 128 * tp
        yield f"the vocabulary is {vocabulary}: Megatron-LM pads it to {rows} rows, a multiple of {128 * tp}"
    elif vocabulary % (128 * tp):
        yield "--make-vocab-size-divisible-by", str(math.gcd(128, vocabulary // tp))


def _expert_placements(plan: Plan, model: nn.Module | None) -> set[str]:
    shapes = {} if model is None else {name: p.shape for name, p in model.named_parameters()}
    return {text for name, text in plan.splits.parameters.items() if len(shapes.get(name, ())) == 3}


def _experts(plan: Plan, model: nn.Module | None) -> Items:
    """Yield the arguments of experts: parameters [expert, …, …], which tp may split by their first dim."""
    mesh, method = plan.mesh, plan.method
    texts = _expert_placements(plan, model)
    over_tp = mesh.tp > 1 and "S0" in texts and not mesh.etp
    if not texts and mesh.ep == 1:
        return
    yield "--expert-model-parallel-size", str(mesh.ep * mesh.tp if over_tp else mesh.ep)
    yield "--expert-tensor-parallel-size", str(1 if over_tp else mesh.etp or mesh.tp)
    yield "--moe-grouped-gemm", ""
    if method.dispatch == "merged":
        yield "--moe-token-dispatcher-type", "flex"
        yield "--moe-enable-deepep", ""
    else:
        yield "--moe-token-dispatcher-type", "alltoall"
    fused = method.permutation == "fused" or (method.kernels == "fused" and not method.permutation)
    if fused:
        yield "--moe-permute-fusion", ""
    if "ep" in method.overlap and mesh.ep > 1:
        yield "--overlap-moe-expert-parallel-comm", ""
    if over_tp:
        yield "tp ranks share out experts and each has all rows: Megatron-LM's tp ranks send their own tokens' rows"
    elif mesh.ep > 1 and mesh.tp > 1 and not mesh.etp and method.dispatch == "rows":
        yield "each tp rank sends all rows to experts: each of Megatron-LM's sends its part, and gathers the others'"


def _environment(plan: Plan) -> tuple[tuple[str, str | None], ...]:
    """Return what `validate_args` asks for: 1 connection with tp or cp before Blackwell, and more with FSDP."""
    if _zero(plan) > 1:
        return (("CUDA_DEVICE_MAX_CONNECTIONS", None),)
    return (("CUDA_DEVICE_MAX_CONNECTIONS", "1"),) if plan.mesh.tp * plan.mesh.cp > 1 else ()
