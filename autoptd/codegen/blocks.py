"""Division of a stage into pieces: segments that become a block class, and segments in the stage's own forward.

A unit that repeats (attention + MLP, × 32) becomes one class. If a stage of the plan begins or ends inside a unit, each
part between such places is a class: a whole unit, or several parts of one, is then a class that calls theirs in turn.
Segments that occur once are in the stage's own forward, unless they are recomputed.

Parameters that a block does not own (`passes/blocks.py`) are declared by the stage and passed as arguments.
"""

from __future__ import annotations

import builtins
import itertools
import math
import re
from collections import ChainMap, Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from torch import fx

from autoptd.codegen.names import TAKEN
from autoptd.codegen.quoting import is_name, plain_name
from autoptd.codegen.recompute import Recomputation, flow_of, in_place_of, recomputation_of
from autoptd.errors import PlanFileError, TraceError
from autoptd.passes.analysis.activations import recomputed_steps
from autoptd.passes.analysis.heads import heads_of
from autoptd.passes.blocks import LayerBlock, find_blocks, owned_by_blocks
from autoptd.passes.fold import Folded, Segment
from autoptd.passes.graph import info, infos, module_path, module_stack
from autoptd.passes.opcall import Sizes
from autoptd.passes.sharding.sharding import Sharding
from autoptd.passes.trace.traced import SEQUENCE

# attributes of emitted modules
_BLOCK_NAMES = frozenset({"tp", "cp", "ep", "dp", "dropout", "_first", "_parts"})
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
    called: str = ""  # name of a part within the class that calls it
    parts: tuple[BlockSegments, ...] = ()  # pieces whose classes its own class calls in turn

    @property
    def first(self) -> int:
        return self.segments[0].index

    def first_instance(self, layout: BlockNames) -> BlockSegments:
        """Return the piece of the first instance, from which the class is written."""
        parts = tuple(part.first_instance(layout) for part in self.parts)
        return replace(self, segments=self.model, prefix=layout.prefix_of(self.model[0].index), parts=parts)

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
class BlockPart:
    """Part of a block that begins at its segment `start`: its class, and its name within the block."""

    start: int
    block: str
    called: str


