"""A plan as a Python file that needs only torch: DTensor styles, FSDP, pipeline stages, recomputation.

The file is the template `torch_body.py` with the constants of its section `the plan` replaced.
APIs of torch 2.13: `torch.distributed.tensor.parallel`, `torch.distributed.pipelining`, `torch.distributed.fsdp`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoptd.codegen.quoting import in_docstring, literal
from autoptd.errors import InputsError, PlanError
from autoptd.export.layers import Layers, modules_of, read_layers, recomputed, whole_layers
from autoptd.export.roles import tied
from autoptd.export.torch_stages import check_split, check_stages
from autoptd.export.torch_styles import Styles, styles_of
from autoptd.models import example_inputs
from autoptd.nest import tensors_of
from autoptd.plans.model import Plan

_BODY = Path(__file__).with_name("torch_body.py")
_BEGIN, _END = "# --- the plan ---\n", "# --- the program ---\n"
_SCHEDULES = {
    "1f1b": "Schedule1F1B",
    "gpipe": "ScheduleGPipe",
    "interleaved": "ScheduleInterleaved1F1B",
    "zero-bubble": "ScheduleInterleavedZeroBubble",
}
_WIDTH = 118


@dataclass(frozen=True)
class TorchProgram:
    """The file's text, and the differences from the plan, which its docstring lists too."""

    text: str
    differs: tuple[str, ...]

    def to_text(self) -> str:
        return self.text

    def to_data(self) -> dict[str, Any]:
        return {"program": self.text, "differs": list(self.differs)}


def torch_program(plan: Plan, model: nn.Module) -> TorchProgram:
    """Return the program of a plan for `model`, which may be on meta.

    Raises PlanError for plans without a counterpart: context parallelism, fp16, no or several stacks of layers, a stage
    without a whole layer, parameters tied across stages, several tensors between stages, a plan of another model.
    """
    if plan.mesh.cp > 1:
        raise PlanError(
            f"context parallelism (cp {plan.mesh.cp}) has no counterpart in an exported torch program",
            where="mesh.cp",
            fix="export to megatron, or plan with cp=1",
        )
    if plan.mesh.ep > 1:
        raise PlanError(
            f"experts on {plan.mesh.ep} ranks of their own have no counterpart in an exported torch program",
            where="mesh.ep",
            fix="plan with fix={'ep': 1}",
        )
    if plan.precision == "fp16":
        raise PlanError(
            "fp16 needs loss scaling, which an exported torch program does not have",
            where="precision",
            fix="plan in bf16, or run the program that autoptd emits",
        )
    layers = read_layers(plan)
    styles = styles_of(plan, model, layers)
    stages = stage_modules(plan, model, layers)
    _check_schedule(plan)
    _check_stages(plan, model, stages)
    unchecked = _checked(plan, model, stages, styles.styles)
    policies, lines = _recomputed(plan, model, layers)
    differs = (*layers.moved, *styles.differs, *lines, *_differences(plan), *unchecked)
    constants = "\n".join(_constants(plan, model, layers, styles, stages, policies))
    return TorchProgram(_filled(_docstring(plan, differs), constants), differs)


def _filled(docstring: str, constants: str) -> str:
    body = _BODY.read_text("utf-8").replace("  # noqa: F401", "").replace("  # type: ignore[method-assign]", "")
    _, _, rest = body.partition('"""\n\n')
    head, _, tail = rest.partition(_BEGIN)
    _, _, tail = tail.partition(_END)
    return f"{docstring}\n\n{head}{_BEGIN}\n{constants}\n\n{_END}{tail}"


