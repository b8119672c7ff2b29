"""Training of a program with all its ranks in one process, and of the plain model, to compare the two.

Parallel ──one thread per rank──► Trained ─┐
                                           ├─► differences, by name
model ─────────one process──────► Trained ─┘
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from autoptd.layout.layout import Layout
from autoptd.passes.kept.copies import ModelCopy
from autoptd.passes.known.flex_attention import eager_flex_attention
from autoptd.passes.trace.loss import Targets, read_objective
from autoptd.passes.trace.skeleton import computed_tensors
from autoptd.runtime.batch import share_of
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import CPU, run_lockstep
from autoptd.runtime.optimizers.groups import ParameterGroup, choose
from autoptd.runtime.optimizers.named import Factory

if TYPE_CHECKING:
    from autoptd.api import Parallel

Batch = Mapping[str, Any]
DEVICE = CPU  # where both are trained by default; the tests' --device sets it
_NOISE = 1e-13  # of the norm of all tensors: a tensor with a smaller norm is zero up to rounding


@dataclass(frozen=True)
class Trained:
    """Results of some training steps. Tensors are whole, by original name."""

    losses: tuple[float, ...]  # one per step
    norms: tuple[float, ...]  # global gradient norm of each step, before clipping
    gradients: dict[str, Tensor]  # of the first step, after clipping; parameters without one are left out
    state: dict[str, Tensor]  # parameters and buffers after the last step
    diverged: tuple[str, ...] = ()  # tensors whose copies are not bit-identical on all ranks that hold one


def train_in_lockstep(
    parallel: Parallel, batches: Sequence[Batch], *, timeout_s: float = 60.0, device: torch.device | None = None
) -> Trained:
    """Train one step per global batch on all ranks of the plan in this process. `parallel` itself is not changed.

    batches: keyword tensors; dim 0 counts the samples of all dp ranks, and each rank takes consecutive ones. `device`:
    that of all ranks, default: DEVICE. Raises what a step raises, and RuntimeFault naming the rank that failed.
    """
    layout = parallel.layout
    values = parallel.initial_values()  # once, not per rank: initialisers draw from the generator of the process

    def body(communicators: Communicators) -> tuple[Trained, dict[str, str]]:
        mine = copy.copy(parallel)
        mine.start(communicators, values)
        return train(mine, batches), {name: digest(x) for name, x in mine.local_tensors().items()}

    results = run_lockstep(layout.mesh, body, timeout_s=timeout_s, device=device or DEVICE)
    first = results[0][0]
    diverged = diverged_copies(layout, [digests for _, digests in results])
    return Trained(first.losses, first.norms, first.gradients, first.state, diverged)


def train(parallel: Parallel, batches: Sequence[Batch]) -> Trained:
    """Train one step per global batch on one rank's running part, which takes its share of each. A collective."""
    losses, norms, gradients = [], [], {}
    for step, batch in enumerate(batches):
        flat = parallel.layout.nest.flat(batch)
        share = share_of(flat, parallel.layout.specs, parallel.dp_rank, parallel.dp_size)
        losses.append(float(parallel.train_step(share)))
        assert parallel.grad_norm is not None
        norms.append(float(parallel.grad_norm))
        if step == 0:
            gradients = on_host(parallel.gradients())
    return Trained(tuple(losses), tuple(norms), gradients, on_host(parallel.state_dict()))


def train_alone(
    model: nn.Module,
    batches: Sequence[Batch],
    *,
    loss: Callable[..., Tensor] | None = None,
    targets: Targets | None = None,
    optimizer: str | Factory = "adamw",
    optimizer_options: Mapping[str, Any] | None = None,
    groups: Sequence[ParameterGroup] = (),
    clip_norm: float | None = None,
    hidden: Collection[str] = (),
    device: torch.device | None = None,
) -> Trained:
    """Train a copy of the model and its loss in plain PyTorch: whole batches, one process.

    Keywords are those of `autoptd.parallelize`; batches hold the inputs and the targets. `hidden`: the matrices that
    Muon updates. `device`: default: DEVICE.
    """
    device = device or DEVICE
    objective, _ = read_objective(loss, {}, targets)
    objective, model = objective.joined(model)
    copies = ModelCopy(model, loss, {id(x): x.detach() for x in computed_tensors(model)})
    objective = replace(objective, loss=copies.loss)
    model = copies.model.to(device)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    stepper = choose(optimizer, optimizer_options or {}, groups, trained, hidden).build(trained)
    losses, norms, gradients = [], [], {}
    with copies.standing_in():
        for step, batch in enumerate(batches):
            stepper.zero_grad()
            with eager_flex_attention():
                mine = tree_map_only(Tensor, lambda x: x.detach().to(device, copy=True), objective.nest.flat(batch))
                value = objective.value(model, mine)
            value.backward()
            parameters = list(model.parameters())
            norms.append(float(nn.utils.clip_grad_norm_(parameters, float("inf") if clip_norm is None else clip_norm)))
            losses.append(float(value.detach()))
            if step == 0:
                gradients = on_host({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
            stepper.step()
    return Trained(tuple(losses), tuple(norms), gradients, on_host(model.state_dict()))


def on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies in the host's memory, without gradients."""
    return {name: x.detach().to("cpu", copy=True) for name, x in tensors.items()}


def differences(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Return ‖found − expected‖ / ‖expected‖ of each tensor; infinite if only one side has it.

    If the expected tensor is zero up to rounding (the gradient of a key's bias), relative to the norm of all tensors.
    """
    whole = torch.stack([x.double().norm() for x in expected.values()]).norm().item() if expected else 0.0
    result = dict.fromkeys([*expected, *found], float("inf"))
    for name in [n for n in expected if n in found]:
        result[name] = difference(found[name], expected[name], expected[name].double().norm().item(), whole)
    return result


def difference(found: Tensor, expected: Tensor, norm: float, whole: float) -> float:
    """Return ‖found − expected‖ / norm for a tensor or a part of one; infinite for NaN.

    norm: that of the whole tensor. whole: that of all tensors, used instead if `norm` is zero up to rounding.
    """
    error = (found.double() - expected.double()).norm().item()
    return error / (norm if norm > _NOISE * whole else whole or 1.0) if error == error else float("inf")


def diverged_copies(layout: Layout, digests: Sequence[Mapping[str, str]]) -> tuple[str, ...]:
    """Return the names of tensors whose copies differ. `digests`: by rank, name -> hash of the local tensor."""
    mesh, wrong = layout.mesh, []
    for name, spec in {**layout.parameters, **layout.buffers}.items():
        held: dict[tuple[int, int], set[str]] = {}
        for rank, found in enumerate(digests):
            if name in found:
                held.setdefault(spec.part(mesh, rank), set()).add(found[name])
        if any(len(copies) > 1 for copies in held.values()):
            wrong.append(name)
    return tuple(wrong)


def digest(x: Tensor) -> str:
    """Return a hash of a tensor's bits."""
    flat = x.detach().cpu().reshape(-1).contiguous().view(torch.uint8)
    return hashlib.blake2b(flat.numpy().data, digest_size=8).hexdigest()
