"""Buffers, constants and counts that a stage needs: for its segments, its counts, its loss, new values of buffers."""

from __future__ import annotations

from torch import fx

from autoptd.passes.fold import Folded, needed_prelude
from autoptd.passes.graph import ancestors
from autoptd.passes.losses.loss_form import COUNT, is_count


def reads_counts(folded: Folded, first: int, last: int) -> bool:
    """Return whether a stage of these segments receives the counts of the batch: if it reads one or is the last."""
    return last == len(folded.segments) - 1 or any(name.startswith(COUNT) for name in _read(folded, first, last))


def updated_buffers(folded: Folded, first: int, last: int) -> list[str]:
    """Return the placeholders of the buffers that a stage holds and updates after each step."""
    names = {n.name for n in held_tensors(folded, first, last)}
    return [name for name in folded.updates.values if name in names]


def held_tensors(folded: Folded, first: int, last: int) -> list[fx.Node]:
    """Return the placeholders of buffers and constants that a stage reads: in its segments, its counts, its loss, and
    the new values of buffers. A buffer that is updated but not read is held where its first sum is computed."""
    wanted = _read(folded, first, last)
    if reads_counts(folded, first, last):
        wanted |= {n.name for n in ancestors(folded.counts)}
    graph, known = folded.traced.graph.graph.nodes, {*folded.traced.inputs, *folded.traced.parameters}
    return [n for n in graph if n.op == "placeholder" and n.name in wanted - known and not is_count(n)]


def _read(folded: Folded, first: int, last: int) -> set[str]:
    """Return the names of the prelude nodes and placeholders of outer functions that a stage reads; of the last stage,
    those of its counts too."""
    found = {n.name for n in needed_prelude(folded, folded.segments[first : last + 1])}
    if last == len(folded.segments) - 1:
        outer = folded.loss_form.outer
        found |= {n.name for n in (*(outer.nodes if outer is not None else ()), *ancestors(folded.counts))}
    homes = _homes(folded)
    done: set[str] = set()
    while ahead := {name for name, at in homes.items() if name in found or first <= at <= last} - done:
        done |= ahead
        found |= ahead.union(*({n.name for n in folded.updates.reads(name)} for name in ahead))
    return found


def _homes(folded: Folded) -> dict[str, int]:
    """Return the first segment that computes a sum for each updated buffer's new value; 0 if none does."""
    updates = folded.updates
    made = dict(zip(folded.sums, updates.sums, strict=True))
    places = {made[n]: s.index for s in folded.segments for n in s.sends if n in made}
    return {name: min((places[n] for n in updates.reads(name) if n in places), default=0) for name in updates.values}