def _docstring(plan: Plan, differs: tuple[str, ...]) -> str:
    mesh = plan.mesh
    lines = [
        f'"""{in_docstring(plan.model)} on {plan.world} devices: {mesh}, '
        f"{plan.schedule.microbatches} microbatches of {plan.micro}.",
        "",
        f"Exported from an autoptd plan; needs torch 2.13. Start {plan.world} processes with torchrun; in each:",
        "",
        "    parallel = parallelize(model, loss_fn)     # the whole model, the same on every rank",
        f"    optimizer = {_optimizer(plan)}",
        "    loss = train_step(parallel, inputs, targets)",
        "    optimizer.step(); optimizer.zero_grad()",
        "",
        "The model takes one tensor and returns one, or an object with `.logits`; models of transformers need",
        "config.use_cache = False. Reshapes to heads must have -1 for their number: a tp rank has only some of the",
        "heads. Before a long run, compare the first losses with those of one process.",
    ]
    if differs:
        lines += ["", "Differences from the plan:", *(f"- {in_docstring(what)}" for what in differs)]
    return "\n".join([*lines, '"""'])


def _optimizer(plan: Plan) -> str:
    name = {"adamw": "torch.optim.AdamW", "sgd": "torch.optim.SGD"}.get(plan.optimizer, "YourOptimizer")
    return f"{name}(parallel.parameters(), lr=…)"


