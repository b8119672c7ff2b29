"""States of an optimizer that are tensors made of others, as torchao's 8-bit ones are of codes and scales.

A checkpoint holds their parts, `exp_avg-codes` and `exp_avg-scale`, as tensors of their own. How parts become a state
again, only the optimizer knows: it makes the states of one parameter in a step with a gradient of zeros, and their
parts are replaced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass  # private; seen in 2.13.0

WITHIN = "-"  # between the name of a state and that of its part


def parts(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the states of a parameter by name, and the parts of those that are made of other tensors."""
    for key in sorted(state, key=str):
        if is_traceable_wrapper_subclass(value := state[key]):
            names, _ = value.__tensor_flatten__()
            yield from parts({f"{key}{WITHIN}{name}": getattr(value, name) for name in names})
        else:
            yield key, value


def joined(found: Mapping[str, Any], made: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the states that the parts in `found` make, as those in `made` are. Raises KeyError if one is missing."""
    whole = {}
    for key, like in made.items():
        if not is_traceable_wrapper_subclass(like):
            whole[key] = found[prefix + key]
            continue
        names, context = like.__tensor_flatten__()
        inner = joined(found, {name: getattr(like, name) for name in names}, f"{prefix}{key}{WITHIN}")
        whole[key] = type(like).__tensor_unflatten__(inner, context, like.size(), like.stride())
    return whole


def made_in_a_step(optimizer: Optimizer, param: nn.Parameter, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return the states that an optimizer makes for a parameter of this shape; nothing of either is changed."""
    everything = [p for group in optimizer.param_groups for p in group["params"]]
    gradients, value, state = [p.grad for p in everything], param.data, optimizer.state.pop(param, None)
    try:
        for p in everything:
            p.grad = None
        param.data = value.new_zeros(shape)
        param.grad = torch.zeros_like(param)
        optimizer.step()
        return dict(optimizer.state.pop(param, {}))
    finally:
        param.grad, param.data = None, value
        for p, gradient in zip(everything, gradients, strict=True):
            p.grad = gradient
        if state is not None:
            optimizer.state[param] = state
