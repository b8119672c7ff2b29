"""Trace a plain model into one fx graph of ATen ops, with symbolic batch and sequence.

    model(**inputs) ──wrapper──► one scalar loss ──torch.export──► fx graph, sizes in sympy, tensors on meta

The user's model is never touched: a skeleton with meta parameters (in the dtype that training will compute in) is
traced in its stead, so a model of any size is traced in the memory of its graph.
"""

from __future__ import annotations

import copy
import linecache
import re
import sysconfig
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import numpy as np
import sympy
import torch
from torch import Tensor, fx, nn
from torch.export import Dim
from torch.export.graph_signature import InputKind

from autoptd.errors import AutoptdError, InputsError, TraceError, UnsupportedOp
from autoptd.passes.bound_sizes import InputDim, bound_dims
from autoptd.passes.collector import without_collector
from autoptd.passes.fake import fake_cpu
from autoptd.passes.input_types import inputs_to_cast
from autoptd.passes.loss import Loss, Objective, read_objective
from autoptd.passes.loss import loss_of as loss_of
from autoptd.passes.own_hooks import refuse_recording_hooks, refuse_unseen_hooks
from autoptd.passes.own_trace import OwnCalls, keep_own
from autoptd.passes.python_state import refuse_counters, refuse_own_draws
from autoptd.passes.regions import inline_regions
from autoptd.passes.repeats import Repeats
from autoptd.passes.silence import silent_export
from autoptd.passes.unfold import unfold

PRECISIONS: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}

Averaging = Literal["global", "per-microbatch"]

BATCH = sympy.Symbol("b", integer=True, positive=True)
SEQUENCE = sympy.Symbol("s", integer=True, positive=True)


@dataclass
class Traced:
    """One forward pass to the loss.

    `graph` has placeholders for parameters, buffers and inputs, in that order, and one scalar output. Each node's
    `meta["val"]` is a fake tensor whose sizes are torch symbols; `symbol` maps those to `b`, `s` and named sizes.
    """

    graph: fx.GraphModule
    parameters: dict[str, str]  # placeholder -> original dotted name
    buffers: dict[str, str]  # placeholder -> original dotted name
    inputs: dict[str, str]  # placeholder -> name of the model's input
    constants: dict[str, Tensor]  # placeholder -> value, of closed-over tensors and of buffers that have one
    symbol: dict[sympy.Symbol, sympy.Expr]  # torch's symbol -> ours
    sizes: dict[sympy.Symbol, tuple[str, int]]  # our symbol -> where it is read: (input, dim)
    example: dict[sympy.Symbol, int]  # our symbol -> its value in the example inputs
    aliases: dict[str, str] = field(default_factory=dict)  # other names of tied parameters -> the canonical one
    frozen: frozenset[str] = frozenset()  # parameters with requires_grad=False
    resolved: dict[sympy.Expr, Any] = field(default_factory=dict)  # sizes in torch's symbols -> in ours, as met
    transient: frozenset[str] = frozenset()  # buffers that are not part of the state dict
    averaging: Averaging = "global"  # what of the loss may be averaged, if it cannot be that of the whole batch
    averaged: bool = False  # whether it is
    objective: Objective = field(default_factory=Objective)  # what the loss is made of
    own: OwnCalls = field(default_factory=OwnCalls)  # backward passes of the user's own


def skeleton(model: nn.Module, precision: str, device: str, mode: AbstractContextManager[Any]) -> nn.Module:
    """A copy of the model without data, floating-point parameters in `precision`; tied parameters stay tied.

    Parameters and buffers are made under `mode`; tensors that are neither keep their values, but for those that are
    computed from others (the weight of a weight-normed layer): these are computed anew, or refused when they are read.
    """
    dtype = PRECISIONS[precision]
    memo: dict[int, Any] = {}
    with mode:
        for x in computed_tensors(model):
            memo[id(x)] = nn.Parameter(torch.empty(x.shape, dtype=dtype, device=device))
        for p in model.parameters():
            kept = dtype if p.is_floating_point() else p.dtype
            memo[id(p)] = nn.Parameter(torch.empty(p.shape, dtype=kept, device=device), requires_grad=p.requires_grad)
        for b in model.buffers():
            memo[id(b)] = torch.empty(b.shape, dtype=b.dtype, device=device)
    return copy.deepcopy(model, memo)


