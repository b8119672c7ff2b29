"""Bytes of the training state, by hand and against those of torch's own optimizers."""

from __future__ import annotations

import itertools

import pytest
import sympy
import torch

from autoptd.cost_models.memory import (
    CONNECTION_BYTES,
    FRAGMENTATION_LEAST,
    SEGMENT_BYTES,
    D,
    Memory,
    N,
    R,
    U,
    accumulation_bytes,
    alive,
    allocator_bytes,
    communicator_bytes,
    formulas,
    in_flight,
    model_state,
    optimizer_step_bytes,
    step_gradient_bytes,
)
from autoptd.schedule import Alive, UncountedActivations, prove_memory, step_lists
from autoptd.schedule import in_flight as counted


def test_total_and_sum():
    one = Memory(parameters=1, gradients=2, optimizer=3, activations=4, temporary=5, communication=6, overhead=7)
    assert one.needed == 28
    assert one + one == Memory(2, 4, 6, 8, 10, 12, 14)
    all_of = one + Memory(context=100)
    assert (all_of.state, all_of.allocated, all_of.needed) == (6, 15, 128)
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
    assert state.state == 1000 * sum(bytes_each)
    sharded = model_state([1000], precision=precision, optimizer=optimizer, zero=1, dp=8)
    assert sharded == Memory(state.parameters, state.gradients, state.optimizer // 8)


def test_gpt3_is_the_known_18_bytes_per_parameter():
    # Rajbhandari et al. 2020 count 16 with half-precision gradients; the fp32 main-grad buffer adds 2
    assert model_state([175 * 10**9], precision="bf16", optimizer="adamw").state == 18 * 175 * 10**9


def test_buckets_are_padded_each():
    # 10 -> 12 and 5 -> 8 elements among 4 ranks: 20 elements here, 5 of them updated here
    state = model_state([10, 5], precision="bf16", optimizer="adamw", zero=1, dp=4)
    assert state == Memory(parameters=40, gradients=80, optimizer=5 * 12)
    assert model_state([10, 5], precision="bf16", optimizer="adamw", dp=4).parameters == 30
    assert model_state([10, 5], precision="bf16", optimizer="adamw", zero=1, dp=4, pad_to=16).parameters == 64
    with pytest.raises(ValueError, match="6 elements are not divisible by 4"):
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
    "wrong",
    [{"precision": "fp8"}, {"optimizer": "adam"}, {"zero": 4}, {"gradients": "fp8"}],
    ids=lambda w: next(iter(w)),
)
def test_unknown_choices_are_refused(wrong: dict[str, object]):
    with pytest.raises(ValueError, match="known: "):
        model_state([1], **{"precision": "bf16", "optimizer": "adamw", **wrong})  # type: ignore[arg-type]


def test_optimizer_step_bytes():
    # adamw in bf16: read grad, main, 2 moments (16), write main, 2 moments (12); read main (4), write the copy (2)
    assert optimizer_step_bytes(10, precision="bf16", optimizer="adamw") == 340
    assert optimizer_step_bytes(10, precision="fp32", optimizer="sgd") == 120


def test_bytes_of_reduced_gradients():
    # norm reads (4), scaling reads and writes (8)
    assert step_gradient_bytes(10, "bf16", "main", 1) == step_gradient_bytes(10, "fp32", "compute", 1) == 120
    # fp16: divided by the loss scale (8)
    assert step_gradient_bytes(10, "fp16", "main", 0) == 200
    # a copy in float32 (2 + 4), and back (4 + 2); ZeRO 3 has float32 shards
    assert step_gradient_bytes(10, "bf16", "compute", 2) == 240
    assert step_gradient_bytes(10, "bf16", "compute", 3) == 120
    # by hand one kernel divides and copies (2 + 4)
    assert step_gradient_bytes(10, "fp16", "compute", 1, by_hand=True) == 180
    assert step_gradient_bytes(10, "fp16", "main", 1, by_hand=True) == 200


