"""Names of variables in emitted code: the user's own module names where there are any, the op's name otherwise."""

from __future__ import annotations

import builtins
import keyword
import re

import torch
from torch import fx

from autoptd.passes.graph import is_getitem, module_path

_TAKEN = frozenset({"torch", "F", "nn", "ops", "tp", "self", "b", "s", "counts", "device", "checkpoint", "submodule", "parameter"})


class Names:
    """Hands out variable names, each once; `c_attn`, then `c_attn_2`."""

    def __init__(self, reserved: frozenset[str] = frozenset()) -> None:
        self.used = set(_TAKEN | reserved)

    def fresh(self, wish: str) -> str:
        base = re.sub(r"\W", "_", wish).strip("_") or "x"
        base = f"x_{base}" if base[0].isdigit() else base
        number, name = 1, base
        while name in self.used or keyword.iskeyword(name) or hasattr(builtins, name):
            number += 1
            name = f"{base}_{number}"
        self.used.add(name)
        return name


def wish(node: fx.Node) -> str:
    """`q_proj` for the result of that module, `transpose` for an op of a larger one."""
    if is_getitem(node):
        return f"{wish(node.args[0])}_{node.args[1]}"  # type: ignore[arg-type]
    if node.op == "placeholder":
        return node.name
    leaf = module_path(node).rpartition(".")[2]
    last = all(module_path(u) != module_path(node) for u in node.users)
    if leaf and not leaf.isdigit() and last and _is_leaf(node):
        return leaf
    target = node.target
    name = target._schema.name.split("::")[1] if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", "x")
    return _SHORT.get(name, name).strip("_")


def _is_leaf(node: fx.Node) -> bool:
    """Whether the node's module does just this: its operands come from other modules or are parameters."""
    path = module_path(node)
    return all(o.op == "placeholder" or module_path(o) != path or o.target is torch.ops.aten.t.default for o in node.all_input_nodes)


_SHORT = {"scaled_dot_product_attention": "attention", "layer_norm": "norm", "reshape": "view", "unsqueeze": "expanded", "cross_entropy": "loss_sum", "valid_count": "count", "arange": "positions", "slice": "part"}
