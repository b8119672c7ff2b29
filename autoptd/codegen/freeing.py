"""`del` statements: a local variable holds its tensor until it is assigned anew, or its function returns.

    up = F.linear(n, self.up.weight)            the plan's memory counts each tensor up to its last use, so that without
    lora_b = F.linear(lora_a, …)                the `del` the function would hold two tensors more than predicted while
    add = up + lora_b                           it computes the next lines. A tensor that autograd saves is alive anyway
    del up, lora_b

A function has one only where it would otherwise hold more than the peak that its plan counts, in forward and in
backward: most plans are fullest in backward, and have none. Arguments are not deleted, since callers hold them too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import fx

from autoptd.codegen.blocks import BlockNames, BlockSegments
from autoptd.codegen.recompute import flow_of
from autoptd.layout.placements import B, Broadcast, Placement
from autoptd.passes.analysis.activations import recomputed_steps
from autoptd.passes.analysis.dataflow import Flow, Storage, Value, base_of, join_heads
from autoptd.passes.analysis.liveness import Peak, forward_bytes, walk_flow
from autoptd.passes.opcall import Sizes
from autoptd.passes.sharding.sharding import Sharding, tensor_name
from autoptd.passes.sharding.shared_masks import shared_masks

_NOTICED = 100  # a tensor is deleted if it has one of so many parts of the peak, or more

Key = tuple[str, str]  # a tensor's name and its placement


class Holding(NamedTuple):
    """A variable that line `line` of a function assigns, and the storage that it then holds."""

    line: int
    variable: str
    storage: str


@dataclass
class _HeldPart:
    """A piece in the lines of a function, or one that it calls."""

    region: Flow
    policy: str
    called: bool
    peak: Peak
    kept: frozenset[str]


def free_early(
    layout: BlockNames,
    sharding: Sharding,
    pieces: Sequence[BlockSegments],
    results: Collection[fx.Node],
    lines: Sequence[str],
    assigned: Iterable[tuple[int, tuple[str, fx.Node, Placement]]],
    returned: Iterable[str],
    prelude: Iterable[fx.Node] = (),
) -> list[str]:
    """Return the lines of a function, which delete variables that would hold a tensor for too long.

    `pieces`: all that the function computes, in program order; it calls those with a class. `results`: the tensors that
    it returns, `returned`: their texts. `assigned`: the line of each variable, its tensor and its placement.
    `prelude`: what the function computes before, of which only the tensors that pieces read are counted.
    """
    freed = held_too_long(layout, sharding, pieces, results, prelude) if layout.sizes else {}
    found = ((line, name, (tensor_name(node), str(placement))) for line, (name, node, placement) in assigned)
    holdings = [Holding(line, name, freed[key]) for line, name, key in found if key in freed]
    return with_deletes([*lines, f"return {', '.join(returned)}"], holdings)[:-1]


def held_too_long(
    layout: BlockNames,
    sharding: Sharding,
    pieces: Sequence[BlockSegments],
    results: Collection[fx.Node],
    prelude: Iterable[fx.Node] = (),
) -> Mapping[Key, str]:
    """Return the tensors that a function's variables must not hold after their last use -> their storages."""
    cp = layout.folded.cut.ranks if layout.folded.cut is not None else 1
    measure = _Measure(layout.number, sharding.ranks, cp)
    alike: dict[object, tuple[BlockSegments, _HeldPart]] = {}
    parts = []
    for piece in pieces:
        key = piece.block, piece.policy, tuple(s.kind for s in piece.segments)
        if piece.block and key in alike:
            parts.append(_renamed(*alike[key], piece))
            continue
        parts.append(measure.part(layout, sharding, piece, bool(piece.block)))
        alike[key] = piece, parts[-1]
    before = _unread(layout, sharding, pieces, list(prelude))
    named = {n.name: tensor_name(n) for piece in pieces for n in piece.receives}
    return _HeldTensors(parts, measure, {tensor_name(n) for n in results}, before, named).found()


