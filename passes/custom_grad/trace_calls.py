"""Recording of functions with a user-defined backward pass: during tracing, each call becomes one opaque op.

    Clip.apply(x, 0.5)          autoptd_own.call(key, [x], [])     and its results
    h.register_hook(halve)      autoptd_own.hook(key, h)           after h

`calls.py` later rewrites them to nodes with targets of `ops.py`. `key` identifies the function and its other arguments;
equal calls share a key, so that equal modules stay equal (see `trace/repeats.py`). A function is run once on data-free
copies, forward and backward (`trial.py`). Code that changes gradients without leaving a node is refused:
differentiating or freezing a parameter inside forward, and hooks on the tensors that autograd saves. In a trace,
`inference_mode` is `no_grad`, which computes the same.

This uses private parts of torch, seen in 2.13.0: `torch.autograd.function._SingleLevelFunction`, where even a bound
`apply` stored before the patch looks up the C function; `custom_function_call` beside it;
`torch.autograd._engine_run_backward`; the proxies of `torch.fx.experimental.proxy_tensor`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any
from unittest.mock import patch

import torch
from torch import SymInt, Tensor, fx, nn
from torch.autograd import function
from torch.autograd.function import _SingleLevelFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, track_tensor_tree
from torch.fx.node import has_side_effect
from torch.library import Library, _scoped_library

from autoptd.errors import UnsupportedOp
from autoptd.passes.custom_grad.ops import OwnFunction, OwnHook
from autoptd.passes.custom_grad.trial import FunctionTrial, try_hook

_LIBRARY = Library("autoptd_own", "FRAGMENT")
_LIBRARY.define("call(int key, Tensor[] given, SymInt[] sizes) -> Tensor[]")
_LIBRARY.define("hook(int key, Tensor given) -> ()")
CALL = torch.ops.autoptd_own.call.default
HOOK = torch.ops.autoptd_own.hook.default
has_side_effect(HOOK)  # a mark has no reader, and must not be removed as dead code

_TORCH = str(Path(torch.__file__).parent)
_ATOMS = (type(None), bool, int, float, complex, str, torch.dtype)


@dataclass(frozen=True)
class Given:
    """Placeholder, among the arguments of a call, for its i-th tensor."""

    index: int


@dataclass(frozen=True)
class Size:
    """Placeholder, among the arguments of a call, for its i-th size."""

    index: int


@dataclass(frozen=True)
class OwnCall:
    """A recorded call, without its tensors and sizes. `several`: whether the result is a tuple."""

    target: OwnFunction | OwnHook
    args: tuple[Any, ...] = (Given(0),)
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    several: bool = False

    def filled(self, given: Sequence[Any], sizes: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with these tensors and sizes filled in."""
        return _fill(self.args, given, sizes), {k: _fill(v, given, sizes) for k, v in self.kwargs.items()}


