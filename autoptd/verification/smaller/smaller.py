"""The model and plan that run in place of those too large for one process.

    planned   the model on meta, traced as for the plan; its graph must be the plan's
    smaller   narrower by its configuration (`widths`), only the layers that the plan distinguishes (`depth`), fewer
              tokens, samples and microbatches; traced in the plan's precision, so that its ops are the planned ones
    carried   the plan's decisions, applied to the smaller model (`carry`)

It runs in float64: `widened` replaces the float types of the emitted program, `Keyed` those of the plain model. Every
parameter is moved off its initial value, since a zero bias would hide faults.

Ranks, stages, cuts, schedule, ZeRO, recomputation and every tensor's placement are those of the plan.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from autoptd.compile.program import read_sharding
from autoptd.compile.read import read_model
from autoptd.compile.traced import TracedModel
from autoptd.errors import AutoptdError, PlanError
from autoptd.layout.sample_rows import SHARED, shared
from autoptd.models.nanogpt import GPTSizes, NanoGPT
from autoptd.passes.kept.copies import stand_for
from autoptd.passes.sharding.expert_regions import expert_parameters
from autoptd.passes.trace.loss import Targets
from autoptd.passes.trace.traced import BATCH, SEQUENCE
from autoptd.passes.trace.unwrap import copy_modes
from autoptd.plans.model import Plan
from autoptd.progress import Progress, Silent
from autoptd.runtime.initialise import values_for
from autoptd.verification.copies import carry_parameter_hooks, carry_settings, copied
from autoptd.verification.domains import inputs_of
from autoptd.verification.smaller.carry import carry
from autoptd.verification.smaller.depth import KeptSegments, drop_layers, keep_segments
from autoptd.verification.smaller.widths import Ranks, congruent, narrow, same_divisors, wider

Loss = Callable[..., Tensor]
MOST_BYTES = 6 * 2**30  # parameters, gradients and optimizer states of all ranks together
LEAST_MICROBATCHES = 3  # the schedule itself is proved for the plan's own number
_TRIES = 4


@dataclass(frozen=True)
class Subject:
    """A model with float64 values, and its plan, ready to run. `shown`: what was made smaller, in words."""

    source: TracedModel
    plan: Plan
    planned: TracedModel  # the model at full size
    shown: tuple[str, ...] = ()


def subject_of(
    plan: Plan,
    model: nn.Module,
    *,
    loss: Loss | None = None,
    targets: Targets | None = None,
    inputs: Mapping[str, Tensor] | None = None,
    full: bool = False,
    progress: Progress | None = None,
) -> Subject:
    """Return the smallest model that keeps every decision of the plan.

    model: the planned one; it may be on meta. inputs, loss, targets: as for `autoptd.plan`. full: keep all layers and
    microbatches. Raises PlanFileError for a plan of another model, PlanError for a model that cannot be made small
    enough.
    """
    progress = progress or Silent()
    plan.check_runnable()
    with progress.stage("trace the model as planned"):
        planned = read_model(
            model,
            inputs=inputs,
            loss=loss,
            targets=targets,
            seq=plan.sizes.get("s"),
            precision=plan.precision,
            progress=Silent(),
            loss_averaging=plan.loss_averaging,
        ).for_batch(plan.batch)
    sharding = read_sharding(planned, plan)
    every = KeptSegments(tuple(range(len(planned.folded.segments))), {})
    kept = every if full else keep_segments(planned.folded, plan)
    with progress.stage("make the model smaller and apply the plan"):
        tried = list(_attempts(plan, kept, every))
        for which, ranks in tried:
            sizes = _sizes(plan, ranks, full)
            try:
                small, changed = _smaller(planned, which, ranks, sizes, inputs)
                carried = carry(plan, sharding, planned.folded, which.segments, small, sizes)
                read_sharding(small, carried)
                break
            except AutoptdError:
                if (which, ranks) == tried[-1]:
                    raise
    _refuse_large(small, carried)
    _set_values(small.model)
    return Subject(small, carried, planned, (*_shown(plan, carried), *_depth(planned, which), *changed))


def _attempts(plan: Plan, kept: KeptSegments, every: KeptSegments) -> Iterator[tuple[KeptSegments, Ranks | None]]:
    """Yield the attempts, smallest first: the kept segments, and the ranks that scale the sizes (None: full sizes)."""
    for which in dict.fromkeys((kept.segments, every.segments)):
        ranks = Ranks(plan.mesh.tp, plan.mesh.cp, plan.mesh.ep)
        for _ in range(_TRIES):
            yield (kept if which == kept.segments else every), ranks
            ranks = wider(ranks)
        yield (kept if which == kept.segments else every), None


def _sizes(plan: Plan, ranks: Ranks | None, full: bool) -> dict[str, int]:
    """Return the fewest tokens, samples and microbatches that are cut as the plan's are.

    No two symbols get the same number: the tracer would take them for one.
    """
    m, pp = plan.schedule.microbatches, plan.mesh.pp
    rest = plan.batch < plan.mesh.dp * plan.micro * m
    least = 1 if ranks is None else max(ranks.scale, 2 if rest else 1)  # a rank that lacks a sample has others
    micro = plan.micro if ranks is None else same_divisors(plan.micro, min(plan.micro, least), plan.mesh.tp)
    fewer = m if full else congruent(m, LEAST_MICROBATCHES, pp if plan.schedule.virtual > 1 else 1)
    tokens: dict[str, int] = {}
    for name, n in plan.sizes.items():
        if name != str(BATCH) and ranks is not None:
            floor, modulus = 6 * ranks.scale, 2 * ranks.all
            options = (congruent(n, floor + i * modulus, modulus) for i in range(len(plan.sizes)))
            tokens[name] = next(x for x in (*options, n) if x not in tokens.values() or x == n)
        elif name != str(BATCH):
            tokens[name] = n
    batch = plan.mesh.dp * micro * fewer - int(rest)
    return {str(BATCH): micro, **tokens, "microbatches": fewer, "batch": batch, "dp": plan.mesh.dp}


def _smaller(
    planned: TracedModel,
    kept: KeptSegments,
    ranks: Ranks | None,
    sizes: Mapping[str, int],
    inputs: Mapping[str, Tensor] | None,
) -> tuple[TracedModel, tuple[str, ...]]:
    """Return the smaller model, traced, and the changes of its widths, in words."""
    narrower = None if ranks is None else _narrow(planned.model, ranks, sizes.get(str(SEQUENCE), 1))
    objective = planned.objective
    if narrower is not None:
        model, changed = narrower
        stand_for(model, planned.model)
        carry_settings(model, planned.model)
    else:
        copies = copied(planned.model, planned.objective.loss)
        model, changed, objective = copies.model, (), replace(objective, loss=copies.loss)
        stand_for(model, planned.model, copies.pairs)
    drop_layers(model, planned.folded, kept)
    says = hasattr(model, "example_inputs") or not hasattr(planned.model, "example_inputs")
    examples = _examples(planned, sizes)
    if objective.outside:
        objective = replace(objective, loss=copy.deepcopy(objective.loss))  # its parameters get new values
    shapes = {name: x for name, x in examples.items() if name not in objective.targets}
    traced = read_model(
        model,
        inputs=None if changed and inputs is None and says else shapes,
        loss=objective,
        targets={name: examples[name] for name in objective.targets} or None,
        seq=sizes.get(str(SEQUENCE)) if SEQUENCE in planned.sizes else None,
        precision=planned.precision,
        progress=Silent(),
        loss_averaging=planned.loss_averaging,
    ).for_batch(sizes["batch"])
    return traced, changed


def _narrow(model: nn.Module, ranks: Ranks, tokens: int) -> tuple[nn.Module, tuple[str, ...]] | None:
    """Return a narrower instance of the model on the CPU, and what changed; None if it has no configuration."""
    if isinstance(model, NanoGPT):
        return _narrow_nanogpt(model, ranks, tokens)
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        return None
    fields = config.to_dict()
    changes = narrow(fields, ranks, tokens)
    made = copy.deepcopy(config)
    for name, value in changes.items():
        setattr(made, name, value)
    try:
        with torch.device("cpu"):
            smaller: nn.Module = type(model)(made)
    except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        what = f"{type(model).__name__} cannot be made with {changes}: {error}"
        raise PlanError(what, where="model", fix="verify a model of your own sizes: --model module:callable") from error
    for name in ("default_seq", "loss_type"):
        if hasattr(model, name):
            setattr(smaller, name, getattr(model, name))
    copy_modes(model, smaller)
    return smaller, _in_words(fields, changes)


def _in_words(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the changed fields as `hidden_size 8192 → 64`, without the ids of special tokens."""
    return tuple(f"{name} {old[name]} → {value}" for name, value in new.items() if not name.endswith("_token_id"))


