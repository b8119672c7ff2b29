"""Plans as Megatron-LM's arguments: golden text, the layout read back, and the reported differences."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import autoptd
from autoptd.errors import PlanError
from autoptd.export.layers import read_layers
from autoptd.export.mapping import mapping
from autoptd.export.megatron import layout, megatron
from autoptd.export.torch_program import torch_program
from autoptd.layout.execution import ExecutionOptions
from autoptd.models.load import load_model
from autoptd.passes.fold import Folded
from autoptd.plans.data import Collectives, MeshSizes, Schedule
from autoptd.plans.model import Plan
from tests.export.export_plans import Llama, gpt3_plan, llama_plan

AS_MEGATRON = ExecutionOptions(kernels="fused", overlap=("dp",), loss="in_place", gathers="again")


@cache
def graph() -> Folded:
    """Return the graph of a `Llama`, with the loss of predicting the tokens."""

    def loss(logits: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), inputs["tokens"].flatten())

    return autoptd.trace(Llama(), inputs={"tokens": torch.zeros(2, 16, dtype=torch.long)}, loss=loss).folded


def arguments(plan: Plan, model: Any = None) -> dict[str, str]:
    return dict(megatron(plan, model).arguments)


def test_gpt3_golden():
    plan = gpt3_plan(
        (25, 48, 73, 98, 121, 146, 171), mesh=MeshSizes(dp=2, tp=8, pp=8), recompute=(*range(2, 12), 26, 27, 99)
    )
    assert megatron(plan, load_model("gpt3-175b")[0]).to_text() == GPT3


GPT3 = """\
# gpt3-175b on 128 × test-cluster: dp 2 × tp 8 × pp 8
# differs: stage 1 begins with layer 11, not inside it with transformer.h.11.{ln_2,mlp}
# differs: stage 3 begins with layer 35, not inside it with transformer.h.35.{ln_2,mlp}
# differs: stage 5 begins with layer 59, not inside it with transformer.h.59.{ln_2,mlp}
# differs: stage 7 begins with layer 84, not inside it with transformer.h.84.{ln_2,mlp}
# differs: the vocabulary is 50257: Megatron-LM pads it to 51200 rows, a multiple of 1024
# differs: tp-gathered inputs are saved for backward: Megatron-LM re-gathers them in backward, for less memory
# differs: P2P between stages overlaps compute: that of Megatron-LM's 1F1B does not
# differs: 1 layer is recomputed in part: Megatron-LM recomputes whole layers
# differs: recomputed layers per stage are 5, 1, 0 × 2, 1, 0 × 3: Megatron-LM takes one number, here the largest
# differs: eager kernels are planned: Megatron-LM's are fused by hand, so times will differ
# differs: the logits and their gradient are both held: Megatron-LM writes the gradient in place, for less memory
# differs: the model was not traced: placements are not compared
# left to you: --lr and its schedule, --clip-grad (1.0 by default), --train-iters, data, tokenizer and checkpoints
export CUDA_DEVICE_MAX_CONNECTIONS=1
MEGATRON_ARGS=(
    --num-layers 96
    --hidden-size 12288
    --ffn-hidden-size 49152
    --num-attention-heads 96
    --max-position-embeddings 2048
    --position-embedding-type learned_absolute
    --vocab-size 50257
    --normalization LayerNorm
    --norm-epsilon 1e-05
    --attention-dropout 0
    --hidden-dropout 0
    --tensor-model-parallel-size 8
    --pipeline-model-parallel-size 8
    --sequence-parallel
    --pipeline-model-parallel-layout 'Et*11|(t*12|)*2,t*13|t*11|t*13|t*12|t*12L'
    --micro-batch-size 2
    --global-batch-size 256
    --seq-length 2048
    --calculate-per-token-loss
    --bf16
    --optimizer adam
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
    --recompute-granularity full
    --recompute-method block
    --recompute-num-layers 5
    --attention-backend auto
)
"""


def test_llama_golden():
    """Even chunks without differences from Megatron-LM; the plan's model is not given."""
    plan = llama_plan(
        (3, 5, 7), mesh=MeshSizes(dp=2, tp=2, pp=2, cp=2), sequence=True, method=AS_MEGATRON, recompute=range(1, 9)
    )
    assert megatron(plan).to_text() == LLAMA


