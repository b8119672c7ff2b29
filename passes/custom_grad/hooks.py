"""Refuse, by name, the hooks of a model that the emitted program would not call.

Only the forward pass is traced, so backward hooks of modules and hooks on parameters would be lost.

Forward hooks run while the model is traced, and what they do to tensors is in the trace:

    layer.register_forward_hook(lambda m, args, out: features.append(out))    read by forward: a part of it
    layer.register_forward_hook(lambda m, args, out: log(out.norm()))         only looks: would be lost

A hook is given other tensors of the same memory, each the result of a marking node, which is removed after the trace.
The hook is a part of forward if the results depend on a node that it made or was given. A part of forward that keeps
something for the next pass, such as a list that grows, is found by a second trace (`trace/python_state.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, track_tensor_tree
from torch.library import Library
from torch.nn.modules import module as module_state
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from autoptd.errors import UnsupportedOp
from autoptd.passes.custom_grad.ops import described
from autoptd.passes.graph import ancestors, made_since

_MODULE = {
    "_backward_hooks": "a backward hook",
    "_backward_pre_hooks": "a backward pre-hook",
}
_PARAMETER = {
    "_backward_hooks": "a hook on its gradient",
    "_post_accumulate_grad_hooks": "a hook after its gradient is accumulated",
}


# modules whose forward hooks set a weight, or keep tensors for the same forward pass, which returns them
_PARTS_OF_FORWARD = ("torch.nn.utils.", "transformers.utils.output_capturing")

_LIBRARY = Library("autoptd_hooks", "FRAGMENT")
_LIBRARY.define("seen(int key, Tensor given) -> Tensor")
SEEN = torch.ops.autoptd_hooks.seen.default
MADE_BY = "made by hook"  # key of a node's meta: the index of the code of the hook that made it


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


class ForwardHooks:
    """The forward hooks of a model that is traced, and those of every module. Hooks that run the same code are one."""

    def __init__(self, model: nn.Module) -> None:
        """Watch the hooks of a model: pass a copy that is discarded afterwards."""
        self.collects = False  # whether forward reads what some hook was given, as far as it is traced
        self._hooks: dict[object, list[Any]] = {}  # code -> hooks
        self._places: dict[int, list[str]] = {}  # index of a code -> where its hooks ran
        self._acting: set[int] = set()  # indices of those that change the trace in other ways
        self._paths = {id(module): path or "model" for path, module in model.named_modules()}
        for module in model.modules():
            self._watch(module._forward_hooks)
            self._watch(module._forward_pre_hooks)

    def _watch(self, held: dict[int, Any]) -> None:
        for key, hook in held.items():
            if not str(getattr(hook, "__module__", "")).startswith(_PARTS_OF_FORWARD):
                self._hooks.setdefault(code_of(hook), []).append(hook)
                held[key] = partial(self._run, hook, list(self._hooks).index(code_of(hook)))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Wrap a trace: watch the hooks of every module as well."""
        everywhere = module_state._global_forward_hooks, module_state._global_forward_pre_hooks
        kept = [dict(held) for held in everywhere]
        for held in everywhere:
            self._watch(held)
        try:
            yield
        finally:
            for held, hooks in zip(everywhere, kept, strict=True):
                held.update(hooks)

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def where(self) -> str:
        """Return the places of the hooks that ran."""
        return "\n".join(place for places in self._places.values() for place in places)

    def _run(self, hook: Callable[..., Any], code: int, module: nn.Module, *args: Any) -> Any:
        mode = get_proxy_mode()
        if mode is None or id(module) not in self._paths:  # such as the wrapper of the model in a trace
            return hook(module, *args)
        tracer: Any = mode.tracer
        place = f"{self._paths[id(module)]}: {described(hook)}"
        if place not in self._places.setdefault(code, []):
            self._places[code].append(place)
        marked = tree_map_only(Tensor, partial(_marked, tracer, code), args)
        before, made_within = _attributes(module), made_since(tracer.graph)
        with _RequiresGradCalls() as calls:
            result = hook(module, *marked)
        for x, mark in zip(tree_leaves(args), tree_leaves(marked), strict=True):
            if isinstance(x, Tensor) and mark.requires_grad and not x.requires_grad:
                x.requires_grad_()
        if result is marked[-1]:
            result = None
        made = made_within()
        for node in made:
            node.meta[MADE_BY] = code
        # transformers registers a hook that calls requires_grad_ on embeddings, for gradient checkpointing
        if result is not None or calls.found or _attributes(module) != before or any(map(_writes, made)):
            self._acting.add(code)
        return result

    def unmark(self, graph: fx.Graph, whole: bool) -> None:
        """Remove the marks from a trace. Raises UnsupportedOp naming the hooks without an effect on it.

        whole: False if the trace leaves out some of forward, which may be what reads a hook's tensors.
        """
        results = ancestors(node for node in graph.nodes if node.op == "output" or _writes(node))
        read = {node.args[0] if node.target is SEEN else node.meta.get(MADE_BY) for node in results} - {None}
        for node in reversed(graph.nodes):
            if node.target is SEEN:
                given = node.args[1]
                given.users.setdefault(node)  # torch.export loses readers of the result without readers of their own
                node.replace_all_uses_with(given)
                graph.erase_node(node)
        self.collects = bool(read)
        looking = [places for code, places in self._places.items() if code not in read | self._acting]
        if looking and whole:
            raise UnsupportedOp(
                "a forward hook only looks at tensors, and nothing that leads to the loss reads what it was given: the "
                "emitted program would not call it",
                where="\n".join(place for places in looking for place in places),
                fix="remove it; let forward return the tensors that the loss needs",
            )


def code_of(hook: Any) -> object:
    """Return the code that a hook runs, equal for functions that differ only in what they hold."""
    match hook:
        case partial():
            return code_of(hook.func)
        case MethodType():
            return code_of(hook.__func__)
        case FunctionType():
            return hook.__code__
    return type(hook)


def keeping(hooks: ForwardHooks) -> UnsupportedOp:
    """Return the error of hooks whose state another pass finds changed."""
    return UnsupportedOp(
        "a forward hook keeps something from pass to pass, such as a list that grows: the program would not",
        where=hooks.where(),
        fix="empty at the start of forward what the hook fills; count outside forward",
    )


def _marked(tracer: Any, code: int, x: Tensor) -> Tensor:
    """Return another tensor of the same memory, which a node of its own gives; `x` if it is not part of the trace."""
    found = None if isinstance(x, nn.Parameter) else tracer.tensor_tracker.get(x)
    if found is None:
        return x
    proxy = tracer.create_proxy("call_function", SEEN, (code, found.proxy), {})
    with disable_proxy_modes_tracing(), torch.enable_grad():
        made = x.view_as(x)
    track_tensor_tree(made, proxy, constant=None, tracer=tracer)
    return made


def _writes(node: fx.Node) -> bool:
    """Return whether a node writes to a tensor, or to a gradient."""
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and (node.is_impure() or bool(schema is not None and schema.is_mutable))


class _RequiresGradCalls(TorchFunctionMode):
    """Mode that records whether `requires_grad_` was called, which is allowed although it adds no node to the trace."""

    found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= getattr(func, "__name__", "") == "requires_grad_"
        return func(*args, **(kwargs or {}))


def _attributes(module: nn.Module) -> object:
    """Return which objects a module holds."""
    return [{k: id(v) for k, v in each.items()} for each in (vars(module), module._parameters, module._buffers)]