def _unread(
    layout: BlockNames, sharding: Sharding, pieces: Sequence[BlockSegments], prelude: Sequence[fx.Node]
) -> dict[Key, tuple[str, int]]:
    """Return the tensors of a prelude whose memory no piece reads -> their storages and bytes."""
    masks = shared_masks(layout.folded, sharding, layout.number) if prelude else {}  # pieces read the converted ones
    wanted = {base_of(node) for piece in pieces for node in piece.prelude if node not in masks}
    bases = {node: base_of(node) for node in prelude}
    return {
        (tensor_name(node), str(B)): (base.name, layout.bytes_before(base))
        for node, base in bases.items()
        if base.op != "placeholder" and base not in wanted
    }


def _renamed(first: BlockSegments, known: _HeldPart, piece: BlockSegments) -> _HeldPart:
    """Return what is known of a called block for an equal one, whose tensors have other names."""
    names: dict[str, str] = {}
    for a, b in zip(first.segments, piece.segments, strict=True):
        for part in ("nodes", "prelude", "receives"):
            names |= {x.name: y.name for x, y in zip(getattr(a, part), getattr(b, part), strict=True)}

    def name(text: str) -> str:  # of a node, followed by the number of its output, a placement or its own tensor
        return re.sub(r"^\w+", lambda found: names.get(found[0], found[0]), text)

    def value(old: Value) -> Value:
        return replace(old, name=name(old.name), storage=replace(old.storage, name=name(old.storage.name)))

    region = Flow(tuple(map(value, known.region.received)), (), tuple(map(value, known.region.sent)))
    return replace(known, region=region, kept=frozenset(map(name, known.kept)))


@dataclass(frozen=True)
class _Measure:
    """Sizes of tensors on a rank."""

    number: Sizes
    ranks: int
    cp: int

    def nbytes(self, storage: Storage) -> int:
        return storage.nbytes(self.number, self.ranks, self.cp)

    def part(self, layout: BlockNames, sharding: Sharding, piece: BlockSegments, called: bool) -> _HeldPart:
        region = flow_of(piece.segments, sharding)
        region = join_heads(region) if piece.policy == "logits" else region
        # a block that is recomputed as a whole saves everything then, and has the class of one that is not
        policy = "selective" if piece.policy == "selective" else "none"
        walked = walk_flow(region, policy, regather=layout.regather)
        kept = frozenset(k.storage.name for k in walked.kept)
        return _HeldPart(region, policy, called, walked.peak(self.number, self.ranks, self.cp), kept)