LLAMA = """\
# by-hand on 16 × test-cluster: dp 2 × tp 2 × pp 2 × cp 2
# differs: P2P does not overlap compute: Megatron-LM must overlap it for interleaved chunks on 2 pipeline ranks
# differs: no model was given: the model's sizes are left to you
# differs: the model was not traced: placements are not compared
# left to you: --lr and its schedule, --clip-grad (1.0 by default), --train-iters, data, tokenizer and checkpoints
export CUDA_DEVICE_MAX_CONNECTIONS=1
MEGATRON_ARGS=(
    --tensor-model-parallel-size 2
    --pipeline-model-parallel-size 2
    --context-parallel-size 2
    --cp-comm-type p2p
    --sequence-parallel
    --num-virtual-stages-per-pipeline-rank 2
    --micro-batch-size 1
    --global-batch-size 8
    --seq-length 16
    --calculate-per-token-loss
    --bf16
    --optimizer adam
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --attention-backend auto
)
"""


def test_a_plan_of_megatron_s_own_kind_differs_in_nothing():
    plan = llama_plan(mesh=MeshSizes(dp=4, tp=2, pp=1), sequence=True, method=AS_MEGATRON)
    said = megatron(plan, Llama(), graph())
    assert said.differs == (
        "the model's sizes are left to you: it is a Llama, which has no configuration; "
        "they are known for gpt2, llama, mistral, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe",
    )


def test_shapes_of_llama():
    found = dict(megatron(llama_plan(mesh=MeshSizes(dp=1, tp=1, pp=1)), load_model("llama3-8b")[0]).arguments)
    expected = {
        "--num-layers": "32",
        "--hidden-size": "4096",
        "--ffn-hidden-size": "14336",
        "--num-attention-heads": "32",
        "--group-query-attention": "",
        "--num-query-groups": "8",
        "--rotary-base": "500000",
        "--vocab-size": "128256",
        "--normalization": "RMSNorm",
        "--swiglu": "",
        "--disable-bias-linear": "",
        "--untie-embeddings-and-output-weights": "",
        "--attention-dropout": "0",
    }
    assert expected.items() <= found.items()
    assert "--kv-channels" not in found


# --- the layout ---------------------------------------------------------------------------------------------------


def read_layout(text: str) -> list[str]:
    """Return the stages with every layer written out: groups first, then single letters; commas are ignored."""
    text = text.replace(",", "")
    text = re.sub(r"\(([^)]+)\)\*(\d+)", lambda m: m[1] * int(m[2]), text)
    return re.sub(r"(.)\*(\d+)", lambda m: m[1] * int(m[2]), text).split("|")


@pytest.mark.parametrize("cuts", [(3, 5, 7), (1, 3, 9), (1, 5, 9), (1, 2, 10), (2, 5, 7), (7, 9, 10)])
def test_the_layout_reads_back_as_the_plan(cuts: tuple[int, ...]):
    try:
        layers = read_layers(llama_plan(cuts, mesh=MeshSizes(dp=1, tp=1, pp=4)))
    except PlanError:
        assert cuts in {(1, 2, 10), (2, 5, 7), (7, 9, 10)}
        return
    stages = read_layout(layout(layers))
    assert len(stages) == 4
    assert "".join(stages) == "EttttL"
    for k, stage in enumerate(stages):
        assert stage.count("t") == len(layers.layers_of(k))


@pytest.mark.parametrize(
    ("cuts", "text"),
    [((3,), "Et|t*3L"), ((1,), "E|t*4L"), ((9,), "Et*4|L"), ((1, 3, 5, 7, 9), "E|(t|)*4,L"), ((3, 5), "Et|t|t*2L")],
)
def test_layouts_golden(cuts: tuple[int, ...], text: str):
    assert layout(read_layers(llama_plan(cuts, mesh=MeshSizes(dp=1, tp=1, pp=len(cuts) + 1)))) == text


# --- reported differences -----------------------------------------------------------------------------------------

TP2 = MeshSizes(dp=1, tp=2, pp=1)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (llama_plan((5,), mesh=MeshSizes(dp=1, tp=1, pp=2), schedule=Schedule(kind="gpipe", microbatches=4)), "gpipe"),
        (
            llama_plan((5,), mesh=MeshSizes(dp=1, tp=1, pp=2), schedule=Schedule(kind="zero-bubble", microbatches=4)),
            "zero-b",
        ),
        (llama_plan(mesh=TP2, method=ExecutionOptions(gradients="both")), "bf16 and a float32 buffer"),
        (llama_plan(mesh=TP2, method=ExecutionOptions(kernels="compiled")), "compiled kernels"),
        (llama_plan(mesh=TP2, method=ExecutionOptions(overlap=("tp",))), "tensor-parallel all-reduces overlap compute"),
        (llama_plan(mesh=MeshSizes(dp=2, tp=1, pp=1), micro=2, batch=15), "the batch is 15"),
        (llama_plan(mesh=TP2, optimizer="custom"), "--optimizer is left to you"),
        (llama_plan(mesh=TP2, recompute=(1, 2), method=ExecutionOptions(recompute="ops")), "recomputed by kind"),
        (llama_plan(mesh=TP2, recompute=(1,), method=ExecutionOptions(recompute="selective")), "3 layers are not"),
        (llama_plan(mesh=TP2, recompute=(9, 10)), "before or after the layers"),
    ],
)
def test_differences_from_megatron_are_reported(plan: Plan, said: str):
    assert [line for line in megatron(plan).differs if said in line], megatron(plan).differs


