"""Base classes of emitted stage files: `Stage`, the wires between stages, parameters under their original names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from autoptd.layout.layout import Layout
from autoptd.ops.cp_axis import Tokens
from autoptd.ops.dp_axis import Replicas
from autoptd.ops.dropout import DropoutKey
from autoptd.ops.expert_axis import Experts
from autoptd.ops.group import Group
from autoptd.ops.tp_axis import Axis


@dataclass(frozen=True)
class Count:
    """One or more numbers of the whole batch, combined from those of its microbatches."""

    combine: str = "sum"  # or "max", "min"
    shape: tuple[int, ...] = ()
    round: int = 0  # of collectives; counts of round 1 are computed from those of round 0


@dataclass(frozen=True)
class Wire:
    """One tensor that a stage sends to the next, described equally on both sides.

    `shape(**sizes)`: shape of the local (tp-split) tensor of one microbatch, from the stage's size symbols.
    `placement` on the tp axis: "B", "Bp", "S1" …; if it is "", ranks are assumed to hold different tensors.
    """

    name: str
    dtype: torch.dtype
    shape: Callable[..., tuple[int, ...]]
    requires_grad: bool
    placement: str = ""

    def is_whole(self, *, gradient: bool) -> bool:
        """Return whether all tp ranks hold equal values (or gradients, which are partial for `Bp`)."""
        return self.placement == "B" or (self.placement == "Bp" and not gradient)


class Stage(nn.Module):
    """One pipeline stage of an emitted program; a subclass per distinct stage.

    `forward(*received, **{name: batch[name] for name in inputs})` returns the tuple of `sends`. On the last stage it
    also takes `counts` and returns this microbatch's share of the global loss, 0-dim and equal on all tp ranks. If the
    loss is a function of sums over the batch and of rows of all its samples, it returns the microbatch's terms and its
    samples' rows, [partial_sums + samples * row_width], and `loss_of` is the function. The microbatch's sums that new
    values of buffers are functions of come last, partial values on tp and cp; `summed` has the positions of each among
    the sums of all stages. Parameters have local shapes and the original model's dotted names; the class is built on
    meta.
    """

    inputs: ClassVar[tuple[str, ...]] = ()  # model inputs that forward reads
    receives: ClassVar[tuple[Wire, ...]] = ()
    sends: ClassVar[tuple[Wire, ...]] = ()
    is_last: ClassVar[bool] = False
    draws: ClassVar[bool] = False  # whether forward draws random numbers
    sizes: ClassVar[dict[str, tuple[str, int]]] = {}  # symbol -> (model input, dim)
    reads_counts: ClassVar[bool] = False  # whether forward takes `counts`; that of the last stage always does
    count_inputs: ClassVar[tuple[str, ...]] = ()  # model inputs that loss_counts reads
    counted: ClassVar[tuple[Count, ...]] = ()  # (): all counts are single numbers, summed in one round
    summed: ClassVar[tuple[tuple[int, int], ...]] = ()  # (start, stop) of each sum for buffers that forward returns
    partial_sums: ClassVar[int] = 0  # number of sums that the loss is a function of
    row_width: ClassVar[int] = 0  # numbers of each sample that it is a function of; both 0: it is a sum itself

    def __init__(
        self,
        tp: Axis,
        dropout: DropoutKey | None = None,
        cp: Tokens | None = None,
        ep: Experts | None = None,
        dp: Replicas | None = None,
    ) -> None:
        super().__init__()
        self.tp = tp
        if cp is not None:
            self.cp = cp
        if ep is not None:
            self.ep = ep
        if dp is not None:
            self.dp = dp
        self.dropout = dropout
        self.shared_inputs: dict[str, Tensor] = {}  # the step's inputs that have no samples

    def loss_counts(self, **inputs: Any) -> tuple[Tensor, ...]:
        """Return one microbatch's contribution to each count of the batch, from the model inputs `count_inputs`.

        If some counts are computed from others, `counts` holds those of earlier rounds.
        """
        return ()

    def loss_of(self, sums: Tensor, counts: tuple[Tensor, ...]) -> Tensor:
        """Return the loss, 0-dim, from sums over the batch, then the rows of its samples, float64 [partial_sums +
        samples * row_width]."""
        raise NotImplementedError("this loss is a sum itself")

    def update_buffers(self, sums: Tensor, counts: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """Return the new values of buffers, by name, from the sums of all stages over the batch, float64."""
        return {}

    # emitted classes declare arguments of their own
    forward: Callable[..., Any]


def stage_axes(layout: Layout, cp: Group, ep: Group, dp: Group) -> dict[str, Tokens | Experts | Replicas]:
    """Return the keywords of a stage for its axes besides tp: only those that its ops communicate over."""
    found: dict[str, Tokens | Experts | Replicas] = {}
    if layout.mesh.cp > 1:
        found["cp"] = Tokens(cp, layout.zigzag)
    if layout.mesh.ep > 1:
        found["ep"] = Experts(ep)
    if layout.sums_over_dp:
        found["dp"] = Replicas(dp)
    return found


def parameter(
    module: nn.Module, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None, requires_grad: bool = True
) -> nn.Parameter:
    """Declare an empty parameter under a dotted name, making containers as needed. Raises KeyError if it exists."""
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
    """Put a module under a dotted name; it takes over the contents of a plain container. Raises KeyError if taken."""
    owner, leaf = _owner(module, name)
    if leaf not in owner._modules:
        owner.add_module(leaf, child)
        return child
    existing = owner._modules[leaf]
    if type(existing) is not nn.Module:
        raise KeyError(f"attribute {name!r} already exists")
    _move_contents(existing, child)
    owner._modules[leaf] = child
    return child


def compose(module: nn.Module, *parts: nn.Module) -> tuple[nn.Module, ...]:
    """Move the contents of parts into a module, and return the parts, which read theirs from it from now on.

    They share its tables of parameters, buffers and submodules, so whatever is put there later, they find it.
    """
    for part in parts:
        _move_contents(part, module)
        part._parameters, part._buffers, part._modules = module._parameters, module._buffers, module._modules
    return parts


def parts_of(block: nn.Module) -> tuple[nn.Module, ...]:
    """Return the parts that an emitted block calls, which are not among its submodules."""
    return getattr(block, "_parts", ())


def _move_contents(container: nn.Module, module: nn.Module) -> None:
    """Move the contents of a plain container, and of containers within it, into a module."""
    for name, inner in container.named_children():
        if name in module._modules and type(inner) is nn.Module:
            _move_contents(inner, module.get_submodule(name))
        else:
            module.add_module(name, inner)
    for name, held in container.named_parameters(recurse=False):
        module.register_parameter(name, held)
    for name, kept in container._buffers.items():
        module.register_buffer(name, kept, persistent=name not in container._non_persistent_buffers_set)


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that owns a dotted name, making containers as needed, and the last part of the name."""
    *path, leaf = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    return module, leaf
