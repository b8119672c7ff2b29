"""Inputs to cast to `precision`, as a user would after `model.to(torch.bfloat16)`.

A float32 perceptron takes float32 inputs. Planned in bf16, its weights are bf16, and its first matrix product would get
both dtypes. Inputs that reach a product through views and copies only are therefore cast on entry. Tensors computed
from an input, such as the sines of a time step, are cast by the product (`known/one_type.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, fx

from autoptd.passes.graph import ancestors, op_name
from autoptd.passes.known.one_type import multiplies, takes_one_type

_MOVES = ("view", "reshape", "flatten", "cat", "stack", "clone", "contiguous", "flip", "roll", "pad", "constant_pad_nd")


def inputs_to_cast(
    graph: fx.Graph, inputs: Mapping[str, str], given: Collection[torch.dtype], computed: torch.dtype
) -> set[str]:
    """Return the names of inputs with a dtype in `given` that meet other tensors of dtype `computed` in a product.

    `inputs`: placeholder -> name. `computed` may be in `given`: the graph was then traced in the original dtype.
    """
    found = set[str]()
    for node in graph.nodes:
        if not (node.op == "call_function" and multiplies(op_name(node))):
            continue
        made_of = {n: _sources(n) & inputs.keys() for n in node.all_input_nodes}
        if any(_type(n) == computed and not names for n, names in made_of.items()):
            found |= {inputs[name] for n, names in made_of.items() if _type(n) in given for name in names}
    return found


def mixes_types(graph: fx.Graph, given: Collection[torch.dtype], computed: torch.dtype) -> bool:
    """Return whether an op of one type gets operands of dtype `computed` and of one in `given`."""
    for node in graph.nodes:
        if node.op == "call_function" and takes_one_type(op_name(node)):
            types = {_type(n) for n in node.all_input_nodes}
            if computed in types and not types.isdisjoint(given):
                return True
    return False


def _type(node: fx.Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, Tensor) else None


def _sources(node: fx.Node) -> set[str]:
    """Return the names of the placeholders that a node is a view or copy of."""
    held = ancestors([node], lambda n: _type(n) == _type(node) and (n.op == "placeholder" or _moves(n)))
    return {n.name for n in held if n.op == "placeholder"}


def _moves(node: fx.Node) -> bool:
    target = node.target
    alias = isinstance(target, torch._ops.OpOverload) and any(
        a.alias_info is not None and not a.alias_info.is_write for a in target._schema.arguments
    )
    return alias or op_name(node) in _MOVES or op_name(node) == "getitem"
