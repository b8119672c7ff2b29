"""Hooks on a model that a program would not call are refused before and while it is traced, each by its name.

What is traced are forward passes, so backward hooks of modules and hooks on parameters would be lost. Forward hooks run
while the model is traced, and what they compute or replace is in the trace; one that merely looks at its tensors would
look at those of the trace and never again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.modules import module as module_state
from torch.overrides import TorchFunctionMode

from autoptd.errors import UnsupportedOp
from autoptd.passes.custom_grad.ops import described

_MODULE = {
    "_backward_hooks": "a backward hook",
    "_backward_pre_hooks": "a backward pre-hook",
}
_PARAMETER = {
    "_backward_hooks": "a hook on its gradient",
    "_post_accumulate_grad_hooks": "a hook after its gradient is added up",
}


def refuse_unseen_hooks(model: nn.Module) -> None:
    """Raise UnsupportedOp for the hooks of modules and parameters that run in a backward pass, naming all of them."""
    found = [f"{place}: {kind}, {described(hook)}" for place, kind, hook in _unseen(model)]
    if found:
        raise UnsupportedOp(
            "hooks that run in the backward pass would be lost: a program has modules and parameters of its own",
            where="\n".join(found),
            fix="remove them; change a gradient within forward: x.register_hook(…) on what it computes, or a "
            "torch.autograd.Function around what reads the parameter",
        )


def _unseen(model: nn.Module) -> Iterator[tuple[str, str, Any]]:
    for path, module in model.named_modules():
        for held, kind in _MODULE.items():
            yield from ((path or "model", kind, hook) for hook in getattr(module, held, {}).values())
    for name, parameter in model.named_parameters():
        for held, kind in _PARAMETER.items():
            yield from ((name, kind, hook) for hook in (getattr(parameter, held, None) or {}).values())
    for hooks in (module_state._global_backward_hooks, module_state._global_backward_pre_hooks):
        yield from (("every module", "a backward hook", hook) for hook in hooks.values())


def refuse_recording_hooks(model: nn.Module) -> None:
    """Have every forward hook of a model that is traced raise UnsupportedOp when it leaves no trace.

    Changes the hooks: for a copy that is thrown away.
    """
    for path, module in model.named_modules():
        for held in (module._forward_hooks, module._forward_pre_hooks):
            for key, hook in list(held.items()):
                held[key] = _watched(hook, path or "model")


def _watched(hook: Callable[..., Any], path: str) -> Callable[..., Any]:
    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        before = _seen(module)
        with _Asked() as asked:
            result = hook(module, *args, **kwargs)
        if asked.found:  # which is all that checkpoints in transformers want of an embedding
            return result
        if result is None and get_proxy_mode() is not None and _seen(module) == before:
            raise UnsupportedOp(
                "a forward hook that gives nothing back only looks at tensors: a program would never call it",
                where=f"{path}: {described(hook)}",
                fix="remove it; what the loss needs of a module, let forward return",
            )
        return result

    return run


class _Asked(TorchFunctionMode):
    """Whether a tensor was asked to require a gradient, which leaves no trace either and is no record."""

    found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= getattr(func, "__name__", "") == "requires_grad_"
        return func(*args, **(kwargs or {}))


def _seen(module: nn.Module) -> object:
    """The length of the trace, and what the module holds."""
    mode = get_proxy_mode()
    tracer: Any = None if mode is None else mode.tracer
    last = None if tracer is None else next(iter(reversed(tracer.graph.nodes)), None)
    held = [{k: id(v) for k, v in each.items()} for each in (vars(module), module._parameters, module._buffers)]
    return last, held
