"""Proof that a program with loops over samples does not depend on how many samples it was traced with.

A number of turns that the model's code computes with, such as a mean over a list, is a number in the trace. Traces with
5 and with 7 samples have different numbers there; else they are one program, for any number of samples.
"""

from __future__ import annotations

import torch
from torch import fx

from autoptd.errors import UnsupportedOp
from autoptd.passes.fold import hashed_lines
from autoptd.passes.graph import source_line
from autoptd.passes.trace.traced import Traced


def drop_unread_constants(graph: fx.Graph, traced: Traced) -> None:
    """Remove constants of loops over samples that nothing reads, such as lengths that were read as numbers."""
    for node in reversed(list(graph.nodes)) if traced.loops else ():
        if node.op == "placeholder" and not node.users and node.name in traced.constants.keys() - traced.buffers.keys():
            graph.erase_node(node)
            del traced.constants[node.name]


def refuse_other_program(first: Traced, second: Traced) -> None:
    """Raise UnsupportedOp unless two normalised traces, with different numbers of samples, are the same program."""
    lines, others = hashed_lines(first), hashed_lines(second)
    constants = [(x, y) for x, y in zip(first.constants.values(), second.constants.values(), strict=False)]
    equal = len(first.constants) == len(second.constants) and all(
        x.shape == y.shape and x.dtype == y.dtype and torch.equal(x, y) for x, y in constants
    )
    if lines == others and equal:
        return
    differ = next((i for i, (x, y) in enumerate(zip(lines, others, strict=False)) if x != y), 0)
    nodes = list(first.graph.graph.nodes)
    raise UnsupportedOp(
        "the model computes with the number of turns of a loop over samples, or with that of pictures",
        where=source_line(nodes[differ]) if differ < len(nodes) else "",
        fix="divide by x.shape[0], not by the length of a list; give every sample equally many pictures of one size; "
        "count classes by F.one_hot(labels, n).sum(0), since the size of a bincount depends on them",
    )
