"""Stages that begin or end inside a layer: parts of layers, written once, train like one process."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from autoptd.api import Parallel
from autoptd.compile.make_plan import make_plan
from autoptd.compile.program import make_program, read_sharding
from autoptd.compile.read import read_model
from autoptd.cost_models.cluster import Cluster
from autoptd.layout.mesh import Mesh
from autoptd.progress import Silent
from autoptd.search.constraints.options import read_constraints
from autoptd.testing.parity import differences, train_alone, train_in_lockstep
from tests.parity.parity_check import Variant, alone, batches, bulk, complaints, parallel, planned
from tests.parity.test_parity_dropout import is_alone
from tests.parity.test_parity_dropout import trained as dropped

PART = re.compile(r"^class (\w+)", re.M)
CUT = Variant(bulk=True, micro=1, cuts=("blocks.1.norm_2",))
AGAIN = replace(CUT, micro=2, gathers="again")
LOOPED = Variant(bulk=True, micro=1, schedule="interleaved", virtual=2)
PLAIN, CHOSEN = ["BlockAttention", "BlockUpDown", "Block"], ["BlockAttentionOps", "BlockUpDownOps", "BlockOps"]
CORE = ["BlockAttentionSelective", "BlockUpDown", "BlockSelective"]
LLAMA = [f"LlamaDecoderLayer{part}" for part in ("SelfAttn", "Mlp", "")]
CASES = [
    ("nanogpt", Mesh(1, 2, 2), CUT, PLAIN),
    ("nanogpt", Mesh(2, 1, 2), replace(CUT, recompute="full", zero=3), PLAIN),
    ("nanogpt", Mesh(1, 2, 2), replace(CUT, recompute="selective"), CORE),
    ("nanogpt", Mesh(1, 2, 2), replace(CUT, recompute="ops"), CHOSEN),
    ("nanogpt", Mesh(2, 1, 2), replace(CUT, recompute="offload"), PLAIN),
    ("nanogpt", Mesh(1, 2, 2), AGAIN, PLAIN),
    ("nanogpt", Mesh(1, 2, 2), LOOPED, PLAIN),
    ("nanogpt", Mesh(1, 2, 2), replace(CUT, schedule="zero-bubble"), PLAIN),
    ("llama", Mesh(1, 2, 2), replace(CUT, cuts=("model.layers.1.post_attention_layernorm",), recompute="full"), LLAMA),
    ("llama", Mesh(2, 1, 2), LOOPED, LLAMA),
]


def classes(made: Parallel) -> list[str]:
    return PART.findall(made.program.files["blocks.py"])


@pytest.mark.parametrize(("name", "mesh", "variant", "written"), CASES, ids=lambda x: getattr(x, "recompute", None))
def test_a_layer_is_composed_of_the_parts_that_stages_call(
    name: str, mesh: Mesh, variant: Variant, written: list[str]
) -> None:
    made = parallel(name, planned(name, mesh, variant), "sgd")
    assert sorted(classes(made)) == sorted(written)
    text = made.program.files["blocks.py"]
    declared = Counter(re.findall(r'parameter\(self, "([^"]+)"', text))
    assert set(declared.values()) == {1}, "each parameter, and so each product, is written once"
    assert not complaints(name, train_in_lockstep(made, batches(name)), alone(name, "sgd"))


@pytest.mark.parametrize("recompute", ["none", "full", "ops"])
def test_parts_drop_what_the_whole_layer_drops(recompute: str) -> None:
    run = Mesh(1, 2, 2), replace(CUT, recompute=recompute)
    assert len(classes(parallel("nanogpt_dropout", planned("nanogpt_dropout", *run), "sgd"))) == 3
    assert is_alone("nanogpt_dropout", dropped("nanogpt_dropout", *run))


def test_parts_of_parts() -> None:
    """Layers cut at different places: several parts of a layer are a class that calls them."""
    layer = "bert.encoder.layer"
    cuts = (f"{layer}.0.attention.output.LayerNorm", f"{layer}.1.output.LayerNorm", f"{layer}.2.intermediate")
    run = Mesh(1, 1, 4), Variant(bulk=True, micro=1, cuts=cuts)
    made = parallel("bert", planned("bert", *run), "sgd")
    named = ("Attention", "AttentionOutput", "IntermediateOutput", "Output", "AttentionToAttentionOutput")
    assert {f"BertLayer{part}" for part in named} <= set(classes(made))
    assert not complaints("bert", train_in_lockstep(made, batches("bert")), alone("bert", "sgd"))


def test_layers_recomputed_in_full_beside_others_that_regather() -> None:
    """The former do not re-gather in backward by themselves, so their code is another."""
    plan = planned("nanogpt", Mesh(1, 2, 2), AGAIN)
    first, *others = plan.stages
    some = first.model_copy(update={"recompute": (2, 3), "policies": ("full", "full")})
    made = parallel("nanogpt", plan.model_copy(update={"stages": (some, *others)}), "sgd")
    assert {"Block", "BlockFull"} <= set(classes(made))
    assert not complaints("nanogpt", train_in_lockstep(made, batches("nanogpt")), alone("nanogpt", "sgd"))


class Odd(nn.Module):
    """A layer of one product, then two: policy `ops`, which keeps every other, keeps others of the second part."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.one(x).tanh()
        return x + self.down(self.up(x).tanh()).tanh()


class OddStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Odd() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize(("recompute", "whole"), [("none", "compose(self, OddOne("), ("ops", "keep(F.linear, ")])
def test_a_layer_is_written_whole_where_its_policy_decides_otherwise_than_for_its_parts(
    recompute: str, whole: str
) -> None:
    torch.manual_seed(0)
    model, x = OddStack().double(), torch.randn(8, 4, 8, dtype=torch.float64)
    source = read_model(model, inputs={"x": x[:2]}, loss=None, seq=None, precision="fp64", progress=Silent())
    fix = {"dp": 1, "tp": 1, "pp": 2, "micro": 1, "recompute": recompute, "cuts": ["layers.1.up"]}
    plan = make_plan(
        source,
        world=2,
        cluster=bulk(Cluster.load("dgx-h100")),
        batch=8,
        precision="fp64",
        optimizer="sgd",
        constraints=read_constraints(fix),
        progress=Silent(),
    )
    program = make_program(source, plan, read_sharding(source, plan))
    _, _, text = program.files["blocks.py"].partition(f"class Odd{recompute.title() if recompute == 'ops' else ''}(")
    assert whole in text.partition("\nclass ")[0]
    found = train_in_lockstep(Parallel(plan, source, program, "sgd", {"lr": 0.05}, None, 0), [{"x": x}])
    wanted = train_alone(model, [{"x": x}], optimizer="sgd", optimizer_options={"lr": 0.05})
    assert max(differences(found.gradients, wanted.gradients).values()) <= 1e-11
