"""The model and the plan that are run in place of those that are too large for one process.

    planned   the model on meta, traced as it was planned; its graph must be the plan's
    smaller   widths by configuration (`widths`), layers by what the plan tells apart (`depth`), fewer tokens, samples
              and microbatches; traced in the plan's precision, so that its ops are the planned ones
    carried   the plan's decisions on the smaller model (`carry`)

It is run in float64: `widened` reads every float type of the emitted program so, and the plain model is held to it by
`Keyed`. Every parameter is moved off its initial value, for a zero bias hides what happens to it.

Ranks, stages, cuts, schedule, ZeRO, recomputation and every tensor's placement are those of the plan.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autoptd.compile import TracedModel, read_model, read_sharding
from autoptd.errors import AutoptdError, PlanError
from autoptd.models.nanogpt import NanoGPT, Sizes
from autoptd.passes.graph import info
from autoptd.passes.trace import BATCH, SEQUENCE
from autoptd.plans import Plan
from autoptd.progress import Progress, Silent
from autoptd.runtime.initialise import values_for
from autoptd.verification.carry import carry
from autoptd.verification.depth import Kept, drop_layers, keep_segments
from autoptd.verification.widths import Ranks, alike, congruent, narrow, wider

Loss = Callable[..., Tensor]
MOST_BYTES = 6 * 2**30  # of all ranks' parameters, gradients and optimizer states together
LEAST_MICROBATCHES = 3  # the schedule is proved for as many as the plan has
_TRIES = 4


@dataclass(frozen=True)
class Subject:
    """What is run: a model with values in float64, and its plan. `shown`: what was made smaller, in words."""

    source: TracedModel
    plan: Plan
    planned: TracedModel  # at its own size
    shown: tuple[str, ...] = ()


def subject_of(
    plan: Plan,
    model: nn.Module,
    *,
    loss: Loss | None = None,
    inputs: Mapping[str, Tensor] | None = None,
    full: bool = False,
    progress: Progress | None = None,
) -> Subject:
    """The smallest model that still has all that the plan decides; with `full` at all its depth and microbatches.

    Raises PlanFileError for a plan of another model, PlanError for what cannot be made small enough.
    """
    progress = progress or Silent()
    plan.check_runnable()
    with progress.stage("trace the model as it was planned"):
        planned = read_model(
            model, inputs=inputs, loss=loss, seq=plan.sizes.get("s"), precision=plan.precision, progress=Silent()
        )
    sharding = read_sharding(planned, plan)
    every = Kept(tuple(range(len(planned.folded.segments))), {})
    kept = every if full else keep_segments(planned.folded, plan)
    ranks = Ranks(plan.mesh.tp, plan.mesh.cp)
    with progress.stage("make it smaller, and carry the plan over"):
        for attempt in range(_TRIES):
            sizes = _sizes(plan, ranks, full)
            try:
                small, changed = _smaller(planned, kept, ranks, sizes, inputs, loss)
                carried = carry(plan, sharding, planned.folded, kept.segments, small, sizes)
                read_sharding(small, carried)
                break
            except AutoptdError:
                if attempt == _TRIES - 1:
                    raise
                ranks = wider(ranks)
    _refuse_large(small.model, carried)
    _set_values(small.model)
    return Subject(small, carried, planned, (*_shown(plan, carried), *_depth(planned, kept), *changed))


def _sizes(plan: Plan, ranks: Ranks, full: bool) -> dict[str, int]:
    """Tokens, samples and microbatches: the least that are cut as the plan's are."""
    micro = alike(plan.micro, min(plan.micro, ranks.room), plan.mesh.tp)
    m, pp = plan.schedule.microbatches, plan.mesh.pp
    fewer = m if full else congruent(m, LEAST_MICROBATCHES, pp if plan.schedule.virtual > 1 else 1)
    rest = plan.batch < plan.mesh.dp * plan.micro * m and plan.mesh.dp * micro > 1
    tokens = {name: congruent(n, 6 * ranks.room, 2 * ranks.all) for name, n in plan.sizes.items() if name != str(BATCH)}
    batch = plan.mesh.dp * micro * fewer - int(rest)
    return {str(BATCH): micro, **tokens, "microbatches": fewer, "batch": batch, "dp": plan.mesh.dp}


def _smaller(
    planned: TracedModel,
    kept: Kept,
    ranks: Ranks,
    sizes: Mapping[str, int],
    inputs: Mapping[str, Tensor] | None,
    loss: Loss | None,
) -> tuple[TracedModel, tuple[str, ...]]:
    """The smaller model, traced, and what of its widths has changed, in words."""
    model, changed = _narrow(planned.model, ranks, sizes.get(str(SEQUENCE), 1))
    drop_layers(model, planned.folded, kept)
    shapes = None if changed and inputs is None else _examples(planned, sizes)
    seq = sizes.get(str(SEQUENCE)) if SEQUENCE in planned.sizes else None
    traced = read_model(model, inputs=shapes, loss=loss, seq=seq, precision=planned.precision, progress=Silent())
    return traced, changed


