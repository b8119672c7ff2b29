"""The plain model in one process, step by step: the reference for the plan's ranks.

It is the user's unchanged module and loss on whole global batches, with torch's own autograd, not the traced graph.
Dropout uses the masks of the emitted program (`keyed`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import _engine_run_backward  # private; seen in 2.13.0

from autoptd.codegen.emit import Program
from autoptd.codegen.quoting import replace_code
from autoptd.compile.traced import TracedModel
from autoptd.ops import library as ops
from autoptd.ops.dropout import DropoutKey, SamplePosition, Samples
from autoptd.passes.batch.batch_dims import counts_samples, sample_place
from autoptd.passes.graph import CALL, OF_ROWS, info
from autoptd.passes.hidden_matrices import hidden_matrices
from autoptd.passes.known.known import drawn_as_traced
from autoptd.passes.random.skipped_layers import skipping_masks
from autoptd.passes.trace.loss import Objective
from autoptd.passes.trace.skeleton import settle
from autoptd.passes.trace.traced import BATCH
from autoptd.runtime.optimizers.groups import choose
from autoptd.verification.copies import copied
from autoptd.verification.keyed import WIDE, Draw, Keyed

aten = torch.ops.aten
Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class PlainStep:
    """One step of the plain model; tensors by original name."""

    loss: float
    norm: float  # before clipping
    gradients: dict[str, Tensor]  # before clipping; only of parameters that have one
    state: dict[str, Tensor]  # parameters, and buffers that forward updates, after the step


def draws_of(source: TracedModel, batch: Batch) -> list[Draw] | None:
    """Return every node that draws; None if the numbers of one depend on how the batch is cut."""
    batch = source.folded.traced.by_sample(batch)
    sizes = {BATCH: next(x.shape[0] for x in batch.values() if x.ndim)} | {
        symbol: batch[name].shape[dim] for symbol, (name, dim) in source.folded.traced.sizes.items() if name in batch
    }
    found = []
    alone = skipping_masks(source.folded.traced.graph.graph, of_gradients=False)
    within = ((only, node) for node, masks in alone.items() if len(masks) == 1 and draw_of(node) for only in masks)
    last = {only: node.meta[CALL] for only, node in sorted(within, key=lambda pair: pair[1].meta[CALL])}
    for segment in source.folded.segments:
        for i, node in enumerate(segment.nodes):
            if not draw_of(node):
                continue
            samples = _samples(node, sizes)
            if samples == ops.MICROBATCH:
                return None
            dropped = float(node.args[1]) if node.target is ops.dropout_mask else None  # type: ignore[arg-type]
            call = node.meta[CALL]
            layer, of_rows = last.get(node, call) - call, OF_ROWS in node.meta
            found.append(Draw(f"{segment.index}.{i}", call, samples, dropped, layer, of_rows))
    return found


def draw_of(node: fx.Node) -> bool:
    """Return whether a node draws random numbers."""
    if node.target in ops.DRAWS:
        return True
    if node.target is aten.dropout.default:
        return bool(node.args[1] and node.args[2])
    return node.target is aten.scaled_dot_product_attention.default and len(node.args) > 4 and bool(node.args[4])


def _samples(node: fx.Node, sizes: Mapping[Any, int]) -> SamplePosition:
    place = sample_place(node)
    width = info(node).ndim - 1 if node.target is aten.scaled_dot_product_attention.default else None
    if place is None or place.dim == width:
        return ops.MICROBATCH if counts_samples(info(node)) else None
    outer, inner = (n if isinstance(n, int) else int(n.subs(sizes)) for n in (place.outer, place.inner))
    return Samples(place.dim, outer, inner)


def widened(program: Program) -> Program:
    """Return an emitted program with every float type replaced by float64; string literals are not changed."""
    wide = {name: replace_code(_WORDS, lambda m: _WIDER[m[0]], text) for name, text in program.files.items()}
    return replace(program, files=wide)


_WIDER = {str(dtype): str(wide) for dtype, wide in WIDE.items()}
_WORDS = re.compile("|".join(rf"(?<![\w.]){re.escape(str(dtype))}\b" for dtype in WIDE))


class NoReference(ArithmeticError):
    """The plain model's loss or gradient on these inputs is no reference: it is not finite, or the gradient is zero."""


def train_plain(
    source: TracedModel,
    batches: Sequence[Batch],
    optimizer: str,
    options: Mapping[str, Any],
    draws: Sequence[Draw] | None,
    rounded: bool = False,
) -> tuple[list[PlainStep], float]:
    """Train the user's model on whole batches; return its steps and the clipping norm, half the first gradient norm.

    draws: None disables dropout. rounded: change the last bits of all parameters first. Raises NoReference for a step
    that is not finite or has no gradient, MoreDraws, and what the model raises.
    """
    copies = copied(source.model, source.objective.loss)
    objective = replace(source.objective, loss=copies.loss)
    with copies.standing_in():
        return _train_copy(copies.model, objective, source, batches, optimizer, options, draws, rounded=rounded)


def _train_copy(
    model: nn.Module,
    objective: Objective,
    source: TracedModel,
    batches: Sequence[Batch],
    optimizer: str,
    options: Mapping[str, Any],
    draws: Sequence[Draw] | None,
    *,
    rounded: bool,
) -> tuple[list[PlainStep], float]:
    if source.folded.traced.settled:
        settle(model, lambda: one_pass(model, batches[0], objective, keyed(source, None, DropoutKey(0))))
    if rounded:
        change_last_bits(model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    stepper = choose(optimizer, options, (), trained, hidden_matrices(source.folded)).build(trained)
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
        held = {**dict(model.named_parameters()), **{n: model.get_buffer(n) for n in source.updates}}
        state = {n: x.detach().clone() for n, x in held.items()}
        steps.append(PlainStep(value, whole, gradients, state))
    return steps, clip


@torch.no_grad()
def change_last_bits(model: nn.Module) -> None:
    """Multiply every parameter by 1 ± 2^-50, four times the rounding of float64."""
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        if p.is_floating_point():
            p.mul_(1 + (torch.rand(p.shape, dtype=p.dtype, generator=generator) - 0.5).sign() * 2.0**-50)


def keyed(source: TracedModel, draws: Sequence[Draw] | None, rng: DropoutKey) -> Keyed:
    """Return the torch function mode under which the plain model runs."""
    wide = any(x.dtype == torch.float64 for x in source.folded.traced.constants.values())
    by_call = None if draws is None else {draw.call: draw for draw in draws}
    return Keyed(by_call, source.folded.traced.random_calls, rng, source.precision, wide)


def one_pass(model: nn.Module, batch: Batch, objective: Objective, keyed: Keyed) -> float:
    """Return the loss of a batch and accumulate its gradient in the model's parameters.

    Raises MoreDraws if the model and the graph differ in the number of dropout calls.
    """
    copies = {name: x.clone() for name, x in batch.items()}  # the model may write to them
    with keyed.of(model), drawn_as_traced(model):
        value = objective.value(model, copies)
        keyed.check()
        _run_backward(value)
    return float(value.detach())


def _run_backward(loss: Tensor) -> None:
    """Run `loss.backward()`, which as a call that modes see would run what is recomputed without them."""
    seed = (torch.ones_like(loss),)
    _engine_run_backward((loss,), seed, False, False, (), allow_unreachable=True, accumulate_grad=True)
