"""Whole layers of a plan: the layer that owns a segment, the layer at which a stage begins, and refusals."""

from __future__ import annotations

import pytest

from autoptd.errors import PlanError
from autoptd.export.layers import is_sequence_parallel, modules_of, read_layers
from autoptd.plans.data import MeshSizes
from tests.export.export_plans import gpt3_plan, llama_plan, plan_of

PP2, PP3 = MeshSizes(dp=1, tp=1, pp=2), MeshSizes(dp=1, tp=1, pp=3)


def test_segments_belong_to_layers():
    layers = read_layers(gpt3_plan((98,), mesh=MeshSizes(dp=1, tp=8, pp=2)))
    assert (layers.stack, layers.count) == ("transformer.h", 96)
    assert layers.owners[:5] == (0, 0, 1, 1, 2)
    assert layers.owners[-3:] == (96, 97, 97)
    assert [layers.layers_of(k) for k in range(2)] == [range(48), range(48, 96)]
    assert layers.moved == ()


@pytest.mark.parametrize(
    ("cut", "first", "moved"),
    [
        (5, 2, ""),
        (4, 1, "stage 1 begins with layer 1, not inside it with layers.1.{post_norm,mlp}"),
        (1, 0, ""),
        (10, 4, "stage 1 begins with what follows the layers, not inside it with head"),
    ],
)
def test_a_stage_that_begins_inside_a_layer_is_moved(cut: int, first: int, moved: str):
    layers = read_layers(llama_plan((cut,), mesh=PP2))
    assert layers.layers_of(1) == range(first, 4)
    assert layers.moved == ((moved,) if moved else ())


def test_the_nearer_end_of_a_layer_is_taken():
    segments = ("embed", *(f"h.{i}.part.{j}" for i in range(2) for j in range(3)), "head")
    for cut, first in ((2, 0), (3, 1), (5, 1), (6, 2)):
        layers = read_layers(plan_of({}, segments, (cut,), mesh=PP2))
        assert layers.layers_of(1) == range(first, 2), cut


def test_a_cut_inside_what_comes_first_is_moved_to_its_end():
    layers = read_layers(gpt3_plan((1,), mesh=MeshSizes(dp=1, tp=1, pp=2)))
    assert layers.bounds == (0, 1, 98)
    assert layers.moved == ("stage 1 begins with layer 0, not inside it with transformer.{wpe,drop}",)


def test_two_cuts_in_one_layer_are_refused():
    with pytest.raises(PlanError, match=r"stage 1 of 3 holds no whole layer \(layers.1.\{post_norm,mlp\}\)"):
        read_layers(llama_plan((4, 5), mesh=PP3).model_copy(update={"segments": ("embed", *["layers.0"] * 9, "head")}))
    with pytest.raises(PlanError, match=r"stage 1 of 3 holds no whole layer"):
        read_layers(llama_plan((3, 4), mesh=PP3))


def test_models_without_one_stack_are_refused():
    with pytest.raises(PlanError, match="no layers are found"):
        read_layers(plan_of({}, ("first", "second"), mesh=MeshSizes(dp=1, tp=1, pp=1)))
    two = ("shared", "encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1", "lm_head")
    with pytest.raises(PlanError, match=r"2 stacks of layers \(decoder.block, encoder.block\)"):
        read_layers(plan_of({}, two, mesh=MeshSizes(dp=1, tp=1, pp=1)))
    pair = ("encoder.block.0.attn", "encoder.block.{0,1}", "decoder.block.0.attn", "decoder.block.{0,1}", "head")
    with pytest.raises(PlanError, match=r"2 stacks of layers \(decoder.block, encoder.block\)"):
        read_layers(plan_of({}, pair, mesh=MeshSizes(dp=1, tp=1, pp=1)))
    with pytest.raises(PlanError, match=r"layer 1 of .+ has no segment of its own"):
        read_layers(plan_of({}, ("h.0.attn", "h.{0,1}", "head"), mesh=MeshSizes(dp=1, tp=1, pp=1)))
    assert (
        read_layers(plan_of({}, ("stem.{0,1}", "h.0", "h.{0,1}", "h.1"), mesh=MeshSizes(dp=1, tp=1, pp=1))).count == 2
    )
    with pytest.raises(PlanError, match="are not numbered consecutively from 0: 0,2"):
        read_layers(plan_of({}, ("h.0", "h.2"), mesh=MeshSizes(dp=1, tp=1, pp=1)))


def test_sequence_parallel_is_read_off_the_layers():
    for sequence in (True, False):
        plan = llama_plan(mesh=MeshSizes(dp=1, tp=2, pp=1), sequence=sequence)
        assert is_sequence_parallel(plan, read_layers(plan)) is sequence


def test_modules_of_a_segment():
    assert modules_of("h.0.{ln_1,attn}") == ["h.0.ln_1", "h.0.attn"]
    assert modules_of("{norm,head}") == ["norm", "head"]
    assert modules_of("h.0") == ["h.0"]
