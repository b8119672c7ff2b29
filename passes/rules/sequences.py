"""Notations of ops that walk through time: samples are apart, steps and layers are not.

lstm(x, [h, c], weights)                     b . ., . b ., . b ., …  ->  b . ., . b ., . b .     batch_first
ctc_loss(scores, labels, steps, lengths)     . b ., b ., b, b  ->  b                             reduction 0
unfold(x, 1, size, step)                     d0 . d2  ->  d0 . d2 .                              windows of steps
"""

from __future__ import annotations

from autoptd.passes.opcall import OpCall
from autoptd.passes.rules.op_notations import arrow, whole


def recurrent(call: OpCall) -> str:
    """Return the notation of `lstm`, `gru`, `rnn_tanh` and `rnn_relu`: input, states, weights -> output, states."""
    states = len(call.outputs) - 1
    steps = ["b", ".", "."] if call.arg(8, "batch_first", False) else [".", "b", "."]
    carried = [[".", "b", "."]] * states
    weights = [["."] * t.ndim for t in call.operands[1 + states :]]
    return arrow([steps, *carried, *weights], [steps, *carried])


def ctc(call: OpCall) -> str:
    """Return the notation of a CTC loss per sample, or its sum. A mean, and targets in one row, stay whole."""
    reduction = call.arg(5, "reduction", 1)
    if reduction not in (0, 2) or [t.ndim for t in call.operands] != [3, 2, 1, 1]:
        return whole(call)
    return arrow([[".", "b", "."], ["b", "."], ["b"], ["b"]], [["b"] if reduction == 0 else []])


def windows(call: OpCall) -> str:
    """Return the notation of `unfold`: the dim that windows are cut from is whole, and they are the last dim."""
    ndim = call.operands[0].ndim
    dim = call.arg(1, "dimension") % max(ndim, 1)
    dims = ["." if i == dim else f"d{i}" for i in range(ndim)]
    return arrow([dims], [[*dims, "."]])
