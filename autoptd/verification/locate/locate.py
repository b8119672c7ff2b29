"""The first op, in the order of execution, whose value or gradient is not what the graph says.

Every line of the emitted program tells what it made (`recorder`); the ranks' parts are put together by the placement
that the plan gives them, and held to the whole tensor of the same op of the graph (`whole`), microbatch by microbatch:

    B, Bp  every rank's value is the whole one       gradient: B every rank's, Bp their sum
    S      the slices one after the other            the same
    P      the sum of the ranks' values              every rank's

Values first: what is wrong there explains all behind it. Where all values are right, gradients, last op first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from autoptd.codegen.blocks import BlockNames as Names
from autoptd.codegen.blocks import BlockSegments, name_blocks, pieces_of
from autoptd.codegen.body import Made
from autoptd.codegen.stage import write_stage
from autoptd.compile.program import make_program, read_sharding
from autoptd.compile.traced import TracedModel
from autoptd.layout.layout import Layout
from autoptd.layout.placements import BP, Broadcast, PartialSum, Placement, Split
from autoptd.ops.tp_axis import from_slices
from autoptd.passes.graph import module_path, op_name
from autoptd.plans.model import Plan
from autoptd.verification.keyed import Draw
from autoptd.verification.locate.recorder import Line, Told
from autoptd.verification.locate.whole import drawn_nodes, microbatches, over_batch, run_whole

_TOLERANCE = 1e-8


@dataclass(frozen=True)
class Meaning:
    """What a line of a stage makes: a tensor of the graph, in a placement; `at` is its place in the stage."""

    node: fx.Node
    placement: Placement
    at: int


@dataclass(frozen=True)
class Found:
    """A line whose result is not what it should be."""

    stage: int
    microbatch: int
    ranks: tuple[int, ...]
    line: Line
    meaning: Meaning
    difference: float
    gradient: bool


def meanings(source: TracedModel, plan: Plan) -> list[dict[tuple[int | None, Line], Meaning]]:
    """By stage: (block call, line) -> what it makes."""
    sharding = read_sharding(source, plan)
    names = name_blocks(source.folded, plan.method.loss == "in_place")
    result = []
    classes = [cls for _, cls in make_program(source, plan, sharding).stages]
    for stage, cls in zip(plan.stages, classes, strict=True):
        policies = plan.policies(stage)
        written = write_stage(names, sharding, stage.first, stage.last, policies)
        pieces = [p for p in pieces_of(names, sharding, stage.first, stage.last, policies) if p.block]
        order = {n: i for i, n in enumerate(source.folded.traced.graph.graph.nodes)}
        found: dict[tuple[int | None, Line], Meaning] = {}
        _note(found, None, cls, written.made[""], {}, order)
        for i, piece in enumerate(pieces):
            _note(found, i, piece.block, written.made[piece.block], _instance(names, piece), order)
        result.append(found)
    return result


def _note(
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
    """Nodes of the instance that a block class is written from -> the piece's own."""
    found: dict[fx.Node, fx.Node] = {}
    for model, mine in zip(piece.first_instance(names).segments, piece.segments, strict=True):
        for field in ("nodes", "parameters", "prelude", "receives"):
            found |= dict(zip(getattr(model, field), getattr(mine, field), strict=True))
    return found


def first_wrong(
    source: TracedModel,
    plan: Plan,
    layout: Layout,
    batch: Mapping[str, Tensor],
    draws: Sequence[Draw],
    told: Sequence[Sequence[Told]],
) -> Found | None:
    """Of one step; `told`: by rank. None where all that was told is right, or tokens are cut over cp."""
    if layout.mesh.cp > 1:
        return None
    known = meanings(source, plan)
    drawn = drawn_nodes(source, draws)
    wrong: list[Found] = []
    over = over_batch(source, batch, drawn)
    for dp, number, first, micro in microbatches(layout, batch):
        ran = run_whole(source, micro, over, drawn, first)
        for stage in range(layout.mesh.stages):
            ranks = tuple(layout.mesh.rank(layout.mesh.holder(stage), dp, tp) for tp in range(layout.mesh.tp))
            rows = [[t for t in told[r] if (t.stage, t.microbatch) == (stage, number)] for r in ranks]
            wrong += _stage(stage, number, ranks, rows, known[stage], ran.values, ran.gradients)
    forward = [f for f in wrong if not f.gradient]
    if forward:
        return min(forward, key=lambda f: (f.meaning.at, f.microbatch, f.stage))
    return max(wrong, key=lambda f: (f.meaning.at, -f.microbatch), default=None)


def _stage(
    stage: int,
    microbatch: int,
    ranks: tuple[int, ...],
    rows: Sequence[Sequence[Told]],
    known: Mapping[tuple[int | None, Line], Meaning],
    values: Mapping[fx.Node, Tensor],
    gradients: Mapping[fx.Node, Tensor | None],
) -> Iterator[Found]:
    """What is wrong in one forward and backward pass, in the order of the lines; of values only the first."""
    for same in zip(*rows, strict=False):
        meaning = known.get((same[0].block, same[0].line))
        if meaning is None or meaning.node not in values or len({t.line for t in same}) > 1:
            continue
        off = _apart([t.value for t in same], meaning.placement, values[meaning.node], gradient=False)
        if off > _TOLERANCE:
            yield Found(stage, microbatch, ranks, same[0].line, meaning, off, gradient=False)
            return
    done: set[fx.Node] = set()
    for same in zip(*rows, strict=False):
        meaning = known.get((same[0].block, same[0].line))
        wanted = None if meaning is None else gradients.get(meaning.node)
        if meaning is None or wanted is None or meaning.node in done:
            continue  # of several placements of one tensor the first has the whole gradient
        done.add(meaning.node)
        got = [torch.zeros_like(t.value) if t.gradient is None else t.gradient for t in same]
        off = _apart(got, meaning.placement, wanted, gradient=True)
        if off > _TOLERANCE:
            yield Found(stage, microbatch, ranks, same[0].line, meaning, off, gradient=True)


def _apart(parts: Sequence[Tensor], placement: Placement, whole: Tensor, *, gradient: bool) -> float:
    """The largest relative difference of what the ranks hold from the whole tensor."""
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
    scale = whole.detach().norm().item() or 1.0
    found = max((x.detach() - whole.detach()).norm().item() for x in held) / scale
    return found if found == found else float("inf")


def tell(source: TracedModel, found: Found, places: Mapping[Line, str]) -> tuple[str, str]:
    """(where, what) of a wrong line."""
    node = found.meaning.node
    path = module_path(node)
    own = source.folded.traced.parameters.get(node.name)
    op = own or (f"{path}: {op_name(node)}" if path else op_name(node))
    what = "the gradient of what it makes" if found.gradient else "what it makes"
    together = {"P": "added up", "S": "put side by side"}.get(str(found.meaning.placement)[0], "each by itself")
    line = places.get(found.line, " ".join(map(str, found.line)))
    return (
        f"stage {found.stage}, {op}",
        f"{what}, {found.meaning.placement} on ranks {list(found.ranks)}, {together}, is off by {found.difference:.1e} "
        f"in microbatch {found.microbatch}\n{line}",
    )
