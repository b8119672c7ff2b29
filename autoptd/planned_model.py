"""Numbers and flags of a user's model, which a program holds as they were when it was planned."""

from __future__ import annotations

from typing import Any

from torch import nn

from autoptd.errors import InputsError

_KINDS = (bool, int, float, str)


class PlannedModel:
    """A model as it was planned: the numbers and strings among its modules' attributes, and what is trained.

        model.beta = 0.5               annealed in the training loop
        model.requires_grad_(False)    frozen after some steps
        model.eval()                   dropout off

    Nothing of this reaches a program, so a step fails once it has changed.
    """

    def __init__(self, model: nn.Module, loss: object) -> None:
        """Note what a model's modules hold, and those of a loss that is a module."""
        roots = [root for root in (model, loss) if isinstance(root, nn.Module)]
        found = [(name, module) for root in roots for name, module in root.named_modules()]
        self._held = [(name, vars(module), _numbers(module)) for name, module in found]
        self._trained = [(name, p, p.requires_grad) for root in roots for name, p in root.named_parameters()]

    def check(self) -> None:
        """Raise InputsError naming the first attribute that has another value."""
        for name, now, held in self._held:
            for key, value in held.items():
                if now.get(key) != value:
                    raise _changed(f"{name}.{key}".lstrip("."), value, now.get(key))
        for name, p, trained in self._trained:
            if p.requires_grad != trained:
                raise _changed(f"{name}.requires_grad", trained, p.requires_grad)


def _numbers(module: nn.Module) -> dict[str, Any]:
    return {
        key: value
        for key, value in vars(module).items()
        if type(value) in _KINDS and value == value and not key.startswith("_")
    }


def _changed(name: str, planned: object, now: object) -> InputsError:
    return InputsError(
        f"{name} of the model was {planned!r} when it was planned and is {now!r} now; the program would go on with "
        f"{planned!r}",
        where=name,
        fix="pass what changes in many steps as an input of forward, a number per sample, or count in a buffer; call "
        "parallelize again for what changes once; in eval_step the program is in evaluation mode by itself",
    )