@dataclass(frozen=True)
class BlockNames:
    """Names of blocks and of the parameters that blocks own, for the whole model; and options of its emitted code."""

    folded: Folded
    owned: dict[str, str]  # original name of a parameter -> its name within its block
    prefixes: dict[int, str]  # first segment of each block -> dotted path
    classes: dict[int, str]  # first segment of the first of equal blocks -> class name; one that does not repeat uses
    # it if recomputed
    parts: Mapping[int, tuple[BlockPart, ...]] = field(default_factory=dict)  # of blocks that stages of the plan cut
    loss_in_place: bool = False  # see `loss` in `search/constraints/options.py`
    regather: bool = False  # see `gathers` there
    fast_dropout: bool = False  # see `dropout` there
    rings: bool = False  # products around the ring of tp
    sizes: Mapping[str, int] = field(default_factory=dict)  # of a microbatch, for which memory was planned

    @property
    def number(self) -> Sizes:
        """The sizes of a microbatch on a cp rank."""
        cp = self.folded.cut.ranks if self.folded.cut is not None else 1
        return Sizes({s: self.sizes[str(s)] // (cp if s == SEQUENCE else 1) for s in self.folded.traced.sizes})

    def bytes_before(self, node: fx.Node) -> int:
        """Return the bytes of what a node of the prelude makes, at the length of the whole sequence."""
        values = {s: self.sizes[str(s)] for s in self.folded.traced.sizes}
        if self.folded.cut is not None:
            values[self.folded.cut.tokens] = values[SEQUENCE] // self.folded.cut.ranks
        number = Sizes(values)
        return sum(math.prod(map(number, t.shape)) * t.dtype.itemsize for t in infos(node))

    def prefix_of(self, segment: int) -> str:
        """Return the dotted path of the instance that a segment belongs to."""
        return self.prefixes[max(i for i in self.prefixes if i <= segment)]


def name_blocks(
    folded: Folded,
    starts: Collection[int] = (),
    *,
    loss_in_place: bool = False,
    regather: bool = False,
    fast_dropout: bool = False,
    rings: bool = False,
    sizes: Mapping[str, int] | None = None,
) -> BlockNames:
    """Choose the names of blocks for all stages. Raises TraceError for parameters with names that emitted code uses.

    `starts`: the `piece_starts` of all stages.
    """
    axes = frozenset(folded.axes)
    _refuse_taken((*folded.traced.parameters.values(), *folded.traced.buffers.values()), _STAGE_NAMES | axes)
    owned, prefixes = owned_by_blocks(folded)
    classes: dict[int, str] = {}
    blocks = list(find_blocks(folded))
    for block in blocks:
        if block.like == block.first:
            segments = block.segments(folded)
            name = _class_name(segments) + ("" if block.unit.count > 1 else _last_word(segments[0].name))
            classes[block.first] = _fresh_class(name, classes.values())
    _refuse_taken(owned.values(), _BLOCK_NAMES | axes)
    parts = _find_parts(folded, blocks, classes, starts)
    used = {*classes.values(), *(part.block for found in parts.values() for part in found)}
    for block in blocks:  # parts have their names before blocks that do not repeat
        if any(classes[block.like] == part.block for found in parts.values() for part in found):
            classes[block.like] = _fresh_class(classes[block.like], used)
    return BlockNames(
        folded, owned, prefixes, classes, parts, loss_in_place, regather, fast_dropout, rings, sizes or {}
    )


def _find_parts(
    folded: Folded, blocks: Sequence[LayerBlock], classes: Mapping[int, str], starts: Collection[int]
) -> dict[int, tuple[BlockPart, ...]]:
    """Return the parts of repeated blocks within which any of `starts` is, by the first of equal blocks."""
    cuts: dict[int, set[int]] = {}
    for block in blocks:
        inside = {i - block.first for i in block.inside(block.first + 1, block.first + block.length) if i in starts}
        cuts.setdefault(block.like, set()).update(inside)
    used = {classes[block.like] for block in blocks if block.unit.count > 1}
    found: dict[int, tuple[BlockPart, ...]] = {}
    for block in blocks:
        if block.like == block.first and cuts[block.first]:
            found[block.first] = _name_parts(folded, block, classes[block.first], [0, *sorted(cuts[block.first])], used)
            used |= {part.block for part in found[block.first]}
    return found


def piece_starts(first: int, last: int, recompute: Mapping[int, str]) -> Iterator[int]:
    """Yield the segments of a stage at which a piece may begin within a block: the first, and each change of policy."""
    for i in range(first, last + 1):
        if i == first or recompute.get(i) != recompute.get(i - 1):
            yield i


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
    _, name = _common_module(segments)
    name = plain_name(name) or "Block"
    if name in _READ or hasattr(builtins, name) or re.fullmatch(r"Stage[0-9_To]+", name) or not is_name(name):
        name = f"{name}Block"
    return "Block" if name in ("Sequential", "ModuleList", "Linear", "Module") else name


def _common_module(segments: tuple[Segment, ...]) -> tuple[str, str]:
    """Return the path and class name of the innermost module that made all of these nodes; ("", "") without one."""
    stacks = [dict(module_stack(n)) for s in segments for n in s.nodes if n.meta.get("nn_module_stack")]
    shared = [path for path in stacks[0] if all(path in stack for stack in stacks)] if stacks else []
    inner = [path for path in shared if re.search(r"\d", path)] or shared
    return (inner[-1], stacks[0][inner[-1]]) if inner else ("", "")


def _name_parts(
    folded: Folded, block: LayerBlock, name: str, starts: Sequence[int], taken: Collection[str]
) -> tuple[BlockPart, ...]:
    """Name the parts of a block that begin at `starts` after its submodules: `LlamaDecoderLayerMlp`, called `mlp`."""
    segments, used = block.segments(folded), set(taken)
    path, _ = _common_module(segments)
    found = list[BlockPart]()
    for start, stop in itertools.pairwise([*starts, block.length]):
        after = [*_submodules(folded, segments[start:stop], path), f"part_{len(found) + 1}"]
        named = [(name + "".join(w[:1].upper() + w[1:] for w in called.split("_")), called) for called in after]
        cls, called = next((pair for pair in named if pair[0] not in used), named[-1])
        found.append(BlockPart(start, _fresh_class(cls, used), called))
        used.add(found[-1].block)
    return tuple(found)


def _submodules(folded: Folded, segments: Sequence[Segment], path: str) -> Iterator[str]:
    """Yield names for some segments of the module at `path`: after one or two submodules with most of their parameters,
    else with most of their ops; then after submodules of those."""
    names = folded.traced.parameters
    sizes = Counter[str]()
    for parameter in (p for s in segments for p in s.parameters):
        sizes[names[parameter.name].rpartition(".")[0]] += math.prod(info(parameter).shape)  # type: ignore[arg-type]
    ops = Counter(module_path(n) for s in segments for n in s.nodes)
    for found in (sizes, ops):
        own = {inner.removeprefix(f"{path}."): size for inner, size in found.items() if inner.startswith(f"{path}.")}
        for depth in (1, 2):
            under = Counter[str]()
            for inner, size in own.items():
                words = re.sub(r"^(\w+\.\d+\.)+", "", inner).split(".")  # an element of a list is named after itself
                under["_".join(words[:depth])] += size
            large = [word for word, size in under.items() if 4 * size > max(under.values())]
            if len(large) in (1, 2) and all(map(is_name, large)):
                yield "_".join(large)


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
            found.append(_piece(layout, sharding, block, group, recompute.get(group[0].index, "none")))
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
    layout: BlockNames, sharding: Sharding, block: LayerBlock, group: tuple[Segment, ...], policy: str
) -> BlockSegments:
    policy = effective_policy(group, sharding, policy)
    low, high = group[0].index - block.first, group[-1].index - block.first
    inside = [part for part in layout.parts.get(block.like, ()) if low <= part.start <= high]
    name = layout.classes[block.like]
    if len(group) < block.length:
        first, *others = [part.block for part in inside]
        name = "To".join((first, *(word.removeprefix(name) for word in others[-1:])))
    # "full" changes nothing within a block that decides nothing, unless others re-gather in backward
    plain, chosen = (recomputation_of(group, sharding, p, layout.regather, layout.rings) for p in ("none", policy))
    name += policy.title() if policy == "logits" or chosen != plain else ""
    if block.unit.count == 1 and policy in ("none", "logits"):
        name = ""
    model = block.model(layout.folded)[low : high + 1]
    piece = BlockSegments(group, name, layout.prefixes[block.first], policy, model)
    if not name or len(inside) < 2:
        return replace(piece, called=inside[0].called if inside else "")
    ends = [*(part.start - low for part in inside), len(group)]
    parts = [_piece(layout, sharding, block, group[a:b], policy) for a, b in itertools.pairwise(ends)]
    return replace(piece, parts=tuple(parts)) if _decide_alike(layout, sharding, piece, parts) else piece


def _decide_alike(layout: BlockNames, sharding: Sharding, piece: BlockSegments, parts: Sequence[BlockSegments]) -> bool:
    """Return whether a policy decides the same about ops of a piece as about those of its parts, each by itself."""

    def decided(piece: BlockSegments) -> tuple[Recomputation, dict[str, bool]]:
        how = piece.segments, sharding, piece.policy, layout.regather
        return recomputation_of(*how, layout.rings), in_place_of(*how) if layout.loss_in_place else {}

    whole, in_place = decided(piece)
    each, losses = zip(*map(decided, parts), strict=True)
    together = [frozenset().union(*(getattr(one, f.name) for one in each)) for f in fields(Recomputation)]
    return together == [getattr(whole, f.name) for f in fields(Recomputation)] and in_place == dict(ChainMap(*losses))
