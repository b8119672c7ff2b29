"""Cuts of a graph at places where few tensors are live.

A cut is narrow if no cut near it crosses fewer live tensors. The middle of a long module may be narrow in that sense
while many more tensors cross it than enter or leave the module, such as within a chunked linear attention: no stage
should end there, and each such place multiplies the stages that the search tries.
"""

from __future__ import annotations

import itertools
from collections import Counter

from torch import fx

from autoptd.passes.graph import is_getitem, module_stack, op_name
from autoptd.passes.trace.traced import Traced

_NEAR = 24  # nodes on each side with which a narrow cut is compared
_MODULE = 512  # most nodes of a module that is taken for one computation
HEAVY = [
    "linear",
    "matmul",
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "einsum",
    "conv1d",
    "conv2d",
    "conv3d",
    "convolution",
    "scaled_dot_product_attention",
]


def narrow_pieces(main: list[fx.Node], traced: Traced) -> list[list[fx.Node]]:
    """Return the pieces of a graph between its narrow cuts."""
    position = {n: i for i, n in enumerate(main)}
    last_use = [max((position[u] for u in n.users if u in position), default=i) for i, n in enumerate(main)]
    delta = [0] * (len(main) + 2)
    for i, last in enumerate(last_use):
        if is_getitem(main[i]) or not any(is_getitem(u) for u in main[i].users):
            delta[i + 1] += 1  # live across the cuts i+1 … last
            delta[last + 1] -= 1
    crossing = list(itertools.accumulate(delta[: len(main) + 1]))
    for i, node in enumerate(main):  # an op and the `getitem` nodes of its outputs stay together
        if is_getitem(node):
            crossing[i] = len(main)
    inside = _wide_within_modules(main, crossing)
    pieces: list[list[fx.Node]] = [[]]
    cuts: list[int] = []  # narrow cuts since the first heavy node of the piece
    for i, node in enumerate(main):
        near = [x for x in crossing[max(1, i - _NEAR) : i + _NEAR + 1] if x > 0]
        narrow = i > 0 and i not in inside and crossing[i] == min(near, default=0)
        if narrow and any(_is_heavy(n, traced) for n in pieces[-1]):
            cuts.append(len(pieces[-1]))
        if cuts and _is_heavy(node, traced):
            whole = pieces.pop()
            first, last = cuts[0], cuts[-1]
            pieces += [p for p in (whole[:first], whole[first:last]) if p] + [whole[last:]]
            cuts = []
        pieces[-1].append(node)
    if cuts:
        whole = pieces.pop()
        pieces += [whole[: cuts[0]], whole[cuts[0] :]]
    return pieces


def merge_light(pieces: list[list[fx.Node]], kinds: list[str], traced: Traced) -> list[list[fx.Node]]:
    """Merge each light piece (no parameters, no heavy op) into the one before it. If that one is one of several of a
    kind, and the next is not, merge it into the next: a loss without weights stays separate from equal blocks.
    """
    repeats = Counter(kinds)
    found: list[list[fx.Node]] = []
    joined = False  # whether the piece before is to be merged into this one
    for i, piece in enumerate(pieces):
        light = not any(_is_heavy(n, traced) for n in piece)
        if joined:
            found[-1].extend(piece)
        elif light and found:
            behind = repeats[kinds[i + 1]] if i + 1 < len(pieces) else 1
            if repeats[kinds[i - 1]] > 1 and behind == 1:
                found.append(list(piece))
                joined = True
                continue
            found[-1].extend(piece)
        else:
            found.append(list(piece))
        joined = False
    return found


def end_with(pieces: list[list[fx.Node]], loss: fx.Node) -> list[list[fx.Node]]:
    """Join what follows the piece of the loss, such as updates of buffers from parameters, to that piece: the last
    stage has the loss.
    """
    last = next(i for i, piece in enumerate(pieces) if loss in piece)
    return [*pieces[:last], [node for piece in pieces[last:] for node in piece]]


def _is_heavy(node: fx.Node, traced: Traced) -> bool:
    """Return whether a node reads a parameter or is a heavy op."""
    return op_name(node) in HEAVY or any(p.name in traced.parameters for p in node.all_input_nodes)


def _wide_within_modules(main: list[fx.Node], crossing: list[int]) -> set[int]:
    """Return the cuts between two ops of one module's own code that more than twice as many tensors cross as the cuts
    before and behind the module."""
    found: dict[int, list[int]] = {}  # cut -> the first and last node of the module's run of nodes
    runs: dict[str, list[int]] = {}
    before: list[str] = []
    for i, node in enumerate(main):
        stack = [path for path, _ in module_stack(node) if path] or before  # ops that passes made have no module
        runs = {path: runs.get(path, [i, i]) for path in stack}
        for run in runs.values():
            run[1] = i
        if stack and before and stack[-1] == before[-1]:
            found[i] = runs[stack[-1]]
        before = stack
    return {
        i
        for i, (first, last) in found.items()
        if first > 0 and last - first < _MODULE and crossing[i] > 2 * max(crossing[first], crossing[last + 1])
    }
