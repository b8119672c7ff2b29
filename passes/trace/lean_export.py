"""Keep torch.export from what no plan reads, and from printing and logging (private parts of torch, seen in 2.13.0).

Two things take a fifth of its time and no plan reads them:

- the Python code of graph modules, which each of its passes copies: modules that write it on first use are private to
  torch, in `torch.fx._lazy_graph_module`;
- the memory format of every tensor, in `meta["tensor_meta"]`, found by comparing symbolic sizes and strides.

On an error it prints the partial graph, thousands of lines for a large model, and logs the kind of failure; autoptd's
own error names the cause and the user's line. It also warns of what torch itself does. It records the line that a guard
on a size is due to, which must be the user's. Where opt_einsum is installed, torch.einsum lets it choose an order of
three and more operands, for which it makes numbers of their sizes.

It splits the graph where gradients are switched on and off, and misses a switch within an autocast region: the split
begins each part with a copy of the region's own begin, and the pass looks for the switch in the first place. So regions
of disabled autocast, which change nothing outside of enabled ones, are removed before.

No other file of autoptd uses these parts of torch.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from traceback import StackSummary
from types import FrameType
from typing import Any
from unittest.mock import patch

from torch import SymInt, Tensor
from torch._export.passes import replace_set_grad_with_hop_pass as grad_switches
from torch._subclasses import fake_tensor
from torch.amp import autocast_mode
from torch.backends import opt_einsum
from torch.export import _trace
from torch.fx import GraphModule
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.proxy import TracerBase

from autoptd.passes.trace import loss
from autoptd.passes.trace.trace_errors import is_foreign

_SWITCHES = "replace_set_grad_with_hop_pass"
_split_by_switches = grad_switches.replace_set_grad_with_hop_pass
_SYMBOLIC_SHAPES = "torch.fx.experimental.symbolic_shapes"  # warns that it does not know the user's line


@contextmanager
def lean_export() -> Iterator[None]:
    """Wrap a call of torch.export.export whose graph is read but not run."""
    describe = "torch.fx.experimental.proxy_tensor._extract_tensor_metadata"
    switches = patch.object(grad_switches, _SWITCHES, _without_disabled_autocast)
    whose = patch.object(ShapeEnv, "_get_user_frame", _user_frame)
    with _use_lazy_graph_module(True), patch(describe, lambda tensor: None), whose, switches, _einsum_orders():
        yield


@contextmanager
def user_lines() -> Iterator[None]:
    """Wrap traces whose nodes shall name the line of the user's code that they are due to, also one of a function or
    another method; torch names that of the innermost `forward`, which may be torch's."""
    foreign, torchs = cache(is_foreign), TracerBase._filter_traceback_frames

    def filtered(tracer: TracerBase, stack: StackSummary) -> StackSummary:
        first = next((i for i, frame in enumerate(stack) if frame.filename == loss.__file__), len(stack))
        mine = [frame for frame in stack[first:] if frame.filename == loss.__file__ or not foreign(frame.filename)]
        return StackSummary.from_list(mine) if mine else torchs(tracer, stack)

    with patch.object(TracerBase, "_filter_traceback_frames", filtered):
        yield


def _without_disabled_autocast(gm: GraphModule, signature: Any) -> Any:
    """Remove regions of disabled autocast, then split the graph as torch does."""
    for node in list(gm.graph.find_nodes(op="call_function", target=autocast_mode._enter_autocast)):
        if not node.args[2]:  # device, dtype, enabled, cache
            for end in list(node.users):
                gm.graph.erase_node(end)
            gm.graph.erase_node(node)
    return _split_by_switches(gm, signature)


def _einsum_orders() -> AbstractContextManager[Any]:
    """Choose the order of an einsum's operands by the sizes of the trace, without a guard."""
    library = opt_einsum.get_opt_einsum()
    if library is None:
        return nullcontext()
    choose = library.contract_path

    def by_hints(equation: str, *operands: Tensor, **options: Any) -> Any:
        shapes = [tuple(n.node.hint if isinstance(n, SymInt) else n for n in x.shape) for x in operands]
        return choose(equation, *shapes, shapes=True, **options)

    return patch.object(library, "contract_path", by_hints)


def _user_frame(env: ShapeEnv, torchs: Callable[[ShapeEnv], FrameType | None] = ShapeEnv._get_user_frame) -> Any:
    """Return the frame that a guard on a size is due to: the innermost of the user's code, else as torch does.

    Torch skips its own frames, but not those of the functions that watch an export.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename != loss.__file__:
        if not is_foreign(frame.f_code.co_filename):
            return frame
        frame = frame.f_back
    return torchs(env)


@contextmanager
def silent_export() -> Iterator[None]:
    """Suppress what `torch.export._trace` prints and logs about a failure, a warning of its copies, and that forward
    assigned tensors to attributes (`left_tensors.py`)."""
    logs: list[logging.Logger] = [_trace.log, logging.getLogger(_SYMBOLIC_SHAPES), fake_tensor.log]
    were_off = [log.disabled for log in logs]
    vars(_trace)["print"] = lambda *args, **kwargs: None  # shadows the builtin
    for log in logs:
        log.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated", FutureWarning)
            warnings.filterwarnings("ignore", "The tensor attributes? .* assigned during export", UserWarning)
            yield
    finally:
        for log, was_off in zip(logs, were_off, strict=True):
            log.disabled = was_off
        vars(_trace).pop("print", None)