class OwnCalls:
    """Registry of the recorded calls, by key."""

    def __init__(self) -> None:
        self.calls: dict[int, OwnCall] = {}
        self._keys: dict[object, int] = {}
        self._names: dict[object, str] = {}
        self._functions: list[object] = []  # keeps functions alive whose ids are in the keys of `_names`
        self._thread = threading.get_ident()  # other ranks of a test are threads beside it
        self.trying = False  # True during a trial run, which may differentiate

    @property
    def tracing(self) -> bool:
        """True while the user's forward is being traced, by this thread and outside trial runs."""
        return threading.get_ident() == self._thread and get_proxy_mode() is not None and not self.trying

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Mark the block as a trial run of a function on copies."""
        self.trying = True
        try:
            yield
        finally:
            self.trying = False

    def key(self, call: OwnCall) -> int:
        """Return the key of a call; equal calls have the same."""
        content = call.target, repr((call.args, call.kwargs)), call.several
        key = self._keys.setdefault(content, len(self._keys))
        self.calls[key] = call
        return key

    def name(self, function: Any) -> str:
        """Return the name of a class or function in emitted programs; equal functions have the same."""
        which = _identity(function)
        if which not in self._names:
            self._functions.append(function)
            hint = getattr(function, "__name__", "hook")
            hint, number = hint if hint.isidentifier() else "hook", 1
            names, name = set(self._names.values()), hint
            while name in names:
                number += 1
                name = f"{hint}_{number}"
            self._names[which] = name
        return self._names[which]

    def equal(self, function: Any) -> Any:
        """Return the first recorded function that is equal to this one, or the function itself."""
        which = _identity(function)
        return next((f for f in self._functions if _identity(f) == which), function)


_MOD_INDEX = "torch._dynamo._trace_wrapped_higher_order_op.mod_index"  # private; seen in 2.13.0


@contextmanager
def record_own_calls(calls: OwnCalls) -> Iterator[None]:
    """Record in `calls`, while models are traced, the calls of functions with a user-defined backward pass."""

    def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return _apply(calls, cls, args, kwargs)

    def engine(*args: Any, **kwargs: Any) -> Any:
        if calls.tracing:
            raise UnsupportedOp(
                "forward differentiates: the emitted program computes gradients of the loss only",
                fix="write the derivative as a formula, or put it into a torch.autograd.Function",
            )
        return run_backward(*args, **kwargs)

    def enter(self: Any) -> Any:
        if calls.tracing:
            raise UnsupportedOp(
                "forward changes what autograd saves (saved_tensors_hooks)",
                fix="remove it: the plan decides what is saved for backward",
            )
        return entered(self)

    def infer(self: Any) -> None:
        if calls.tracing:
            self._inference_mode_context = torch.no_grad() if self.mode else torch.enable_grad()
            self._inference_mode_context.__enter__()
        else:
            inferring(self)

    def shape_of(key: int, given: Sequence[Tensor], sizes: Sequence[Any]) -> list[Tensor]:
        args, kwargs = calls.calls[key].filled(given, sizes)
        result = calls.calls[key].target(*args, **kwargs)
        return list(result) if calls.calls[key].several else [result]

    def transformed(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if calls.tracing:
            raise UnsupportedOp(
                f"{cls.__name__}.apply is called under a transform of torch.func", fix="call it on the whole tensor"
            )
        return under_transforms(cls, *args, **kwargs)

    run_backward, entered = torch.autograd._engine_run_backward, saved_tensors_hooks.__enter__
    under_transforms, inferring = function.custom_function_call, torch.inference_mode.__enter__
    with (
        patch.object(_SingleLevelFunction, "apply", classmethod(applied), create=True),
        patch.object(function, "custom_function_call", transformed),
        patch.object(torch.autograd, "_engine_run_backward", engine),
        patch.object(saved_tensors_hooks, "__enter__", enter),
        patch.object(torch.inference_mode, "__enter__", infer),
        patch(_MOD_INDEX, torch.ops.aten.index),  # torch's own, for masks written by vmap; its gradient is the same
        _scoped_library("autoptd_own", "FRAGMENT") as library,
        _methods(calls),
    ):
        library._register_fake("call", shape_of)
        library._register_fake("hook", lambda key, given: None)
        yield


@contextmanager
def _methods(calls: OwnCalls) -> Iterator[None]:
    """Patch methods that concern gradients. A TorchFunctionMode is no option: torch.cond cannot be traced in one."""
    with ExitStack() as stack:

        def put(name: str, method: object) -> None:
            stack.enter_context(patch.object(Tensor, name, method, create=True))

        for name in ("retain_grad", "register_post_accumulate_grad_hook"):
            put(name, _refused(calls, name, getattr(Tensor, name)))
        for name in ("register_backward_hook", "register_full_backward_hook", "register_full_backward_pre_hook"):
            stack.enter_context(patch.object(nn.Module, name, _refused(calls, name, getattr(nn.Module, name))))
        register, requires, grad_fn, ask = Tensor.register_hook, _REQUIRES, _GRAD_FN, Tensor.requires_grad_

        def register_hook(self: Tensor, hook: Callable[[Tensor], Any]) -> Any:
            return _hook(calls, self, hook) if calls.tracing else register(self, hook)

        def requires_grad_(self: Tensor, requires_grad: bool = True) -> Tensor:
            _check_frozen(calls, self, requires_grad)
            return ask(self, requires_grad)

        def set_requires_grad(self: Tensor, value: bool) -> None:
            _check_frozen(calls, self, value)
            requires.__set__(self, value)

        def get_grad_fn(self: Tensor) -> Any:
            if calls.tracing and _users_call():
                raise UnsupportedOp(
                    "forward reads grad_fn, which a program does not have", fix="use Tensor.register_hook or a Function"
                )
            return grad_fn.__get__(self)

        put("register_hook", register_hook)
        put("requires_grad_", requires_grad_)
        put("requires_grad", property(requires.__get__, set_requires_grad))
        put("grad_fn", property(get_grad_fn))
        yield


_REQUIRES: Any = vars(torch._C.TensorBase)["requires_grad"]
_GRAD_FN: Any = vars(torch._C.TensorBase)["grad_fn"]


def _refused(calls: OwnCalls, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if calls.tracing:
            raise UnsupportedOp(
                f"forward calls {name}: the emitted program stores no gradients of activations",
                fix="remove it; gradients of parameters are in parallel.gradients() after a step",
            )
        return method(*args, **kwargs)

    return run


def _check_frozen(calls: OwnCalls, tensor: Tensor, value: bool) -> None:
    if calls.tracing and isinstance(tensor, nn.Parameter) and bool(value) != tensor.requires_grad:
        raise UnsupportedOp(
            "forward freezes or unfreezes a parameter",
            fix="set requires_grad before planning; inside forward use parameter.detach()",
        )


def _users_call() -> bool:
    """Return whether torch was called by code that is not torch's, skipping this file and torch_function frames."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_filename == __file__ or "torch_function" in frame.f_code.co_name
    ):
        frame = frame.f_back
    return not frame.f_code.co_filename.startswith(_TORCH)