def test_bytes_of_accumulation():
    # one microbatch: read in bf16 (2), copied to float32 (4); of two, the second reads and writes (8)
    assert accumulation_bytes(10, "bf16", "main") == 60
    assert accumulation_bytes(10, "bf16", "main", 1, 2) == pytest.approx((60 + 100) / 2)
    assert accumulation_bytes(10, "bf16", "compute", 1, 2) == pytest.approx((40 + 60) / 2)
    # by hand products add, or the first gradient stays where autograd left it
    assert accumulation_bytes(10, "bf16", "main", 1, 2, by_hand=True) == 0
    assert accumulation_bytes(10, "bf16", "compute", 1, 2, by_hand=True) == pytest.approx(60 / 2)
    assert accumulation_bytes(10, "bf16", "fused", 1, 2) == 0, "beside other kernels too"
    # ZeRO 2 on 5 ranks: a bucket for each microbatch (6); its shard is read (4), copied (4) or added (8)
    assert accumulation_bytes(10, "bf16", "main", 2, 2, 5) == pytest.approx(60 + 2 * (8 + 12) / 2)
    # ZeRO 3 keeps shards in float32, whatever is reduced
    assert accumulation_bytes(10, "bf16", "compute", 3, 1, 5) == pytest.approx(40 + 2 * (2 + 4))


def test_in_flight():
    assert [in_flight(s, 4, 8) for s in range(4)] == [4, 3, 2, 1]
    assert [in_flight(s, 4, 2) for s in range(4)] == [2, 2, 2, 1]
    with pytest.raises(ValueError):
        in_flight(4, 4, 8)
    with pytest.raises(ValueError, match="known: 1f1b"):
        in_flight(0, 4, 8, "dualpipe")


@pytest.mark.parametrize(
    ("kind", "virtual"),
    [("gpipe", 1), ("1f1b", 1), ("zero-bubble", 1), ("interleaved", 2), ("interleaved", 3), ("zero-bubble-v", 2)],
)
def test_in_flight_is_what_the_action_lists_hold(kind: str, virtual: int):
    for stages in (1, 2, 3, 4, 6):
        for microbatches in (1, 2, 3, 4, 6, 12):
            if kind == "interleaved" and microbatches % stages:
                continue  # refused by the schedule
            lists = step_lists(kind, stages, microbatches, virtual)
            held = [sum(counted(actions)) for actions in lists]
            assert [in_flight(i, stages, microbatches, kind, virtual) for i in range(stages)] == held


def test_a_vee_is_counted_by_chunk_whatever_the_chunks_weigh():
    for stages in range(1, 7):
        for microbatches in range(1, 14):
            for i, actions in enumerate(step_lists("zero-bubble-v", stages, microbatches, 2)):
                rows = alive(i, stages, microbatches, "zero-bubble-v", 2)
                for weights in ((1, 0), (0, 1), (3, 2), (2, 3), (1, 1)):
                    held = sum(n * w for n, w in zip(counted(actions, weights), weights, strict=True))
                    assert rows.kept(weights) == held
    assert alive(0, 4, 8, "zero-bubble-v", 2) == (((7, 1), (8, 0)), 1, ((0, 1), (1, 0)))
    assert alive(0, 4, 8, "zero-bubble-v", 2).kept((10, 1)) == 80
    assert alive(1, 4, 8, "interleaved", 2).kept((10, 1)) == 50  # 9 chunks of 5.5 on average, to an even number


def test_what_waits_for_its_second_half_is_counted():
    """Count one less in any row, and an action list holds more than is counted."""
    for kind, chunks in (("zero-bubble", 1), ("zero-bubble-v", 2)):
        for stages, microbatches in itertools.product(range(1, 7), range(1, 19)):
            lists = step_lists(kind, stages, microbatches, chunks)
            counted = [alive(i, stages, microbatches, kind, chunks) for i in range(stages)]
            prove_memory(lists, counted)
            for i, held in enumerate(counted):
                for row, chunk in itertools.product(range(len(held.rows)), range(chunks)):
                    if held.waiting[row][chunk] == 0:
                        continue
                    fewer = [list(numbers) for numbers in held.waiting]
                    fewer[row][chunk] -= 1
                    less = held._replace(waiting=tuple(map(tuple, fewer)))
                    with pytest.raises(UncountedActivations, match="before their W"):
                        prove_memory(lists, [*counted[:i], less, *counted[i + 1 :]])
    one, two = (alive(i, 2, 8, "zero-bubble") for i in range(2))
    assert [one.kept([10], [3]), two.kept([10], [3]), two.kept([10])] == [23, 26, 20]
    assert alive(1, 4, 16, "zero-bubble-v", 2).alike == Alive(((8,), (8,), (5,)), 1, ((1,), (1,), (3,)))


