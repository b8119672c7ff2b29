"""The rule of an op: its row, or what was discovered by running it, or none (then it is replicated)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoptd.passes.opcall import OpCall, Sizes
from autoptd.passes.rules.discover import Discovery, discover
from autoptd.passes.rules.factor_notation import Groups
from autoptd.passes.rules.factors import Rule, Strategy, expand
from autoptd.passes.rules.table import RULES


def rule_for(call: OpCall) -> Rule | None:
    """The op's row in the table, or the factors that proved splittable."""
    return RULES[call.target] if call.target in RULES else discover(call).rule


def discovery(call: OpCall) -> Discovery | None:
    """What was found out about an op that has no row, to be reported."""
    return None if call.target in RULES else discover(call)


def strategies(
    call: OpCall, ranks: int, sizes: Sizes, groups: Groups | None = None, rules: Mapping[Any, Rule] = RULES
) -> list[Strategy]:
    """All legal strategies of a call, in a fixed order. An op without a row is done in full by every rank."""
    return expand(rules.get(call.target), call, ranks, sizes, groups)
