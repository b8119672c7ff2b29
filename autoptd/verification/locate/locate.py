"""The first op, in the order of execution, whose value or gradient differs from the graph's.

Every line of the emitted program records its result (`recorder`). The ranks' parts are combined by their placement in
the plan, and compared with the whole tensor of the same op of the graph (`whole`), microbatch by microbatch:

           whole value                               whole gradient
    B      every rank's value                        every rank's gradient
    Bp     every rank's value                        the sum of the ranks' gradients
    S      the concatenated slices                   the concatenated slices
    P      the sum of the ranks' values              every rank's gradient

Values are compared first, since a wrong one explains all after it; if all are right, gradients, the last op first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from autoptd.codegen.blocks import BlockNames as Names
from autoptd.codegen.blocks import BlockSegments, name_blocks, piece_starts, pieces_of
from autoptd.codegen.body import Made
from autoptd.codegen.stage import write_stage
from autoptd.compile.program import emission_options, make_program, read_sharding
from autoptd.compile.traced import TracedModel
from autoptd.layout.layout import Layout
from autoptd.layout.placements import BP, Broadcast, PartialSum, Placement, Split
from autoptd.ops.axis.slices import from_slices
from autoptd.passes.graph import module_path, op_name
from autoptd.plans.model import Plan
from autoptd.verification.keyed import Draw
from autoptd.verification.locate.recorder import Line, Recorded
from autoptd.verification.locate.whole import batch_totals, drawn_nodes, microbatches, run_whole

_TOLERANCE = 1e-8


@dataclass(frozen=True)
class Meaning:
    """The result of a line of a stage: a tensor of the graph in a placement. `at`: its position in the graph."""

    node: fx.Node
    placement: Placement
    at: int


@dataclass(frozen=True)
class Found:
    """A line with a wrong value or gradient."""

    stage: int
    microbatch: int
    ranks: tuple[int, ...]
    line: Line
    meaning: Meaning
    difference: float
    gradient: bool


def meanings(source: TracedModel, plan: Plan) -> list[dict[tuple[int | None, Line], Meaning]]:
    """Return, for each stage, (block call, line) -> the tensor that the line computes."""
    sharding = read_sharding(source, plan)
    starts = {i for s in plan.stages for i in piece_starts(s.first, s.last, plan.policies(s))}
    names = name_blocks(source.folded, starts, **emission_options(plan))
    result = []
    classes = [cls for _, cls in make_program(source, plan, sharding).stages]
    for stage, cls in zip(plan.stages, classes, strict=True):
        policies = plan.policies(stage)
        written = write_stage(names, sharding, stage.first, stage.last, policies)
        pieces = [p for p in pieces_of(names, sharding, stage.first, stage.last, policies) if p.block]
        order = {n: i for i, n in enumerate(source.folded.traced.graph.graph.nodes)}
        found: dict[tuple[int | None, Line], Meaning] = {}
        _add_meanings(found, None, cls, written.made[""], {}, order)
        calls = [call for piece in pieces for call in (piece, *piece.parts)]
        for i, piece in enumerate(calls):
            _add_meanings(found, i, piece.block, written.made[piece.block], _instance(names, piece), order)
        result.append(found)
    return result


def _add_meanings(
    found: dict[tuple[int | None, Line], Meaning],
    block: int | None,
    cls: str,
    made: Sequence[Made],
    instance: Mapping[fx.Node, fx.Node],
    order: Mapping[fx.Node, int],
) -> None:
    count: dict[str, int] = {}
    for name, node, placement in made:
        mine = instance.get(node, node)
        line = cls, name, count.setdefault(name, 0)
        found[block, line] = Meaning(mine, placement, order[mine])
        count[name] += 1


def _instance(names: Names, piece: BlockSegments) -> dict[fx.Node, fx.Node]:
    """Return the nodes of the instance that a block class is written from -> the nodes of this piece."""
    found: dict[fx.Node, fx.Node] = {}
    for model, mine in zip(piece.first_instance(names).segments, piece.segments, strict=True):
        for field in ("nodes", "parameters", "prelude", "receives"):
            found |= dict(zip(getattr(model, field), getattr(mine, field), strict=True))
    return found


def first_wrong_line(
    source: TracedModel,
    plan: Plan,
    layout: Layout,
    batch: Mapping[str, Tensor],
    draws: Sequence[Draw],
    recorded: Sequence[Sequence[Recorded]],
) -> Found | None:
    """Return the first wrong line of one step; None if all are right, with cp or ep, or if samples read statistics over
    the batch. `recorded`: results by rank."""
    if layout.mesh.cp > 1 or layout.mesh.ep > 1 or source.folded.statistics.count:
        return None
    known = meanings(source, plan)
    drawn = drawn_nodes(source, draws)
    wrong: list[Found] = []
    totals = batch_totals(source, batch, drawn)
    for dp, number, first, micro in microbatches(layout, batch):
        ran = run_whole(source, micro, totals, drawn, first)
        for stage in range(layout.mesh.stages):
            ranks = tuple(layout.mesh.rank(layout.mesh.holder(stage), dp, tp) for tp in range(layout.mesh.tp))
            rows = [[t for t in recorded[r] if (t.stage, t.microbatch) == (stage, number)] for r in ranks]
            wrong += _stage(stage, number, ranks, rows, known[stage], ran.values, ran.gradients)
    forward = [f for f in wrong if not f.gradient]
    if forward:
        return min(forward, key=lambda f: (f.meaning.at, f.microbatch, f.stage))
    return max(wrong, key=lambda f: (f.meaning.at, -f.microbatch), default=None)


def _stage(
    stage: int,
    microbatch: int,
    ranks: tuple[int, ...],
    rows: Sequence[Sequence[Recorded]],
    known: Mapping[tuple[int | None, Line], Meaning],
    values: Mapping[fx.Node, Tensor],
    gradients: Mapping[fx.Node, Tensor | None],
) -> Iterator[Found]:
    """Yield the wrong lines of one forward and backward pass, in order: the first wrong value, all wrong gradients."""
    for same in zip(*rows, strict=False):
        meaning = known.get((same[0].block, same[0].line))
        if meaning is None or meaning.node not in values or len({t.line for t in same}) > 1:
            continue
        off = _relative_difference([t.value for t in same], meaning.placement, values[meaning.node], gradient=False)
        if off > _TOLERANCE:
            yield Found(stage, microbatch, ranks, same[0].line, meaning, off, gradient=False)
            return
    done: set[fx.Node] = set()
    for same in zip(*rows, strict=False):
        meaning = known.get((same[0].block, same[0].line))
        wanted = None if meaning is None else gradients.get(meaning.node)
        if meaning is None or wanted is None or meaning.node in done:
            continue  # only the first placement of a tensor has the whole gradient
        done.add(meaning.node)
        got = [torch.zeros_like(t.value) if t.gradient is None else t.gradient for t in same]
        off = _relative_difference(got, meaning.placement, wanted, gradient=True)
        if off > _TOLERANCE:
            yield Found(stage, microbatch, ranks, same[0].line, meaning, off, gradient=True)


def _relative_difference(parts: Sequence[Tensor], placement: Placement, whole: Tensor, *, gradient: bool) -> float:
    """Return the largest relative difference between the ranks' combined parts and the whole tensor."""
    if not whole.dtype.is_floating_point:
        return 0.0
    summed = placement == BP if gradient else isinstance(placement, PartialSum)
    match placement:
        case Split(dim, groups) if len(parts) > 1:
            held = [from_slices(torch.stack(list(parts)), dim, groups)]
        case Broadcast() | PartialSum() if summed:
            held = [torch.stack(list(parts)).sum(0)]
        case _:
            held = list(parts)
    if any(x.shape != whole.shape for x in held):
        return float("inf")
    if any(not torch.equal(x.isfinite(), whole.isfinite()) for x in held):
        return float("inf")
    wanted, *got = (x.detach().nan_to_num(0.0, 0.0, 0.0) for x in (whole, *held))  # masks hold -inf
    return max((x - wanted).norm().item() for x in got) / (wanted.norm().item() or 1.0)


def describe(source: TracedModel, found: Found, places: Mapping[Line, str]) -> tuple[str, str]:
    """Return (where, what) of a wrong line."""
    node = found.meaning.node
    path = module_path(node)
    own = source.folded.traced.parameters.get(node.name, node.name if node.op == "placeholder" else None)
    op = own or (f"{path}: {op_name(node)}" if path else op_name(node))
    what = "the gradient of its result" if found.gradient else "its result"
    together = {"P": "added up", "S": "concatenated"}.get(str(found.meaning.placement)[0], "each by itself")
    line = places.get(found.line, " ".join(map(str, found.line)))
    return (
        f"stage {found.stage}, {op}",
        f"{what}, {found.meaning.placement} on ranks {list(found.ranks)}, {together}, is off by {found.difference:.1e} "
        f"in microbatch {found.microbatch}\n{line}",
    )