@dataclass
class _HeldTensors:
    """Tensors that the variables of a function hold beyond their last use."""

    parts: Sequence[_HeldPart]
    measure: _Measure
    results: Collection[str]
    before: Mapping[Key, tuple[str, int]]  # tensors made before, that no part reads: their storages and bytes
    named: Mapping[str, str]  # a tensor as its readers call it -> as the part that makes it does: an op's second output
    alias: dict[str, str] = field(default_factory=dict)  # a tensor that an earlier part sends -> its storage

    def found(self) -> dict[Key, str]:
        keys: dict[Key, str] = {}
        own: dict[str, int] = {}  # storages that the function's lines make, and their bytes
        last: dict[str, tuple[int, int]] = {}  # part and step of each storage's last use
        unheld: set[str] = set()  # saved for backward, or returned
        for p, part in enumerate(self.parts):
            core = set(map(id, recomputed_steps(part.region.steps, "selective"))) if part.policy == "selective" else ()
            unheld.update(map(self._storage, part.kept))
            for value in part.region.received:
                last[self._storage(value.storage.name)] = p, -1
            for i, step in enumerate(part.region.steps):
                last.update((self._storage(v.storage.name), (p, i)) for v in (*step.operands, *step.outputs))
                if id(step) not in core and not part.called:
                    self._add(step.outputs, own, keys)
            if part.called:
                self._add(part.region.sent, own, keys)
            for value in part.region.sent:
                self.alias[value.name] = name = self._storage(value.storage.name)
                last.setdefault(name, (p, 0))  # unless it is read later: an equal block's steps are not kept
                unheld.update({name} if value.name in self.results else ())
        dead: dict[tuple[int, int], list[str]] = {}
        for name in own.keys() - unheld:
            dead.setdefault(last[name], []).append(name)
        keys |= {key: name for key, (name, _) in self.before.items()}
        freed = self._freed(dead, own)
        return {key: name for key, name in keys.items() if name in freed}

    def _storage(self, name: str) -> str:
        name = self.named.get(name, name)
        return self.alias.get(name, name)

    def _add(self, values: Iterable[Value], own: dict[str, int], keys: dict[Key, str]) -> None:
        """Add tensors that the function's own lines assign to variables."""
        for value in values:
            name = self._storage(value.storage.name)
            if name not in own and value.storage.origin != "made":
                continue
            own.setdefault(name, self.measure.nbytes(value.storage))
            whole = isinstance(value.placement, Broadcast) and not value.info.requires_grad
            keys[value.name, str(B if whole else value.placement)] = name

    def _freed(self, dead: Mapping[tuple[int, int], Sequence[str]], own: Mapping[str, int]) -> set[str]:
        """Return the storages to free, given those that are read for the last time by each step of a part."""
        peaks = [part.peak for part in self.parts]
        before = [sum(peak.kept for peak in peaks[:p]) for p in range(len(peaks))]
        limit = max(most + max(peak.forward, peak.backward) for most, peak in zip(before, peaks, strict=True))
        held = dict(self.before.values())
        freed: set[str] = set()
        for p, part in enumerate(self.parts):
            moments = [part.peak.forward] if part.called else self._moments(part)
            for i, total in enumerate(moments):
                if before[p] + total + sum(held.values()) > limit:
                    freed |= {name for name, nbytes in held.items() if nbytes * _NOTICED >= limit}
                    held = {name: nbytes for name, nbytes in held.items() if name not in freed}
                at = [(p, i)] if not part.called else [where for where in dead if where[0] == p]
                held |= {name: own[name] for where in at for name in dead.get(where, ())}
        return freed

    def _moments(self, part: _HeldPart) -> Sequence[int]:
        m = self.measure
        return forward_bytes(part.region, part.kept, m.number, m.ranks, m.cp)


def with_deletes(lines: Sequence[str], holders: Sequence[Holding]) -> list[str]:
    """Return the lines of a function with a `del` after the last use of the storages of `holders`."""
    if not holders:
        return list(lines)
    statements = ast.parse("\n".join(lines)).body
    reads, writes, captured = [], [], set[str]()
    for statement in statements:
        names = [n for n in ast.walk(statement) if isinstance(n, ast.Name)]
        loaded, stored = ({n.id for n in names if isinstance(n.ctx, kind)} for kind in (ast.Load, ast.Store))
        if isinstance(statement, ast.FunctionDef):  # run by a later statement, and again in backward
            captured |= loaded - stored - {a.arg for a in statement.args.args}
            loaded, stored = set(), set()
        reads.append(loaded)
        writes.append(stored)
    ends = [s.end_lineno or s.lineno for s in statements]
    spans: dict[str, list[tuple[str, int, int]]] = {}  # storage -> variable, its last read, and where it is rebound
    for holder in holders:
        at = next(i for i, end in enumerate(ends) if holder.line < end)
        again = next((i for i in range(at + 1, len(ends)) if holder.variable in writes[i]), len(ends))
        last = max((i for i in range(at + 1, min(again + 1, len(ends))) if holder.variable in reads[i]), default=at)
        spans.setdefault(holder.storage, []).append((holder.variable, last, again))
    deleted: dict[int, dict[str, None]] = {}
    for found in spans.values():
        end = max(last for _, last, _ in found)
        if end < len(ends) - 1:
            held = [name for name, _, again in found if again > end and name not in captured]
            deleted.setdefault(end, {}).update(dict.fromkeys(held))
    after = {ends[i]: f"del {', '.join(names)}" for i, names in deleted.items() if names}
    return [text for i, line in enumerate(lines, 1) for text in (line, *([after[i]] if i in after else []))]
