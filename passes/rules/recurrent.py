"""Notation of recurrent nets: samples are apart, time steps and layers are not.

    lstm(x, [h, c], weights)     b . ., . b ., . b ., …  ->  b . ., . b ., . b .      batch_first
"""

from __future__ import annotations

from autoptd.passes.opcall import OpCall
from autoptd.passes.rules.op_notations import arrow

_BATCH_FIRST = 8  # position of the argument


def recurrent(call: OpCall) -> str:
    """Return the notation of `lstm`, `gru`, `rnn_tanh` and `rnn_relu`: input, states, weights -> output, states."""
    states = len(call.outputs) - 1
    steps = ["b", ".", "."] if call.arg(_BATCH_FIRST, "batch_first", False) else [".", "b", "."]
    carried = [[".", "b", "."]] * states
    weights = [["."] * t.ndim for t in call.operands[1 + states :]]
    return arrow([steps, *carried, *weights], [steps, *carried])
