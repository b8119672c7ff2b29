"""The layout that the runtime reads, derived from a plan and the traced model."""

from __future__ import annotations

from typing import Any

import sympy

from autoptd.codegen.blocks import name_blocks
from autoptd.compile.program import token_splits
from autoptd.compile.traced import TracedModel
from autoptd.cost_models.memory import COMPUTE_BYTES, MAIN_BYTES
from autoptd.errors import PlanError
from autoptd.layout.layout import InputSpec, Layout, TensorSpec
from autoptd.layout.mesh import Mesh as RankMesh
from autoptd.layout.placements import Split, parse_placement
from autoptd.layout.sample_rows import PLAIN, SHARED, samples_first
from autoptd.layout.size_conditions import SAMPLES, EqualParts, refuse_other_sizes
from autoptd.layout.state_bytes import elements_of
from autoptd.passes.fold import Folded
from autoptd.passes.graph import info, infos
from autoptd.passes.held_tensors import held_tensors
from autoptd.passes.hidden_matrices import hidden_matrices
from autoptd.passes.opcall import TensorInfo
from autoptd.passes.random.skipped_layers import skipping_masks
from autoptd.passes.rules.lookup import op_of
from autoptd.passes.sharding.expert_regions import expert_parameters
from autoptd.passes.sharding.sharding import ops_of
from autoptd.passes.trace.traced import PRECISIONS, SEQUENCE
from autoptd.plans.model import Plan
from autoptd.search.pipeline.stage_parameters import parameter_dtypes


def _cut_inputs(source: TracedModel, plan: Plan) -> tuple[bool, dict[tuple[str, int], int]]:
    """Return whether context parallelism splits tokens in a zigzag, and the multiples that input dims must be of."""
    if plan.mesh.cp == 1:
        return False, {}
    splits = token_splits(source, plan)
    return splits.zigzag, {source.folded.traced.sizes[SEQUENCE]: splits.chunks}


def _equal_parts(folded: Folded, plan: Plan) -> tuple[EqualParts, ...]:
    """Return the sizes of a batch that the plan splits over tp, which batches of other lengths must allow too."""
    found: dict[EqualParts, None] = {}
    for kind, segment in folded.representatives.items():
        for _, node in ops_of(segment):
            call = op_of(node).call
            text = plan.strategies[kind][node.name].partition(" [")[0].replace(" -> ", ", ")
            placements = map(parse_placement, filter(None, text.split(", ")))
            for tensor, placement in zip(call.operands + call.outputs, placements, strict=True):
                size = tensor.shape[placement.dim] if isinstance(placement, Split) else 1
                if isinstance(placement, Split) and not isinstance(size, int) and size.free_symbols:
                    found[EqualParts(size, placement.groups * plan.mesh.tp)] = None
    return tuple(found)


def input_tensors(source: TracedModel) -> dict[str, TensorInfo]:
    """Return type and shape of the model's inputs and targets, by name; sizes may be symbols."""
    traced = source.folded.traced
    found = (n for n in traced.graph.graph.nodes if n.op == "placeholder" and n.name in traced.inputs)
    return {traced.inputs[node.name]: info(node) for node in found}


def _input_specs(source: TracedModel, plan: Plan) -> dict[str, InputSpec]:
    """Return type and shape that a batch must have, by the model's inputs."""
    traced = source.folded.traced
    values = {symbol: plan.sizes[str(symbol)] for symbol in traced.sizes}
    found = {}
    for name, x in input_tensors(source).items():
        rows = traced.rows.get(name, PLAIN)
        shape = x.shape if rows == SHARED else x.shape[1:]
        symbols = tuple(str(n) if isinstance(n, sympy.Expr) and n.free_symbols else "" for n in shape)
        sizes = tuple(int(sympy.sympify(n).subs(values)) for n in shape)
        value = tuple(traced.known[name].flatten().tolist()) if name in traced.known else ()
        found[name] = InputSpec(x.dtype, sizes, symbols, rows, value, written=name in traced.written)
    return {name: found[name] for name in samples_first(traced.inputs.values(), traced.rows)}


