"""Instrumentation of emitted stage files: every line records its result and the gradient of that.

    o_proj_whole = tp.all_reduce_both(o_proj)
    o_proj_whole = _record(_frame, "o_proj_whole", o_proj_whole)      added after each assignment of a forward pass

Nothing else is changed. Recomputation in the backward pass is not recorded.
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
_RECORDER = "from autoptd.verification.locate.recorder import begin as _begin, end as _end, record as _record"
_IMPORT = ast.parse(_RECORDER).body


@dataclass
class Recorded:
    """The result of a line on one rank, and its gradient after the backward pass."""

    stage: int
    microbatch: int
    block: int | None  # index of the stage's block call; None: a line of the stage itself
    line: Line
    value: Tensor
    gradient: Tensor | None = None


@dataclass
class Recorder:
    """The results recorded on one rank. `stages`: id of each of its stage modules -> stage number."""

    stages: dict[int, int] = field(default_factory=dict)
    recorded: list[Recorded] = field(default_factory=list)
    microbatches: Counter[int] = field(default_factory=Counter)
    open: bool = True
    at: tuple[int, int] | None = None  # the stage and microbatch of the current forward pass
    blocks: int = 0


@dataclass
class Frame:
    """One forward pass of a stage or block; nothing is recorded if `recorder` is None."""

    recorder: Recorder | None
    name: str
    stage: int = 0
    microbatch: int = 0
    block: int | None = None
    count: Counter[str] = field(default_factory=Counter)


_HERE = threading.local()  # `recorder`: that of the rank which this thread runs


def record_here(recorder: Recorder) -> None:
    """Make this thread's emitted code record to `recorder` from now on."""
    _HERE.recorder = recorder


def begin(module: Any) -> Frame:
    """Return the frame of a forward pass that begins."""
    recorder: Recorder | None = getattr(_HERE, "recorder", None)
    name = type(module).__name__
    if recorder is None or not recorder.open:
        return Frame(None, name)
    if isinstance(module, Stage):
        stage = recorder.stages[id(module)]
        recorder.at, recorder.blocks = (stage, recorder.microbatches[stage]), 0
        recorder.microbatches[stage] += 1
        return Frame(recorder, name, *recorder.at)
    if recorder.at is None:  # recomputation in a backward pass
        return Frame(None, name)
    recorder.blocks += 1
    return Frame(recorder, name, *recorder.at, block=recorder.blocks - 1)


def end(frame: Frame) -> None:
    """End a forward pass; after a stage's, nothing is recorded until the next one begins."""
    if frame.recorder is not None and frame.block is None:
        frame.recorder.at = None


def record(frame: Frame, name: str, x: Any) -> Any:
    """Record the value of a variable, and return it."""
    recorder = frame.recorder
    if recorder is None or recorder.at is None or not isinstance(x, Tensor):
        return x
    frame.count[name] += 1
    line = frame.name, name, frame.count[name] - 1
    recorded = Recorded(frame.stage, frame.microbatch, frame.block, line, x.detach().clone())
    recorder.recorded.append(recorded)
    if x.requires_grad:
        x = x.view_as(x)  # a no-op cast returns its operand, whose hooks would see the gradients of both lines
        x.register_hook(lambda grad: _keep_gradient(recorded, grad))
    return x


def _keep_gradient(recorded: Recorded, grad: Tensor) -> None:
    if recorded.gradient is None:
        recorded.gradient = grad.detach().clone()


def recording(program: Program) -> tuple[Program, dict[Line, str]]:
    """Return the instrumented program, and the text of each line: `blocks.py:57  out = tp.all_reduce_both(o_proj)`."""
    files, places = dict(program.files), dict[Line, str]()
    for name, text in program.files.items():
        if name.endswith(".py") and name != "__init__.py":
            tree = ast.parse(text)
            for node in tree.body:
                if isinstance(node, ast.ClassDef):
                    places |= _instrument(node, name, text.splitlines())
            future = (n.module == "__future__" if isinstance(n, ast.ImportFrom) else False for n in tree.body)
            at = max((i + 1 for i, is_future in enumerate(future) if is_future), default=0)
            tree.body[at:at] = _IMPORT
            # memory that is not written yet has no values to compare
            files[name] = ast.unparse(ast.fix_missing_locations(tree)).replace("new_empty(", "new_zeros(")
    return replace(program, files=files), places


def _instrument(cls: ast.ClassDef, file: str, lines: list[str]) -> Mapping[Line, str]:
    places: dict[Line, str] = {}
    count: Counter[str] = Counter()
    for forward in [n for n in cls.body if isinstance(n, ast.FunctionDef) and n.name == "forward"]:
        arguments = [a.arg for a in forward.args.args[1:] if _is_tensor(a)]
        for name in arguments:
            places[cls.name, name, count[name]] = f"{file}:{forward.lineno}  {name}, an argument of {cls.name}.forward"
            count[name] += 1
        _walk(forward, cls.name, file, lines, count, places)
        first = ast.parse("_frame = _begin(self)").body
        recorded = [_record_call(name) for name in arguments]
        forward.body[:0] = [*first, *recorded]
        _before_return(forward)
    return places


def _is_tensor(argument: ast.arg) -> bool:
    return isinstance(argument.annotation, ast.Name) and argument.annotation.id == "Tensor"


def _walk(node: Any, cls: str, file: str, lines: list[str], count: Counter[str], places: dict[Line, str]) -> None:
    """Add a recording call after each assignment, also within nested functions and loops."""
    body: list[ast.stmt] = []
    for statement in node.body:
        body.append(statement)
        if isinstance(statement, (ast.FunctionDef, ast.For)):
            _walk(statement, cls, file, lines, count, places)
        for name in _assigned(statement):
            text = lines[statement.lineno - 1].strip()
            places[cls, name, count[name]] = f"{file}:{statement.lineno}  {text}"
            count[name] += 1
            body.append(_record_call(name))
    node.body = body


def _assigned(statement: ast.stmt) -> Iterator[str]:
    """Yield the variables of an assignment; a block or recomputed function records its own results."""
    if not isinstance(statement, ast.Assign):
        return
    called = statement.value.func if isinstance(statement.value, ast.Call) else None
    if isinstance(called, ast.Name) and called.id in ("block", "offload", "recompute"):
        return
    for target in statement.targets:
        names = target.elts if isinstance(target, ast.Tuple) else [target]
        yield from (n.id for n in names if isinstance(n, ast.Name) and n.id != "_")


def _record_call(name: str) -> ast.stmt:
    return ast.parse(f"{name} = _record(_frame, {name!r}, {name})").body[0]


def _before_return(forward: ast.FunctionDef) -> None:
    if isinstance(forward.body[-1], ast.Return):
        forward.body.insert(-1, ast.parse("_end(_frame)").body[0])
