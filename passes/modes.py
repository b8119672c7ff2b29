"""Modules in eval mode are traced so: a plan trains the model as it was given, as one process would run it."""

from __future__ import annotations

from torch import nn

_SHOWN = 4


def eval_notes(model: nn.Module) -> list[str]:
    """What the plan says of modules that do not drop, or normalise by the statistics of others, because of eval()."""
    names = [name for name, _ in _in_eval(model, "", set())]
    if not names:
        return []
    if names == [""]:
        return [
            f"the model is in eval mode, as it was given: {_MEANING}; model.train() before planning trains with both"
        ]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"in eval mode, as given: {', '.join(n or 'the model itself' for n in names[:_SHOWN])}{more}: {_MEANING}"]


def copy_modes(model: nn.Module, other: nn.Module) -> None:
    """Put the modules of another model of the same structure into the modes of this one's."""
    modes = {name: module.training for name, module in model.named_modules(remove_duplicate=False)}
    for name, module in other.named_modules(remove_duplicate=False):
        module.training = modes.get(name, model.training)


_MEANING = "no dropout there, and batch norms take their running statistics"


def _in_eval(module: nn.Module, name: str, seen: set[int]) -> list[tuple[str, nn.Module]]:
    """The outermost modules that are in eval mode with all that they hold, and others that are by themselves."""
    if id(module) in seen:
        return []
    seen.add(id(module))
    if not any(m.training for m in module.modules()):
        return [(name, module)]
    found = [] if module.training else [(name, module)]
    for key, child in module.named_children():
        found += _in_eval(child, f"{name}.{key}" if name else key, seen)
    return found
