"""Bytes of the training state, by hand and against what torch's own optimizers keep."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoptd.cost_models.memory import (
    Memory,
    in_flight,
    model_state,
    optimizer_step_bytes,
    padded,
)


def test_total_and_sum():
    one = Memory(parameters=1, gradients=2, optimizer=3, activations=4, temporary=5, communication=6, overhead=7)
    assert one.total == 28
    assert one + one == Memory(2, 4, 6, 8, 10, 12, 14)
    assert Memory(**one.to_data()) == one


@pytest.mark.parametrize(
    ("precision", "optimizer", "bytes_each"),
    [
        ("bf16", "adamw", (2, 4, 12)),
        ("fp16", "adamw", (2, 4, 12)),
        ("fp32", "adamw", (4, 4, 8)),
        ("fp64", "adamw", (8, 8, 16)),
        ("bf16", "sgd", (2, 4, 4)),
        ("fp32", "sgd", (4, 4, 0)),
        ("fp64", "sgd", (8, 8, 0)),
    ],
)
def test_bytes_per_parameter(precision: str, optimizer: str, bytes_each: tuple[int, int, int]):
    state = model_state([1000], precision=precision, optimizer=optimizer)
    assert (state.parameters, state.gradients, state.optimizer) == tuple(1000 * each for each in bytes_each)
    assert state.total == 1000 * sum(bytes_each)
    sharded = model_state([1000], precision=precision, optimizer=optimizer, zero=1, dp=8)
    assert sharded == Memory(state.parameters, state.gradients, state.optimizer // 8)


def test_gpt3_is_the_known_18_bytes_per_parameter():
    # Rajbhandari et al. 2020 count 16 with half-precision gradients; the fp32 main-grad buffer adds 2
    assert model_state([175 * 10**9], precision="bf16", optimizer="adamw").total == 18 * 175 * 10**9


def test_buckets_are_padded_each():
    # 10 -> 12 and 5 -> 8 elements among 4 ranks: 20 elements here, 5 of them updated here
    state = model_state([10, 5], precision="bf16", optimizer="adamw", zero=1, dp=4)
    assert state == Memory(parameters=40, gradients=80, optimizer=5 * 12)
    assert model_state([10, 5], precision="bf16", optimizer="adamw", dp=4).parameters == 30
    assert model_state([10, 5], precision="bf16", optimizer="adamw", zero=1, dp=4, pad_to=16).parameters == 64
    with pytest.raises(ValueError, match="6 elements do not divide among 4"):
        model_state([10], precision="bf16", optimizer="adamw", zero=1, dp=4, pad_to=6)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_torch_keeps_as_much(optimizer: str):
    weight = torch.nn.Parameter(torch.zeros(1000, dtype=torch.float32))
    weight.grad = torch.zeros_like(weight)
    stepped = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[optimizer]([weight], lr=0.1)
    stepped.step()
    kept = sum(t.nbytes for s in stepped.state.values() for t in s.values() if torch.is_tensor(t) and t.numel() > 1)
    assert model_state([1000], precision="fp32", optimizer=optimizer).optimizer == kept


@pytest.mark.parametrize(
    "wrong", [{"precision": "fp8"}, {"optimizer": "lion"}, {"zero": 2}], ids=["precision", "optimizer", "zero"]
)
def test_unknown_choices_are_refused(wrong: dict[str, object]):
    with pytest.raises(ValueError, match="known: "):
        model_state([1], **{"precision": "bf16", "optimizer": "adamw", **wrong})  # type: ignore[arg-type]


def test_optimizer_step_bytes():
    # adamw in bf16: read grad, main, 2 moments (16), write main, 2 moments (12) and the bf16 copy (2)
    assert optimizer_step_bytes(10, precision="bf16", optimizer="adamw") == 300
    assert optimizer_step_bytes(10, precision="fp32", optimizer="sgd") == 120


def test_in_flight():
    assert [in_flight(s, 4, 8) for s in range(4)] == [4, 3, 2, 1]
    assert [in_flight(s, 4, 2) for s in range(4)] == [2, 2, 2, 1]
    with pytest.raises(ValueError):
        in_flight(4, 4, 8)


@given(st.lists(st.integers(0, 10**6), max_size=5), st.integers(1, 64))
def test_zero_never_costs_more_than_its_padding(buckets: list[int], dp: int):
    whole = model_state(buckets, precision="bf16", optimizer="adamw")
    shard = model_state(buckets, precision="bf16", optimizer="adamw", zero=1, dp=dp)
    spare = sum(padded(n, dp) - n for n in buckets)
    assert shard.parameters == whole.parameters + 2 * spare
    assert whole.optimizer + 12 * spare == shard.optimizer * dp
