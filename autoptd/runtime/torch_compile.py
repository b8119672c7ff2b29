"""torch.compile for a stage: one compilation per class of block, shared by all its layers, and of what is around them.

A stage's own code is compiled in its runs of straight-line statements (`straight_line.py`), such as the embedding
before the blocks, and after them the head and its loss: inductor pads a head whose vocabulary is no multiple of eight,
and fuses the loss with the cast of its logits to float32.

Ops that communicate or draw random numbers stay eager, so each block becomes several graphs with eager calls between
them; collectives keep their order and dropout masks their keys. Module hooks still run (they wait for parameter
all-gathers), and so do gradient hooks of each parameter (they reduce buckets). A smaller last microbatch causes one
more compilation, for dynamic sizes, in the first step.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cache
from threading import Lock
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from autoptd.errors import PlanError, RuntimeFault
from autoptd.ops import library as ops
from autoptd.ops.expert_axis import Experts
from autoptd.ops.recompute import keep, recompute, spare
from autoptd.ops.stage import Stage, parts_of
from autoptd.ops.tp_axis import Axis
from autoptd.runtime.straight_line import PART, inline, split
from autoptd.schedule import row_of

DEFAULT = "inductor"
_ON_HOST = ("grouped_mm",)  # reads values on the host
_MOST_GRAPHS = 64  # of a function: 0, 1 or more rows for any of several experts are different graphs
_PARSER_LOCK = Lock()  # for ranks that are threads: CPython's parser counts recursion depth over all threads


def check_backend(backend: str, schedule: str, device: torch.device | None = None) -> None:
    """Raise PlanError for a backend that torch does not know, or that cannot run this schedule or on this device."""
    from torch.compiler import list_backends
    from torch.utils._triton import has_triton

    known = list_backends(())
    if backend not in known:
        raise PlanError(f"unknown backend {backend!r}", where="compile", fix=f"give True, or one of {', '.join(known)}")
    if row_of(schedule).splits_backward:
        raise PlanError(
            f"the {schedule} schedule splits backward passes into B and W, which compiled blocks cannot do",
            where="compile",
            fix="plan with another schedule, or leave out compile=",
        )
    if backend == DEFAULT and device is not None and device.type == "cuda" and not has_triton():
        raise PlanError(
            "blocks cannot be compiled: Triton, with which torch.compile makes kernels for a GPU, does not work here",
            where="compile",
            fix="install the triton of this torch, or pass compile=False: slower than predicted",
        )


@contextmanager
def compiling(compiled: bool) -> Iterator[None]:
    """Turn an error of torch.compile within a step into RuntimeFault, with the way out.

    Having compiled a function too often, torch would run it without a graph: a block that is recomputed so saves other
    tensors than it did in its graph. That is an error, of more graphs than any program should need.
    """
    if not compiled:
        yield
        return
    from torch._dynamo import config
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    try:
        with config.patch(fail_on_recompile_limit_hit=True, recompile_limit=_MOST_GRAPHS):
            yield
    except (RuntimeError, FailOnRecompileLimitHit) as error:
        root = error.__cause__ or error
        if not isinstance(root, TorchDynamoException | FailOnRecompileLimitHit):
            raise
        raise RuntimeFault(
            f"torch.compile cannot compile the program: {' '.join(str(root).splitlines()[:2])}",
            where=getattr(error, "where", ""),
            fix="pass compile=False, and plan with fix={'kernels': 'eager'} for predictions of that",
        ) from error


def compile_stage(stage: Stage, backend: str = DEFAULT) -> int:
    """Compile a stage's blocks and own code at their first call; return the number of blocks."""
    blocks = blocks_of(stage)
    outside: dict[int, Axis | Experts] = {}
    for block in blocks.values():
        for module in (block, *parts_of(block)):
            for name, axis in [(n, x) for n, x in vars(module).items() if isinstance(x, Axis | Experts)]:
                if id(axis) not in outside:
                    outside[id(axis)] = copy(axis)
                    outside[id(axis)].__class__ = _outside_axis(type(axis))  # type: ignore[arg-type]
                setattr(module, name, outside[id(axis)])
        with _PARSER_LOCK:
            compiled = _compiled(type(block), tuple(map(type, parts_of(block))), backend)  # type: ignore[arg-type]
            block.forward = MethodType(compiled, block)
    with _PARSER_LOCK:
        forward, *parts = _compiled_parts(type(stage), backend)  # type: ignore[arg-type]
    for index, part in enumerate(parts):
        setattr(stage, f"{PART}{index}", MethodType(part, stage))
    stage.forward = MethodType(forward, stage)  # type: ignore[method-assign]
    return len(blocks)


def blocks_of(stage: Stage) -> dict[str, nn.Module]:
    """Return the outermost modules with a forward of their own, by path; those that own no parameters by list."""
    found: dict[str, nn.Module] = {}
    for path, module in stage.named_modules():
        if module is not stage and type(module) is not nn.Module and not any(path.startswith(f"{b}.") for b in found):
            found[path] = module
    lists = ((name, x) for name, x in vars(stage).items() if isinstance(x, list))
    listed = {f"{name}.{i}": x for name, each in lists for i, x in enumerate(each) if isinstance(x, nn.Module)}
    owned = set(map(id, found.values()))
    return found | {name: module for name, module in listed.items() if id(module) not in owned}