def _narrow_nanogpt(model: NanoGPT, ranks: Ranks, tokens: int) -> tuple[nn.Module, tuple[str, ...]]:
    first: Any = model.blocks[0]
    vocab, width = model.tokens.weight.shape
    old = {"n_embd": width, "n_head": first.attention.heads, "vocab_size": vocab, "n_positions": model.max_seq}
    new = old | narrow(old, ranks, tokens)
    sizes = GPTSizes(
        vocab=new["vocab_size"],
        max_seq=new["n_positions"],
        width=new["n_embd"],
        layers=len(model.blocks),
        heads=new["n_head"],
        dropout=float(model.drop.p),
        bias=first.up.bias is not None,
    )
    with torch.device("cpu"):
        made = NanoGPT(sizes)
    copy_modes(model, made)
    return made, _in_words(old, {name: n for name, n in new.items() if n != old[name]})


@torch.no_grad()
def _set_values(model: nn.Module) -> None:
    """Initialise the model in float64 on the CPU, and move every parameter off its initial value."""
    empty = [n for n, x in (*model.named_parameters(), *model.named_buffers()) if x.is_meta]
    for name, value in values_for(model, empty, 0).items():
        _replace(model, name, value)
    model.cpu().double()
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        spread = min(0.1, p.shape[-1] ** -0.5) if p.ndim > 1 else 0.1
        p.add_(spread * torch.randn(p.shape, generator=generator, dtype=p.dtype))