def computed_tensors(model: nn.Module) -> list[Tensor]:
    """Attributes of modules that need a gradient and are no parameters."""
    values = [value for module in model.modules() for value in vars(module).values()]
    return [x for x in values if isinstance(x, Tensor) and x.requires_grad]


def without_caches(model: nn.Module) -> nn.Module:
    """Turn off what a Hugging Face model keeps for generating text after this pass: its loss never reads it."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is True:
            config.use_cache = False
    return model


def canonical_names(model: nn.Module) -> dict[str, str]:
    """Every parameter name → the first name of the same tensor."""
    first: dict[int, str] = {}
    return {n: first.setdefault(id(p), n) for n, p in model.named_parameters(remove_duplicate=False)}


def trace(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    *,
    loss: Callable[..., Tensor] | Objective | None = None,
    precision: str = "fp32",
    repeats: bool = True,
    averaging: Averaging = "global",
) -> Traced:
    """Trace `model(**inputs)` to its scalar loss.

    `inputs` are example keyword tensors whose dim 0 counts samples, those of the `targets` of an objective among them;
    only shapes and dtypes are read. The model holds what `Objective.joined` put there. With `repeats`,
    equal modules are traced once and written out for every call, which gives the same graph in less time.
    Raises InputsError (inputs that do not suit), UnsupportedOp (a size depends on data), TraceError (all else).
    """
    _check_inputs(inputs)
    _check_modules(model)
    refuse_unseen_hooks(model)
    names = canonical_names(model)
    batch = _batch_size(inputs)
    shapes = {n: ((max(2, batch), *x.shape[1:]) if _counts_samples(x, batch) else x.shape) for n, x in inputs.items()}
    specs = {n: (shapes[n], x.dtype) for n, x in inputs.items()}
    objective, _ = read_objective(loss, inputs)
    exporter, own = _Exporter(model, specs, objective, precision), OwnCalls()
    with keep_own(own):
        exporter, program = exporter.with_casts(repeats=repeats)
        if bound := bound_dims(program, specs):
            exporter = replace(exporter, fixed=bound)
            program = exporter.run(repeats=repeats)
        if repeats and _to_decompose(program.graph):
            program = exporter.run(repeats=False)
        if _to_decompose(program.graph):
            program = program.run_decompositions({})
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    traced = _collect(program, list(inputs), names, frozen, batch, objective)
    traced.averaging = averaging
    traced.own = own
    values = dict(model.named_buffers(remove_duplicate=False))
    traced.transient = frozenset(values) - set(model.state_dict(keep_vars=True))
    traced.constants |= {
        arg: values[name].detach().cpu() for arg, name in traced.buffers.items() if not values[name].is_meta
    }
    return traced


Specs = Mapping[str, tuple[Any, torch.dtype]]  # of the example inputs: shape and dtype


@dataclass(frozen=True)
class _Exporter:
    """What is exported: the model with its loss, and the shapes and dtypes of its inputs."""

    model: nn.Module
    specs: Specs
    objective: Objective
    precision: str
    fixed: Collection[InputDim] = ()  # dims of inputs that are no symbols
    casts: Mapping[str, torch.dtype] = field(default_factory=dict)  # of inputs, as they enter the model

    def with_casts(self, *, repeats: bool) -> tuple[_Exporter, torch.export.ExportedProgram]:
        """The whole graph, and what it was exported by: inputs in the type of the parameters given are cast where they
        meet products of another. Some ops refuse that while traced: then a graph in the type given tells which."""
        given = {p.dtype for p in self.model.parameters() if p.is_floating_point()}
        computed = PRECISIONS[self.precision]
        names = [
            n for n, (_, dtype) in self.specs.items() if dtype in given - {computed} and n not in self.objective.targets
        ]
        try:
            program = self.run(repeats=repeats)
            odd = self._inputs_to_cast(program, names, given - {computed}, computed)
        except TraceError as error:
            written = next((name for name, dtype in PRECISIONS.items() if {dtype} == given), None)
            if isinstance(error, UnsupportedOp) or not names or written is None:
                raise
            program = replace(self, precision=written).run(repeats=repeats)
            odd = self._inputs_to_cast(program, names, given, PRECISIONS[written])
            if not odd:
                raise
        if not odd:
            return self, program
        exporter = replace(self, casts=dict.fromkeys(odd, computed))
        return exporter, exporter.run(repeats=repeats)

    def _inputs_to_cast(
        self,
        program: torch.export.ExportedProgram,
        names: Collection[str],
        given: Collection[torch.dtype],
        computed: torch.dtype,
    ) -> set[str]:
        arguments = dict(zip(program.graph_signature.user_inputs, self.specs, strict=True))
        own = {argument: name for argument, name in arguments.items() if name in names}
        return inputs_to_cast(program.graph, own, given, computed)

    def run(self, *, repeats: bool) -> torch.export.ExportedProgram:
        """The whole graph. Raises InputsError, UnsupportedOp, TraceError."""
        try:
            return self._on("cpu", repeats)
        except TraceError as error:
            # a model built on meta may hold meta tensors that are no buffers: then only meta will do
            if isinstance(error, UnsupportedOp) or not any(p.is_meta for p in self.model.parameters()):
                raise
            first = error
        try:
            return self._on("meta", repeats)
        except TraceError:
            raise first from None

    def _on(self, device: str, repeats: bool) -> torch.export.ExportedProgram:
        """Without data. Sizes of 1 would be baked in, and inputs that are one object merged: these are new ones."""
        mode = fake_cpu() if device == "cpu" else nullcontext()
        try:
            model = without_caches(skeleton(self.model, self.precision, device, mode))
        except AutoptdError:
            raise
        except Exception as error:
            raise _not_copied(error) from error
        names = {id(p): name for name, p in self.model.named_parameters()}
        root = Loss(model, self.objective.in_precision(PRECISIONS[self.precision]), names, self.casts)
        with mode:
            fake = {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in self.specs.items()}
        kinds = dict.fromkeys(self.fixed, Dim.STATIC)
        dynamic = ({name: {d: kinds.get((name, d), Dim.AUTO) for d in range(x.ndim)} for name, x in fake.items()},)
        refuse_recording_hooks(model)
        found = Repeats(model) if repeats else None
        try:
            with without_collector(), silent_export(), refuse_own_draws(self.model):
                program = refuse_counters(
                    model, root, lambda: torch.export.export(root, (fake,), dynamic_shapes=dynamic, strict=False)
                )
        except AutoptdError as error:
            raise _placed(error) from None
        except Exception as error:  # whatever the model's code raises, or a library that it calls
            raise _explain(error) from error
        if found is not None:
            inline_regions(program.graph, program.graph_module)
            unfold(program.graph, found.captures, found.paths)
        return program


def _placed(error: AutoptdError) -> AutoptdError:
    """With the user's line, where an error does not say where."""
    return error if error.where else type(error)(error.what, where=_user_line(error), fix=error.fix)


