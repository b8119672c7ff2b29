"""Trace equal modules once, so that tracing does not grow with the depth of a model.

    first call        traced in full, between two marks:   enter(k, given) … leave(k, made)
    second call       traced in full, and compared with the first
    every later one   one opaque call, repeat(k, given), which `expand_repeats` replaces by a copy of the first

Two calls are alike if their modules are (see `repeat_state`) and their arguments are: the argument tree, the plain
values in it, and shape, stride, dtype and requires_grad of its tensors, with sizes as expressions. `given` are the
tensors among the arguments plus the module's parameters and buffers; `made` are the tensors computed and returned. The
code around a repeated module still runs for every call, so its inputs (residuals, masks, tied parameters) are wired
exactly. A call is traced in full if it may depend on anything else: it reads outside tensors, writes to any but its
own buffers, changes its arguments or attributes, has hooks, returns something unknown, or its second trace differs from
the first.

This uses torch's private tracer (`torch.fx.experimental.proxy_tensor`, seen in 2.13.0); no other file of autoptd does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, track_tensor_tree
from torch.nn.modules import module as module_state
from torch.utils import _pytree as pytree

from autoptd.passes.trace.repeat_state import Read, Same, Unknown, atom, describe, state, watch_of, watching

_LIBRARY = torch.library.Library("autoptd_trace", "FRAGMENT")
_TAGS = (torch.Tag.flexible_layout,)  # without it, the tracer stores copies of all arguments, as strides might matter
_LIBRARY.define("enter(int key, Tensor[] given) -> ()", tags=_TAGS)
_LIBRARY.define("leave(int key, Tensor[] made) -> ()", tags=_TAGS)
_LIBRARY.define("repeat(int key, Tensor[] given) -> Tensor[]", tags=_TAGS)
ENTER = torch.ops.autoptd_trace.enter.default
LEAVE = torch.ops.autoptd_trace.leave.default
REPEAT = torch.ops.autoptd_trace.repeat.default

_NO_TORCH_FUNCTION = torch._C.DisableTorchFunction  # without it, each read of a shape passes through four modes
_TRIES = 8  # captures of calls that are alike but for watched attributes; beyond these, calls are not compared


@dataclass
class Capture:
    """One traced call: the attributes it read, its results, and its nodes in comparable form."""

    key: int
    path: str  # of the module
    reads: Mapping[tuple[str, str], Hashable]  # (submodule, watched attribute) -> its value
    made: list[Tensor]  # distinct tensors that it computed and returned
    leaves: list[tuple[str, Any]]  # of the result: ("made", i), ("given", i) or ("plain", value)
    spec: pytree.TreeSpec
    form: list[Hashable]
    results: list[Hashable]  # references of `made` into `form`
    confirmed: bool = False


@dataclass
class _ModuleCall:
    """A call about to run: its description, its argument leaves and the nodes of its input tensors."""

    alike: Hashable  # equal for calls that are alike
    leaves: list[Any]
    nodes: dict[fx.Node, int]  # node of each distinct tensor -> its position in `given`
    buffers: frozenset[fx.Node]  # of these, the module's own buffers, which the call may write to


class Repeats:
    """Runner of a model's module calls during export. `captures` and `paths` are read by `expand_repeats`.

    `gradients`: whether the trace has them on, but for regions of forward.
    """

    def __init__(self, model: nn.Module, gradients: bool = True) -> None:
        self.captures: dict[int, Capture] = {}  # by key
        self.paths: dict[int, list[str]] = {}  # key -> paths of the modules that repeat it, in call order
        self._known: dict[Hashable, list[Capture]] = {}
        self._refused: set[Hashable] = set()
        self._modules = {id(vars(m)): m for m in model.modules() if _is_compared(m)}
        self._model, self._watch, self._gradients = model, watch_of(model), gradients
        self._keys = 0

    def running(self) -> AbstractContextManager[None]:
        """Return the context in which the model is traced."""
        return watching(self._model, self._watch, _is_compared, self._run_call)

    def _run_call(self, module: nn.Module, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        base = self._modules.get(id(vars(module)))
        mode = get_proxy_mode()
        if base is None or mode is None or not self._is_plain():
            return inner(module, *args, **kwargs)
        if id(vars(base)) not in self._watch.several:
            self._watch.several.add(id(vars(base)))  # a module without equals is compared from its second call on
            return inner(module, *args, **kwargs)
        tracer: Any = mode.tracer
        try:
            path = tracer.path_of_module(module)
            with _NO_TORCH_FUNCTION():
                call = self._call(tracer, base, args, kwargs)
            known = self._known.setdefault(call.alike, [])
            like = next((c for c in known if self._agrees(c, base)), None)
            if call.alike in self._refused or (like is None and len(known) >= _TRIES):
                return inner(module, *args, **kwargs)
        except (Unknown, NameError):
            return inner(module, *args, **kwargs)
        if like is not None and like.confirmed:
            return self._repeat(tracer, like, base, path, call)
        out, capture = self._capture(tracer, base, path, call, lambda: inner(module, *args, **kwargs), args, kwargs)
        if capture is None:
            self._refused.add(call.alike)
        elif like is None:
            known.append(capture)
            self.captures[capture.key] = capture
        elif _same(like, capture):
            like.confirmed = True
        else:
            self._refused.add(call.alike)
        return out

    def _is_plain(self) -> bool:
        """Return whether no global state changes a call: gradients as elsewhere, no autocast, no module hooks."""
        hooks = (
            module_state._global_forward_hooks,
            module_state._global_forward_pre_hooks,
            module_state._global_backward_hooks,
            module_state._global_backward_pre_hooks,
        )
        autocast = any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
        return torch.is_grad_enabled() == self._gradients and not autocast and not any(hooks)

    def _call(self, tracer: Any, base: nn.Module, args: Any, kwargs: Any) -> _ModuleCall:
        """Describe a call. Raises Unknown if it cannot be compared with others."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        nodes: dict[fx.Node, int] = {}
        described = [_describe_tensor(tracer, x, nodes) if isinstance(x, Tensor) else atom(x) for x in leaves]
        for m in base.modules():
            for own in (*m._parameters.values(), *m._buffers.values()):
                if own is not None:
                    described.append(_describe_tensor(tracer, own, nodes))
        buffers = frozenset(_node_of(tracer, x) for x in base.buffers())
        surroundings = torch.get_default_dtype(), torch.get_default_device()
        return _ModuleCall(
            (describe(base, self._watch), tuple(described), str(spec), surroundings), leaves, nodes, buffers
        )

    def _agrees(self, capture: Capture, base: nn.Module) -> bool:
        return all(_held(base, *name) == value for name, value in capture.reads.items())

    def _capture(
        self, tracer: Any, base: nn.Module, path: str, call: _ModuleCall, run: Callable[[], Any], args: Any, kwargs: Any
    ) -> tuple[Any, Capture | None]:
        """Run and trace a call; return its result, and its capture if it can be repeated."""
        try:
            with _NO_TORCH_FUNCTION():
                before = state(base)
        except Unknown:
            return run(), None
        self._keys += 1
        key, given = self._keys, list(call.nodes)
        outer = set(self._watch.read)
        self._watch.read.clear()
        enter = tracer.create_node("call_function", ENTER, (key, given), {})
        enter.meta["val"] = None
        out = run()
        mine = set(self._watch.read)
        self._watch.read |= outer
        try:
            with _NO_TORCH_FUNCTION():
                after = pytree.tree_leaves((args, kwargs))
                same = self._is_plain() and state(base) == before and _unchanged(call.leaves, after)
                capture = self._build_capture(tracer, base, path, call, key, enter, out, mine) if same else None
        except Unknown:
            capture = None
        if capture is None:
            tracer.graph.erase_node(enter)
            return out, None
        made = [_node_of(tracer, t) for t in capture.made]
        leave = tracer.create_node("call_function", LEAVE, (key, made), {})
        leave.meta["val"] = None
        return out, capture

    def _build_capture(
        self,
        tracer: Any,
        base: nn.Module,
        path: str,
        call: _ModuleCall,
        key: int,
        enter: fx.Node,
        out: Any,
        mine: set[Read],
    ) -> Capture:
        """Return the capture of the nodes traced since `enter`. Raises Unknown if they depend on more than `given`."""
        env: dict[fx.Node, Hashable] = {n: ("given", i) for n, i in call.nodes.items()}
        form = list(_form(_nodes_after(enter), env, self.captures, call.buffers))
        leaves, spec = pytree.tree_flatten(out)
        made: dict[fx.Node, Tensor] = {}
        sources: list[tuple[str, Any]] = []
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                atom(leaf)
                sources.append(("plain", leaf))
                continue
            node = _node_of(tracer, leaf)
            if node in call.nodes:
                sources.append(("given", call.nodes[node]))
            elif node in env:
                sources.append(("made", list(made).index(node) if node in made else len(made)))
                made.setdefault(node, leaf)
            else:
                raise Unknown("a result from outside")
        names = {id(vars(m)): n for n, m in base.named_modules()}
        reads = {(names[held], a): _held(base, names[held], a) for held, a in mine if held in names}
        self._check_results(sources, call, leaves)
        return Capture(key, path, reads, list(made.values()), sources, spec, form, [env[n] for n in made])

    def _check_results(self, sources: list[tuple[str, Any]], call: _ModuleCall, leaves: list[Any]) -> None:
        """Raise Unknown if the call returns its own parameter or buffer: a later call could not return its own one."""
        arguments = {id(x) for x in call.leaves}
        if any(what == "given" and id(leaf) not in arguments for (what, _), leaf in zip(sources, leaves, strict=True)):
            raise Unknown("a result that is its own parameter")

    def _repeat(self, tracer: Any, capture: Capture, base: nn.Module, path: str, call: _ModuleCall) -> Any:
        """Record a `repeat` node instead of running the call, and return the call's result."""
        with disable_proxy_modes_tracing():
            made = [_fresh(t) for t in capture.made]
        proxy = tracer.create_proxy(
            "call_function", REPEAT, (capture.key, [fx.Proxy(n, tracer) for n in call.nodes]), {}
        )
        track_tensor_tree(made, proxy, constant=None, tracer=tracer)
        self.paths.setdefault(capture.key, []).append(path)
        self._watch.read |= {(id(vars(base.get_submodule(name))), a) for name, a in capture.reads}
        by_node = {i: x for x in call.leaves if isinstance(x, Tensor) for i in [call.nodes[_node_of(tracer, x)]]}
        pick = {"made": made.__getitem__, "given": by_node.__getitem__, "plain": lambda value: value}
        return pytree.tree_unflatten([pick[what](which) for what, which in capture.leaves], capture.spec)


