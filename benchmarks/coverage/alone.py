"""A model by itself, in one process: whether it has a finite loss and a gradient on a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autoptd.nest import Nest
from autoptd.passes.trace.loss import read_objective

Batch = Mapping[str, Any]  # of tensors, which may be nested
Loss = Callable[..., Tensor]


def train_alone(model: nn.Module, batch: Batch, loss_of: Loss | None = None, targets: Sequence[str] = ()) -> None:
    """Raise if the model has no finite loss or no gradient by itself; its buffers may change, its gradients do not.

    loss_of: the loss, of the outputs and of the batch's entries `targets`; None: the model returns it.
    """
    nest = Nest.of(batch)
    objective, _ = read_objective(loss_of, {}, {n: batch[n] for n in targets} or None, nest)
    loss = objective.value(model, {name: x.clone() for name, x in nest.flat(batch).items()})
    loss.backward()
    if not torch.isfinite(loss):
        raise ValueError(f"the loss is {loss}")
    norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    if not torch.isfinite(torch.stack(norms)).all():
        raise ValueError("a gradient is not finite")
    model.zero_grad(set_to_none=True)


def first_that_trains(
    model: nn.Module,
    batches: Iterable[Callable[[], dict[str, Any]]],
    loss_of: Loss | None = None,
    targets: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the first batch on which a model trains. Raises what the first one of all raised if there is none."""
    first: Exception | None = None
    for make in batches:
        try:
            batch = make()
            train_alone(model, batch, loss_of, targets)
        except Exception as error:  # noqa: BLE001  a model refuses a batch in its own way
            first = first or error
        else:
            return batch
    raise first or LookupError("no batch was proposed")
