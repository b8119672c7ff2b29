"""Inputs of the type that the model's parameters had, where `precision` makes them another.

A plain perceptron in float32 takes float32; planned in bf16 its weights are bf16, and its first product would be given
both. Such inputs are cast as they enter the model, as a person would who calls `model.to(torch.bfloat16)`: those that
reach a product as they are, through nothing but views and copies. What is computed from an input before, such as the
sines of a time step, keeps its type; where that meets a product, `types.py` refuses it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, fx

from autoptd.passes.graph import ancestors, op_name

_PRODUCTS = ("linear", "matmul", "mm", "bmm", "mv", "dot", "addmm", "baddbmm", "addbmm", "addmv", "einsum", "bilinear")
_CONVOLUTIONS = "conv"  # conv1d, conv_transpose2d, convolution
_MOVES = ("view", "reshape", "flatten", "cat", "stack", "clone", "contiguous", "flip", "roll", "pad", "constant_pad_nd")


def inputs_to_cast(
    graph: fx.Graph, inputs: Mapping[str, str], given: Collection[torch.dtype], computed: torch.dtype
) -> set[str]:
    """Names of inputs, of a type in `given`, that a product is given beside other tensors of type `computed`.

    `inputs`: placeholder -> name. Traced in the given type itself, the other tensors have that type too.
    """
    found = set[str]()
    for node in graph.nodes:
        if not (node.op == "call_function" and _multiplies(op_name(node))):
            continue
        made_of = {n: _sources(n) & inputs.keys() for n in node.all_input_nodes}
        if any(_type(n) == computed and not names for n, names in made_of.items()):
            found |= {inputs[name] for n, names in made_of.items() if _type(n) in given for name in names}
    return found


def _multiplies(name: str) -> bool:
    return name in _PRODUCTS or name.startswith(_CONVOLUTIONS) or name == "scaled_dot_product_attention"


def _type(node: fx.Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, Tensor) else None


def _sources(node: fx.Node) -> set[str]:
    """Names of the placeholders whose elements a node holds, moved at most."""
    held = ancestors([node], lambda n: _type(n) == _type(node) and (n.op == "placeholder" or _moves(n)))
    return {n.name for n in held if n.op == "placeholder"}


def _moves(node: fx.Node) -> bool:
    target = node.target
    alias = isinstance(target, torch._ops.OpOverload) and any(
        a.alias_info is not None and not a.alias_info.is_write for a in target._schema.arguments
    )
    return alias or op_name(node) in _MOVES or op_name(node) == "getitem"