def test_a_vee_is_refused():
    schedule = Schedule(kind="zero-bubble-v", microbatches=4, virtual=2)
    with pytest.raises(PlanError, match="zero-bubble-v places stages"):
        megatron(llama_plan((3, 5, 7), mesh=MeshSizes(dp=1, tp=1, pp=2), schedule=schedule))


@pytest.mark.parametrize(
    ("name", "text", "theirs"),
    [("mlp.up_proj.weight", "S1", "S0"), ("attention.o_proj.weight", "S0", "S1"), ("mlp.down_proj.weight", "B", "S1")],
)
def test_placements_of_other_kinds_are_listed(name: str, text: str, theirs: str):
    found = megatron(llama_plan(mesh=TP2, splits={name: text}), Llama(), graph()).differs
    assert f"layers.{{0..3}}.{name} is {text}: Megatron-LM's is {theirs}" in found


def test_mixed_recomputation_is_whole_layers():
    plan = llama_plan(mesh=TP2, recompute=(1, 2, 3, 4))
    stage = plan.stages[0].model_copy(update={"policies": ("full", "full", "selective", "selective")})
    plan = plan.model_copy(update={"stages": (stage,)})
    assert arguments(plan)["--recompute-num-layers"] == "2"
    assert "recomputation is full and selective by segment: Megatron-LM has one policy, here whole layers" in (
        megatron(plan).differs
    )


@pytest.mark.parametrize(("gathers", "differs"), [(1, False), (2, True)])
def test_a_layer_that_communicates_otherwise_is_reported(gathers: int, differs: bool):
    """Weights that are gathered for use keep their placements."""
    splits_backward = {
        f"layers.*.{{{part}}}": Collectives(count=4, forward={"all_gather": n, "reduce_scatter": 1}, backward={})
        for part, n in (("input_norm,attention", gathers), ("post_norm,mlp", 1))
    }
    outside = {"head": Collectives(count=1, forward={"all_reduce": 2}, backward={})}
    plan = llama_plan(mesh=TP2, sequence=True, method=AS_MEGATRON, collectives=splits_backward | outside)
    line = "a layer's forward pass has all-gather 3, reduce-scatter 2: "
    theirs = "has all-gather 2, reduce-scatter 2"
    assert (f"{line}Megatron-LM's {theirs}" in megatron(plan, Llama()).differs) is differs
    assert (f"{line}the program's {theirs}" in torch_program(plan, Llama()).differs) is differs
    assert len([x for x in megatron(plan, Llama()).differs if "forward pass" in x]) == differs


def test_zero_as_arguments():
    mesh = MeshSizes(dp=4, tp=2, pp=1)
    assert "--use-distributed-optimizer" not in arguments(llama_plan(mesh=mesh, zero=0))
    assert (
        arguments(llama_plan(mesh=mesh, method=ExecutionOptions(shards=2)))["--num-distributed-optimizer-instances"]
        == "2"
    )
    for zero, strategy in ((2, "optim_grads"), (3, "optim_grads_params")):
        said = megatron(llama_plan(mesh=mesh, zero=zero))
        assert dict(said.arguments)["--data-parallel-sharding-strategy"] == strategy
        assert said.environment == (("CUDA_DEVICE_MAX_CONNECTIONS", None),)


@pytest.mark.parametrize("zero", range(4))
def test_sgd_has_no_momentum_and_is_not_sharded(zero: int):
    said = megatron(llama_plan(mesh=MeshSizes(dp=4, tp=2, pp=1), zero=zero, optimizer="sgd"))
    found = dict(said.arguments)
    assert (found["--optimizer"], found["--sgd-momentum"], found["--weight-decay"]) == ("sgd", "0", "0")
    sharded = {"--use-distributed-optimizer", "--use-megatron-fsdp", "--overlap-param-gather"}
    assert not sharded & found.keys() and "--overlap-grad-reduce" in found
    assert any(f"ZeRO-{zero} with sgd" in line for line in said.differs) == (zero > 0)
    alone = megatron(llama_plan(mesh=MeshSizes(dp=1, tp=2, pp=1), zero=zero, optimizer="sgd"))
    assert not any("with sgd" in line for line in alone.differs)


@pytest.mark.parametrize(("etp", "share"), [(0, "2"), (1, "1")])
def test_the_mesh_of_experts_as_arguments(etp: int, share: str):
    given = arguments(llama_plan(mesh=MeshSizes(dp=4, tp=2, pp=1, ep=4, etp=etp)))
    assert (given["--expert-model-parallel-size"], given["--expert-tensor-parallel-size"]) == ("4", share)
    assert "--expert-model-parallel-size" not in arguments(llama_plan(mesh=TP2))


