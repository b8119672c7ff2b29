"""Exported programs as text: golden constants, valid Python, and refusals and reported differences."""

from __future__ import annotations

import ast
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from autoptd.errors import PlanError
from autoptd.export.roles import read_parts
from autoptd.export.torch_program import torch_program
from autoptd.layout.execution import ExecutionOptions
from autoptd.models.load import load_model
from autoptd.plans.data import Collectives, MeshSizes, Schedule
from autoptd.plans.model import Plan
from tests.export.export_plans import Llama, gpt3_plan, llama_plan

TP2 = MeshSizes(dp=1, tp=2, pp=1)
HEAD = "# --- the plan ---\n\n"


def constants(text: str) -> str:
    return text.partition(HEAD)[2].partition("\n\n# --- the program")[0]


def loaded(text: str) -> Any:
    module = sys.modules["exported"] = ModuleType("exported")
    exec(compile(text, "exported", "exec"), vars(module))
    return module


def test_llama_golden():
    plan = llama_plan(
        (4,), mesh=MeshSizes(dp=4, tp=2, pp=2), sequence=True, recompute=(1, 2, 3), method=ExecutionOptions(shards=2)
    )
    program = torch_program(plan, Llama())
    assert constants(program.text) == LLAMA
    assert program.differs == (
        "stage 1 begins with layer 1, not inside it with layers.1.{post_norm,mlp}",
        "parts of layers are recomputed by module (1): the input of each module is saved",
        "ZeRO-1 is planned: FSDP also shards parameters, and gathers them once a step; less memory between steps",
    )
    for what in program.differs:
        assert what in str(ast.get_docstring(ast.parse(program.text)))


LLAMA = """\
MESH = {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "tp": 2}  # in rank order, tp fastest
MICRO_BATCH = 1  # samples of a microbatch on one data-parallel rank
MICROBATCHES = 4  # per step
SCHEDULE: Any = Schedule1F1B
STAGES: tuple[tuple[str, ...], ...] = (  # modules of each stage; stage k is on pipeline rank k % pp
    ("embed", "layers.0"),
    ("layers.1", "layers.2", "layers.3", "norm", "head"),
)
TENSOR_PARALLEL: dict[str, ParallelStyle] = {  # by module name, * for any number
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "layers.*.input_norm": SequenceParallel(),
    "layers.*.attention.q_proj": ColwiseParallel(),
    "layers.*.attention.k_proj": ColwiseParallel(),
    "layers.*.attention.v_proj": ColwiseParallel(),
    "layers.*.attention.o_proj": RowwiseParallel(output_layouts=Shard(1)),
    "layers.*.post_norm": SequenceParallel(),
    "layers.*.mlp.gate_proj": ColwiseParallel(),
    "layers.*.mlp.up_proj": ColwiseParallel(),
    "layers.*.mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}
GATHERED: tuple[str, ...] = ("layers.*.attention", "layers.*.mlp")
TIED: dict[str, str] = {}
RECOMPUTED: dict[str, str] = {"layers.0": "full", "layers.1.input_norm": "full", "layers.1.attention": "full"}
SHARDED: tuple[str, ...] = ("layers.*",)
RESHARD_AFTER_FORWARD = False
REDUCE_EACH_MICROBATCH = False
PARAM_DTYPE: torch.dtype | None = torch.bfloat16
REDUCE_DTYPE: torch.dtype | None = torch.float32"""


def test_gpt3_is_split_as_far_as_dtensor_goes():
    """Fused layers of transformers have no DTensor style: only the table is split, and the rest is reported."""
    plan = gpt3_plan((), mesh=TP2)
    program = torch_program(plan, load_model("gpt3-175b")[0])
    styles = constants(program.text).partition("TENSOR_PARALLEL")[2].partition("}")[0]
    assert [line.strip().partition(":")[0] for line in styles.splitlines()[1:]] == ['"transformer.wte"', '"lm_head"']
    assert 'TIED: dict[str, str] = {"lm_head.weight": "transformer.wte.weight"}' in program.text
    assert "sequence parallelism is left out: models of transformers" in program.differs[0]
    assert "transformer.h.{0..95}.attn.c_attn.weight is S1/3 in the plan, B in this program" in program.differs


def test_heads_norms_inside_attention_see_a_share_of_the_heads():
    model = Llama()
    for layer in model.layers:
        assert isinstance(layer, nn.Module)
        layer.attention.q_norm = nn.RMSNorm(4)
    program = torch_program(llama_plan(mesh=TP2, splits={"attention.q_norm.weight": "Bp"}), model)
    assert '"layers.*.attention.q_norm": SequenceParallel(sequence_dim=2, use_local_output=True)' in program.text
    assert '"layers.*.input_norm"' not in program.text


