"""Scans of RG-LRU and WKV compute what the loops over tokens of transformers compute, and carry the same gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.recurrent_gemma import RecurrentGemmaConfig, modeling_recurrent_gemma
from transformers.models.rwkv import modeling_rwkv

from autoptd.passes.known.gated_recurrences import GATED, real_gated_recurrence, wkv
from autoptd.passes.known.replace import _same_parameters, replaced_functions
from tests.passes.known.test_delta_rule import InFloat64

Rglru = modeling_recurrent_gemma.RecurrentGemmaRglru


def assert_same(found: list[Tensor], expected: list[Tensor], given: list[Tensor]) -> None:
    weights = [torch.randn_like(x) for x in expected]
    gradients = []
    for results in (found, expected):
        for x, y in zip(results, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
        total = sum((x * w).sum() for x, w in zip(results, weights, strict=True))
        gradients.append(torch.autograd.grad(total, given, allow_unused=True, materialize_grads=True))
    for x, y in zip(*gradients, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("started", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 7, 16])
def test_a_gated_recurrence_is_that_of_transformers(tokens: int, started: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, tokens, 6, dtype=torch.float64, requires_grad=True)
    gates = torch.rand(2, tokens, 6, dtype=torch.float64, requires_grad=True)
    reset = torch.rand(2, tokens, 1) < 0.2
    state = torch.randn(2, 6, dtype=torch.float64) if started else None
    layer = Rglru(RecurrentGemmaConfig(hidden_size=6, lru_width=6, num_attention_heads=2))
    with InFloat64():
        theirs = layer._rnn_scan(x, gates, reset, state, torch.float64)
        mine = real_gated_recurrence(layer, x, gates, reset, state, torch.float64)
    assert_same([*mine], [*theirs], [x, gates])


@pytest.mark.parametrize("scale", [1.0, 40.0])
@pytest.mark.parametrize("started", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 7, 16])
def test_wkv_is_that_of_transformers(tokens: int, started: bool, scale: float) -> None:
    torch.manual_seed(0)
    decay, first = (torch.randn(6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    key, value = (torch.randn(2, tokens, 6, dtype=torch.float64) for _ in range(2))
    key = (key * scale).requires_grad_()
    state = [torch.randn(2, 6), torch.rand(2, 6), torch.randn(2, 6)] if started else None
    state = [x.double() for x in state] if state else None
    given = [decay, first, key, value.requires_grad_()]
    with InFloat64():
        theirs, last = modeling_rwkv.rwkv_linear_attention_cpu(*given, state=state, return_state=True)
        mine, ours = wkv(*given, state=state, return_state=True)
    torch.testing.assert_close(ours[2], last[2].detach())
    for held in ours, last:  # the sums are relative to e^m, of which only the product has a gradient
        held[:2] = [x * torch.exp(held[2] - held[2].detach()) for x in held[:2]]
    assert_same([mine, *ours[:2]], [theirs, *last[:2]], given)
    assert wkv(*given)[1] is None


def test_models_call_functions_and_methods_of_these_names() -> None:
    for name, theirs in (
        ("_rnn_scan", Rglru._rnn_scan),
        ("rwkv_linear_attention_cpu", modeling_rwkv.rwkv_linear_attention_cpu),
    ):
        assert _same_parameters(theirs, GATED[name])


def test_a_method_is_replaced_in_its_class_and_restored() -> None:
    layer = Rglru(RecurrentGemmaConfig(hidden_size=6, lru_width=6, num_attention_heads=2))
    before = Rglru._rnn_scan
    with replaced_functions(layer, GATED):
        assert Rglru._rnn_scan is real_gated_recurrence
    assert Rglru._rnn_scan is before