def _narrow(model: nn.Module, ranks: Ranks, tokens: int) -> tuple[nn.Module, tuple[str, ...]]:
    """A copy of the model on the CPU, narrower where its configuration says how wide it is."""
    if isinstance(model, NanoGPT):
        return _narrow_nanogpt(model, ranks, tokens)
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        return copy.deepcopy(model), ()
    fields = config.to_dict()
    changes = narrow(fields, ranks, tokens)
    made = copy.deepcopy(config)
    for name, value in changes.items():
        setattr(made, name, value)
    try:
        with torch.device("cpu"):
            smaller: nn.Module = type(model)(made).train(model.training)
    except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        what = f"{type(model).__name__} cannot be made with {changes}: {error}"
        raise PlanError(what, where="model", fix="verify a model of your own sizes: --model module:callable") from error
    for name in ("default_seq", "loss_type"):
        if hasattr(model, name):
            setattr(smaller, name, getattr(model, name))
    return smaller, _told(fields, changes)


def _told(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, ...]:
    """`hidden_size 8192 as 64`; ids of special tokens tell nothing."""
    return tuple(f"{name} {old[name]} as {value}" for name, value in new.items() if not name.endswith("_token_id"))


def _narrow_nanogpt(model: NanoGPT, ranks: Ranks, tokens: int) -> tuple[nn.Module, tuple[str, ...]]:
    first: Any = model.blocks[0]
    vocab, width = model.tokens.weight.shape
    old = {"n_embd": width, "n_head": first.attention.heads, "vocab_size": vocab, "n_positions": model.max_seq}
    new = old | narrow(old, ranks, tokens)
    sizes = Sizes(
        vocab=new["vocab_size"],
        max_seq=new["n_positions"],
        width=new["n_embd"],
        layers=len(model.blocks),
        heads=new["n_head"],
        dropout=float(model.drop.p),
        bias=first.up.bias is not None,
    )
    with torch.device("cpu"):
        made = NanoGPT(sizes).train(model.training)
    return made, _told(old, {name: n for name, n in new.items() if n != old[name]})


@torch.no_grad()
def _set_values(model: nn.Module) -> None:
    """In float64 on the CPU, every parameter moved off its initial value: a zero bias hides what happens to it."""
    empty = [n for n, x in (*model.named_parameters(), *model.named_buffers()) if x.is_meta]
    for name, value in values_for(model, empty, 0).items():
        _replace(model, name, value)
    model.double().train()
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        spread = min(0.1, p.shape[-1] ** -0.5) if p.ndim > 1 else 0.1
        p.add_(spread * torch.randn(p.shape, generator=generator, dtype=p.dtype))


def _replace(model: nn.Module, name: str, value: Tensor) -> None:
    """Give a tensor on meta its value; tied ones stay one."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    old = getattr(module, leaf)
    new = nn.Parameter(value.clone(), old.requires_grad) if isinstance(old, nn.Parameter) else value.clone()
    for other in model.modules():
        for table in (other._parameters, other._buffers):
            for key, held in table.items():
                if held is old:
                    table[key] = new  # type: ignore[assignment]


def _examples(planned: TracedModel, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Inputs of the planned model's shapes at other sizes, on meta."""
    values = {s: sizes.get(str(s), n) for s, n in {**planned.sizes, BATCH: 2}.items()} | {BATCH: 2}
    return {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape, dtype in inputs_of(planned, values)}


def inputs_of(source: TracedModel, values: Mapping[Any, int]) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """Name, shape and dtype of each input at given sizes."""
    traced, found = source.folded.traced, []
    for node in traced.graph.graph.nodes:
        if node.op == "placeholder" and node.name in traced.inputs:
            shape = tuple(n if isinstance(n, int) else int(n.subs(dict(values))) for n in info(node).shape)
            found.append((traced.inputs[node.name], shape, info(node).dtype))
    return found


def _refuse_large(model: nn.Module, plan: Plan) -> None:
    elements = sum(p.numel() for p in model.parameters())
    needed = elements * 8 * 4 * plan.mesh.dp * plan.mesh.cp
    if needed > MOST_BYTES:
        raise PlanError(
            f"all ranks together would take about {needed / 2**30:.0f} GiB: the model has {elements:,} parameters "
            "after layers are left out, and does not say how to make it narrower",
            where="model",
            fix="plan and verify the same model at smaller widths: --model module:callable",
        )


def _shown(plan: Plan, carried: Plan) -> tuple[str, ...]:
    """What of the plan's numbers is shown smaller."""
    names = {"s": "tokens", "b": "samples of a microbatch"}
    found = [
        f"{names.get(name, name)} {n} as {carried.sizes[name]}"
        for name, n in plan.sizes.items()
        if carried.sizes[name] != n
    ]
    old, new = plan.schedule.microbatches, carried.schedule.microbatches
    return (*found, *([f"{old} microbatches as {new}"] if new != old else []))


def _depth(planned: TracedModel, kept: Kept) -> tuple[str, ...]:
    return tuple(
        f"{unit.count} × {planned.folded.segments[unit.first].name.rpartition('.')[0] or 'layers'} as "
        f"{unit.count - kept.dropped[unit.first]}"
        for unit in planned.folded.units
        if kept.dropped.get(unit.first)
    )