def test_roles_of_fused_and_transposed_layers():
    parts = {part.path: part for part in read_parts(gpt3_plan((), mesh=TP2), load_model("gpt3-175b")[0])}
    roles = {name: (parts[name].kind, parts[name].role, parts[name].groups) for name in parts if ".h.3." in name}
    assert roles["transformer.h.3.attn.c_attn"] == ("transposed", "column", 3)
    assert roles["transformer.h.3.attn.c_proj"] == ("transposed", "row", 1)
    assert roles["transformer.h.3.mlp.c_fc"] == ("transposed", "column", 1)
    assert roles["transformer.h.3.ln_1"] == ("other", "whole", 1)
    assert parts["transformer.wte"].role == "table"


def test_a_column_at_the_end_of_attention_gathers_twice():
    part = "layers.*.{input_norm,attention}"
    found = {part: Collectives(count=4, forward={"all_to_all": 4}, backward={})}
    plan = llama_plan(mesh=TP2, splits={"attention.o_proj.weight": "S0"}, collectives=found)
    program = torch_program(plan, Llama())
    column = "ColwiseParallel(input_layouts=Shard(-1), output_layouts=Replicate())"
    assert f'"layers.*.attention.o_proj": {column}' in program.text
    theirs = "the program's has all-gather 2, all-reduce 1"
    assert f"a layer's forward pass has all-to-all 4: {theirs}" in program.differs


def test_policies_of_recomputation_go_by_module():
    plan = llama_plan(mesh=MeshSizes(dp=1, tp=1, pp=1), recompute=(1, 2, 3, 5))
    stage = plan.stages[0].model_copy(update={"policies": ("full", "full", "ops", "selective")})
    program = loaded(torch_program(plan.model_copy(update={"stages": (stage,)}), Llama()).text)
    assert program.RECOMPUTED == {
        "layers.0": "full",
        "layers.1.input_norm": "ops",
        "layers.1.attention": "ops",
        "layers.2.input_norm": "selective",
        "layers.2.attention": "selective",
    }
    every = loaded(torch_program(llama_plan(mesh=MeshSizes(dp=1, tp=1, pp=1), recompute=range(1, 9)), Llama()).text)
    assert every.RECOMPUTED == {"layers.*": "full"}


def test_one_odd_layer_is_named_by_itself():
    plan = llama_plan(mesh=TP2)
    odd = {
        "layers.2.mlp.gate_proj.weight": "B",
        "layers.2.mlp.up_proj.weight": "B",
        "layers.2.mlp.down_proj.weight": "B",
    }
    splits = plan.splits.model_copy(update={"parameters": plan.splits.parameters | odd})
    text = constants(torch_program(plan.model_copy(update={"splits": splits}), Llama()).text)
    assert '"layers.3.mlp.up_proj": ColwiseParallel()' in text
    assert "layers.2.mlp" not in text
    assert '"layers.*.attention.q_proj": ColwiseParallel()' in text


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        (llama_plan(mesh=MeshSizes(dp=1, tp=1, pp=1)), {}),
        (llama_plan((5,), mesh=MeshSizes(dp=2, tp=2, pp=2), sequence=True, recompute=range(11)), {}),
        (
            llama_plan(mesh=TP2, tied=True, zero=3, method=ExecutionOptions(recompute="selective"), recompute=(1,)),
            {"tied": True},
        ),
    ],
)
def test_programs_are_python(plan: Plan, options: dict[str, bool]):
    program = loaded(torch_program(plan, Llama(**options)).text)
    assert program.MESH["tp"] == plan.mesh.tp
    assert tuple(program.MESH) == ("pp", "dp_replicate", "dp_shard", "tp")
    assert len(program.STAGES) == plan.mesh.pp
    assert "noqa" not in torch_program(plan, Llama(**options)).text


