"""Linear recurrences that models write as a loop over tokens, as scans of logarithmic depth.

    h_t = a_t · h_{t-1} + b_t

A loop has some ops for each token, which no plan of thousands of tokens can hold. The pairs of neighbouring steps are
one recurrence of half the length, whose results give the odd steps, and the even ones follow from those (Blelloch 1990,
Prefix sums and their applications). The numbers are those of the loop up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def linear_recurrence(a: Tensor, b: Tensor) -> Tensor:
    """Return h [..., t, n] of a, b [..., t, n], from h = 0 before the first step."""
    steps = b.shape[-2]
    if steps == 1:
        return b
    if steps % 2:
        return linear_recurrence(F.pad(a, (0, 0, 0, 1)), F.pad(b, (0, 0, 0, 1)))[..., :steps, :]
    pairs = steps // 2
    (a0, a1), (b0, b1) = (x.unflatten(-2, (pairs, 2)).unbind(-2) for x in (a, b))
    odd = linear_recurrence(a1 * a0, a1 * b0 + b1)
    even = b0 + a0 * F.pad(odd, (0, 0, 1, 0))[..., :pairs, :]
    return torch.stack((even, odd), -2).flatten(-3, -2)


def selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    use_mambapy: bool = False,
    use_associative_scan: bool = False,
    **kwargs: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return y [b, c, t], and the last state [b, c, n], of x, dt, z [b, c, t], A [c, n], B, C [b, n, t] and D [c].

    h_t = exp(A dt_t) h_{t-1} + dt_t B_t x_t and y_t = C_t h_t + D x_t, gated by z (Gu and Dao 2023, Mamba).
    """
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[..., None]
    if delta_softplus:
        dt = F.softplus(dt)
    dt = dt[..., None]
    enters = dt * B.transpose(1, 2)[:, None].float() * hidden_states[..., None].float()
    states = linear_recurrence(torch.exp(A[None, :, None] * dt), enters)
    outputs = (states.to(hidden_states.dtype) * C.transpose(1, 2)[:, None]).sum(-1)
    if D is not None:
        outputs = outputs + hidden_states * D[None, :, None]
    if z is not None:
        outputs = outputs * F.silu(z)
    return (outputs, states[:, :, -1]) if return_last_state else outputs


SCANS: dict[str, Callable[..., Any]] = {"mamba_selective_scan": selective_scan}