def _is_compared(module: nn.Module) -> bool:
    """Return whether calls of a module are compared: not for module containers, nor torch modules of a single op."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return False
    return bool(module._modules) or not type(module).__module__.startswith("torch.nn.")


def _node_of(tracer: Any, tensor: Tensor) -> fx.Node:
    found = tracer.tensor_tracker.get(tensor)
    if found is None or found.constant is not None:
        raise Unknown("a tensor with a value")
    node: fx.Node = found.proxy.node
    return node


def _describe_tensor(tracer: Any, tensor: Tensor, nodes: dict[fx.Node, int]) -> Hashable:
    if getattr(tensor, "constant", None) is not None or tensor.layout != torch.strided:
        raise Unknown("a tensor with a value")
    place = nodes.setdefault(_node_of(tracer, tensor), len(nodes))
    return place, type(tensor), isinstance(tensor, nn.Parameter), *_meta(tensor)


def _meta(tensor: Tensor) -> tuple[Hashable, ...]:
    strides = map(_size, tensor.stride())
    return tuple(map(_size, tensor.shape)), tuple(strides), tensor.dtype, tensor.device, tensor.requires_grad


def _size(size: Any) -> Hashable:
    return size.node.expr if isinstance(size, SymInt) else size


def _held(base: nn.Module, name: str, attribute: str) -> Hashable:
    held = vars(base.get_submodule(name))
    return atom(held[attribute]) if attribute in held else "absent"


def _unchanged(before: list[Any], after: list[Any]) -> bool:
    return len(before) == len(after) and all(a is b for a, b in zip(before, after, strict=True))


def _nodes_after(enter: fx.Node) -> Iterator[fx.Node]:
    node = enter.next
    while node.op != "root":
        yield node
        node = node.next


def is_size(node: fx.Node) -> bool:
    """Return whether a node computes a size. Sizes are compared as expressions, wherever they are computed."""
    return isinstance(node.meta.get("val"), (SymInt, SymFloat, SymBool))


# ---- comparable form of a range of nodes ----


def _form(
    nodes: Iterator[fx.Node], env: dict[fx.Node, Hashable], captures: Mapping[int, Capture], own: Collection[fx.Node]
) -> Iterator[Hashable]:
    """Yield one entry per node, and store each node's reference in `env`. Nested repeats are expanded. Raises Unknown
    for a node that cannot be repeated, that reads a tensor from outside, or that writes to one besides `own` ones."""
    inside = set(own)
    count = 0

    def refer(value: Any) -> Hashable:
        if isinstance(value, fx.Node):
            if is_size(value):
                return "size", value.meta["val"].node.expr
            if value not in env:
                raise Unknown("a tensor from outside")
            return env[value]
        if isinstance(value, (tuple, list)):
            return tuple(map(refer, value))
        return atom(value)

    for node in nodes:
        if node.target in (ENTER, LEAVE) or is_size(node):
            continue
        _check_node(node, inside)
        inside.add(node)
        if node.target is REPEAT:
            capture, given = captures[node.args[0]], refer(node.args[1])  # type: ignore[index]
            yield from (_moved(entry, given, count) for entry in capture.form)
            env[node] = "several", tuple(_moved(r, given, count) for r in capture.results)
            count += len(capture.form)
            continue
        source = env.get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
        if isinstance(source, tuple) and source[0] == "several":
            env[node] = source[1][node.args[1]]
            continue
        env[node] = "node", count
        kwargs = tuple((k, refer(v)) for k, v in node.kwargs.items())
        yield Same(node.target), refer(node.args), kwargs, _values(node.meta.get("val"))
        count += 1


def _moved(value: Any, given: Any, by: int) -> Any:
    """Rebase the references of a nested form: `given` replaces its inputs, node numbers grow by `by`."""
    if isinstance(value, tuple):
        if len(value) == 2 and value[0] == "given" and type(value[1]) is int:
            return given[value[1]]
        if len(value) == 2 and value[0] == "node" and type(value[1]) is int:
            return "node", value[1] + by
        return tuple(_moved(v, given, by) for v in value)
    return value


def _values(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return _meta(value)
    if isinstance(value, (tuple, list)):
        return tuple(map(_values, value))
    return atom(value)


def _check_node(node: fx.Node, inside: set[fx.Node]) -> None:
    target = node.target
    if node.op != "call_function" or isinstance(target, torch._ops.HigherOrderOperator):
        raise Unknown(f"{node.op} {target}")
    if "unbacked_bindings" in node.meta:
        raise Unknown("a size that depends on data")
    if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
        for value, argument in zip(node.args, target._schema.arguments, strict=False):
            writes = argument.alias_info is not None and argument.alias_info.is_write
            if writes and isinstance(value, fx.Node) and value not in inside:
                raise Unknown("writes to a tensor from outside")


def _same(a: Capture, b: Capture) -> bool:
    """Return whether two calls with equal descriptions computed and returned the same."""
    sides = [
        (c.form, c.results, c.reads, c.spec, [(what, atom(x)) for what, x in c.leaves], list(map(_meta, c.made)))
        for c in (a, b)
    ]
    return sides[0] == sides[1]


# ---- placeholder results of a call that is not run ----


class _New(torch.autograd.Function):
    """Return an empty tensor like another one, which requires a gradient because `anchor` does."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, like: Tensor) -> Tensor:
        return _empty(like)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AssertionError("a traced model is not run backward")


def _empty(like: Tensor) -> Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)


def _fresh(like: Tensor) -> Tensor:
    if not like.requires_grad:
        return _empty(like)
    anchor = torch.empty((), dtype=like.dtype, device=like.device, requires_grad=True)
    return _New.apply(anchor, like)  # type: ignore[no-untyped-call, no-any-return]