def _to_decompose(graph: fx.Graph) -> bool:
    """Whether torch has to write a graph in other ops: writes through views, and transforms of torch.func."""
    transforms = (getattr(n.target, "__module__", "") == "torch._functorch.predispatch" for n in graph.nodes)
    return _writes_through_views(graph) or any(transforms)


def _writes_through_views(graph: fx.Graph) -> bool:
    """Whether an in-place op writes to a view, or to a tensor that has one: those need torch's functionalisation."""
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        written = node.args[0] if node.target._schema.is_mutable else None
        if isinstance(written, fx.Node) and any(_is_view(n) for n in (written, *written.users)):
            return True
    return False


def _is_view(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and any(
        a.alias_info is not None and not a.alias_info.is_write for a in node.target._schema.arguments
    )


def _check_inputs(inputs: Mapping[str, Tensor]) -> None:
    if not inputs:
        raise InputsError("no example inputs", fix="pass inputs={'x': torch.empty(…)}: keyword tensors of forward")
    for name, x in inputs.items():
        if not isinstance(x, Tensor):
            raise InputsError(f"input {name!r} is {type(x).__name__}, not a tensor", fix="pass keyword tensors only")
    if all(x.ndim == 0 for x in inputs.values()):
        raise InputsError("no input has a dim that counts samples", fix="give the inputs a leading batch dim")


def _check_modules(model: nn.Module) -> None:
    """Raise TraceError for modules whose code torch has compiled already: nothing of it passes by the trace."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise TraceError(
                f"{name or 'the model'} was compiled by torch.jit.script or torch.jit.trace, and cannot be traced",
                where=name,
                fix="pass the module that was given to torch.jit, before it was",
            )


def _batch_size(inputs: Mapping[str, Tensor]) -> int:
    return next(x.shape[0] for x in inputs.values() if x.ndim)


def _counts_samples(x: Tensor, batch: int) -> bool:
    return x.ndim > 0 and x.shape[0] == batch


def _not_copied(error: Exception) -> TraceError:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return TraceError(
        f"the model cannot be copied without its data: {type(error).__name__}: {first[:300]}",
        fix="keep on modules only what copy.deepcopy(model) copies",
    )


NUMBER_READ = "a number is read out of a tensor's data, and is not known before the values are"
_FIXED_SHAPES = "use a form whose shapes do not depend on values (torch.where, a mask, torch.topk with a fixed k)"
KEEP_TENSORS = (
    "keep it a tensor: x / x.max(), not x / float(x.max()); no .item(), .tolist(), int() or float(). "
    "Where it is a size, " + _FIXED_SHAPES
)


def _explain(error: Exception) -> TraceError:
    """Turn torch.export's report into one sentence with module path and the user's line."""
    text = str(error)
    where = _user_line(error) or _user_line_in(text)
    unbacked = re.search(r"u\d+", text) and ("data-dependent" in text.lower() or "unbacked" in text.lower())
    if "data-dependent" in text.lower() or unbacked or "GuardOnDataDependentSymNode" in type(error).__name__:
        what = _what_depends(text)
        return UnsupportedOp(what, where=where, fix=KEEP_TENSORS if what == NUMBER_READ else _FIXED_SHAPES)
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    return TraceError(
        f"the model cannot be traced: {type(error).__name__}: {first[:300]}",
        where=where,
        fix="check that model(**inputs) runs in eager PyTorch with these inputs (on device='meta' as well)",
    )


def _what_depends(text: str) -> str:
    """What of a model depends on data, from the first line of torch's report."""
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    guarded = re.match(r"Could not guard on data-dependent expression (.*) \(unhinted", first)
    if first.startswith("Could not extract specialized") or (guarded and re.fullmatch(r"z?u[fi]?\d+", guarded[1])):
        return NUMBER_READ
    if guarded:
        return "a branch or a loop depends on data: which way it goes is not known before the values are"
    return f"a size or a branch depends on data: {first[:200]}"


_FOREIGN = [Path(file).parent for file in (torch.__file__, sympy.__file__, np.__file__, __file__)]
_STANDARD = Path(sysconfig.get_paths()["stdlib"])


def _is_foreign(file: Path) -> bool:
    """Whether code is Python's, ours, or that of a library that models calculate with."""
    if any(file.is_relative_to(folder) for folder in _FOREIGN):
        return True
    return file.is_relative_to(_STANDARD) and "site-packages" not in file.parts


def _user_line(error: BaseException) -> str:
    """`module.path (file.py:41)  source` of the deepest frame under a module's forward that is the user's own code."""
    where, path = "", "model"
    tb = error.__traceback__
    while tb is not None:
        frame, file = tb.tb_frame, Path(tb.tb_frame.f_code.co_filename)
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and not type(owner).__module__.startswith(_WRAPPING):
            path = _module_path(tb.tb_frame, owner)
        if file.exists() and not _is_foreign(file):
            source = linecache.getline(str(file), tb.tb_lineno).strip()
            where = f"{path} ({file.name}:{tb.tb_lineno})  {source}"
        tb = tb.tb_next
    return where


_WRAPPING = (Loss.__module__, "torch.export", "torch._export")  # of modules that are none of the user's


def _module_path(frame: FrameType | None, owner: nn.Module) -> str:
    """The dotted path of a module that is running, found in the wrapper further up the stack."""
    while frame is not None:
        root = frame.f_locals.get("self")
        if isinstance(root, Loss):
            return next((n for n, m in root.model.named_modules() if m is owner and n), type(owner).__name__)
        frame = frame.f_back
    return type(owner).__name__


def _user_line_in(text: str) -> str:
    match = re.search(r'File "([^"]+)", line (\d+), in (\w+)\n\s+(.+)', text)
    return f"{match[3]} ({match[1].rsplit('/', 1)[-1]}:{match[2]})  {match[4].strip()}" if match else ""


def _collect(
    program: torch.export.ExportedProgram,
    fake: Sequence[str],
    names: Mapping[str, str],
    frozen: set[str],
    batch: int,
    objective: Objective,
) -> Traced:
    graph = program.graph_module
    of_loss = dict(objective.loss.named_buffers(prefix="loss")) if isinstance(objective.loss, nn.Module) else {}
    parameters: dict[str, str] = {}
    buffers: dict[str, str] = {}
    inputs: dict[str, str] = {}
    constants: dict[str, Tensor] = {}
    user = iter(fake)
    for spec in program.graph_signature.input_specs:
        arg = spec.arg.name
        if spec.kind == InputKind.PARAMETER:
            assert spec.target is not None
            parameters[arg] = names[spec.target.removeprefix("model.")]
        elif spec.kind == InputKind.BUFFER and spec.target in of_loss:
            constants[arg] = of_loss[spec.target].detach().cpu()
        elif spec.kind == InputKind.BUFFER:
            assert spec.target is not None
            buffers[arg] = spec.target.removeprefix("model.")
        elif spec.kind == InputKind.CONSTANT_TENSOR:
            assert spec.target is not None
            constants[arg] = program.constants[spec.target]
        elif spec.kind == InputKind.USER_INPUT:
            inputs[arg] = next(user)
        else:
            raise TraceError(f"the model closes over a {spec.kind.name.lower()}", fix="pass tensors as inputs")
    symbol, sizes, example = _name_symbols(graph, inputs, batch)
    return Traced(
        graph=graph,
        parameters=parameters,
        buffers=buffers,
        inputs=inputs,
        constants=constants,
        symbol=symbol,
        sizes=sizes,
        example=example,
        aliases={n: c for n, c in names.items() if n != c},
        frozen=frozenset(names[n] for n in frozen),
        objective=objective,
    )


def _name_symbols(
    graph: fx.GraphModule, inputs: Mapping[str, str], batch: int
) -> tuple[dict[sympy.Symbol, sympy.Expr], dict[sympy.Symbol, tuple[str, int]], dict[sympy.Symbol, int]]:
    """Call torch's symbols b (dim 0 of the inputs), s (the next dim) and s2, s3 … (further ones, by size).

    Export gives equal sizes of different inputs different symbols where nothing forces them to agree.
    """
    symbol: dict[sympy.Symbol, sympy.Expr] = {}
    sizes: dict[sympy.Symbol, tuple[str, int]] = {}
    example: dict[sympy.Symbol, int] = {}
    by_size: dict[int, sympy.Symbol] = {}
    baked = []
    for node in graph.graph.nodes:
        if node.op != "placeholder" or node.name not in inputs:
            continue
        for dim, size in enumerate(node.meta["val"].shape):
            # the hint: comparing a symbolic size itself would specialise it
            hint = int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)
            counts_samples = dim == 0 and hint == max(2, batch)
            expr = sympy.sympify(size.node.expr if isinstance(size, torch.SymInt) else size)
            if expr.is_Integer and counts_samples:
                baked.append(inputs[node.name])
            if not isinstance(expr, sympy.Symbol):
                continue
            if counts_samples:
                ours = BATCH
            else:
                fresh = SEQUENCE if not by_size else sympy.Symbol(f"s{len(by_size) + 1}", integer=True, positive=True)
                ours = by_size.setdefault(hint, fresh)
            symbol[expr] = ours
            sizes.setdefault(ours, (inputs[node.name], dim))
            example.setdefault(ours, hint)
    if baked:
        raise TraceError(
            f"the model bakes the batch size {batch} of input {baked[0]!r} into its graph",
            fix="write shapes with x.size(0) or -1 instead of numbers, or remove branches on the batch size",
        )
    return symbol, sizes, example
