"""Delta rules without loops compute what the functions of transformers compute, and carry the same gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.models.bailing_hybrid import modeling_bailing_hybrid
from transformers.models.glm5_next import modeling_glm5_next
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.olmo_hybrid import modeling_olmo_hybrid
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.models.qwen4_exp import modeling_qwen4_exp

from autoptd.passes.known.delta_rule import DELTA_RULES, gated_delta_rule, kimi_delta_attention
from autoptd.passes.known.replace import _same_parameters

GATED = (modeling_qwen3_next, modeling_qwen3_5, modeling_qwen3_5_moe, modeling_olmo_hybrid, modeling_qwen4_exp)
KIMI = (modeling_kimi_linear, modeling_bailing_hybrid, modeling_glm5_next)


class InFloat64(TorchFunctionMode):
    """Casts to float32 in a library's code are casts to float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(x: Any) -> Any:
            return torch.float64 if x is torch.float32 else x

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(wide, args), **{k: wide(v) for k, v in (kwargs or {}).items()})


def inputs(tokens: int, heads: int, shared: int, by_channel: bool, alike: float = 0.0) -> list[Tensor]:
    """Return queries, keys, values, gates and rates; `alike`: how much keys have in common."""
    torch.manual_seed(0)
    b, k, v = 2, 8, 6
    query, key = (torch.randn(b, tokens, heads, k, dtype=torch.float64) for _ in range(2))
    key = (1 - alike) * key + alike * torch.randn(k, dtype=torch.float64)
    value = torch.randn(b, tokens, heads * shared, v, dtype=torch.float64)
    shape = (b, tokens, heads * shared, k) if by_channel else (b, tokens, heads * shared)
    gates = -torch.nn.functional.softplus(2 * torch.randn(shape, dtype=torch.float64))
    rates = torch.rand(b, tokens, heads * shared, dtype=torch.float64)
    return [x.requires_grad_() for x in (query, key, value, gates, rates)]


def assert_same(mine: Callable[..., Any], theirs: Callable[..., Any], given: list[Tensor], **options: Any) -> None:
    """Compare values, the last state and all gradients."""
    states = [x for x in options.values() if isinstance(x, Tensor)]
    with InFloat64():
        found, expected = (
            [x for x in f(*given, use_qk_l2norm_in_kernel=True, **options) if x is not None] for f in (mine, theirs)
        )
    assert len(found) == len(expected)
    weights = [torch.randn_like(x) for x in expected]
    gradients = []
    for results in (found, expected):
        for x, y in zip(results, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)
        total = sum((x * w).sum() for x, w in zip(results, weights, strict=True))
        gradients.append(torch.autograd.grad(total, [*given, *states]))
    for x, y in zip(*gradients, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("tokens", [16, 64, 130, 320])
@pytest.mark.parametrize("shared", [1, 2])
def test_a_gated_delta_rule_is_that_of_transformers(tokens: int, shared: int) -> None:
    given = inputs(tokens, 2, shared, by_channel=False)
    assert_same(gated_delta_rule, modeling_qwen3_next.torch_chunk_gated_delta_rule, given)


@pytest.mark.parametrize("tokens", [16, 64, 130, 320])
def test_kimi_delta_attention_is_that_of_transformers(tokens: int) -> None:
    given = inputs(tokens, 2, 1, by_channel=True)
    assert_same(kimi_delta_attention, modeling_kimi_linear.chunk_kimi_delta_attention, given)


@pytest.mark.parametrize("by_channel", [True, False])
def test_states_before_and_after_are_those_of_transformers(by_channel: bool) -> None:
    mine, theirs = (
        (kimi_delta_attention, modeling_kimi_linear.chunk_kimi_delta_attention)
        if by_channel
        else (gated_delta_rule, modeling_qwen3_next.torch_chunk_gated_delta_rule)
    )
    first = torch.randn(2, 2, 8, 6, dtype=torch.float64, requires_grad=True)
    for tokens in (20, 100):
        given = inputs(tokens, 2, 1, by_channel)
        assert_same(mine, theirs, given, initial_state=first, output_final_state=True, chunk_size=32)


def test_keys_that_are_alike_lose_no_digits() -> None:
    given = inputs(128, 2, 1, by_channel=False, alike=0.98)
    given[3] = (given[3] * 1e-3).detach().requires_grad_()
    assert_same(gated_delta_rule, modeling_qwen3_next.torch_recurrent_gated_delta_rule, given)


def test_gates_that_forget_all_neither_overflow_nor_divide_zero() -> None:
    given = inputs(128, 2, 1, by_channel=True)
    given[3] = (given[3] * 300).detach().requires_grad_()

    def step_by_step(*args: Tensor, **options: Any) -> Any:
        return modeling_kimi_linear.recurrent_kimi_delta_attention(*args, None, False, **options)

    assert_same(kimi_delta_attention, step_by_step, given)


@pytest.mark.parametrize("module", [*GATED, *KIMI], ids=lambda m: m.__name__.rpartition("_")[2])
def test_models_call_the_functions_by_these_names(module: Any) -> None:
    name = "torch_chunk_gated_delta_rule" if module in GATED else "chunk_kimi_delta_attention"
    assert _same_parameters(vars(module)[name], DELTA_RULES[name])