def _constants(
    plan: Plan, model: nn.Module, layers: Layers, styles: Styles, stages: list[list[str]], policies: dict[str, str]
) -> Iterator[str]:
    mesh = plan.mesh
    shard = (plan.method.shards or mesh.dp) if plan.zero else 1
    sizes = {"pp": mesh.pp, "dp_replicate": mesh.dp // shard, "dp_shard": shard, "tp": mesh.tp}
    yield f"MESH = {_literal(sizes)}  # in rank order, tp fastest"
    yield f"MICRO_BATCH = {plan.micro}  # samples of a microbatch on one data-parallel rank"
    yield f"MICROBATCHES = {plan.schedule.microbatches}  # per step"
    yield f"SCHEDULE: Any = {_SCHEDULES[plan.schedule.kind]}"
    yield "STAGES: tuple[tuple[str, ...], ...] = (  # modules of each stage; stage k is on pipeline rank k % pp"
    yield from (line for names in stages for line in _tuple(names, 1))
    yield ")"
    yield "TENSOR_PARALLEL: dict[str, ParallelStyle] = {  # by module name, * for any number"
    yield from (f"    {literal(name)}: {text}," for name, text in styles.styles.items())
    yield "}"
    yield from _named("GATHERED: tuple[str, ...]", list(styles.gathered))
    yield f"TIED: dict[str, str] = {_literal(tied(model))}"
    yield from _mapping("RECOMPUTED: dict[str, str]", policies)
    yield from _named("SHARDED: tuple[str, ...]", [layers.pattern])
    yield f"RESHARD_AFTER_FORWARD = {plan.zero == 3}"
    yield f"REDUCE_EACH_MICROBATCH = {plan.zero >= 2}"
    bf16 = plan.precision == "bf16"
    reduce_type = "torch.bfloat16" if plan.method.gradients == "compute" else "torch.float32"
    yield f"PARAM_DTYPE: torch.dtype | None = {'torch.bfloat16' if bf16 else None}"
    yield f"REDUCE_DTYPE: torch.dtype | None = {reduce_type if bf16 else None}"


def _literal(mapping: dict[str, Any]) -> str:
    items = (f"{literal(k)}: {literal(v) if isinstance(v, str) else v}" for k, v in mapping.items())
    return "{" + ", ".join(items) + "}"


def _named(name: str, values: list[str]) -> Iterator[str]:
    lines = list(_tuple(values, 0))
    yield f"{name} = {lines[0].rstrip(',') if len(lines) == 1 else lines[0]}"
    yield from (line if line != ")," else ")" for line in lines[1:])


def _mapping(name: str, values: dict[str, str]) -> Iterator[str]:
    """Yield an assignment of a dict, on one line if it fits."""
    line = f"{name} = {_literal(values)}"
    yield from (
        [line]
        if len(line) <= _WIDTH
        else [
            f"{name} = {{",
            *(f"    {literal(key)}: {literal(value)}," for key, value in values.items()),
            "}",
        ]
    )


def _tuple(values: list[str], depth: int) -> Iterator[str]:
    """Yield `("a", "b"),` on one line if it fits, else one value per line."""
    quoted = [literal(value) for value in values]
    indent = "    " * depth
    line = f"{indent}({', '.join(quoted)}{',' if len(quoted) == 1 else ''}),"
    if len(line) + 30 * (depth == 0) <= _WIDTH:
        yield line
        return
    yield f"{indent}("
    yield from (f"{indent}    {value}," for value in quoted)
    yield f"{indent}),"


# --- stages -------------------------------------------------------------------------------------------------------


def stage_modules(plan: Plan, model: nn.Module, layers: Layers) -> list[list[str]]:
    """Return the names of the modules of each stage, which other stages replace by stand-ins."""
    known = {name for name, _ in model.named_modules() if name}
    ends: dict[int, list[str]] = {0: [], layers.count + 1: []}
    for segment, unit in zip(plan.segments, layers.owners, strict=True):
        if unit in ends:
            holds = [m for m in modules_of(segment) if m in known and not layers.path(0).startswith(f"{m}.")]
            ends[unit] = list(dict.fromkeys([*ends[unit], *holds]))
    stages = []
    for k in range(len(layers.bounds) - 1):
        units = range(layers.bounds[k], layers.bounds[k + 1])
        stages.append([name for unit in units for name in ends.get(unit, [layers.path(unit - 1)])])
    return stages


def _check_schedule(plan: Plan) -> None:
    """Raise PlanError for numbers of microbatches that torch's schedules refuse."""
    count, pp, stages = plan.schedule.microbatches, plan.mesh.pp, len(plan.stages)
    if stages == 1:
        return
    if plan.schedule.kind == "1f1b" and count < stages:
        raise PlanError(
            f"{count} microbatches are fewer than {stages} stages, which torch's Schedule1F1B refuses",
            where="schedule.microbatches",
            fix="plan with smaller microbatches, a larger batch, or schedule='gpipe'",
        )
    rounds = max(1, count // pp)
    if plan.schedule.kind in ("interleaved", "zero-bubble") and count % rounds:
        raise PlanError(
            f"{count} microbatches do not divide into {rounds} rounds, as torch's interleaved schedules require",
            where="schedule.microbatches",
            fix=f"plan with a batch of a multiple of {plan.mesh.dp * plan.micro * pp} samples",
        )


def _check_stages(plan: Plan, model: nn.Module, stages: list[list[str]]) -> None:
    if len(stages) == 1:
        return
    owner = {name: k for k, names in enumerate(stages) for name in names}

    def stage_of(parameter: str) -> int | None:
        parts = parameter.split(".")
        return next((owner[p] for n in range(len(parts), 0, -1) if (p := ".".join(parts[:n])) in owner), None)

    for name, _ in model.named_parameters():
        if stage_of(name) is None:
            raise PlanError(
                f"{name} is not in a module that belongs to one stage",
                where=name,
                fix="plan with pp=1, or write this stage by hand",
            )
    for name, source in tied(model).items():
        if stage_of(name) != stage_of(source):
            raise PlanError(
                f"{name} is tied to {source} of another stage: torch's stages do not sum gradients of tied parameters",
                where=name,
                fix="plan with pp=1, or untie them",
            )
    if wide := sorted(kind for kind, texts in plan.boundaries.items() if len(texts) > 1):
        raise PlanError(
            f"{wide[0]} receives {len(plan.boundaries[wide[0]])} tensors: exported stages send one",
            where=f"boundaries[{wide[0]!r}]",
            fix="plan with pp=1, or run the program that autoptd emits",
        )


def _checked(plan: Plan, model: nn.Module, stages: list[list[str]], styles: dict[str, str]) -> list[str]:
    """Return what could not be checked. Raises PlanError if stages, or parts of tp, do not make up the model."""
    if len(stages) == 1 and not styles:
        return []
    tokens = plan.sizes.get("s")
    try:
        found = next(iter(tensors_of(example_inputs(model, plan.micro, tokens))))
        shape, dtype = tuple(found.shape), found.dtype
    except InputsError:  # of a model whose inputs only its owner knows
        if tokens is None:
            return ["stages and parts of tp were not checked: the inputs of the model are not known"]
        shape, dtype = (plan.micro, tokens), torch.long
    said = [check_stages(model, stages, shape, dtype)] if len(stages) > 1 else []
    said += [check_split(model, styles, plan.mesh.tp, shape, dtype)] if styles else []
    return [line for line in said if line]


# --- recomputation and differences --------------------------------------------------------------------------------


def _recomputed(plan: Plan, model: nn.Module, layers: Layers) -> tuple[dict[str, str], list[str]]:
    """Return the policies of recomputed modules, and the differences.

    They are whole layers, or the modules of recomputed segments if only a part of a layer is recomputed.
    """
    known = {name for name, _ in model.named_modules() if name}
    whole = whole_layers(plan, layers)
    if len(whole) == layers.count and len(set(whole.values())) == 1:
        names = {layers.pattern: whole[0]}
    else:
        names = {escape(layers.path(i)): policy for i, policy in whole.items()}
    parts, dropped = 0, []
    for index, policy in recomputed(plan).items():
        if layers.owners[index] - 1 in whole:
            continue
        found = [escape(m) for m in modules_of(plan.segments[index]) if m in known]
        names |= {name: policy for name in found if name not in names}
        parts += bool(found)
        dropped += [] if found else [plan.segments[index]]
    lines = [f"parts of layers are recomputed by module ({parts}): the input of each module is saved"] if parts else []
    return names, [*lines, *(f"{name} is not a module: it is not recomputed" for name in dropped)]


def _differences(plan: Plan) -> Iterator[str]:
    method, mesh = plan.method, plan.mesh
    whole = mesh.dp * plan.micro * plan.schedule.microbatches
    if whole != plan.batch:
        yield f"the batch is {plan.batch}: this program takes whole microbatches on every rank, {whole} samples"
    if plan.zero == 1 and mesh.dp > 1:
        yield "ZeRO-1 is planned: FSDP also shards parameters, and gathers them once a step; less memory between steps"
    if plan.zero >= 2 and mesh.pp > 1:
        yield f"ZeRO-{plan.zero} is planned: torch's schedules reduce gradients only after the last microbatch"
    if mesh.dp > 1 and "dp" not in method.overlap:
        yield "data-parallel collectives overlap compute in this program"
    if "tp" in method.overlap and mesh.tp > 1:
        yield "tensor-parallel collectives do not overlap compute in this program"
    if method.gathers == "again" and mesh.tp > 1:
        yield "tp-gathered inputs are saved for backward in this program, not re-gathered"
    if method.gradients == "both":
        yield "gradients have no second buffer in this program"
    if method.kernels != "eager":
        yield f"{method.kernels} kernels are planned: this program runs torch's own; compile modules with torch.compile"
    if method.attention != "torch":
        yield f"attention with {method.attention} kernels is planned: this program uses the model's own call"
    if "logits" in plan.partial:
        yield "logits are planned in chunks of the vocabulary: here they are whole, which takes more memory"
    elif method.loss != "kept":
        yield "the gradient of the logits is planned in place of the logits: that is up to loss_fn"
    if method.bucket_bytes:
        yield f"buckets of {method.bucket_bytes} bytes are planned: FSDP's buckets are layers"
    if any(method.offload):
        yield "a part of the optimizer state is planned in host memory: this program keeps all of it on the devices"
    if method.sends != "whole" and mesh.pp > 1 and mesh.tp > 1:
        yield "scatter-gather P2P is planned: stages of this program send whole tensors"
    if plan.precision == "fp64":
        yield "the precision is fp64: give a model in torch.float64"