@cache
def _compiled(block: type[nn.Module], parts: tuple[type[nn.Module], ...], backend: str) -> Callable[..., Any]:
    """Compile a class's forward and that of the parts it calls, with the eager versions of `ops` that stay outside."""
    outside = _outside_ops()
    tree = _with_parts(_tree(block), parts)
    tree = _DeferredKeys(frozenset(vars(outside))).visit(tree)
    names = {"ops": _compiled_ops(vars(outside))}
    names |= {f.__name__: torch.compiler.disable(f) for f in (keep, recompute, spare)}
    made: Callable[..., Any] = torch.compile(_run(tree, block, names)[block.forward.__name__], backend=backend)
    return made


def _with_parts(tree: ast.Module, parts: Sequence[type[nn.Module]]) -> ast.Module:
    """Write the parts that a forward calls into it; it names them in one statement, `attention, mlp = self._parts`."""
    (forward,) = tree.body
    assert isinstance(forward, ast.FunctionDef)
    tuples = (t for s in forward.body if isinstance(s, ast.Assign) for t in s.targets if isinstance(t, ast.Tuple))
    called = [name.id for name in next(tuples).elts if isinstance(name, ast.Name)] if parts else []
    methods = [_tree(part).body[0] for part in parts]
    inline(forward, {n: m for n, m in zip(called, methods, strict=True) if isinstance(m, ast.FunctionDef)})
    return tree


@cache
def _compiled_parts(stage: type[Stage], backend: str) -> list[Callable[..., Any]]:
    """Return a class's forward, which calls its straight-line runs as methods, and those, compiled."""
    outside = {f"ops.{name}" for name in vars(_outside_ops())}
    tree = _tree(stage)
    (forward,) = tree.body
    assert isinstance(forward, ast.FunctionDef)
    parts = split(forward, lambda call: ast.unparse(call.func) not in outside and not _writes(call))
    tree.body += parts
    names = _run(tree, stage, {"ops": _compiled_ops({})})
    return [names[forward.name], *(torch.compile(names[part.name], backend=backend) for part in parts)]


def _writes(call: ast.Call) -> bool:
    """Return whether a call overwrites its operands, which a graph may hold for its backward pass."""
    return any(k.arg == "in_place" and ast.unparse(k.value) == "True" for k in call.keywords)


def _tree(module: type[nn.Module]) -> ast.Module:
    return ast.parse(textwrap.dedent(inspect.getsource(module.forward)))


def _run(tree: ast.Module, module: type[nn.Module], names: dict[str, Any]) -> dict[str, Any]:
    """Run definitions that stand in the place of a class's forward; return all names of its file, some replaced."""
    file, line = inspect.getsourcefile(module.forward) or "", inspect.getsourcelines(module.forward)[1]
    code = compile(ast.increment_lineno(ast.fix_missing_locations(tree), line - 1), file, "exec")
    found = vars(sys.modules[module.__module__]) | names
    exec(code, found)
    return found


class _DeferredKeys(ast.NodeTransformer):
    """Wraps f-string keys of eager ops in lambdas: a graph with a layer's number in it would fit that layer only."""

    def __init__(self, outside: frozenset[str]) -> None:
        self._outside = outside

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        called = node.func
        if isinstance(called, ast.Attribute) and ast.unparse(called.value) == "ops" and called.attr in self._outside:
            for keyword in (k for k in node.keywords if isinstance(k.value, ast.JoinedStr)):
                keyword.value = ast.Lambda(ast.arguments([], [], None, [], [], None, []), keyword.value)
        return node


@cache
def _outside_axis(axis: type) -> type:
    """Make a subclass of an axis whose methods all stay eager."""
    names = [name for name, f in inspect.getmembers(axis, inspect.isfunction) if not name.startswith("_")]
    return type(f"Outside{axis.__name__}", (axis,), {n: torch.compiler.disable(getattr(axis, n)) for n in names})


def _compiled_ops(outside: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(**vars(ops) | {"as_complex": _copied_as_complex} | outside)


def _copied_as_complex(x: Tensor) -> Tensor:
    """`ops.as_complex` of a copy. No graph can ask where memory begins, and in torch 2.13 none can begin with a complex
    view of a real tensor whose last dim is not 2."""
    return torch.view_as_complex(x.clone(memory_format=torch.contiguous_format))


@cache
def _outside_ops() -> SimpleNamespace:
    """Return eager versions of the `ops` that communicate, draw or read values; they take functions for keys."""
    return SimpleNamespace(**{name: _outside(f) for name, f in vars(ops).items() if _stays_outside(name, f)})


def _outside(f: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **named: Any) -> Any:
        return f(*args, **{name: x() if isinstance(x, FunctionType) else x for name, x in named.items()})

    return torch.compiler.disable(call)


def _stays_outside(name: str, f: object) -> bool:
    ours = isinstance(f, FunctionType) and f.__module__.startswith("autoptd.ops.")
    if not isinstance(f, FunctionType) or not ours or name.startswith("_"):
        return False
    types = " ".join(str(p.annotation) for p in inspect.signature(f).parameters.values())
    return name in _ON_HOST or any(word in types for word in ("Axis", "Tokens", "DropoutKey"))
