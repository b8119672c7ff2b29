"""Division of a stage into pieces: segments that become a block class, and segments in the stage's own forward.

A unit that repeats (attention + MLP, × 32) becomes one class; a stage that begins or ends inside a unit has a class for
its part of it. Segments that occur once are in the stage's own forward, unless they are recomputed.

Parameters that a block does not own (`passes/blocks.py`) are declared by the stage and passed as arguments.
"""

from __future__ import annotations

import builtins
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from autoptd.codegen.names import TAKEN
from autoptd.codegen.quoting import is_name, plain_name
from autoptd.codegen.recompute import flow_of, recomputation_of
from autoptd.errors import PlanFileError, TraceError
from autoptd.passes.analysis.activations import recomputed_steps
from autoptd.passes.analysis.heads import heads_of
from autoptd.passes.blocks import LayerBlock, find_blocks, owned_by_blocks
from autoptd.passes.fold import Folded, Segment
from autoptd.passes.graph import module_stack
from autoptd.passes.sharding.sharding import Sharding

# attributes of emitted modules
_BLOCK_NAMES = frozenset({"tp", "cp", "ep", "dp", "dropout", "_first"})
_STAGE_NAMES = _BLOCK_NAMES | {
    "draws",
    "inputs",
    "receives",
    "sends",
    "is_last",
    "sizes",
    "partial_sums",
    "count_inputs",
    "counted",
    "loss_counts",
    "loss_of",
    "reads_counts",
    "summed",
    "update_buffers",
    "shared_inputs",
}
# names that emitted files use, which no block class may have
_READ = TAKEN | {
    *("Tensor", "Axis", "Tokens", "Experts", "Replicas", "DropoutKey", "Stage", "Count", "Wire", "buffer", "LAYERS"),
    *("BF16", "FP16", "FP32", "FP64", "loss_counts", "loss_of", "dropout", "first", "path", "i", "stage"),
}


@dataclass(frozen=True)
class BlockSegments:
    """Consecutive segments of one stage; `block` is their class, or "" if they are in the stage's own forward."""

    segments: tuple[Segment, ...]
    block: str
    prefix: str  # dotted path of the module that owns its parameters
    policy: str  # of recomputation: "none", or one of `passes.analysis.activations.POLICIES`
    model: tuple[Segment, ...]  # the same segments of the first equal block, from which the class is written

    @property
    def first(self) -> int:
        return self.segments[0].index

    def first_instance(self, layout: BlockNames) -> BlockSegments:
        """Return the piece of the first instance, from which the class is written."""
        return replace(self, segments=self.model, prefix=layout.prefix_of(self.model[0].index))

    @property
    def called_by(self) -> str:
        """The function that calls of the whole piece go through: `recompute`, `offload`, or none ("")."""
        return {"full": "recompute", "ops": "recompute", "offload": "offload"}.get(self.policy, "")

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        return tuple(n for s in self.segments for n in s.nodes)

    @property
    def parameters(self) -> tuple[fx.Node, ...]:
        return _unique(n for s in self.segments for n in s.parameters)

    @property
    def prelude(self) -> tuple[fx.Node, ...]:
        return _unique(n for s in self.segments for n in s.prelude)

    @property
    def receives(self) -> tuple[fx.Node, ...]:
        inside = set(self.nodes)
        return _unique(n for s in self.segments for n in s.receives if n not in inside)

    def sends(self, folded: Folded) -> tuple[fx.Node, ...]:
        """Return the tensors that other pieces read and the loss, then sums over samples."""
        inside = {s.index for s in self.segments}
        outside = {n for s in folded.segments if s.index not in inside for n in s.receives}
        sent = [n for s in self.segments for n in s.sends]
        return (*(n for n in sent if n in outside or n is folded.loss), *(n for n in sent if n in folded.sums))


def _unique(nodes: Iterator[fx.Node]) -> tuple[fx.Node, ...]:
    return tuple(dict.fromkeys(nodes))


@dataclass(frozen=True)
class BlockNames:
    """Names of blocks and of the parameters that blocks own, for the whole model; and options of its emitted code."""

    folded: Folded
    owned: dict[str, str]  # original name of a parameter -> its name within its block
    prefixes: dict[int, str]  # first segment of each block -> dotted path
    classes: dict[int, str]  # first segment of the first of equal blocks -> class name; one that does not repeat uses
    # it if recomputed
    loss_in_place: bool = False  # see `loss` in `search/constraints/options.py`
    regather: bool = False  # see `gathers` there
    fast_dropout: bool = False  # see `dropout` there

    def prefix_of(self, segment: int) -> str:
        """Return the dotted path of the instance that a segment belongs to."""
        return self.prefixes[max(i for i in self.prefixes if i <= segment)]


