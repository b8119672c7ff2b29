"""Gated delta rules, whose functions loop over the rows and the chunks of a sequence, without loops.

    S_t = (I - β_t k_t k_tᵀ) Diag(α_t) S_{t-1} + β_t k_t v_tᵀ        o_t = S_tᵀ q_t / √d

α_t is one number for a head (Yang et al. 2024, Gated Delta Networks, equation 10) or one for each channel of the key
(Kimi Team 2025, Kimi Linear, equation 1). With Γ_i the product of α from the start of a chunk to its position i, the
chunk has (section 3.3 and equations 6 to 9)

    M_ij = β_i k_iᵀ Diag(Γ_i / Γ_j) k_j, i > j      (I + M) V = β v      (I + M) W = β Γ k
    S' = (Diag(Γ_last) - K̃ᵀ W) S + K̃ᵀ V             K̃_j = (Γ_last / Γ_j) k_j

Triangular systems are solved by substitution in one op: the inverse as a product of powers of M, which would be of
logarithmic depth as well, loses all digits where keys are alike. The states of the chunks are a linear recurrence of
matrices, which is a scan of logarithmic depth. All heads are computed alike, so each rank may have some.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autoptd.passes.known.numbers import number
from autoptd.passes.known.scans import linear_recurrence

BLOCK = 16  # positions of which all pairs of channels are computed
_EPSILON = 1e-6  # in the norms of queries and keys


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return o [b, t, h, v], and the last state [b, h, k, v] if wanted.

    query, key: [b, t, h / n, k], each serving n heads of value [b, t, h, v]. g: log α, [b, t, h]. beta: [b, t, h].
    """
    shared = value.shape[2] // key.shape[2]
    if shared > 1:
        query, key = (x.repeat_interleave(shared, 2) for x in (query, key))
    decay = g[..., None]
    return _delta_rule(
        query, key, value, decay, beta, chunk_size, initial_state, output_final_state, use_qk_l2norm_in_kernel
    )


def kimi_delta_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return o [b, t, h, v], and the last state [b, h, k, v] if wanted.

    query, key: [b, t, h, k]. value: [b, t, h, v]. g: log α, [b, t, h, k]. beta: [b, t, h].
    """
    return _delta_rule(
        query, key, value, g, beta, chunk_size, initial_state, output_final_state, use_qk_l2norm_in_kernel
    )


def _delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    chunk_size: int,
    initial_state: Tensor | None,
    output_final_state: bool,
    normalised: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return outputs [b, t, h, v] and the last state. decay: log α, [b, t, h, k], or [b, t, h, 1] for all channels."""
    dtype, tokens = query.dtype, number(query.shape[1])
    short = -tokens % chunk_size
    query, key, value, decay, beta = (
        F.pad(x.transpose(1, 2).to(torch.float32), (0, 0, 0, short)).unflatten(2, (-1, chunk_size))
        for x in (query, key, value, decay, beta[..., None])
    )
    if normalised:
        query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _EPSILON) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    decay = decay.cumsum(3)
    learnt, since = key * beta, decay.exp()
    reads, system = _pairs(query, learnt, key, decay)
    values = torch.linalg.solve_triangular(system, value * beta, upper=False, unitriangular=True)
    state = None
    if (tokens + short) // chunk_size == 1 and initial_state is None and not output_final_state:
        outputs = reads @ values
    else:
        known = torch.linalg.solve_triangular(system, learnt * since, upper=False, unitriangular=True)
        last = decay[..., -1:, :]
        kept = (key * (last - decay).exp()).mT
        same = torch.eye(key.shape[-1], dtype=key.dtype, device=key.device)
        before, state = _states(last.exp().mT * same - kept @ known, kept @ values, initial_state)
        outputs = (query * since) @ before + reads @ (values - known @ before)
    outputs = outputs.flatten(2, 3)[:, :, :tokens].transpose(1, 2).contiguous().to(dtype)
    return outputs, state if output_final_state else None


def _states(passes: Tensor, enters: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the states [b, h, c, k, v] before each chunk, and the last [b, h, k, v], of S' = passes S + enters."""
    if first is None:
        after = linear_recurrence(passes, enters, -3, torch.matmul)
        return F.pad(after, (0, 0, 0, 0, 1, 0))[:, :, :-1], after[:, :, -1]
    first = first.to(enters.dtype).unsqueeze(2)
    enters = torch.cat((passes[:, :, :1] @ first + enters[:, :, :1], enters[:, :, 1:]), 2)
    after = linear_recurrence(passes, enters, -3, torch.matmul)
    return torch.cat((first, after[:, :, :-1]), 2), after[:, :, -1]


def _pairs(query: Tensor, learnt: Tensor, key: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """Return x_i^T Diag(Γ_i / Γ_j) k_j for i ≥ j, else 0, [b, h, n, c, c], for x of `query` and of `learnt`."""
    if decay.shape[-1] == 1:
        ratios = _earlier(decay - decay.mT, key.shape[-2])
        return (query @ key.mT) * ratios, (learnt @ key.mT) * ratios
    reads, system = _by_channel(torch.stack((query, learnt)), key, decay).unbind()
    return reads, system


def _by_channel(x: Tensor, key: Tensor, decay: Tensor) -> Tensor:
    """Return the products of x with all earlier keys, [..., c, c], where each channel decays by itself.

    Γ_i / Γ_j of two blocks of positions is a product of two ratios to the last position of the first block, which are
    at most 1, so that a matrix product does. Within a block of BLOCK positions, all ratios are computed.
    """
    size = key.shape[-2]
    if size <= BLOCK or size % 2:
        ratios = _earlier(decay.unsqueeze(-2) - decay.unsqueeze(-3), size, (..., None))
        return (x.unsqueeze(-2) * key.unsqueeze(-3) * ratios).sum(-1)
    x, key, decay = (y.unflatten(-2, (2, size // 2)) for y in (x, key, decay))
    within, late = _by_channel(x, key, decay), x.select(-3, 1)
    (early_decay, late_decay), early = decay.unbind(-3), key.select(-3, 0)
    joint = early_decay[..., -1:, :]
    across = (late * (late_decay - joint).exp()) @ (early * (joint - early_decay).exp()).mT
    first, second = within.unbind(-3)
    return torch.cat((F.pad(first, (0, size // 2)), torch.cat((across, second), -1)), -2)


def _earlier(logarithms: Tensor, size: int, at: Any = ...) -> Tensor:
    """Return exp of logarithms of ratios [c, c] of positions, zero where the second position is the later one."""
    later = torch.ones(size, size, dtype=torch.bool, device=logarithms.device).triu(1)
    return logarithms.masked_fill(later[at], -torch.inf).exp()


DELTA_RULES: dict[str, Callable[..., Any]] = {
    "chunk_kimi_delta_attention": kimi_delta_attention,
    "torch_chunk_gated_delta_rule": gated_delta_rule,
}
