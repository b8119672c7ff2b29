"""Emitted stage files that tell what each of their lines makes, and the list of what they told.

    o_proj_whole = tp.all_reduce_both(o_proj)
    o_proj_whole = _seen(_frame, "o_proj_whole", o_proj_whole)      added after each assignment of a forward pass

Nothing else of a file is changed. What a block runs again in the backward pass is not told twice.
"""

from __future__ import annotations

import ast
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from autoptd.codegen.emit import Program
from autoptd.ops.stage import Stage

Line = tuple[str, str, int]  # class, variable, which of its assignments
_IMPORT = ast.parse("from autoptd.verification.locate.recorder import begin as _begin, end as _end, seen as _seen").body


@dataclass
class Told:
    """A tensor that a line made on one rank, and its gradient once there is one."""

    stage: int
    microbatch: int
    block: int | None  # which of the stage's block calls; None: the stage's own line
    line: Line
    value: Tensor
    gradient: Tensor | None = None


@dataclass
class Recorder:
    """What one rank tells. `stages`: its own, by id."""

    stages: dict[int, int] = field(default_factory=dict)
    told: list[Told] = field(default_factory=list)
    microbatches: Counter[int] = field(default_factory=Counter)
    open: bool = True
    at: tuple[int, int] | None = None  # the stage and microbatch whose forward pass is under way
    blocks: int = 0


@dataclass
class Frame:
    """One forward pass of a stage or block; of None nothing is told."""

    recorder: Recorder | None
    name: str
    stage: int = 0
    microbatch: int = 0
    block: int | None = None
    count: Counter[str] = field(default_factory=Counter)


_HERE = threading.local()  # `recorder`: of the rank that is this thread


def record_here(recorder: Recorder) -> None:
    """From now on this thread's emitted code tells `recorder`."""
    _HERE.recorder = recorder


def begin(module: Any) -> Frame:
    """A forward pass begins."""
    recorder: Recorder | None = getattr(_HERE, "recorder", None)
    name = type(module).__name__
    if recorder is None or not recorder.open:
        return Frame(None, name)
    if isinstance(module, Stage):
        stage = recorder.stages[id(module)]
        recorder.at, recorder.blocks = (stage, recorder.microbatches[stage]), 0
        recorder.microbatches[stage] += 1
        return Frame(recorder, name, *recorder.at)
    if recorder.at is None:  # run again, in a backward pass
        return Frame(None, name)
    recorder.blocks += 1
    return Frame(recorder, name, *recorder.at, block=recorder.blocks - 1)


def end(frame: Frame) -> None:
    """A stage's forward pass is over."""
    if frame.recorder is not None and frame.block is None:
        frame.recorder.at = None


def seen(frame: Frame, name: str, x: Any) -> Any:
    """Tell what a variable holds, and hand it on."""
    recorder = frame.recorder
    if recorder is None or recorder.at is None or not isinstance(x, Tensor):
        return x
    frame.count[name] += 1
    line = frame.name, name, frame.count[name] - 1
    told = Told(frame.stage, frame.microbatch, frame.block, line, x.detach().clone())
    recorder.told.append(told)
    if x.requires_grad:
        x = x.view_as(x)  # a cast to the type that it has is the same tensor, with the gradient of both
        x.register_hook(lambda grad: _keep(told, grad))
    return x


def _keep(told: Told, grad: Tensor) -> None:
    if told.gradient is None:
        told.gradient = grad.detach().clone()


def recording(program: Program) -> tuple[Program, dict[Line, str]]:
    """The program that tells, and where each line stands: `blocks.py:57  o_proj_whole = tp.all_reduce_both(o_proj)`."""
    files, places = dict(program.files), dict[Line, str]()
    for name, text in program.files.items():
        if name.endswith(".py") and name != "__init__.py":
            tree = ast.parse(text)
            for node in tree.body:
                if isinstance(node, ast.ClassDef):
                    places |= _instrument(node, name, text.splitlines())
            at = 1 + max(
                i for i, n in enumerate(tree.body) if isinstance(n, ast.ImportFrom) and n.module == "__future__"
            )
            tree.body[at:at] = _IMPORT
            files[name] = ast.unparse(ast.fix_missing_locations(tree))
    return replace(program, files=files), places


def _instrument(cls: ast.ClassDef, file: str, lines: list[str]) -> Mapping[Line, str]:
    places: dict[Line, str] = {}
    count: Counter[str] = Counter()
    for forward in [n for n in cls.body if isinstance(n, ast.FunctionDef) and n.name == "forward"]:
        arguments = [a.arg for a in forward.args.args[1:] if _is_tensor(a)]
        for name in arguments:
            places[cls.name, name, count[name]] = f"{file}:{forward.lineno}  {name}, as {cls.name}.forward is given it"
            count[name] += 1
        _walk(forward, cls.name, file, lines, count, places)
        first = ast.parse("_frame = _begin(self)").body
        told = [_tell(name) for name in arguments]
        forward.body[:0] = [*first, *told]
        _before_return(forward)
    return places


def _is_tensor(argument: ast.arg) -> bool:
    return isinstance(argument.annotation, ast.Name) and argument.annotation.id == "Tensor"


def _walk(node: Any, cls: str, file: str, lines: list[str], count: Counter[str], places: dict[Line, str]) -> None:
    """After each assignment, telling what it made; in functions within the forward pass too."""
    body: list[ast.stmt] = []
    for statement in node.body:
        body.append(statement)
        if isinstance(statement, (ast.FunctionDef, ast.For)):
            _walk(statement, cls, file, lines, count, places)
        for name in _assigned(statement):
            text = lines[statement.lineno - 1].strip()
            places[cls, name, count[name]] = f"{file}:{statement.lineno}  {text}"
            count[name] += 1
            body.append(_tell(name))
    node.body = body


def _assigned(statement: ast.stmt) -> Iterator[str]:
    """Variables of an assignment, unless a block or a recomputed function gives them, which told already."""
    if not isinstance(statement, ast.Assign):
        return
    called = statement.value.func if isinstance(statement.value, ast.Call) else None
    if isinstance(called, ast.Name) and called.id in ("block", "recompute"):
        return
    for target in statement.targets:
        names = target.elts if isinstance(target, ast.Tuple) else [target]
        yield from (n.id for n in names if isinstance(n, ast.Name) and n.id != "_")


def _tell(name: str) -> ast.stmt:
    return ast.parse(f"{name} = _seen(_frame, {name!r}, {name})").body[0]


def _before_return(forward: ast.FunctionDef) -> None:
    if isinstance(forward.body[-1], ast.Return):
        forward.body.insert(-1, ast.parse("_end(_frame)").body[0])
