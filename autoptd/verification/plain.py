"""The plain model in one process, step by step: what the plan's ranks are held to.

It is the user's module and the user's loss, run as they stand on whole global batches, with torch's own autograd: not
the traced graph. Dropout draws what the emitted program draws (`keyed`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from autoptd.codegen.emit import Program
from autoptd.codegen.quoting import replace_code
from autoptd.compile.traced import TracedModel
from autoptd.ops import library as ops
from autoptd.ops.dropout import DropoutKey, SamplePosition, Samples
from autoptd.passes.batch.batch_dims import counts_samples, sample_place
from autoptd.passes.graph import info
from autoptd.passes.trace.loss import Objective
from autoptd.passes.trace.traced import BATCH
from autoptd.runtime.optimizer import NAMED
from autoptd.verification.copies import copied
from autoptd.verification.keyed import TYPES, Draw, Keyed, MoreDraws

aten = torch.ops.aten
Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class PlainStep:
    """One step of the plain model; tensors by original name."""

    loss: float
    norm: float  # before clipping
    gradients: dict[str, Tensor]  # before clipping; without those of parameters that nothing reaches
    state: dict[str, Tensor]  # parameters after the step


def draws_of(source: TracedModel, batch: Batch) -> list[Draw] | None:
    """Every node that drops, in program order; None where what one drops depends on how the batch is cut."""
    sizes = {BATCH: next(x.shape[0] for x in batch.values() if x.ndim)} | {
        symbol: batch[name].shape[dim] for symbol, (name, dim) in source.folded.traced.sizes.items() if name in batch
    }
    found = []
    for segment in source.folded.segments:
        for i, node in enumerate(segment.nodes):
            if not draw_of(node):
                continue
            samples = _samples(node, sizes)
            if samples == ops.MICROBATCH:
                return None
            found.append(Draw(f"{segment.index}.{i}", samples))
    return found


def draw_of(node: fx.Node) -> bool:
    """Whether a node drops elements."""
    if node.target is aten.dropout.default:
        return bool(node.args[1] and node.args[2])
    return node.target is aten.scaled_dot_product_attention.default and len(node.args) > 4 and bool(node.args[4])


def _samples(node: fx.Node, sizes: Mapping[Any, int]) -> SamplePosition:
    place = sample_place(node)
    width = info(node).ndim - 1 if node.target is not aten.dropout.default else None
    if place is None or place.dim == width:
        return ops.MICROBATCH if counts_samples(info(node)) else None
    outer, inner = (n if isinstance(n, int) else int(n.subs(sizes)) for n in (place.outer, place.inner))
    return Samples(place.dim, outer, inner)


def widened(program: Program) -> Program:
    """An emitted program in which every float type is float64, and nothing else is another: no name in a literal."""
    wide = {name: replace_code(_WORDS, lambda _: "torch.float64", text) for name, text in program.files.items()}
    return replace(program, files=wide)


_WORDS = re.compile("|".join(rf"(?<![\w.]){re.escape(str(dtype))}\b" for dtype in TYPES))


class NoReference(ArithmeticError):
    """The plain model's loss or gradient on these inputs says nothing: it is not finite, or nothing has a gradient."""


def train_plain(
    source: TracedModel,
    batches: Sequence[Batch],
    optimizer: str,
    options: Mapping[str, Any],
    draws: Sequence[Draw] | None,
) -> tuple[list[PlainStep], float]:
    """Steps of the user's own model and autograd on whole batches, and the norm to which they were clipped: half the
    first. `draws`: None where nothing is dropped.

    Raises NoReference where a step is not finite or has no gradient, MoreDraws, and what the model raises.
    """
    model, objective = copied(source.model), source.objective.in_precision(torch.float64)
    stepper = NAMED[optimizer](model.parameters(), **options)
    steps: list[PlainStep] = []
    clip = 0.0
    for number, batch in enumerate(batches):
        stepper.zero_grad()
        value = one_pass(model, batch, objective, keyed(source, draws, DropoutKey(0, step=number)))
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        whole = float(nn.utils.get_total_norm(list(gradients.values())))
        if not math.isfinite(value) or not math.isfinite(whole) or not whole:
            raise NoReference(f"in step {number + 1} its loss is {value:g}, its gradient norm {whole:g}")
        clip = clip or whole / 2
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        stepper.step()
        state = {n: p.detach().clone() for n, p in model.named_parameters()}
        steps.append(PlainStep(value, whole, gradients, state))
    return steps, clip


def keyed(source: TracedModel, draws: Sequence[Draw] | None, rng: DropoutKey) -> Keyed:
    """How the plain model's calls of torch are taken."""
    wide = any(x.dtype == torch.float64 for x in source.folded.traced.constants.values())
    return Keyed(draws, rng, source.precision, wide)


def one_pass(model: nn.Module, batch: Batch, objective: Objective, keyed: Keyed) -> float:
    """The loss of a batch, its gradient added to the model's own. Raises MoreDraws where the graph drops less often, or
    more."""
    with keyed:
        value = objective.value(model, batch)
        if keyed.draws is not None and keyed.used < len(keyed.draws):
            raise MoreDraws(f"{keyed.used} instead of {len(keyed.draws)}")
        value.backward()
    return float(value.detach())
