"""Errors raised while tracing, as one sentence with the module's path and the user's line."""

from __future__ import annotations

import inspect
import linecache
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from threading import get_ident
from types import FrameType
from typing import Any
from unittest.mock import patch

import numpy as np
import sympy
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn.utils.rnn import PackedSequence

from autoptd.errors import AutoptdError, TraceError, UnsupportedOp
from autoptd.passes.left_to_plan.ranks import OF_ONE_PROCESS, RANKS_ASKED
from autoptd.passes.normalise.functionalize import KEEP_STATE
from autoptd.passes.objectives.metrics import Metrics
from autoptd.passes.trace.loss import Loss, LossArguments, Objective

_OF_TRACES = (AutoptdError, DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)


def placed(error: AutoptdError) -> AutoptdError:
    """Return the error with the user's line added if it has no location."""
    return error if error.where else type(error)(error.what, where=user_line(error), fix=error.fix)


@contextmanager
def refuse_caught_errors() -> Iterator[None]:
    """Wrap a trace. Raises UnsupportedOp if the user's code caught an error that only a trace raises: it went on in
    another way than it does with data."""
    raised, thread = list[BaseException](), get_ident()

    def recording(init: Callable[..., None]) -> Callable[..., None]:
        def made(self: BaseException, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            if get_ident() == thread:
                raised.append(self)

        return made

    def numpy(self: Tensor, **kwargs: Any) -> Any:
        if isinstance(self, FakeTensor):
            raise UnsupportedOp(NUMBER_READ, fix=KEEP_TENSORS)
        return to_numpy(self, **kwargs)

    to_numpy = Tensor.numpy
    with ExitStack() as patches:
        for kind in _OF_TRACES:
            patches.enter_context(patch.object(kind, "__init__", recording(kind.__init__)))
        patches.enter_context(patch.object(Tensor, "numpy", numpy))
        yield
    for error in raised:
        caught = error.__traceback__  # its first frame is the one that caught it
        if caught is not None and not is_foreign(caught.tb_frame.f_code.co_filename):
            what = str(error).strip().splitlines()[0]
            raise UnsupportedOp(
                f"forward catches an error that only the trace raises, and goes on without: {what}",
                where=user_line(error),
                fix="do not read data in forward, or not within try",
            )


@contextmanager
def copying() -> Iterator[None]:
    """Wrap the copying of a model: raise TraceError for whatever its attributes raise."""
    try:
        yield
    except AutoptdError:
        raise
    except Exception as error:
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise TraceError(
            f"the model cannot be copied without its data: {type(error).__name__}: {first[:300]}",
            fix="store on modules only attributes that copy.deepcopy(model) can copy",
        ) from error


NUMBER_READ = "a number is read from a tensor's data, which is unknown at planning time"
_FIXED_SHAPES = (
    "use a form whose shapes do not depend on values (torch.where, a mask, torch.topk with a fixed k, "
    "F.one_hot(labels, n).sum(0) for a bincount)"
)
KEEP_TENSORS = (
    "keep it a tensor: x / x.max(), not x / float(x.max()); no .item(), .tolist(), int() or float(). "
    "If it is a size, " + _FIXED_SHAPES
)
_MIXED_TYPES = "expected scalar type|should be the same|have the same dtype|only supported for half, float"
_ONE_TYPE = (
    "plan in the type that the model is written for, precision='fp32'; or let forward make its tensors in the type of "
    "what they meet (torch.ones(n, dtype=x.dtype), mask.to(x.dtype)): precision= converts parameters, and inputs that "
    "layers take, but no buffers and constants. Autocast is not used"
)
_BRANCH = "a branch or a loop depends on data, which is unknown at planning time"
_WAYS_OUT = {
    NUMBER_READ: KEEP_TENSORS,
    _BRANCH: "compute both sides and select: torch.where(condition, a, b), with torch.rand(()) < p as the condition "
    "where a number is drawn; or " + _FIXED_SHAPES,
}


PADDED = (
    "pad the samples to one length and pass their lengths or a mask: attention takes a mask, and a recurrent layer's "
    "last state is read by gather; or pack several sequences into a row, kept apart by a mask"
)
# code of torch for samples of several lengths, whose sizes are data -> what it is called
_RAGGED = {
    "torch/nested/": "nested tensors hold samples of several lengths",
    "pack_padded_sequence": "pack_padded_sequence makes batches of several sizes",
}


def explain(error: Exception) -> TraceError:
    """Return torch.export's error as one sentence with the module path and the user's line."""
    text = str(error)
    where = user_line(error) or _user_line_in(text)
    if ragged := _ragged(error):
        return UnsupportedOp(f"{ragged}, which are unknown at planning time", where=where, fix=PADDED)
    if "Default process group has not been initialized" in text:
        return UnsupportedOp(RANKS_ASKED, where=where, fix=OF_ONE_PROCESS)
    if "Inference tensors" in text:
        what = "the model holds tensors that were made under torch.inference_mode(), which cannot be traced"
        return UnsupportedOp(what, where=where, fix="make them under torch.no_grad(), or clone them")
    if "its data is not allocated yet" in text:  # of a list of tensors that is made one, as indices
        return _number_read(error, where)
    if type(error).__name__ == "DataDependentOutputException":  # an op of torch that returns a number
        return _number_read(error, where, f" (by {error})")
    unbacked = re.search(r"u\d+", text) and ("data-dependent" in text.lower() or "unbacked" in text.lower())
    if "data-dependent" in text.lower() or unbacked or "GuardOnDataDependentSymNode" in type(error).__name__:
        what = _what_depends(text)
        fixed = UnsupportedOp(what, where=where, fix=_WAYS_OUT.get(what, _FIXED_SHAPES))
        return _number_read(error, where) if what == NUMBER_READ else fixed
    if "unhashable type: non-nested SymInt" in text:
        what = "the number of samples is given to a function that keeps its results, as by functools.cache"
        return TraceError(
            what, where=where, fix="call it as f.__wrapped__(n), which keeps none, or take its cache away"
        )
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    what, runs = _outer_call(error) or (
        "the model",
        "model(**inputs) runs in eager PyTorch with these inputs (on device='meta' as well)",
    )
    fix = _ONE_TYPE if re.search(_MIXED_TYPES, first) else f"check that {runs}"
    if not where and (misnamed := _forward_takes(error)):
        where, fix = "inputs", misnamed
    return TraceError(f"{what} cannot be traced: {type(error).__name__}: {first[:300]}", where=where, fix=fix)


def _outer_call(error: Exception) -> tuple[str, str] | None:
    """Return what raised an error, if not the model: the loss or a metric; and the call that should run."""
    for frame in _frames(error):
        objective = frame.f_locals.get("self")
        if frame.f_code.co_name != "of_outputs" or not isinstance(objective, Objective):
            continue
        batch = ", ".join(map(repr, frame.f_locals.get("batch") or ()))
        if isinstance(objective, Metrics):
            name = frame.f_locals.get("name")
            return f"the metric {name!r}", f"it runs as metric(outputs, batch), where batch is a mapping with {batch}"
        named = ", ".join(map(repr, objective.targets))
        given = {
            LossArguments.OUTPUTS: "loss(outputs)",
            LossArguments.INPUTS: f"loss(outputs, batch), where batch is a mapping with {batch}",
            LossArguments.TARGET: "loss(outputs, targets), where targets is the tensor that was given as targets=",
            LossArguments.KEYWORDS: f"loss(outputs, {', '.join(f'{name}=…' for name in objective.targets)})",
            LossArguments.MAPPING: f"loss(outputs, targets), where targets is a mapping with {named}; inputs that "
            "it reads too are given as further targets, under other names",
        }
        return "the loss", f"it runs as {given[objective.form]}"
    return None


def _forward_takes(error: Exception) -> str:
    """Return a fix for inputs whose names are not those that forward takes; "" for any other error."""
    if not isinstance(error, TypeError) or "argument" not in str(error):
        return ""
    roots = (frame.f_locals.get("self") for frame in _frames(error))
    model = next((root.model for root in roots if isinstance(root, Loss)), None)
    if model is None:
        return ""
    return f"name the inputs as forward does: {type(model).__name__}.forward{inspect.signature(model.forward)}"


def _frames(error: BaseException) -> Iterator[FrameType]:
    """Yield the frames of a traceback, outermost first."""
    tb = error.__traceback__
    while tb is not None:
        yield tb.tb_frame
        tb = tb.tb_next


def _number_read(error: Exception, where: str, by: str = "") -> UnsupportedOp:
    """Return the error of a number that is read from a tensor, with the name of the buffer if it is one."""
    if name := _buffer_read(error):
        what = f"a number is read from the buffer {name}, whose value at each step is unknown at planning time"
        return UnsupportedOp(what + by, where=where, fix=_KEEP_BUFFERS)
    return UnsupportedOp(NUMBER_READ + by, where=where, fix=KEEP_TENSORS)


def _buffer_read(error: Exception) -> str:
    """Return the buffer of which the user's deepest line reads a number, by `self` and its text; "" if it does not."""
    name = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        owner, file = frame.f_locals.get("self"), frame.f_code.co_filename
        if not is_foreign(file):
            read = re.search(_READS, linecache.getline(file, line))
            held = owner._buffers if isinstance(owner, nn.Module) else {}
            name = next((x for x in (read.groups() if read else ()) if x in held), "")
    return name


_READS = r"\b(?:int|float|bool)\(self\.(\w+)\b|\bself\.(\w+)(?:\[\w+\])?\.(?:item|tolist)\(\)"
_KEEP_BUFFERS = (
    "keep it a tensor: x / self.scale, not x / float(self.scale). If it is a place in a queue of features of earlier "
    "steps, compare with the other samples of the batch instead, as MoCo v3 does, or update the queue outside forward, "
    "between steps"
)


def _ragged(error: BaseException) -> str:
    """Return what an error has to do with samples of several lengths; "" if nothing."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        place = f"{Path(frame.f_code.co_filename).as_posix()} {frame.f_code.co_name}"
        held = "PackedSequence" if any(isinstance(x, PackedSequence) for x in frame.f_locals.values()) else ""
        for code, what in _RAGGED.items():
            if code in place or (held and code == "pack_padded_sequence"):
                return what
    return ""


def not_functional(error: RuntimeError) -> TraceError:
    """Return the error of a write that torch cannot make functional, such as one to x.data."""
    if "is mutated in the forward method" in str(error):
        return UnsupportedOp("forward writes to x.data of a tensor", fix=KEEP_STATE)
    return explain(error)


def may_loop(error: TraceError) -> bool:
    """Return whether a model may be traced if loops over samples are recorded, and inputs of equal rows are known."""
    return bool(
        re.search(
            r"depends on data|depends on whether a mask|from a tensor's data|bakes the batch size|cannot be traced",
            error.what,
        )
    )


def _what_depends(text: str) -> str:
    """Return what depends on data, judged by the first line of torch's report."""
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    guarded = re.match(r"Could not guard on data-dependent expression (.*) \(unhinted", first)
    if first.startswith("Could not extract specialized") or (guarded and re.fullmatch(r"z?u[fi]?\d+", guarded[1])):
        return NUMBER_READ
    if guarded:
        return _BRANCH
    return f"a size or a branch depends on data: {first[:200]}"


_FOREIGN = [Path(file).parent for file in (torch.__file__, sympy.__file__, np.__file__)] + [Path(__file__).parents[1]]
_STANDARD = Path(sysconfig.get_paths()["stdlib"])


@cache
def is_foreign(name: str) -> bool:
    """Return whether a file belongs to Python, autoptd or a numeric library (torch, sympy, numpy), not to the user."""
    file = Path(name)
    if not file.is_absolute():  # `<string>` and the like
        return True
    if any(file.is_relative_to(folder) for folder in _FOREIGN):
        return True
    return file.is_relative_to(_STANDARD) and "site-packages" not in file.parts


def user_line(error: BaseException) -> str:
    """Return `module.path (file.py:41)  source` for the deepest frame of a traceback that is the user's code."""
    where, path = "", "model"
    tb = error.__traceback__
    while tb is not None:
        frame, file = tb.tb_frame, Path(tb.tb_frame.f_code.co_filename)
        owner = frame.f_locals.get("self")
        if frame.f_code.co_name == "of_outputs" and isinstance(owner, Objective):
            path = "metric" if isinstance(owner, Metrics) else "loss"
        if isinstance(owner, nn.Module) and not type(owner).__module__.startswith(_WRAPPING):
            path = _module_path(tb.tb_frame, owner)
        if file.exists() and not is_foreign(str(file)):
            source = linecache.getline(str(file), tb.tb_lineno).strip()
            where = f"{path} ({file.name}:{tb.tb_lineno})  {source}"
        tb = tb.tb_next
    return where


_WRAPPING = (Loss.__module__, "torch.export", "torch._export")  # Python modules whose nn.Modules wrap the user's model


def _module_path(frame: FrameType | None, owner: nn.Module) -> str:
    """Return the dotted path of a running module, looked up in the `Loss` wrapper further up the stack."""
    while frame is not None:
        root = frame.f_locals.get("self")
        if isinstance(root, Loss):
            return next((n for n, m in root.model.named_modules() if m is owner and n), type(owner).__name__)
        frame = frame.f_back
    return type(owner).__name__


def _user_line_in(text: str) -> str:
    match = re.search(r'File "([^"]+)", line (\d+), in (\w+)\n\s+(.+)', text)
    return f"{match[3]} ({match[1].rsplit('/', 1)[-1]}:{match[2]})  {match[4].strip()}" if match else ""
