"""Recurrent nets with dropout between their layers, layer by layer, so that the dropout is an op of its own.

    lstm(x, 3 layers, dropout=p)     lstm(dropout(lstm(dropout(lstm(x)))))        each of one layer, in both directions

torch's `lstm`, `gru`, `rnn_tanh` and `rnn_relu` draw the numbers themselves. As ops of their own they are drawn by key,
like any other dropout. The functions of `torch._VF` are replaced, which `nn.LSTM` and its kin call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import _VF, Tensor

_OPS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


@contextmanager
def layer_by_layer() -> Iterator[None]:
    """Wrap a trace, or a pass of a plain model: recurrent nets that drop between layers run one layer at a time."""
    with ExitStack() as stack:
        for name in _OPS:
            stack.enter_context(patch.object(_VF, name, partial(run_layers, getattr(_VF, name))))
        yield


def run_layers(op: Callable[..., Any], x: Tensor, *rest: Any) -> Any:
    """Return `op(x, *rest)`, one layer at a time if it drops between layers, in eval mode too: the ops are then alike.

    `rest`: states, weights, bias, layers, dropout, train, bidirectional, batch_first. A packed sequence has other
    arguments, and is run as it is.
    """
    if len(rest) != 8 or not isinstance(rest[3], int) or not (rest[3] > 1 and rest[4]):
        return op(x, *rest)
    states, weights, bias, layers, dropout, train, bidirectional, batch_first = rest
    several = not isinstance(states, Tensor)
    each, directions = len(weights) // layers, 1 + bidirectional
    ends: list[Sequence[Tensor]] = []
    for layer in range(layers):
        own = [h[layer * directions : (layer + 1) * directions] for h in (states if several else [states])]
        mine = weights[layer * each : (layer + 1) * each]
        x, *end = op(x, own if several else own[0], mine, bias, 1, 0.0, train, bidirectional, batch_first)
        ends.append(end)
        if layer < layers - 1:
            x = F.dropout(x, dropout, train)
    return x, *map(torch.cat, zip(*ends, strict=True))