def test_more_in_flight_than_counted_is_refused():
    lists = step_lists("zero-bubble-v", 4, 8, 2)
    honest = [alive(i, 4, 8, "zero-bubble-v", 2) for i in range(4)]
    prove_memory(lists, honest)
    with pytest.raises(UncountedActivations, match=r"rank 1 holds activations of 6\+2 .* predicted for 6\+1 or 7\+1"):
        prove_memory(lists, [honest[0], Alive(((6, 1), (7, 1))), *honest[2:]])
    lists = step_lists("interleaved", 4, 8, 2)
    prove_memory(lists, [alive(i, 4, 8, "interleaved", 2) for i in range(4)])
    with pytest.raises(UncountedActivations, match="rank 0"):
        prove_memory(lists, [Alive(((10, 10),), 2)] * 4)


@pytest.mark.parametrize(
    ("zero", "options", "expected"),
    [
        # 1000 bf16 elements with adamw over 4 shards, by the table of the module
        (2, {"whole_numel": 100}, Memory(2000, 1000 + 400, 3000)),
        (2, {"whole_numel": 100, "gradients": "compute"}, Memory(2000, 500 + 200, 3000)),
        (3, {"whole_numel": 100, "gathered_numel": 250}, Memory(1000 + 500, 1000 + 400, 2000)),
        (3, {"whole_numel": 100, "gradients": "compute"}, Memory(1000, 1000 + 200, 2000)),
        (1, {"gradients": "compute"}, Memory(2000, 2000, 3000)),
        (1, {"gradients": "fused"}, Memory(2000, 4000, 3000)),
        (1, {"shards": 2}, Memory(2000, 4000, 6000)),
        (3, {"shards": 2}, Memory(2000, 2000, 4000)),
    ],
)
def test_sharded_state_by_hand(zero: int, options: dict[str, object], expected: Memory):
    assert model_state([1000], precision="bf16", optimizer="adamw", zero=zero, dp=4, **options) == expected  # type: ignore[arg-type]


def test_shards_divide_the_data_parallel_ranks():
    with pytest.raises(ValueError, match="3 shards do not divide 4"):
        model_state([12], precision="bf16", optimizer="adamw", zero=1, dp=4, shards=3)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_numbers_are_the_formulas(zero: int, precision: str):
    found = formulas(precision=precision, optimizer="adamw", zero=zero)
    state = model_state([96], precision=precision, optimizer="adamw", zero=zero, dp=8, whole_numel=10, gathered_numel=7)
    assert state == Memory(
        **{name: int(text.subs({N: 96, D: 8 if zero else 1, U: 10, R: 7})) for name, text in found.items()}
    )


def test_the_known_bytes_per_parameter_of_each_stage():
    # Rajbhandari et al. 2020, figure 1: 2 + (2 + 12) / d and so on, with half-precision gradients
    terms = [formulas(precision="fp16", optimizer="adamw", zero=z, gradients="compute") for z in (0, 1, 2, 3)]
    totals = [sympy.expand(sum(t.values()).subs({U: 0, R: 0}) / N) for t in terms]
    assert totals[:3] == [16, 4 + 12 / D, 2 + 14 / D]
    assert totals[3] == 16 / D  # FSDP: a float32 parameter and gradient instead of two halves and a main copy


def test_beyond_tensors():
    assert allocator_bytes(0) == 0
    assert allocator_bytes(10 * SEGMENT_BYTES, 0.26) == 3 * SEGMENT_BYTES
    assert communicator_bytes([1, 1]) == 0
    assert communicator_bytes([8, 1, 4], channels=24, connections=2) == 2 * 24 * 2 * CONNECTION_BYTES


def test_what_a_device_must_have_counts_the_least_that_was_held_free():
    # of 40 segments allocated and freed in a step 14 usually stay free (0.35), and 2 at least (0.05)
    tensors = Memory(parameters=7, activations=30 * SEGMENT_BYTES, temporary=10 * SEGMENT_BYTES, context=11)
    found = tensors + Memory(overhead=allocator_bytes(40 * SEGMENT_BYTES, FRAGMENTATION_LEAST), communication=5)
    assert found.needed == 23 + 42 * SEGMENT_BYTES
    assert found.reserved == 7 + 54 * SEGMENT_BYTES
    assert found.shown == 23 + 54 * SEGMENT_BYTES
