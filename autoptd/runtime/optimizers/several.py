"""Several optimizers as one, so that schedulers, logs and checkpoints see one list of parameter groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer


class SeveralOptimizers(Optimizer):
    """Optimizers stepped one after the other; `param_groups` and `state` are theirs, not copies.

    `places`: for each group, in order, the optimizer that it belongs to. An optimizer's groups are in its own order.
    """

    def __init__(self, optimizers: Sequence[Optimizer], places: Sequence[int]) -> None:
        super().__init__([torch.nn.Parameter(torch.empty(0))], {})
        self.optimizers, self.places = tuple(optimizers), tuple(places)
        shared = set(optimizers[0].defaults).intersection(*(each.defaults for each in optimizers))
        self.defaults = {key: value for key, value in optimizers[0].defaults.items() if key in shared}
        self._collect()

    def _collect(self) -> None:
        left = [iter(each.param_groups) for each in self.optimizers]
        self.param_groups = [next(left[place]) for place in self.places]
        self.state = next(iter(self.optimizers)).state
        for each in self.optimizers[1:]:
            self.state.update(each.state)
        for each in self.optimizers:
            each.state = self.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Step each optimizer; return the closure's result."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for each in self.optimizers:
            each.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of each optimizer with its own method."""
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            hook(self, state_dict)
        for number, each in enumerate(self.optimizers):
            groups = [g for g, place in zip(state_dict["param_groups"], self.places, strict=True) if place == number]
            inside = [i for group in groups for i in group["params"]]
            renumbered = {old: new for new, old in enumerate(inside)}
            counted = iter(range(len(inside)))
            each.state = type(self.state)(dict)
            each.load_state_dict(
                {
                    "state": {renumbered[i]: x for i, x in state_dict["state"].items() if i in renumbered},
                    "param_groups": [{**group, "params": [next(counted) for _ in group["params"]]} for group in groups],
                }
            )
        self._collect()


def described(optimizer: Optimizer) -> str:
    """Return the name of an optimizer's class, or of the classes of several: `Muon + AdamW`."""
    several = optimizer.optimizers if isinstance(optimizer, SeveralOptimizers) else (optimizer,)
    return " + ".join(type(each).__name__ for each in several)


def defaults_by_group(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the default options of each parameter group's own optimizer."""
    if isinstance(optimizer, SeveralOptimizers):
        return [optimizer.optimizers[place].defaults for place in optimizer.places]
    return [optimizer.defaults for _ in optimizer.param_groups]