def make_layout(source: TracedModel, plan: Plan) -> Layout:
    """Return the part of a plan that the runtime needs, with shapes and types of the model's tensors."""
    folded, traced = source.folded, source.folded.traced
    refuse_other_sizes(traced.conditions, plan.sizes | {SAMPLES: plan.batch}, PlanError)
    shapes = {n: tuple(p.shape) for n, p in source.model.named_parameters(remove_duplicate=False)}
    dtypes = parameter_dtypes(folded)
    held: dict[str, list[int]] = {}
    buffers: dict[str, TensorSpec] = {}
    for index, stage in enumerate(plan.stages):
        segments = folded.segments[stage.first : stage.last + 1]
        names = [traced.parameters[p.name] for s in segments for p in s.parameters]
        if index == 0:
            names += [traced.parameters[n.name] for n in folded.unused_parameters]
        for name in dict.fromkeys(names):
            held.setdefault(name, []).append(index)
        for node in held_tensors(folded, stage.first, stage.last):
            name = traced.buffers.get(node.name, node.name)
            tensor = infos(node)[0]
            stages = (*(buffers[name].stages if name in buffers else ()), index)
            buffers[name] = TensorSpec(
                parse_placement("B"),
                tuple(map(int, tensor.shape)),
                stages,
                trainable=False,
                dtype=tensor.dtype,
                updated=node.name in folded.updates.values,
            )
    called = {i: policy for s in plan.stages for i, policy in plan.policies(s).items()}
    indices = [i for i, policy in called.items() if policy not in ("selective", "logits")]
    recomputed = {traced.parameters[p.name] for i in indices for p in folded.segments[i].parameters}
    experts = expert_parameters(folded) if plan.mesh.ep > 1 else {}
    order = list(dict.fromkeys(traced.parameters[p.name] for s in folded.segments for p in s.parameters))
    order += [n for n in held if n not in set(order)]
    skipped = _skipped_by(folded)
    hidden = hidden_matrices(folded)
    owned, unused = name_blocks(folded).owned, {traced.parameters[n.name] for n in folded.unused_parameters}
    parameters = {
        name: TensorSpec(
            parse_placement(plan.splits.parameters[name]),
            shapes[name],
            tuple(held[name]),
            name not in traced.frozen,
            dtype=None if dtypes[name] == PRECISIONS[plan.precision] else dtypes[name],  # integer or frozen tensors
            recomputed=name in recomputed,
            block=name.removesuffix(owned.get(name, name)).rstrip("."),
            idle=name in unused,
            skipped=skipped.get(name, ()),
            rows=traced.of_turns.get(name, ()),
            ep=plan.mesh.ep if name in experts else 1,
            hidden=name in hidden,
            over_tp=name in experts and plan.mesh.etp == 1 and plan.mesh.tp > 1,
        )
        for name in order
    }
    zigzag, multiples = _cut_inputs(source, plan)
    narrow = plan.method.gradients == "compute"
    return Layout(
        mesh=RankMesh(
            plan.mesh.dp,
            plan.mesh.tp,
            plan.mesh.pp,
            plan.schedule.virtual,
            plan.route.shape,
            plan.mesh.cp,
            plan.mesh.ep,
            plan.mesh.etp,
        ),
        micro=plan.micro,
        microbatches=plan.schedule.microbatches,
        inputs=tuple(samples_first(traced.inputs.values(), traced.rows)),
        parameters=parameters,
        buffers=buffers,
        zero=plan.zero,
        shards=min(plan.method.shards, plan.mesh.dp * plan.mesh.cp) if plan.zero else 0,
        precision=plan.precision,
        schedule=plan.schedule.kind,
        gather_later="dp" in plan.method.overlap,
        rings=plan.method.rings and plan.mesh.tp > 1,
        sums_over_dp="dp" in folded.axes,
        statistics=folded.statistics.evaluation if folded.statistics.over_dp else "none",
        sums=folded.updates.width,
        sums_ahead=plan.method.sums == "ahead",
        one_microbatch=bool(folded.loss_form.refused),
        zigzag=zigzag,
        multiples=multiples,
        parts=_equal_parts(folded, plan) if plan.mesh.tp > 1 else (),
        conditions=traced.conditions,
        samples=plan.batch,
        specs=_input_specs(source, plan),
        nest=source.objective.nest,
        slices=plan.method.sends == "slices",
        modules=tuple(stage.modules for stage in plan.stages),
        gradients="compute" if narrow else "main",
        offload=plan.method.offload,
        bucket_elements=elements_of(
            plan.method.bucket_bytes,
            (COMPUTE_BYTES if narrow else MAIN_BYTES)[plan.precision],
            plan.mesh.dp * plan.mesh.cp,
        ),
    )


def _skipped_by(folded: Folded) -> dict[str, tuple[tuple[str, float], ...]]:
    """Return the masks of the layers that alone read each parameter."""
    names, segments = folded.traced.parameters, folded.segments
    masks = skipping_masks(folded.traced.graph.graph, of_gradients=True)
    key = {n: f"{s.index}.{i}" for s in segments for i, n in enumerate(s.nodes)}
    return {
        names[n.name]: tuple(sorted((key[mask], float(mask.args[1])) for mask in of))  # type: ignore[arg-type]
        for n, of in masks.items()
        if of and n.name in names
    }


def named_values(source: TracedModel) -> dict[str, Any]:
    """Return the constants that the graph closes over, by their names in the stages."""
    traced = source.folded.traced
    return {name: value for name, value in traced.constants.items() if name not in traced.buffers}