def _apply(calls: OwnCalls, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `cls.apply(*args, **kwargs)`, recorded as one op if a model is being traced."""

    def plain(*args: Any, **kwargs: Any) -> Any:
        return super(_SingleLevelFunction, cls).apply(*args, **kwargs)  # type: ignore[misc]

    mode, home = get_proxy_mode(), cls.__module__
    if mode is None or calls.trying or home.startswith("autoptd."):
        return plain(*args, **kwargs)
    reading = _Reading()
    positional, named = reading.template(args, cls), {k: reading.template(v, cls) for k, v in kwargs.items()}
    bare = OwnCall(OwnFunction(cls, calls.name(cls), ()), positional, named)
    tracer: Any = mode.tracer

    def run(given: Sequence[Tensor]) -> Any:
        filled, options = bare.filled(given, reading.sizes)
        return plain(*filled, **options)

    proxies = [_proxy(tracer, x) for x in reading.given]
    with disable_proxy_modes_tracing(), calls.trial():
        trial = FunctionTrial(run, reading.given)
    flows = tuple(y.requires_grad or not torch.is_grad_enabled() for y in trial.outputs)
    target = OwnFunction(cls, bare.target.name, flows, trial.view, trial.reached)
    several = not isinstance(trial.result, Tensor)
    key = calls.key(OwnCall(target, positional, named, several))
    sizes = [_proxy_of_size(tracer, n) for n in reading.sizes]
    proxy = tracer.create_proxy("call_function", CALL, (key, proxies, sizes), {})
    track_tensor_tree(trial.outputs, proxy, constant=None, tracer=tracer)
    return trial.result


class _HookHandle:
    """Handle that removes a hook from the trace."""

    def __init__(self, node: fx.Node) -> None:
        self.node = node

    def remove(self) -> None:
        if self.node.graph is not None and self.node in self.node.graph.nodes:
            self.node.graph.erase_node(self.node)

    def __enter__(self) -> _HookHandle:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def _hook(calls: OwnCalls, tensor: Tensor, hook: Callable[[Tensor], Any]) -> _HookHandle:
    mode = get_proxy_mode()
    assert mode is not None
    if not tensor.requires_grad:
        raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
    if isinstance(tensor, nn.Parameter):
        raise UnsupportedOp(
            "forward registers a hook on a parameter and does not remove it: every forward pass adds another one",
            fix="register it on a tensor that forward computes, or wrap the parameter in a torch.autograd.Function",
        )
    tracer: Any = mode.tracer
    proxy = _proxy(tracer, tensor)
    with disable_proxy_modes_tracing(), calls.trial():
        try_hook(hook, tensor)
    key = calls.key(OwnCall(OwnHook(calls.equal(hook), calls.name(hook))))
    return _HookHandle(tracer.create_proxy("call_function", HOOK, (key, proxy), {}).node)


def _proxy(tracer: Any, tensor: Tensor) -> fx.Proxy:
    found = tracer.tensor_tracker.get(tensor)
    if found is None:
        raise UnsupportedOp(
            f"a user-defined autograd function gets a tensor {list(tensor.shape)} from outside the model",
            fix="make it a parameter, a buffer or an input of the model",
        )
    proxy: fx.Proxy = found.proxy
    return proxy


def _proxy_of_size(tracer: Any, size: SymInt) -> Any:
    found = tracer.symnode_tracker.get(size)
    return size if found is None else found.force()


class _Reading:
    """Collector of the tensors and sizes among arguments, in order."""

    def __init__(self) -> None:
        self.given: list[Tensor] = []
        self.sizes: list[SymInt] = []

    def template(self, value: Any, cls: type) -> Any:
        """Return a value with placeholders for tensors and sizes. Raises UnsupportedOp for types without literals."""
        if isinstance(value, Tensor):
            self.given.append(value)
            return Given(len(self.given) - 1)
        if isinstance(value, SymInt):
            self.sizes.append(value)
            return Size(len(self.sizes) - 1)
        if type(value) in _ATOMS or isinstance(value, torch.dtype):
            return value
        if type(value) in (tuple, list, torch.Size):
            items = [self.template(v, cls) for v in value]
            return items if type(value) is list else tuple(items)
        raise UnsupportedOp(
            f"{cls.__name__}.apply is given an argument of type {type(value).__name__}",
            fix="pass tensors, numbers, strings, and tuples or lists of them; emitted code cannot express other types",
        )


def _fill(value: Any, given: Sequence[Any], sizes: Sequence[Any]) -> Any:
    match value:
        case Given(index):
            return given[index]
        case Size(index):
            return sizes[index]
        case tuple() | list():
            return type(value)(_fill(v, given, sizes) for v in value)
    return value


def _identity(function: Any) -> object:
    """Return a key that is equal for the same object, and for functions with the same code over the same values."""
    if isinstance(function, MethodType):
        return _identity(function.__func__), id(function.__self__)
    if isinstance(function, FunctionType):
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        held = (*cells, *(function.__defaults__ or ()))
        return function.__code__, tuple((type(v), repr(v)) if isinstance(v, _ATOMS) else id(v) for v in held)
    return id(function)
