"""The rule of an op: its row, or what was discovered by running it, or none (then it is replicated)."""

from __future__ import annotations

from autoptd.passes.discover import Discovery, discover
from autoptd.passes.factors import Rule
from autoptd.passes.opcall import OpCall
from autoptd.passes.rules import RULES


def rule_for(call: OpCall) -> Rule | None:
    """The op's row in the table, or the factors that proved splittable."""
    return RULES[call.target] if call.target in RULES else discover(call).rule


def discovery(call: OpCall) -> Discovery | None:
    """What was found out about an op that has no row, to be reported."""
    return None if call.target in RULES else discover(call)
