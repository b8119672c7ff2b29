"""Notation of attention, and its implementation for more ranks than there are key heads."""

from __future__ import annotations

from autoptd.passes.opcall import OpCall
from autoptd.passes.rules.factors import Implementation, Rule
from autoptd.passes.rules.op_notations import arrow, fit
from autoptd.passes.rules.views import same


def attention(call: OpCall) -> str:
    """Return the notation of attention: heads can be split (grouped by key-value head) and, unless causal, queries."""
    return _notation(call, ["(h g)"] if is_grouped(call) else ["h"], ["h"])


def attention_of_own_keys(call: OpCall) -> str:
    """Return a notation in which query heads are split and key heads are whole on every rank."""
    return _notation(call, ["h"], ["."])


def is_grouped(call: OpCall) -> bool:
    """Return whether several query heads read one of several key heads."""
    query, key = call.operands[:2]
    return query.ndim > 3 and not same(query.shape[-3], key.shape[-3]) and key.shape[-3] != 1


def _notation(call: OpCall, head: list[str], few: list[str]) -> str:
    query, key, value = call.operands[:3]
    batch = [f"b{i}" for i in range(query.ndim - 3)]
    head, few = (head, few) if query.ndim > 2 else ([], [])
    rows = "." if call.arg(5, "is_causal", False) else "q"
    result = [*batch, *head, rows, "."]
    keys = [fit(t, [*batch, *few, ".", "."]) for t in (key, value)]
    masks = [fit(m, [*batch, *head, rows, "."]) for m in call.operands[3:]]
    return arrow([result, *keys, *masks], [result])


# Each rank has all key heads, and its query heads read their own of them: `Axis.own_keys`.
OWN_KEYS = Implementation("own_keys", "h", applies=is_grouped, notation=attention_of_own_keys)
ATTENTION = Rule(attention, implementations=(OWN_KEYS,))
