"""Numbers of the random calls of a forward pass, as the traced graph counts them.

They count on through the pass. A model that computes selected rows may leave out calls: an expert that no row chose is
not run. Its calls are then counted for each module, and such a module is either left out or called as often as traced.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import _disable_current_modes


class MoreDraws(RuntimeError):
    """The model draws more often, or less often, than its graph."""


class CallNumbers:
    """The numbers that are still to come. of: the module of each call. rows: calls that may be left out.

    Calls follow from torch's random state: activation checkpointing recomputes from the state that it saved.
    """

    def __init__(self, of: Sequence[str], rows: Collection[int]) -> None:
        self._of, self._rows = of if rows else [""] * len(of), rows
        self._seen: dict[bytes, int] = {}
        self._next: dict[str, list[int]] = {}
        for number, module in reversed(list(enumerate(self._of))):
            self._next.setdefault(module, []).append(number)
        self._running: list[str] = []
        self._hooks = ExitStack()

    def start(self, model: nn.Module) -> None:
        """Know the running module of this model, until `stop`."""
        names = {id(module): name for name, module in model.named_modules()}

        def enter(module: nn.Module, args: Any) -> None:
            self._running.append(names.get(id(module), ""))

        def leave(module: nn.Module, args: Any, result: Any) -> None:
            self._running.pop()

        if self._rows:
            for hook in (
                register_module_forward_pre_hook(enter),
                register_module_forward_hook(leave, always_call=True),
            ):
                self._hooks.callback(hook.remove)

    def stop(self) -> None:
        self._hooks.close()

    def take(self) -> int:
        """Return the number of a call, and advance torch's generator. Raises MoreDraws."""
        state = torch.get_rng_state().numpy().tobytes()
        with _disable_current_modes():
            torch.rand(())
        if state not in self._seen:
            module = self._running[-1] if self._rows and self._running else ""
            if not self._next.get(module):
                raise MoreDraws
            self._seen[state] = self._next[module].pop()
        return self._seen[state]

    def leave_out(self, call: int, layer: int) -> None:
        """Count the calls of a layer that the model skips, those after `call`."""
        for number in range(call + 1, call + 1 + layer):
            self._next[self._of[number]].remove(number)
            self._seen[f"{number}".encode()] = number

    def check(self) -> None:
        """Raise MoreDraws if calls are missing after a forward pass."""
        seen = set(self._seen.values())
        missing = set(range(len(self._of))) - seen
        if missing - set(self._rows) or {self._of[i] for i in missing} & {self._of[i] for i in seen}:
            raise MoreDraws(f"{len(seen)} instead of {len(self._of)}")