@pytest.mark.parametrize(("tp", "sequence"), [(1, False), (2, False), (2, True)])
def test_experts_and_tp_need_sequence_parallelism(tp: int, sequence: bool):
    plan = llama_plan(mesh=MeshSizes(dp=4, tp=tp, pp=1, ep=4), sequence=sequence)
    assert ("--sequence-parallel" in arguments(plan)) == (tp > 1)
    said = "experts with sequence parallelism only" in "\n".join(megatron(plan).differs)
    assert said == (tp > 1 and not sequence)


@pytest.mark.parametrize(("shards", "instances"), [(0, None), (4, None), (2, "2"), (1, "4")])
def test_shards_are_counted_over_dp_and_cp(shards: int, instances: str | None):
    plan = llama_plan(mesh=MeshSizes(dp=2, tp=1, pp=1, cp=2), method=ExecutionOptions(shards=shards))
    assert arguments(plan).get("--num-distributed-optimizer-instances") == instances
    assert mapping(plan)["zero"] == {"level": 1, "ranks": shards or 4}


def test_sharded_parameters_are_shards_over_dp_and_cp():
    plan = llama_plan(mesh=MeshSizes(dp=2, tp=1, pp=1, cp=2), zero=3)
    assert {(row["dp"], row["cp"]) for row in mapping(plan)["parameters"].values()} == {("F", "F")}
    assert mapping(llama_plan(mesh=MeshSizes(dp=2, tp=1, pp=1), zero=0))["zero"] == {"level": 0, "ranks": 1}


def test_other_shares_of_offload_and_what_else_it_asks_for_are_said():
    mesh = MeshSizes(dp=2, tp=1, pp=2)
    found = megatron(llama_plan((5,), mesh=mesh, method=ExecutionOptions(offload=(0.5, 0.25))))
    assert "0.5, 0.25 of the optimizer state is on the host" in "\n".join(found.differs)
    even = megatron(llama_plan((5,), mesh=mesh, method=ExecutionOptions(offload=(0.5, 0.5))))
    assert "of the optimizer state" not in "\n".join(even.differs)
    whole = megatron(llama_plan(mesh=MeshSizes(dp=2, tp=1, pp=1), zero=0, method=ExecutionOptions(offload=(0.5,))))
    assert "--use-distributed-optimizer" in dict(whole.arguments), "--use-precision-aware-optimizer asks for it"
    assert "offloads only the sharded state of Adam" in "\n".join(whole.differs)


def test_the_loss_is_a_mean_over_the_tokens_of_the_whole_batch():
    assert "--calculate-per-token-loss" in arguments(llama_plan(mesh=TP2))
    assert "--calculate-per-token-loss" not in arguments(llama_plan(mesh=TP2, loss_averaging="per-microbatch"))


def test_offload_is_a_fraction():
    mesh = MeshSizes(dp=2, tp=1, pp=1)
    found = arguments(llama_plan(mesh=mesh, method=ExecutionOptions(offload=(0.25,))))
    assert found["--optimizer-offload-fraction"] == "0.25" and "--optimizer-cpu-offload" in found
    assert "--optimizer-cpu-offload" not in arguments(llama_plan(mesh=mesh))


def test_buckets_are_counted_in_gradients():
    mesh, method = MeshSizes(dp=2, tp=1, pp=1), ExecutionOptions(overlap=("dp",), bucket_bytes=400)
    assert arguments(llama_plan(mesh=mesh, method=method))["--ddp-bucket-size"] == "100"
    method = replace(method, gradients="compute")
    assert arguments(llama_plan(mesh=mesh, method=method, precision="fp32"))["--ddp-bucket-size"] == "100"
    found = arguments(llama_plan(mesh=mesh, method=method))
    assert found["--ddp-bucket-size"] == "200"
    assert "--grad-reduce-in-bf16" in found


@pytest.mark.parametrize(
    ("plan", "what"),
    [
        (llama_plan(mesh=TP2, precision="fp64"), "not in fp64"),
        (
            llama_plan((3, 5, 7), mesh=MeshSizes(dp=1, tp=1, pp=2), microbatches=5),
            "5 microbatches are not a multiple",
        ),
    ],
)
def test_what_has_no_counterpart_is_refused(plan: Plan, what: str):
    with pytest.raises(PlanError, match=what) as error:
        megatron(plan)
    assert error.value.where and error.value.fix


def test_another_model_is_refused():
    with pytest.raises(PlanError, match=r"the plan splits layers.3.*, which the model lacks"):
        megatron(llama_plan(mesh=TP2), Llama(layers=3))
