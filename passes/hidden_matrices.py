"""The matrices between a model's embeddings and its head, which optimizers such as Muon are for."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from autoptd.passes.fold import Folded
from autoptd.passes.graph import infos, op_name

_MULTIPLY = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum")
_SHAPE = ("t", "transpose", "permute", "view", "reshape", "_to_copy", "to", "expand", "unsqueeze", "split", "slice")


def hidden_matrices(folded: Folded) -> frozenset[str]:
    """Return the trainable 2-D parameters that products read, except tables of embeddings and the head.

    The head is the parameter of the last of these products. A stack of matrices, as of experts, is not 2-D.
    """
    traced = folded.traced
    order = {node: i for i, node in enumerate(traced.graph.graph.nodes)}
    last: dict[str, int] = {}
    tables = set()
    for node in order:
        name = traced.parameters.get(node.name) if node.op in ("placeholder", "get_attr") else None
        if name is None or name in traced.frozen or infos(node)[0].ndim != 2:
            continue
        readers = list(_readers(node))
        if any(op_name(reader) == "embedding" for reader in readers):
            tables.add(name)
        if products := [order[reader] for reader in readers if op_name(reader) in _MULTIPLY]:
            last[name] = max(products)
    head = max(last, key=lambda name: last[name], default="")
    return frozenset(last.keys() - tables - {head})


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the ops that read a parameter, or a view of it."""
    for user in node.users:
        if op_name(user) in _SHAPE:
            yield from _readers(user)
        else:
            yield user
