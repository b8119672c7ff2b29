"""What an emitted stage file builds on: `Stage`, the wires between stages, parameters under their original names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from autoptd.ops.cp_axis import Tokens
from autoptd.ops.dropout import DropoutKey
from autoptd.ops.tp_axis import Axis


@dataclass(frozen=True)
class Count:
    """A number of the whole batch, or several: how those of microbatches combine, their shape, and in which round of
    collectives it is known: counts of round 1 are computed from those of round 0."""

    combine: str = "sum"  # or "max", "min"
    shape: tuple[int, ...] = ()
    round: int = 0


@dataclass(frozen=True)
class Wire:
    """One tensor that crosses from a stage to the next, the same on both sides.

    `shape(**sizes)` is that of the local (tp-split) tensor for one microbatch, from the stage's size symbols.
    `placement` on the tp axis: "B", "Bp", "S1" …; where it is not told, ranks are taken to hold different tensors.
    """

    name: str
    dtype: torch.dtype
    shape: Callable[..., tuple[int, ...]]
    requires_grad: bool
    placement: str = ""

    def is_whole(self, *, gradient: bool) -> bool:
        """Whether every tp rank has the same, value or gradient: that of `Bp` is partial on each."""
        return self.placement == "B" or (self.placement == "Bp" and not gradient)


class Stage(nn.Module):
    """One pipeline stage of an emitted program; a subclass per distinct stage.

    `forward(*received, **{name: batch[name] for name in inputs})` returns the tuple of `sends`, or on the last stage,
    given `counts` too, the 0-dim share of the global loss of this microbatch (the same on all tp ranks); where the loss
    is a function of sums over the batch, what this microbatch adds to them, [partial_sums]; `loss_of` is that function.
    Parameters have local shapes and the original model's dotted names; the class is built on the meta device.
    """

    inputs: ClassVar[tuple[str, ...]] = ()  # model inputs that forward reads
    receives: ClassVar[tuple[Wire, ...]] = ()
    sends: ClassVar[tuple[Wire, ...]] = ()
    is_last: ClassVar[bool] = False
    draws: ClassVar[bool] = False  # whether forward draws random numbers
    sizes: ClassVar[dict[str, tuple[str, int]]] = {}  # symbol -> (model input, dim)
    reads_counts: ClassVar[bool] = False  # whether forward is given `counts`; that of the last stage is anyway
    count_inputs: ClassVar[tuple[str, ...]] = ()  # model inputs that loss_counts reads
    counted: ClassVar[tuple[Count, ...]] = ()  # left out where all counts are single numbers, summed in one round
    partial_sums: ClassVar[int] = 0  # elements of the sums that the loss is a function of; 0: it is a sum itself

    def __init__(self, tp: Axis, dropout: DropoutKey | None = None, cp: Tokens | None = None) -> None:
        super().__init__()
        self.tp = tp
        if cp is not None:
            self.cp = cp
        self.dropout = dropout

    def loss_counts(self, **inputs: Any) -> tuple[Tensor, ...]:
        """What one microbatch adds to each count of the batch, from the model inputs `count_inputs`.

        Where a count is computed from others, it is given those so far known as `counts`.
        """
        return ()

    def loss_of(self, sums: Tensor, counts: tuple[Tensor, ...]) -> Tensor:
        """The loss, 0-dim, from sums over the batch, float64 [partial_sums]."""
        raise NotImplementedError("this loss is a sum itself")

    # nn.Module.__call__ types forward as Any; emitted classes give it their own arguments
    forward: Callable[..., Any]


def parameter(
    module: nn.Module, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None, requires_grad: bool = True
) -> nn.Parameter:
    """Declare an empty parameter under a dotted name, containers made as needed. Raises KeyError if it exists."""
    owner, leaf = _owner(module, name)
    new = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=requires_grad)
    owner.register_parameter(leaf, new)
    return new


def buffer(
    module: nn.Module, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None, persistent: bool = True
) -> Tensor:
    """Declare an empty buffer under a dotted name. Raises KeyError if it exists."""
    owner, leaf = _owner(module, name)
    new = torch.empty(shape, dtype=dtype)
    owner.register_buffer(leaf, new, persistent=persistent)
    return new


def submodule(module: nn.Module, name: str, child: nn.Module) -> nn.Module:
    """Put a module under a dotted name. A container that stands there already hands over what it holds."""
    owner, leaf = _owner(module, name)
    if leaf not in owner._modules:
        owner.add_module(leaf, child)
        return child
    standing = owner._modules[leaf]
    if type(standing) is not nn.Module:
        raise KeyError(f"attribute {name!r} already exists")
    _hand_over(standing, child)
    owner._modules[leaf] = child
    return child


def _hand_over(container: nn.Module, module: nn.Module) -> None:
    """Move what a plain container holds into a module, and containers within it likewise."""
    for name, inner in container.named_children():
        if name in module._modules and type(inner) is nn.Module:
            _hand_over(inner, module.get_submodule(name))
        else:
            module.add_module(name, inner)
    for name, held in container.named_parameters(recurse=False):
        module.register_parameter(name, held)
    for name, kept in container._buffers.items():
        module.register_buffer(name, kept, persistent=name not in container._non_persistent_buffers_set)


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds the last part of a dotted name."""
    *path, leaf = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    return module, leaf