@pytest.mark.parametrize(
    ("kind", "cuts", "virtual", "expected"),
    [
        ("1f1b", (5,), 1, Schedule1F1B),
        ("gpipe", (5,), 1, ScheduleGPipe),
        ("interleaved", (3, 5, 7), 2, ScheduleInterleaved1F1B),
    ],
)
def test_schedules_are_built(kind: Any, cuts: tuple[int, ...], virtual: int, expected: type):
    schedule = Schedule(kind=kind, microbatches=4, virtual=virtual)
    program = loaded(torch_program(llama_plan(cuts, mesh=MeshSizes(dp=1, tp=1, pp=2), schedule=schedule), Llama()).text)
    group = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    stages = []
    for index in range(0, len(program.STAGES), 2):
        stage = object.__new__(PipelineStage)
        vars(stage).update(stage_index=index, num_stages=len(program.STAGES), group=group, group_size=2, group_rank=0)
        vars(stage).update(stage_index_to_group_rank={i: i % 2 for i in range(len(program.STAGES))}, has_backward=True)
        vars(stage).update(submod=nn.Identity(), device=torch.device("cpu"))
        stages.append(stage)
    assert type(program.make_schedule(stages, print)) is expected


def test_stages_of_a_model_are_cut_out_of_it():
    """The stages in sequence compute what the whole model does."""
    plan = llama_plan((3, 5, 7), mesh=MeshSizes(dp=1, tp=1, pp=4))
    program = loaded(torch_program(plan, Llama()).text)
    torch.manual_seed(0)
    model = Llama()
    x = torch.randint(0, 32, (2, 8))
    expected, hidden = model(x), x
    whole = model.state_dict()
    kept = []
    for index in range(4):
        part = Llama()
        part.load_state_dict(whole)
        hidden = program.cut_stage(part, index)(hidden)
        kept += part.state_dict()
    torch.testing.assert_close(hidden, expected)
    assert sorted(kept) == sorted(whole)


VEE = Schedule(kind="zero-bubble-v", microbatches=4, virtual=2)


@pytest.mark.parametrize(
    ("plan", "model", "what"),
    [
        (llama_plan(mesh=MeshSizes(dp=1, tp=1, pp=1, cp=2)), Llama(), "context parallelism"),
        (
            llama_plan((5,), mesh=MeshSizes(dp=1, tp=1, pp=2), tied=True),
            Llama(tied=True),
            "head.weight is tied to embed.weight",
        ),
        (
            llama_plan((5,), mesh=MeshSizes(dp=1, tp=1, pp=2), microbatches=1),
            Llama(),
            "1 microbatches are fewer than 2 stages",
        ),
        (
            llama_plan((3, 5, 7), mesh=MeshSizes(dp=1, tp=1, pp=2), microbatches=5),
            Llama(),
            "do not divide into 2 rounds",
        ),
        (llama_plan(mesh=TP2), Llama(3), "which the model lacks"),
        (llama_plan((3, 5, 7), mesh=MeshSizes(dp=1, tp=1, pp=2), schedule=VEE), Llama(), "zero-bubble-v places stages"),
    ],
)
def test_what_has_no_counterpart_is_refused(plan: Plan, model: nn.Module, what: str):
    with pytest.raises(PlanError, match=what) as error:
        torch_program(plan, model)
    assert error.value.where and error.value.fix


def test_a_parameter_outside_of_modules_is_refused_in_a_pipeline():
    model = Llama()
    model.register_parameter("scale", nn.Parameter(torch.ones(())))
    with pytest.raises(PlanError, match="scale is not in a module that belongs to one stage"):
        torch_program(llama_plan((5,), mesh=MeshSizes(dp=1, tp=1, pp=2)), model)


def test_stages_that_hand_on_two_tensors_are_refused():
    plan = llama_plan((5,), mesh=MeshSizes(dp=1, tp=1, pp=2))
    plan = plan.model_copy(update={"boundaries": plan.boundaries | {"head": ("B", "B")}})
    with pytest.raises(PlanError, match="head receives 2 tensors"):
        torch_program(plan, Llama())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"zero": 2, "cuts": (5,), "mesh": MeshSizes(dp=2, tp=1, pp=2)}, "after the last microbatch"),
        ({"mesh": MeshSizes(dp=2, tp=1, pp=1), "micro": 2, "batch": 15}, "the batch is 15"),
        ({"mesh": TP2, "method": ExecutionOptions(kernels="compiled")}, "compiled kernels"),
        ({"mesh": TP2, "method": ExecutionOptions(gathers="again")}, "not re-gathered"),
        (
            {"mesh": TP2, "method": ExecutionOptions(overlap=("tp",))},
            "tensor-parallel collectives do not overlap compute",
        ),
        ({"mesh": TP2, "precision": "fp64"}, "torch.float64"),
    ],
)
def test_differences_from_torch_are_reported(changes: dict[str, Any], said: str):
    found = torch_program(llama_plan(changes.pop("cuts", ()), **changes), Llama()).differs
    assert [line for line in found if said in line], found
