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

from autoptd.passes.known.numbers import number

Times = Callable[[Tensor, Tensor], Tensor]


def linear_recurrence(a: Tensor, b: Tensor, dim: int = -2, times: Times = torch.mul) -> Tensor:
    """Return h, of the shape of b [..., t, n], from h = 0 before the first step; a is broadcast to b.

    dim: of the steps, from the end. times: the product, of numbers, or `torch.matmul` of matrices a [..., t, k, k] and
    b [..., t, k, n] with dim -3.
    """
    steps = number(b.shape[dim])
    if steps == 1:
        return b
    behind = (0, 0) * (-dim - 1)
    if steps % 2:
        a, b = (F.pad(x, (*behind, 0, 1)) for x in (a, b))
        return linear_recurrence(a, b, dim, times).narrow(dim, 0, steps)
    pairs = steps // 2
    (a0, a1), (b0, b1) = (x.unflatten(dim, (pairs, 2)).unbind(dim) for x in (a, b))
    odd = linear_recurrence(times(a1, a0), times(a1, b0) + b1, dim, times)
    even = b0 + times(a0, F.pad(odd, (*behind, 1, 0)).narrow(dim, 0, pairs))
    return torch.stack((even, odd), dim).flatten(dim - 1, dim)


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
