"""Tracing a module: its graph with the loss, normalised and folded into a `TracedModel`.

It imports torch.export, which takes a second; a model whose trace is known already needs none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autoptd.compile.traced import TracedModel
from autoptd.errors import InputsError, PlanError, TraceError, UnsupportedOp, nearest
from autoptd.layout.sample_rows import PLAIN, SHARED, Rows, is_declared, readings, with_samples
from autoptd.layout.size_conditions import Conditions
from autoptd.models.inputs import inputs_beside, model_name
from autoptd.nest import Nest
from autoptd.passes.evaluation.difference import Difference, first_difference
from autoptd.passes.fold import fold, graph_hash
from autoptd.passes.loops.same_program import refuse_other_program
from autoptd.passes.losses.outer_function import LARGEST
from autoptd.passes.normalise.normalise import normalise
from autoptd.passes.objectives.metrics import Metrics
from autoptd.passes.objectives.terms import NamedTerms
from autoptd.passes.trace.lean_export import user_lines
from autoptd.passes.trace.loss import Objective, Targets, name_targets, read_objective
from autoptd.passes.trace.specialize_sizes import check_inputs
from autoptd.passes.trace.trace import SAMPLES, trace
from autoptd.passes.trace.traced import AVERAGINGS, BATCH, SEQUENCE
from autoptd.passes.trace.unwrap import compiled_notes, eval_notes, modes_of, refuse_unsuitable, unwrap
from autoptd.progress import Progress
from autoptd.search.sharding.cache import ShardingCache

_PRECISIONS = ("bf16", "fp16", "fp32", "fp64")
_MEANT = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float64": "fp64"}


def read_model(
    model: nn.Module,
    *,
    inputs: Mapping[str, Any] | None,
    loss: Callable[..., Tensor] | Objective | None,
    targets: Targets | None = None,
    seq: int | None,
    precision: str,
    progress: Progress,
    loss_averaging: str = "global",
) -> TracedModel:
    """Trace and fold a model. Raises InputsError for invalid arguments or missing inputs; TraceError, UnsupportedOp."""
    read = partial(
        _read_model,
        model,
        inputs=inputs,
        loss=loss,
        targets=targets,
        seq=seq,
        precision=precision,
        progress=progress,
        loss_averaging=loss_averaging,
    )
    try:
        return read(terms=())
    except NamedTerms as found:  # known once the loss has run
        terms = found.names
    if loss_averaging != "global":
        raise InputsError(
            f"the loss returns {', '.join(map(repr, terms))} beside the loss, which are computed from the whole batch",
            where="loss_averaging",
            fix="leave loss_averaging out, or return the scalar alone",
        )
    return read(terms=terms)


def _read_model(
    model: nn.Module,
    *,
    inputs: Mapping[str, Any] | None,
    loss: Callable[..., Tensor] | Objective | None,
    targets: Targets | None,
    seq: int | None,
    precision: str,
    progress: Progress,
    loss_averaging: str,
    terms: tuple[str, ...],
) -> TracedModel:
    if precision == "fp8":
        raise PlanError(
            "no program computes in fp8 yet",
            where="precision",
            fix="predict it: autoptd.plan(…, precision='bf16', assume={'fp8': 'mxfp8'})",
        )
    if precision not in _PRECISIONS:
        raise PlanError(
            f"unknown precision {precision!r}", where="precision", fix=nearest(str(precision), _PRECISIONS, _MEANT)
        )
    if loss_averaging not in AVERAGINGS:
        raise InputsError(
            f"loss_averaging is {loss_averaging!r}",
            where="loss_averaging",
            fix=nearest(str(loss_averaging), AVERAGINGS),
        )
    if not isinstance(model, nn.Module):
        raise InputsError(f"the model is {type(model).__name__}, not an nn.Module", fix="pass the module itself")
    notes = compiled_notes(model)
    model = unwrap(model)
    notes += eval_notes(model)
    refuse_unsuitable(model)
    if not any(p.requires_grad for p in model.parameters()):
        raise InputsError("the model has no trainable parameter", fix="set requires_grad=True on those to train")
    if seq is not None and (not isinstance(seq, int) or isinstance(seq, bool) or seq < 1):
        raise InputsError(f"seq is {seq!r}", where="seq", fix="give the tokens of a sample, at least 1")
    if inputs is not None and not isinstance(inputs, Mapping):
        raise InputsError(
            f"inputs is of type {type(inputs).__name__}, not a mapping",
            where="inputs",
            fix="pass inputs={'name': tensor, …} with the keyword arguments of forward",
        )
    given = dict(inputs) if inputs is not None else inputs_beside(model, seq, name_targets(targets))
    nest = loss.nest if isinstance(loss, Objective) else Nest.of({**given, **name_targets(targets)})
    given = nest.flat(named_inputs := given)
    if named_inputs and not given:
        name, x = next(iter(named_inputs.items()))
        raise InputsError(
            f"input {name!r} is {type(x).__name__}, and no input holds a tensor",
            where="inputs",
            fix="pass keyword tensors, whose dim 0 counts samples",
        )
    objective, named = read_objective(loss, given, targets, nest)
    objective, model = objective.joined(model)
    if terms:
        objective, model = objective.with_terms(terms, model)
    check_inputs(examples := {**given, **named})
    in_modes = modes_of(model, objective.loss)

    def traced_with(examples: Mapping[str, Tensor], rows: Rows, objective: Objective = objective) -> TracedModel:
        metrics = isinstance(objective, Metrics)
        traced_by = partial(
            trace,
            model,
            inputs=examples,
            rows=rows,
            loss=objective,
            precision=precision,
            averaging="global" if metrics else loss_averaging,  # type: ignore[arg-type]
            evaluating=metrics,
        )
        with progress.stage(f"trace {type(model).__name__}"):
            traced = traced_by()
        try:
            # ops are tried on small tensors on the CPU, whatever the caller's default device
            with torch.device("cpu"), progress.stage("normalise and fold the graph"):
                folded = fold(normalise(traced))
                digest = graph_hash(traced)
                if traced.loops:
                    refuse_other_program(traced, normalise(traced_by(samples=SAMPLES[1])))
                known = ShardingCache(folded).read()
        except UnsupportedOp as error:
            if not (dims := traced.dims_as_numbers - objective.fixed):
                raise
            with suppress(TraceError):
                found = traced_with(examples, rows, replace(objective, fixed=objective.fixed | dims))
                found.folded.traced.length_fixed = error.where
                if found.folded.loss_form.row_width <= LARGEST:
                    return found
            raise
        sizes = {s: n for s, n in traced.example.items() if s != BATCH}
        if seq is not None and SEQUENCE in sizes:
            sizes[SEQUENCE] = seq

        def again(samples: int) -> TracedModel:
            given = with_samples(examples, rows, samples)
            found = traced_with(given, rows, objective)
            return found if samples > 1 else found.for_one(lambda: (traced_by(), traced_by(inputs=given, single=True)))

        def evaluated(metrics: Objective) -> TracedModel:
            return traced_with(examples, rows, metrics)

        def parted() -> Difference | Conditions:
            with in_modes(), user_lines():
                same = replace(objective, fixed=objective.fixed | traced.fixed_dims)
                training, evaluation = traced_by(), traced_by(evaluating=True, loss=same)
            with torch.device("cpu"):
                return first_difference(training, evaluation)

        given_notes = (*notes, *traced.notes)
        name, late = model_name(model), (evaluated, parted)
        return TracedModel(lambda: model, name, folded, digest, sizes, precision, known, again, given_notes, *late)

    first: TraceError | None = None
    for rows in readings(examples):
        try:
            found = traced_with(examples, rows)
            _refuse_other_length(seq, found, examples)
            _refuse_two_readings(found, examples, rows, traced_with)
            return found
        except TraceError as error:
            first = first or error
            if isinstance(error, UnsupportedOp) and set(rows.values()) <= {PLAIN, SHARED}:  # no guess is left
                first = error
                break
    assert first is not None
    raise first from first.__cause__


def _refuse_other_length(seq: int | None, found: TracedModel, examples: Mapping[str, Tensor]) -> None:
    """Raise InputsError if a length is asked for, and the model runs at another one only."""
    where = found.folded.traced.length_fixed
    if (
        seq is not None
        and SEQUENCE not in found.sizes
        and where
        and not any(seq in x.shape[1:] for x in examples.values())
    ):
        raise InputsError(
            f"seq is {seq}, but the model runs at the length of the example inputs only: it is a number",
            where=where,
            fix=f"give example inputs of {seq} tokens a sample, or leave seq out",
        )


def _refuse_two_readings(
    found: TracedModel,
    examples: Mapping[str, Tensor],
    rows: Rows,
    traced_with: Callable[[Mapping[str, Tensor], Rows], TracedModel],
) -> None:
    """Raise InputsError for an input that may have rows for each sample, if all samples may share it as well.

    A data-parallel rank is given its part of the one and all of the other. Tried are several rows for each sample, and
    one where a loss over the whole batch picks rows of the input, as of weights of classes.
    """
    traced = found.folded.traced
    read = {traced.inputs[n.name] for n in traced.graph.graph.nodes if n.users and n.name in traced.inputs}
    unsaid = {name: row for name, row in rows.items() if name in read and not is_declared(examples[name])}
    several = [name for name, row in unsaid.items() if row not in (PLAIN, SHARED)]
    picked = [[name] for name, row in unsaid.items() if row == PLAIN and name in traced.read_whole]
    for names in filter(None, [several, *picked]):
        try:
            shared = traced_with(examples, {**rows, **dict.fromkeys(names, SHARED)})
        except Exception:  # noqa: BLE001  whatever a library raises where sizes do not fit
            continue
        if not shared.folded.loss_form.refused:
            raise InputsError(
                f"input {names[0]!r} of shape {list(examples[names[0]].shape)} may have {rows[names[0]]}, or be shared "
                "by all samples",
                where=f"inputs: {names[0]}",
                fix=f"say which, inputs={{{names[0]!r}: autoptd.shared(x)}} or autoptd.shared(x, False); or, if its "
                "size is not that of a batch, give example inputs of another number of samples, such as 3 or 7",
            )
