"""Lookup of an op's rule: its row in the table, or one discovered by running the op, or None (replicated)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoptd.passes.opcall import OpCall, Sizes
from autoptd.passes.rules.discover import Discovery, discover
from autoptd.passes.rules.factor_notation import Groups
from autoptd.passes.rules.factors import Rule, Strategy, expand
from autoptd.passes.rules.table import RULES


def rule_for(call: OpCall) -> Rule | None:
    """Return the op's row in the table, else the rule of the factors that proved splittable, if any."""
    return RULES[call.target] if call.target in RULES else discover(call).rule


def discovery(call: OpCall) -> Discovery | None:
    """Return the discovery for an op without a row, which reports show; None for an op with one."""
    return None if call.target in RULES else discover(call)


def strategies(
    call: OpCall, ranks: int, sizes: Sizes, groups: Groups | None = None, rules: Mapping[Any, Rule] = RULES
) -> list[Strategy]:
    """Return all legal strategies of a call, in a fixed order. Every rank runs an op without a rule in full."""
    return expand(rules.get(call.target), call, ranks, sizes, groups)