def _replace(model: nn.Module, name: str, value: Tensor) -> None:
    """Replace a tensor on meta by its value, wherever it is tied."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    old = getattr(module, leaf)
    new: Tensor = value.clone()
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, old.requires_grad)
        carry_parameter_hooks(new, old)
    for other in model.modules():
        for table in (other._parameters, other._buffers):
            for key, held in table.items():
                if held is old:
                    table[key] = new  # type: ignore[assignment]


def _examples(planned: TracedModel, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Return inputs of the planned model on meta, at other sizes."""
    values = {s: sizes.get(str(s), n) for s, n in {**planned.sizes, BATCH: 2}.items()} | {BATCH: 2}
    found = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape, dtype in inputs_of(planned, values)}
    rows = planned.folded.traced.rows
    return {name: shared(x, rows.get(name) == SHARED) for name, x in found.items()}


def _refuse_large(small: TracedModel, plan: Plan) -> None:
    sizes = {name: p.numel() for name, p in small.model.named_parameters()}
    elements, mesh = sum(sizes.values()), plan.mesh
    experts = sum(sizes[name] for name in expert_parameters(small.folded)) if mesh.ep > 1 else 0
    spread = mesh.ep if mesh.etp == 0 else mesh.ep / mesh.tp  # ranks that hold different experts, of dp × cp
    needed = (elements - experts + experts / spread) * 8 * 4 * mesh.dp * mesh.cp
    if needed > MOST_BYTES:
        raise PlanError(
            f"all ranks together would take about {needed / 2**30:.0f} GiB: the model has {elements:,} parameters "
            "after layers are dropped, and no configuration by which to make it narrower",
            where="model",
            fix="plan and verify the same model at smaller widths: --model module:callable",
        )


def _shown(plan: Plan, carried: Plan) -> tuple[str, ...]:
    """Return the sizes of the plan that were made smaller, in words."""
    names = {"s": "tokens", "b": "samples per microbatch"}
    found = [
        f"{names.get(name, name)} {n} → {carried.sizes[name]}"
        for name, n in plan.sizes.items()
        if carried.sizes[name] != n
    ]
    old, new = plan.schedule.microbatches, carried.schedule.microbatches
    return (*found, *([f"microbatches {old} → {new}"] if new != old else []))


def _depth(planned: TracedModel, kept: KeptSegments) -> tuple[str, ...]:
    return tuple(
        f"{unit.count} × {planned.folded.segments[unit.first].name.rpartition('.')[0] or 'layers'} → "
        f"{unit.count - kept.dropped[unit.first]}"
        for unit in planned.folded.units
        if kept.dropped.get(unit.first)
    )
