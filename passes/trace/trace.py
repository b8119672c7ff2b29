"""Trace a plain model into one fx graph of ATen ops, with symbolic batch and sequence.

    model(**inputs) ──wrapper──► one scalar loss ──torch.export──► fx graph, sizes in sympy, fake tensors

The user's model is not modified: a data-free skeleton, in the dtype that training computes in, is traced in its place.
Tracing needs memory for the graph only, whatever the model's size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from autoptd.errors import AutoptdError, TraceError, UnsupportedOp
from autoptd.layout.sample_rows import SHARED, Rows, readings, samples_in
from autoptd.passes.custom_grad.hooks import ForwardHooks, refuse_unseen_hooks
from autoptd.passes.custom_grad.trace_calls import OwnCalls, record_own_calls
from autoptd.passes.gc_pause import without_collector
from autoptd.passes.graph import updated_values
from autoptd.passes.kept.copies import one_at_a_time
from autoptd.passes.known.known import written_to_trace
from autoptd.passes.known.numbers import SizeNeeded
from autoptd.passes.known.one_type import OneType
from autoptd.passes.left_to_plan.checkpoints import plain_checkpoints
from autoptd.passes.left_to_plan.ranks import as_one_process, refuse_communication
from autoptd.passes.loops.empty_masks import Key, RowTurns
from autoptd.passes.loops.sample_loops import KnownInputs, equal_rows, reading
from autoptd.passes.loops.sizes_read import Branches, recorded_branches
from autoptd.passes.loops.turn_parameters import count_rows, parameters_of_turns, trained_without_turns
from autoptd.passes.normalise.functionalize import refuse_given_memory, refuse_lost_tangents, refuse_writes_to_out
from autoptd.passes.normalise.inline_regions import inline_regions
from autoptd.passes.normalise.input_types import inputs_to_cast, mixes_types
from autoptd.passes.normalise.view_writes import (
    copy_written_inputs,
    refuse_writes_to_state,
    reshape_functionally,
    to_decompose,
    write_functionally,
    write_to_operands,
)
from autoptd.passes.random.skipped_layers import Skips, select_layers
from autoptd.passes.random.tracing import random_code
from autoptd.passes.trace.collect import changed_state, collect, merge_buffers, name_new_buffers
from autoptd.passes.trace.expand_repeats import expand_repeats
from autoptd.passes.trace.fake import fake_cpu, with_loss_shapes, without_shape_cache
from autoptd.passes.trace.lean_export import lean_export, silent_export
from autoptd.passes.trace.loss import Loss, Objective, read_objective
from autoptd.passes.trace.python_state import refuse_changes, refuse_own_draws, refuse_updates, write_assigned_buffers
from autoptd.passes.trace.repeats import Repeats
from autoptd.passes.trace.skeleton import refuse_packing_beside_cache, settle, skeleton
from autoptd.passes.trace.specialize_sizes import (
    InputDim,
    bound_dims,
    check_inputs,
    fixed_at,
    picture_dims,
    table_dims,
)
from autoptd.passes.trace.tensor_len import symbolic_len
from autoptd.passes.trace.trace_errors import copying, explain, may_loop, not_functional, placed, user_line
from autoptd.passes.trace.traced import PRECISIONS, SEQUENCE, Averaging, Traced, canonical_names
from autoptd.passes.trace.unwrap import Originals, UnregisteredTensor, refuse_scripted


def trace(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    *,
    loss: Callable[..., Tensor] | Objective | None = None,
    precision: str = "fp32",
    repeats: bool = True,
    averaging: Averaging = "global",
    samples: int = 0,
    rows: Rows | None = None,
    evaluating: bool = False,
    single: bool = False,
) -> Traced:
    """Trace `model(**inputs)` to its scalar loss.

    `inputs` are example keyword tensors whose dim 0 counts samples, including the targets of an objective; only shapes
    and dtypes are read. `model` is the one that `Objective.joined` returned. With `repeats`, equal modules are traced
    once and copied for every call, which gives the same graph in less time. `samples`: trace with so many samples, and
    record loops over them (`loops/sample_loops.py`); else done only if the model cannot be traced without. `rows`: what
    the inputs' dims are; default, the likeliest. `evaluating`: trace what it computes after `model.eval()`, under
    `no_grad`. `single`: trace what it computes for a step of one sample; the number of samples is then no symbol.
    Raises InputsError (unsuitable inputs), UnsupportedOp (a size depends on data), TraceError (anything else).
    """
    traced = partial(_traced, model, inputs, loss, precision, averaging=averaging, rows=rows, evaluating=evaluating)
    if single:
        return traced(repeats, 0, count=1)
    if not samples:
        try:
            return traced(repeats, 0)
        except TraceError as error:
            if not may_loop(error):
                raise
            first = error
        bakes = "bakes the batch size" in first.what
        with suppress(TraceError):
            if bakes:
                return traced(repeats, 0, ints=True)
        try:
            return traced(False, SAMPLES[0])
        except TraceError as error:
            with suppress(TraceError):
                if bakes:  # as the one group of as many samples as the example has, which the export takes for 1
                    return traced(repeats, 0, times=2)
            further = isinstance(error, UnsupportedOp) and error.where != first.where
            raise (error if further else first) from (error if further else first).__cause__
    return traced(False, samples)


def _traced(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    loss: Callable[..., Tensor] | Objective | None,
    precision: str,
    repeats: bool,
    samples: int,
    *,
    averaging: Averaging,
    rows: Rows | None,
    evaluating: bool,
    ints: bool = False,
    count: int = 0,
    times: int = 1,
) -> Traced:
    check_inputs(inputs)
    refuse_scripted(model)
    refuse_unseen_hooks(model)
    names = canonical_names(model)
    rows = rows or next(readings(inputs))
    apart = {n: rows[n].apart(x) for n, x in inputs.items()}
    count = count or samples or max(2, times * samples_in(inputs, rows))  # torch.export bakes in sizes of 1
    shapes = {n: x.shape if rows[n] == SHARED else (count, *x.shape[1:]) for n, x in apart.items()}
    specs = {n: (shapes[n], x.dtype) for n, x in inputs.items()}
    objective, _ = read_objective(loss, inputs)
    counted = [n for n in apart if rows[n] != SHARED and n not in objective.targets]
    known = KnownInputs(samples, equal_rows(apart, counted)) if samples else None
    fixed = picture_dims(specs) | table_dims(specs, rows) | {(name, 1) for name, row in rows.items() if row.rows > 1}
    fixed |= objective.fixed
    how = {"known": known, "ints": ints, "evaluating": evaluating}
    exporter, own = _Exporter(model, specs, objective, precision, rows, fixed, **how), OwnCalls()  # type: ignore[arg-type]
    turns, trained = RowTurns(), dict[frozenset[Key], set[str]]()
    with record_own_calls(own):
        exporter, program = exporter.exported(repeats=repeats)
        because = exporter.because or fixed_at(program.graph_module, 1)
        if bound := bound_dims(program, specs, objective.fixed):
            exporter = replace(exporter, fixed=exporter.fixed | bound)
            program = exporter.run(repeats=repeats)
        if exporter.turns.rows:
            program = exporter.run(repeats=False)
            turns, functional = RowTurns(rows=dict(exporter.turns.rows)), partial(exporter.functional, repeats=False)
            trained = trained_without_turns(
                program, turns, lambda some: replace(exporter, turns=some).run(repeats=False), functional
            )
        if exporter.skips.rates:
            program = select_layers(lambda some: exporter.leaving_out(some).run_functional(), exporter.skips.rates)
        else:
            program = exporter.functional(program, repeats=repeats)
        of_turns = count_rows(program, parameters_of_turns(program, turns, trained)) if turns.rows else {}
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    traced = collect(program, rows, names, frozen, count, objective, exporter.branches, known is not None)
    traced.of_turns = {names[target.removeprefix("model.")]: of for target, of in of_turns.items()}
    refuse_updates(model, traced, evaluating=evaluating)
    long = any(len(shape) > 1 and (name, 1) not in fixed for name, (shape, _) in specs.items())
    if long and SEQUENCE not in traced.sizes:
        traced.length_fixed = because or "code of a library that forward calls"
    traced.averaging, traced.left_out, traced.left = averaging, tuple(sorted(exporter.left_out)), {*exporter.left}
    if known is not None:
        traced.loops, traced.known = True, {name: known.rows[name] for name in sorted(known.used)}
    traced.own, traced.settled, traced.written = own, exporter.settled, frozenset(exporter.written)
    values = dict(model.named_buffers(remove_duplicate=False))
    traced.transient = frozenset(values) - set(model.state_dict(keep_vars=True))
    traced.constants |= {
        arg: values[name].detach().cpu()
        for arg, name in traced.buffers.items()
        if not values[name].is_meta and arg not in updated_values(traced.graph.graph)
    }
    return traced


SAMPLES = 5, 7  # of the two traces with loops over samples; primes that few other sizes are multiples of

Specs = Mapping[str, tuple[Any, torch.dtype]]  # example input -> its shape and dtype


@dataclass(frozen=True)
class _Exporter:
    """The arguments of an export: the model, its loss, and the shapes and dtypes of its inputs."""

    model: nn.Module
    specs: Specs
    objective: Objective
    precision: str
    rows: Rows
    fixed: frozenset[InputDim] = frozenset()  # static input dims
    casts: Mapping[str, torch.dtype] = field(default_factory=dict)  # input -> dtype that it is cast to on entry
    skips: Skips = field(default_factory=Skips)
    because: str = ""  # what needs these as numbers
    known: KnownInputs | None = None  # set if loops over samples are recorded
    settled: bool = False  # whether a forward pass comes first, for the modules that it replaces
    ints: bool = False  # whether `int` and `float` of sizes give sizes
    evaluating: bool = False  # whether model and loss are in eval mode, without gradients
    left_out: set[str] = field(default_factory=set)  # places of checks of data
    left: set[tuple[str, str]] = field(default_factory=set)  # Python values where forward leaves a tensor
    written: set[str] = field(default_factory=set)  # inputs that forward writes to
    turns: RowTurns = field(default_factory=RowTurns)
    branches: Branches = field(default_factory=dict)
    one_type: bool = False  # whether tensors that forward makes are cast where they meet those of `precision`

    def with_fixed_sizes(self) -> _Exporter:
        """Return an exporter for which all sizes but the number of samples are those of the example inputs."""
        every = {(name, d) for name, (shape, _) in self.specs.items() for d in range(1, len(shape))}
        return replace(self, fixed=self.fixed | every)

    def exported(self, *, repeats: bool) -> tuple[_Exporter, torch.export.ExportedProgram]:
        """Return the graph and its exporter, which has numbers in place of sizes where it cannot be traced without."""
        first: AutoptdError
        try:
            return self.with_casts(repeats=repeats)
        except UnregisteredTensor as error:
            other, first = replace(self.with_fixed_sizes(), settled=True, because=error.where), error
        except TraceError as error:  # such as with a table of positions, which has one size
            other, first = replace(self.with_fixed_sizes(), because=error.where), error
            if isinstance(error, UnsupportedOp) or other == self:
                raise
        try:
            return other.with_casts(repeats=repeats)
        except AutoptdError:
            raise first from first.__cause__

    def with_casts(self, *, repeats: bool) -> tuple[_Exporter, torch.export.ExportedProgram]:
        """Return the graph and its exporter, which casts inputs in the user's parameter dtype that meet a matrix
        product in `precision`. If torch refuses mixed dtypes, a graph in the original dtype shows which inputs do."""
        try:
            return self._with_casts(repeats=repeats)
        except SizeNeeded as needed:
            fixed = self.fixed | needed.dims(self.specs)
            return replace(self, fixed=fixed, because=user_line(needed)).with_casts(repeats=repeats)

    def _with_casts(self, *, repeats: bool) -> tuple[_Exporter, torch.export.ExportedProgram]:
        given, computed = self._written(), PRECISIONS[self.precision]
        names = [
            n for n, (_, dtype) in self.specs.items() if dtype in given - {computed} and n not in self.objective.targets
        ]
        exporter = self
        try:
            program = self.run(repeats=repeats)
            if to_cast := self._inputs_to_cast(program, names, given - {computed}, computed):
                exporter = replace(self, casts=dict.fromkeys(to_cast, computed))
                program = exporter.run(repeats=repeats)
            if not mixes_types(program.graph, given - {computed}, computed):
                return exporter, program
        except TraceError as error:
            written = next((name for name, dtype in PRECISIONS.items() if {dtype} == given), None)
            if isinstance(error, UnsupportedOp) or computed in given or written is None:
                raise
            program = replace(self, precision=written).run(repeats=repeats)
            to_cast = self._inputs_to_cast(program, names, given, PRECISIONS[written])
            exporter = replace(self, casts=dict.fromkeys(to_cast, computed), one_type=True)
            try:
                return exporter, exporter.run(repeats=repeats)
            except TraceError:
                raise error from error.__cause__
        exporter = replace(exporter, one_type=True)
        return exporter, exporter.run(repeats=repeats)

    def _written(self) -> set[torch.dtype]:
        """Return the float types of the user's parameters."""
        return {p.dtype for p in self.model.parameters() if p.is_floating_point()}

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
        """Return the exported graph. Raises InputsError, UnsupportedOp, TraceError."""
        try:
            return self._on("cpu", repeats)
        except TraceError as error:
            # a model built on meta may hold meta tensors that are no buffers: it can be traced on meta only
            if isinstance(error, UnsupportedOp) or not any(p.is_meta for p in self.model.parameters()):
                raise
            first = error
        try:
            return self._on("meta", repeats)
        except TraceError:
            raise first from None

    def leaving_out(self, branches: frozenset[int]) -> _Exporter:
        """Return an exporter that leaves out the layers of these branches on a drawn number."""
        return replace(self, skips=Skips(branches))

    def run_functional(self) -> torch.export.ExportedProgram:
        """Return the exported graph without writes in place."""
        return self.functional(self.run(repeats=False), repeats=False)

    def functional(self, program: torch.export.ExportedProgram, *, repeats: bool) -> torch.export.ExportedProgram:
        """Return a program without writes in place, of views or of torch.func's transforms traced once more."""
        refuse_given_memory(program.graph)
        reshape_functionally(program.graph)
        write_to_operands(program.graph)
        given = dict(zip(map(str, program.graph_signature.user_inputs), self.specs, strict=True))
        self.written.update(given[arg] for arg in copy_written_inputs(program.graph, given))
        refuse_lost_tangents(program.graph)
        write_functionally(program)
        if repeats and to_decompose(program.graph):
            return self.run_functional()
        if not to_decompose(program.graph):
            return program
        written = program.graph
        refuse_writes_to_out(written)
        merge_buffers(program, canonical_names(self.model))
        with silent_export(), with_loss_shapes():
            try:
                program = program.run_decompositions({})
            except RuntimeError as error:
                raise not_functional(error) from error
        refuse_writes_to_state(written, changed_state(program, list(self.specs)))
        name_new_buffers(program)
        return program

    def _on(self, device: str, repeats: bool) -> torch.export.ExportedProgram:
        """Export on a device, without data. Inputs are new tensors: torch.export would merge identical objects."""
        mode = fake_cpu() if device == "cpu" else nullcontext()
        with one_at_a_time, copying():
            copies = skeleton(self.model, self.objective.loss, self.precision, device, mode)
        model = copies.model
        reads = partial(reading, self.known, self.rows, self.left_out, self.turns)
        objective = replace(self.objective, loss=copies.loss)
        root = Loss(model, objective, Originals.of(self.model, model), self.casts, self.rows, reads)
        if self.evaluating:
            root.eval()
        with mode, copies.standing_in():
            fake = {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in self.specs.items()}
            if self.settled:
                settle(model, lambda: objective.value(model, fake))
        ones = {(name, d) for name, x in fake.items() for d, size in enumerate(x.shape) if size == 1}
        kinds = dict.fromkeys(self.fixed | ones, Dim.STATIC)
        dynamic = ({name: {d: kinds.get((name, d), Dim.AUTO) for d in range(x.ndim)} for name, x in fake.items()},)
        hooks, given, samples = ForwardHooks(model), self._written(), self.known.samples if self.known else 0
        self.branches.clear()

        def traced() -> torch.export.ExportedProgram:
            found = Repeats(model, not self.evaluating) if repeats and not hooks else None
            self.turns.rows.clear()
            repeating = nullcontext() if found is None else found.running()
            typed = OneType(given, PRECISIONS[self.precision]) if self.one_type else nullcontext()
            with repeating, random_code(self.skips), recorded_branches(self.branches), typed:
                program = torch.export.export(root, (fake,), dynamic_shapes=dynamic, strict=False)
            refuse_communication(program.graph)
            buffers = program.graph_signature.inputs_to_buffers
            inline_regions(program.graph, program.graph_module, buffers)  # writes within them are looked for next
            hooks.unmark(program.graph, whole=not self.skips.without | self.turns.without)
            if found is not None:
                expand_repeats(program.graph, found.captures, found.paths)
            return program

        try:
            with (
                one_at_a_time,  # what is patched would be given back by another thread
                without_collector(),
                without_shape_cache(),
                with_loss_shapes(),
                lean_export(),
                silent_export(),
                refuse_own_draws(model),
                refuse_packing_beside_cache(self.model, self.specs),
                symbolic_len(model, self.objective.loss, self.ints or samples > 0, samples),
                written_to_trace(self.model),
                hooks.running(),
                write_assigned_buffers(root),
                plain_checkpoints(root),
                as_one_process(),
                torch.set_grad_enabled(not self.evaluating),
                copies.standing_in(),
            ):
                return refuse_changes(copies, root, hooks, traced, self.left)
        except AutoptdError as error:
            raise placed(error) from None
        except SizeNeeded:
            raise
        except Exception as error:  # anything that the model's code or a library raises
            raise explain(error) from error
