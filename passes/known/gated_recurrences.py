"""Recurrences of single channels that models write as a loop over tokens, as scans of logarithmic depth.

RG-LRU   h_t = a_t h_{t-1} + x_t, forgotten at the start of a document          (De et al. 2024, Griffin, equation 4)
WKV      o_t = (Σ_{j<t} e^{k_j + (t-1-j) w} v_j + e^{u + k_t} v_t) / (the same sums without v)
                                                                             (Peng et al. 2023, RWKV, equation 16)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoptd.passes.known.numbers import number
from autoptd.passes.known.scans import linear_recurrence

_NEVER = -1e38  # the largest exponent before any token, as the loop has it


def real_gated_recurrence(
    self: nn.Module,
    hidden_states: Tensor,
    recurrent_gate: Tensor,
    reset: Tensor,
    recurrent_states: Tensor | None,
    acc_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Return h [b, t, c] of x and the gates a [b, t, c], and the last state [b, c].

    reset: [b, t, 1], the tokens before which all is forgotten.
    """
    gates, enters = (recurrent_gate * ~reset).to(acc_dtype), hidden_states.to(acc_dtype)
    if recurrent_states is not None:
        enters = torch.cat((enters[:, :1] + gates[:, :1] * recurrent_states[:, None], enters[:, 1:]), 1)
    states = linear_recurrence(gates, enters)
    return states.to(hidden_states.dtype), states[:, -1]


def wkv(
    time_decay: Tensor,
    time_first: Tensor,
    key: Tensor,
    value: Tensor,
    state: Any = None,
    return_state: bool = False,
) -> tuple[Tensor, Any]:
    """Return o [b, t, c] of k, v [b, t, c], w = -e^time_decay and u = time_first [c].

    The sums are kept relative to e^{m_t}, m_t the largest exponent so far, which cancels: gradients need not know it.
    state: the two sums and m of the tokens before, [b, c] each.
    """
    tokens, exponent, decay = number(key.shape[1]), key.float(), -torch.exp(time_decay)
    gone = torch.arange(tokens, device=key.device)[:, None] * decay.detach()
    largest = (exponent.detach() - gone).cummax(1).values + gone
    if state is not None:
        largest = torch.maximum(largest, state[2][:, None] + gone + decay.detach())
    earlier = _shifted(largest, None if state is None else state[2], _NEVER)
    weight = torch.exp(exponent - largest)
    enters = torch.stack((weight * value, weight))
    passes = torch.exp(earlier + decay - largest)
    if state is not None:
        first = passes[:, :1] * torch.stack((state[0], state[1]))[:, :, None]
        enters = torch.cat((enters[:, :, :1] + first, enters[:, :, 1:]), 2)
    sums = linear_recurrence(passes, enters)
    values, weights = _shifted(sums, None if state is None else torch.stack((state[0], state[1])), 0.0).unbind()
    now = exponent + time_first
    top = torch.maximum(earlier, now.detach())
    before, own = torch.exp(earlier - top), torch.exp(now - top)
    output = ((before * values + own * value) / (before * weights + own)).to(key.dtype)
    return output, [*sums[:, :, -1], largest[:, -1]] if return_state or state is not None else None


def _shifted(x: Tensor, first: Tensor | None, fill: float) -> Tensor:
    """Return [..., t, c] of the token before each, `first` [..., c] or a number before the first."""
    if first is None:
        return F.pad(x, (0, 0, 1, 0), value=fill)[..., :-1, :]
    return torch.cat((first.unsqueeze(-2), x[..., :-1, :]), -2)


GATED: dict[str, Callable[..., Any]] = {"_rnn_scan": real_gated_recurrence, "rwkv_linear_attention_cpu": wkv}
