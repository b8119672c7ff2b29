"""Names of variables in emitted code: those of the user's variables and modules if possible, else the op's name."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import fx

from autoptd.codegen.quoting import plain_name
from autoptd.passes.fold import owner
from autoptd.passes.graph import NAMED, info, is_getitem, module_path, operands
from autoptd.passes.sharding.context_parallel_graph import convert
from autoptd.passes.sharding.expert_parallel_graph import EXPERT_OPS, batch_route, route

aten = torch.ops.aten
GLOBALS = frozenset(
    {"torch", "F", "nn", "ops", "keep", "offload", "own", "recompute", "spare"}
)  # read by lines of forward
AXIS_NAMES = frozenset({"tp", "cp", "ep", "dp"})
TAKEN = (
    GLOBALS
    | AXIS_NAMES
    | {"self", "b", "s", "s_local", "counts", "device", "block", "submodule", "parameter", "compose"}
)


class Names:
    """Allocator of unique variable names: `c_attn`, then `c_attn_2`.

    inputs: arguments whose names are fixed by the model. sizes: variables that other lines assign.
    """

    def __init__(self, inputs: Iterable[str] = (), sizes: Iterable[str] = ()) -> None:
        self._taken = TAKEN | frozenset(sizes)
        self.used = {*self._taken, *inputs}

    def fresh(self, hint: str) -> str:
        base = plain_name(hint) or "x"
        number, name = 1, base
        while name in self.used or keyword.iskeyword(name) or hasattr(builtins, name):
            number += 1
            name = f"{base}_{number}"
        self.used.add(name)
        return name

    def argument(self, name: str) -> tuple[str, list[str]]:
        """Return the variable for an argument with a fixed, reserved name, and lines that assign it."""
        assert name in self.used, name
        if name not in self._taken:
            return name, []
        variable = self.fresh(name)
        return variable, [f"{variable} = {name}"]

    def release(self, name: str) -> None:
        """Free a name whose variable is no longer read."""
        self.used.discard(name)


def hint(node: fx.Node) -> str:
    """Return a name for a node: the variable that the user's line assigns, else its module (`q_proj`), else its op."""
    if node.op == "placeholder":
        return node.name.removeprefix("inputs_")
    if NAMED in node.meta:
        return str(node.meta[NAMED])
    if node.target is convert:
        return f"{hint(node.all_input_nodes[0])}_own"
    if node.target in EXPERT_OPS.values():
        return hint(node.all_input_nodes[0]) if node.target not in (route, batch_route) else "route"
    assigned = assigned_names(node)
    if is_getitem(node):
        index = node.args[1]
        assert isinstance(index, int)
        return assigned[index] if index < len(assigned) > 1 else f"{hint(owner(node))}_{index}"
    if ends_line(node) and (name := _target(node, assigned)):
        return name
    leaf = module_path(node).rpartition(".")[2]
    if leaf and not leaf.isdigit() and any(_is_weight(o) for o in node.all_input_nodes):
        return leaf
    target = node.target
    name = (
        target._schema.name.split("::")[1]
        if isinstance(target, torch._ops.OpOverload)
        else getattr(target, "__name__", "x")
    )
    if name in _NAMED_LIKE_OPERAND and not info(node).requires_grad and node.all_input_nodes:
        return hint(node.all_input_nodes[0])
    return _SHORT.get(name, name).strip("_").lower()


def variable(node: fx.Node) -> str:
    """Return the variable that the user's line assigns a tensor to, else "x"."""
    name = _target(node, assigned_names(node)) if node.op == "call_function" and ends_line(node) else ""
    return name or "x"


def _target(node: fx.Node, assigned: Sequence[str]) -> str:
    """Return the name for the last node of a line: the only one, or its own of `q, k = rotate(q, k)`."""
    if len(assigned) < 2:
        return assigned[0] if assigned else ""
    ends = [n for n in _line_of(node) if ends_line(n) and not is_getitem(n)]
    return assigned[ends.index(node)] if len(ends) == len(assigned) else ""


def _line_of(node: fx.Node) -> list[fx.Node]:
    """Return the nodes made by the same line of the same module, in order."""

    def alike(other: fx.Node) -> bool:
        same = other.meta.get("stack_trace") == node.meta.get("stack_trace")
        return other.op == "call_function" and same and module_path(other) == module_path(node)

    first = node
    while alike(first.prev):
        first = first.prev
    found = [first]
    while alike(found[-1].next):
        found.append(found[-1].next)
    return found


_NAMED_LIKE_OPERAND = frozenset({"unsqueeze", "expand", "to", "_to_copy", "pad", "slice", "contiguous"})


def assigned_names(node: fx.Node) -> list[str]:
    """Return `["q", "k", "v"]` for a line `q, k, v = …` of the user's source; the attribute's name for `self.q = …`."""
    code = source_code(node)
    match = re.match(rf"\s*({_PLACE}(?:,\s*{_PLACE})*)(?::[^=]+)?(?:\*\*|//|[-+*/@&|^%])?=(?!=)", code)
    return [part.strip().rpartition(".")[2] for part in match[1].split(",")] if match else []


_PLACE = r"[A-Za-z_][\w.]*\s*"


def source_code(node: fx.Node) -> str:
    """Return the user's line that made the node."""
    lines = (node.meta.get("stack_trace") or "").strip().splitlines()
    return lines[-1].strip() if len(lines) > 1 else ""


def ends_line(node: fx.Node) -> bool:
    """Return whether the node is the last of its line, which the line assigns."""
    place = node.meta.get("stack_trace")
    return all(u.meta.get("stack_trace") != place or module_path(u) != module_path(node) for u in node.users)


def read_by(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the tensors that the line of an op reads: its operands, and those of views written into it."""
    for operand in operands(node):
        yield operand
        if reads_in_place(operand):
            yield from read_by(operand)


def reads_in_place(node: fx.Node) -> bool:
    """Return whether a transposed weight, or a view within one line of the user's, is inlined into its reader."""
    if node.target is aten.t.default:
        return operands(node)[0].op == "placeholder" and len(node.users) == 1
    if node.target not in _VIEWS or len(node.users) != 1:
        return False
    (reader,) = node.users
    return reader.target in _VIEWS and not ends_line(node)


_VIEWS = frozenset(
    {aten.reshape.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default, aten.expand.default}
)


def _is_weight(node: fx.Node) -> bool:
    return node.name.startswith("p_") if node.op == "placeholder" else node.target is torch.ops.aten.t.default


_SHORT = {
    "scaled_dot_product_attention": "attention",
    "ring": "attention",
    "ulysses": "attention",
    "layer_norm": "norm",
    "rms_norm": "norm",
    "reshape": "view",
    "unsqueeze": "expanded",
    "cross_entropy": "loss_sum",
    "row_cross_entropy": "losses",
    "valid_count": "count",
    "arange": "positions",
    "slice": "part",
}
