"""Refuse, by name, the hooks of a model that the emitted program would not call.

Only the forward pass is traced, so backward hooks of modules and hooks on parameters would be lost. Forward hooks run
while the model is traced, and the ops they compute are in the trace; a hook that only reads its tensors would see those
of the trace and no others.
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
    "_post_accumulate_grad_hooks": "a hook after its gradient is accumulated",
}


# modules of libraries whose forward hooks keep tensors for the same forward pass, which returns them
_KEPT_FOR_FORWARD = ("transformers.utils.output_capturing",)


def refuse_unseen_hooks(model: nn.Module) -> None:
    """Raise UnsupportedOp naming all hooks of modules and parameters that run in the backward pass."""
    found = [f"{place}: {kind}, {described(hook)}" for place, kind, hook in _unseen(model)]
    if found:
        raise UnsupportedOp(
            "hooks that run in the backward pass would be lost: the emitted program has its own modules and parameters",
            where="\n".join(found),
            fix="remove them; change gradients within forward: x.register_hook(…) on a tensor it computes, or a "
            "torch.autograd.Function around the op that reads the parameter",
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
    """Make every forward hook raise UnsupportedOp if it runs during tracing without any effect on the trace.

    Replaces the model's hooks: pass a copy that is discarded afterwards.
    """
    for path, module in model.named_modules():
        for held in (module._forward_hooks, module._forward_pre_hooks):
            for key, hook in list(held.items()):
                if getattr(hook, "__module__", "") in _KEPT_FOR_FORWARD:
                    continue
                held[key] = _watched(hook, path or "model")


def _watched(hook: Callable[..., Any], path: str) -> Callable[..., Any]:
    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        before = _seen(module)
        with _RequiresGradCalls() as calls:
            result = hook(module, *args, **kwargs)
        if calls.found:  # transformers registers such a hook on embeddings for gradient checkpointing
            return result
        if result is None and get_proxy_mode() is not None and _seen(module) == before:
            raise UnsupportedOp(
                "a forward hook that returns nothing only looks at tensors: the emitted program would not call it",
                where=f"{path}: {described(hook)}",
                fix="remove it; let forward return the tensors that the loss needs",
            )
        return result

    return run


class _RequiresGradCalls(TorchFunctionMode):
    """Mode that records whether `requires_grad_` was called, which is allowed although it adds no node to the trace."""

    found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= getattr(func, "__name__", "") == "requires_grad_"
        return func(*args, **(kwargs or {}))


def _seen(module: nn.Module) -> object:
    """Return the last node of the trace and the module's attributes, which change if a hook has an effect."""
    mode = get_proxy_mode()
    tracer: Any = None if mode is None else mode.tracer
    last = None if tracer is None else next(iter(reversed(tracer.graph.nodes)), None)
    held = [{k: id(v) for k, v in each.items()} for each in (vars(module), module._parameters, module._buffers)]
    return last, held
