"""The optimizer of one rank: built over flat pieces and whole parameters, and stepped once per training step."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autoptd.errors import InputsError, PlanError
from autoptd.layout.layout import Layout
from autoptd.layout.owners import Owners
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.optimizers.groups import ParameterGroup, choose
from autoptd.runtime.optimizers.named import Factory
from autoptd.runtime.optimizers.several import defaults_by_group
from autoptd.runtime.optimizers.whole_tensors import WholeTensors
from autoptd.runtime.zero.param_buffers import ParameterShard

_SIGNED = "autoptd_parameters"  # key of a state with the digest of what it is of


@dataclass(frozen=True)
class Updated:
    """A parameter that this rank's optimizer updates: all of it if `piece` is None, else a flat piece.

    `saved`: whether this rank writes the optimizer's state of it to a checkpoint; one rank does per element.
    """

    name: str
    param: nn.Parameter
    piece: ParameterShard | None
    saved: bool


class OptimizerStep:
    """The optimizer of a rank (`optimizer`) and what it updates (`updated`). Construction is a collective.

    `groups`: names of the model's parameters in each of torch's groups, on whichever rank; `whole`: of those that are
    updated as a whole.
    """

    def __init__(
        self,
        optimizer: str | Factory,
        options: Mapping[str, Any],
        groups: Sequence[ParameterGroup],
        layout: Layout,
        c: Communicators,
        pieces: Sequence[ParameterShard],
        tensors: Mapping[str, Tensor],
    ) -> None:
        """Raise PlanError for an optimizer that cannot update these parameters. `tensors`: this rank's, by name."""
        names = [name for name, spec in layout.parameters.items() if spec.trainable]
        hidden = {name for name in names if layout.parameters[name].hidden}
        chosen = choose(optimizer, options, groups, names, hidden)
        self.whole = frozenset(chosen.names("whole"))
        dtypes = {name: torch.promote_types(x.dtype, torch.float32) for name, x in tensors.items()}
        self._owners = Owners(layout, c.stage, self.whole)
        self._whole = WholeTensors(self.whole, self._owners, c, pieces, dtypes)
        flat = [piece for piece in pieces if piece.name not in self.whole]
        self._flat = sorted(flat, key=lambda piece: piece.host_grad is not None)  # those on the device first
        on_host = [piece.name for piece in pieces if piece.host_grad is not None]
        if self.whole.intersection(on_host):
            raise PlanError(
                "an optimizer that updates whole parameters does so on the device", where="offload", fix="leave it out"
            )
        self._waits = bool(on_host) and c.device.type == "cuda"  # for gradients to be on the host
        parameters = {piece.name: piece.param for piece in self._flat} | self._whole.parameters
        self.optimizer = chosen.build(parameters)
        self.groups = [group.names for group in chosen.groups]
        self._defaults, self._is_alone = defaults_by_group(self.optimizer), c.world.size == 1
        self._whole.free()
        self.updated = [Updated(piece.name, piece.param, piece, piece.counts) for piece in self._flat]
        for whole in self._owners.of(c.rank):
            first = layout.mesh.holder(layout.parameters[whole.name].stages[0]) == c.stage
            counts = first and self._owners.counts(whole)
            self.updated.append(Updated(whole.name, self._whole.parameters[whole.name], None, counts))
        _keep_apart(self.optimizer, self._described(layout, c))

    def _described(self, layout: Layout, c: Communicators) -> str:
        """Return a digest of what this rank's optimizer updates: ranks with the same have equal states."""
        found = []
        for each in self.updated:
            spec, start = layout.parameters[each.name], 0 if each.piece is None else each.piece.start
            part = spec.part(layout.mesh, c.rank), spec.parts(layout.mesh.tp), str(spec.placement)
            found.append((each.name, start, each.param.numel(), *part))
        return hashlib.sha256(repr(found).encode()).hexdigest()

    def check(self) -> None:
        """Raise InputsError for added groups, which have no part of the model, and for hooks of steps, which would see
        this rank's parts of parameters."""
        given, known = len(self.optimizer.param_groups), len(self._defaults)
        if given != known:
            raise InputsError(
                f"the optimizer has {given} groups of parameters, and had {known} when it was made; a step would not "
                "train what is in the others",
                where="par.optimizer",
                fix="give groups to parallelize, as parameter_groups=",
            )
        hooked = self.optimizer._optimizer_step_pre_hooks or self.optimizer._optimizer_step_post_hooks  # torch 2.13.0
        if hooked and not self._is_alone:
            raise InputsError(
                "the optimizer has hooks of its steps, which see one rank's flat parts of parameters and gradients",
                where="par.optimizer",
                fix="call what does not change them after train_step; clip with clip_norm=; write the rest into the "
                "step of an optimizer of your own (optimizer=)",
            )

    def options(self) -> str:
        """Return the options of each group as text, a line for each: those that the optimizer's class has by default.

        Tensors on a device, which the host would wait for, are left out, and so is what else the class may put there.
        """
        lines = []
        for i, (group, defaults) in enumerate(zip(self.optimizer.param_groups, self._defaults, strict=False)):
            shown = ((key, _plain(group.get(key))) for key in sorted(defaults))
            lines += [f"{key} = {text} in group {i}" for key, text in shown if text]
        return "\n".join(lines)

    def run(self, used: Collection[str]) -> None:
        """Step parameters in `used`, which have a gradient on some rank. A collective of the stage's ranks.

        Kernels of the device are queued before the host steps its own pieces, since the optimizer has them first."""
        for piece in self._flat:
            piece.param.grad = piece.stepped_grad() if piece.name in used else None
        if self._waits:
            torch.cuda.current_stream().synchronize()
        with self._whole.gathered(used):
            self.optimizer.step()
        for piece in self._flat:
            piece.param.grad = None  # a second step, of a loop that calls the optimizer's own, changes nothing


def _keep_apart(optimizer: Optimizer, described: str) -> None:
    """Refuse the states of other optimizers: torch compares the numbers of parameters only, not which they are."""

    def sign(_: Optimizer, state: dict[str, Any]) -> None:
        state[_SIGNED] = described

    def check(_: Optimizer, state: dict[str, Any]) -> None:
        if state.get(_SIGNED) != described:
            raise InputsError(
                "this is the state of other parameters than this rank's optimizer updates: of a plain optimizer, or of "
                "another rank or plan",
                where="par.optimizer.load_state_dict",
                fix="par.save writes the states of all ranks, and par.load and par.resume restore them under any plan",
            )

    optimizer.register_state_dict_post_hook(sign)
    optimizer.register_load_state_dict_pre_hook(check)


def _plain(value: object) -> str:
    """Return numbers, strings and tuples of them as text; "" for anything else."""
    if isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu":
        return repr(value.item())
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_plain, value))})"
    return repr(value) if isinstance(value, (bool, int, float, str)) else ""
