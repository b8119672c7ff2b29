"""Text signatures of parts of a graph: equal exactly for parts that differ in names alone."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

from torch import fx

from autoptd.passes.graph import infos, substitute
from autoptd.passes.opcall import TensorInfo


def structures(prelude: Iterable[fx.Node]) -> dict[fx.Node, str]:
    """Return a text for each prelude node, given in program order: equal for nodes that compute the same. Buffers count
    by shape and dtype alone, so that layers which each read a buffer of their own are equal.
    """
    texts: dict[fx.Node, str] = {}
    numbers: dict[str, int] = {}  # text of a distinct op -> its number
    for node in prelude:
        if node.op == "placeholder":
            buffer = node.name.startswith(("b_", "c_"))
            texts[node] = f"{'buffer' if buffer else node.name}{shapes_text(node)}"
        else:
            args, kwargs = substitute((node.args, tuple(node.kwargs.items())), lambda n: Unquoted(texts[n]))
            texts[node] = f"#{numbers.setdefault(f'{node.target}{args}{kwargs}', len(numbers))}"
    return texts


class Unquoted(str):
    """Text in place of a node; its `repr` has no quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def shapes_text(node: fx.Node) -> str:
    """Return the text of the shape, dtype and gradient of each output."""
    return ",".join(map(_shape, infos(node)))


@functools.cache
def _shape(tensor: TensorInfo) -> str:
    return f"{tuple(map(str, tensor.shape))}{tensor.dtype}{'g' if tensor.requires_grad else ''}"


def signature_of(
    nodes: list[fx.Node],
    parameters: tuple[fx.Node, ...],
    outside: tuple[fx.Node, ...],
    receives: tuple[fx.Node, ...],
    sends: tuple[fx.Node, ...],
    structure: Mapping[fx.Node, str],
) -> str:
    """Return ops, arguments, shapes and wiring of consecutive nodes; outside nodes are named by list and position."""
    names: dict[fx.Node, str] = {n: f"%{i}" for i, n in enumerate(nodes)}
    names |= {n: f"p{i}{shapes_text(n)}" for i, n in enumerate(parameters)}
    names |= {n: f"o{i}{structure[n]}" for i, n in enumerate(outside)}
    names |= {n: f"x{i}{shapes_text(n)}" for i, n in enumerate(receives)}
    lines = []
    for n in nodes:
        args = substitute(n.args, lambda o: Unquoted(names[o]))
        kwargs = {k: substitute(v, lambda o: Unquoted(names[o])) for k, v in n.kwargs.items()}
        lines.append(f"{names[n]}={n.target}{args}{kwargs}:{shapes_text(n)}")
    lines.append("sends " + " ".join(names[n] for n in sends))
    return "\n".join(lines)
