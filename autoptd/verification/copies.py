"""Copies of a model that train as it does: hooks of parameters, which a deep copy drops, are copied too, and hooks of
modules belong to the copy."""

from __future__ import annotations

import copy
import re
from collections import OrderedDict, deque
from typing import Any

import torch
from torch import Tensor, nn

from autoptd.errors import PlanError
from autoptd.passes.custom_grad.hook_copies import bound_to
from autoptd.passes.kept.copies import ModelCopy
from autoptd.passes.objectives.loss_modules import constants
from autoptd.passes.trace.skeleton import computed_tensors

# Attributes of a module that hold its hooks (private to torch; seen in 2.13.0).
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)


def copied(model: nn.Module, loss: object) -> ModelCopy:
    """Return a deep copy of the model, including the hooks of its parameters, and of a loss that is a module, whose
    constants are in float64.

    What a forward pass left on a module, such as a recurrent state, is copied without the graph that it came from.
    """
    known: dict[int, Any] = {id(x): x.detach().clone() for x in computed_tensors(model)}
    copies = ModelCopy(model, loss, known | constants(loss, torch.float64, {*map(id, model.buffers())}))
    for mine, theirs in zip(copies.model.parameters(), model.parameters(), strict=True):
        carry_parameter_hooks(mine, theirs)
    return copies


def carry_parameter_hooks(to: Tensor, of: Tensor) -> None:
    """Register on `to` the hooks of `of`: those of register_hook and register_post_accumulate_grad_hook."""
    for hook in _held(of, "_backward_hooks"):
        to.register_hook(hook)
    for hook in _held(of, "_post_accumulate_grad_hooks"):
        to.register_post_accumulate_grad_hook(hook)


def carry_settings(to: nn.Module, of: nn.Module) -> None:
    """Copy what was set on a model after its construction, matched by name: hooks, frozen parameters, training modes.

    to: a new instance of the same class, with other sizes. Raises PlanError if modules of `of` were added, removed or
    replaced after construction, or if one was given a `forward` of its own.
    """
    mine, theirs = (dict(m.named_modules(remove_duplicate=False)) for m in (to, of))
    changed = [n for n, m in theirs.items() if type(mine.get(n, m)) is not type(m) or "forward" in vars(m)]
    if changed or {_form(n) for n in mine} != {_form(n) for n in theirs}:
        raise PlanError(
            "the model was changed after its construction, so its configuration does not describe all of it",
            where=", ".join(changed[:6]) or "model",
            fix="verify it at its own widths",
        )
    both = mine.keys() & theirs.keys()
    copies: dict[int, Any] = {id(theirs[n]): mine[n] for n in both}
    copies |= {id(x): vars(mine[n])[k] for n in both for k, x in _own_containers(theirs[n]) if k in vars(mine[n])}
    for name in both:
        mine[name].training = theirs[name].training
        for kept in _HOOKS:
            held = copy.copy(getattr(theirs[name], kept))
            bound = kept in ("_forward_hooks", "_forward_pre_hooks")
            setattr(mine[name], kept, type(held)((k, bound_to(copies, h)) for k, h in held.items()) if bound else held)
    given = dict(of.named_parameters(remove_duplicate=False))
    for name, p in to.named_parameters():
        if name in given:
            p.requires_grad_(given[name].requires_grad)
            if p.requires_grad:
                carry_parameter_hooks(p, given[name])


def _own_containers(module: nn.Module) -> list[tuple[str, Any]]:
    return [
        (k, x) for k, x in vars(module).items() if not k.startswith("_") and isinstance(x, (list, dict, set, deque))
    ]


def _form(name: str) -> str:
    """Return a module's name with the numbers of layers and experts replaced by `#`."""
    return re.sub(r"\d+", "#", name)


def _held(x: Tensor, name: str) -> list[Any]:
    hooks: OrderedDict[int, Any] | None = getattr(x, name, None)
    return list((hooks or {}).values())