def name_blocks(
    folded: Folded, loss_in_place: bool = False, regather: bool = False, fast_dropout: bool = False
) -> BlockNames:
    """Choose the names of blocks for all stages. Raises TraceError for parameters with names that emitted code uses."""
    axes = frozenset(folded.axes)
    _refuse_taken((*folded.traced.parameters.values(), *folded.traced.buffers.values()), _STAGE_NAMES | axes)
    owned, prefixes = owned_by_blocks(folded)
    classes: dict[int, str] = {}
    for block in find_blocks(folded):
        if block.like == block.first:
            segments = block.segments(folded)
            name = _class_name(segments) + ("" if block.unit.count > 1 else _last_word(segments[0].name))
            classes[block.first] = _fresh_class(name, classes.values())
    _refuse_taken(owned.values(), _BLOCK_NAMES | axes)
    return BlockNames(folded, owned, prefixes, classes, loss_in_place, regather, fast_dropout)


def _refuse_taken(parameters: Iterable[str], taken: frozenset[str]) -> None:
    wrong = [name for name in parameters if name.partition(".")[0] in taken]
    if wrong:
        raise TraceError(
            "parameters keep their names in the program, but its modules use these names themselves",
            where="\n".join(wrong),
            fix=f"rename the attribute to something other than {', '.join(sorted(taken))}",
        )


def _class_name(segments: tuple[Segment, ...]) -> str:
    """Return a class name after the innermost module that made all of these nodes."""
    stacks = [dict(module_stack(n)) for s in segments for n in s.nodes if n.meta.get("nn_module_stack")]
    if not stacks:
        return "Block"
    shared = [path for path in stacks[0] if all(path in stack for stack in stacks)]
    inner = [path for path in shared if re.search(r"\d", path)] or shared
    name = plain_name(stacks[0][inner[-1]]) if inner else "Block"
    if name in _READ or hasattr(builtins, name) or re.fullmatch(r"Stage[0-9_To]+", name) or not is_name(name):
        name = f"{name}Block"
    return "Block" if name in ("Sequential", "ModuleList", "Linear", "Module") else name


def _fresh_class(name: str, others: Collection[str]) -> str:
    """Return an unused name: `LlamaDecoderLayer`, then `LlamaDecoderLayer2`."""
    numbers = itertools.chain([""], itertools.count(2))
    return next(found for number in numbers if (found := f"{name}{number}") not in others)


def _last_word(name: str) -> str:
    return "".join(part.title() for part in re.findall(r"[a-z]+", name)[-1:])


def pieces_of(
    layout: BlockNames, sharding: Sharding, first: int, last: int, recompute: Mapping[int, str]
) -> list[BlockSegments]:
    """Divide a stage's segments into pieces, in program order. `recompute`: segment -> policy."""
    folded = layout.folded
    found: list[BlockSegments] = []
    for block in find_blocks(folded):
        mine = tuple(folded.segments[i] for i in block.inside(first, last))
        groups = list(_by_policy(mine, recompute))
        if layout.prefixes[block.first]:
            _refuse_several(groups, recompute)
        for group in groups:
            policy = effective_policy(group, sharding, recompute.get(group[0].index, "none"))
            keeps = bool(recomputation_of(group, sharding, policy).kept)
            found.append(_piece(layout, block, group, policy, keeps))
    return found


def _refuse_several(groups: Sequence[tuple[Segment, ...]], recompute: Mapping[int, str]) -> None:
    """Raise PlanFileError for several policies within a block, since one module holds its parameters."""
    if len(groups) > 1:
        policies = ", ".join(f"{recompute.get(g[0].index, 'none')} for {g[0].index}" for g in groups)
        first, last = groups[0][0].index, groups[-1][-1].index
        raise PlanFileError(
            f"segments {first} to {last} are one block, which has one recomputation policy, not {policies}",
            where="stages",
            fix="give all segments of the block the same policy, or cut the stage between them",
        )


def effective_policy(segments: tuple[Segment, ...], sharding: Sharding, policy: str) -> str:
    """Return the policy, or "none" if it recomputes no op of these segments."""
    if policy == "selective" and not recomputed_steps(flow_of(segments, sharding).steps, policy):
        return "none"
    if policy == "logits" and not any(heads_of(s, sharding.kinds[s.kind]) for s in segments):
        return "none"
    return policy


def _by_policy(segments: tuple[Segment, ...], recompute: Mapping[int, str]) -> Iterator[tuple[Segment, ...]]:
    group: list[Segment] = []
    for segment in segments:
        if group and recompute.get(segment.index) != recompute.get(group[-1].index):
            yield tuple(group)
            group = []
        group.append(segment)
    if group:
        yield tuple(group)


def _piece(
    layout: BlockNames, block: LayerBlock, group: tuple[Segment, ...], policy: str, keeps: bool
) -> BlockSegments:
    name = layout.classes[block.like] if block.unit.count > 1 or policy not in ("none", "logits") else ""
    low, high = group[0].index - block.first, group[-1].index - block.first
    if name and len(group) < block.length:
        name += f"Part{low + 1}" if low == high else f"Parts{low + 1}To{high + 1}"
    # "full" changes nothing within a block that decides nothing
    partly = policy in ("selective", "ops", "logits") or (policy == "full" and keeps)
    name += policy.title() if name and partly else ""
    model = block.model(layout.folded)[low : high + 1]
    return BlockSegments(group, name, layout.prefixes[block.first], policy, model)
