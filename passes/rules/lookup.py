"""Lookup of an op's rule: its row in the table, or one discovered by running the op, or None (replicated)."""

from __future__ import annotations

from torch import fx

from autoptd.passes.graph import op_call
from autoptd.passes.opcall import OpCall
from autoptd.passes.rules.discover import Discovery, discover
from autoptd.passes.rules.factors import Op
from autoptd.passes.rules.table import RULES


def resolve(call: OpCall) -> Op:
    """Return a call with its rule: the op's row in the table, else the factors that proved splittable, if any."""
    return Op(call, RULES[call.target] if call.target in RULES else discover(call).rule)


def op_of(node: fx.Node) -> Op:
    """Return the op of a node in a normalised graph; resolved once, and carried in `meta["op"]`."""
    found = node.meta.get("op")
    if found is None:
        found = node.meta["op"] = resolve(op_call(node))
    return found


def discovery(call: OpCall) -> Discovery | None:
    """Return the discovery for an op without a row, which reports show; None for an op with one."""
    return None if call.target in RULES else discover(call)
