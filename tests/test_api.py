"""Public API: plans are reproducible, name their model, count their collectives, and run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import autoptd
from autoptd.models.nanogpt import GPTSizes, NanoGPT
from autoptd.plans.model import Plan
from autoptd.progress import Silent
from autoptd.search.planner import Planner

EAGER = {"tp": 8, "micro": 1, "kernels": "eager"}
EIGHT: dict[str, Any] = {"world": 8, "cluster": "dgx-h100", "batch": 8, "fix": EAGER}
PAIR = {"all_gather": 2, "reduce_scatter": 2}


def gpt() -> NanoGPT:
    with torch.device("meta"):
        return NanoGPT(GPTSizes(vocab=64, max_seq=16, width=32, layers=3, heads=4))


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=3,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32000,
        max_position_embeddings=2048,
    )
    config.name_or_path = "someone/llama-tiny"
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    with torch.device("meta"):
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=4096, n_layer=3, n_head=32, vocab_size=50304, n_positions=2048)
        )


@pytest.fixture(scope="module")
def planned() -> autoptd.Parallel:
    return autoptd.parallelize(llama(), **EIGHT)


def test_a_model_is_called_what_its_configuration_says(planned: autoptd.Parallel):
    assert planned.plan.model == "llama-tiny"
    assert autoptd.plan(gpt(), world=2, cluster="dgx-h100", batch=4).model == "NanoGPT"


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_a_layer_communicates_as_megatron_does(model: str, planned: autoptd.Parallel):
    """Two all-gathers and two reduce-scatters each way: the search finds sequence parallelism by itself."""
    plan = planned.plan if model == "llama" else autoptd.plan(gpt2(), **EIGHT)
    layers = [found for kind, found in plan.collectives.items() if ".*." in kind]
    assert {found.count for found in layers} == {3}
    assert sum((Counter(found.forward) for found in layers), Counter()) == PAIR
    assert sum((Counter(found.backward) for found in layers), Counter()) == PAIR
    assert plan.collectives["lm_head"].forward == {"all_reduce": 2}  # of the vocabulary-parallel cross entropy
    assert "layers" in plan.explain() or "transformer.h" in plan.explain()


def test_the_plan_counts_what_the_program_has(planned: autoptd.Parallel):
    """Counted in the emitted source: the communicating lines of a block, and the stage's own."""
    blocks = planned.program.files["blocks.py"]
    calls = Counter(re.findall(r"tp\.(all_gather|gather_linear|reduce_scatter|all_reduce|all_to_all)s?\(", blocks))
    calls["all_gather"] += calls.pop("gather_linear", 0)
    assert calls == PAIR
    assert planned.plan.mesh.pp == 1
    own = Counter(re.findall(r"tp\.(\w+)\(", planned.program.files["stage_0.py"]))
    outside = [found for kind, found in planned.plan.collectives.items() if ".*." not in kind]
    counted = sum((Counter(found.forward) for found in outside), Counter())
    counted["all_reduce"] -= 2  # inside the cross entropy
    assert +own == +counted


def test_a_single_tensor_rank_does_not_communicate():
    plan = autoptd.plan(gpt(), world=2, cluster="dgx-h100", batch=4, fix={"tp": 1})
    assert plan.collectives == {}
    assert "Collectives" not in plan.explain()


def emitted(folder: str) -> None:
    """Emit the program of a searched plan."""
    fix = {"tp": 2, "pp": 2, "recompute": "full"}
    autoptd.parallelize(gpt(), world=8, cluster="dgx-h100", batch=16, fix=fix).emit(folder)


def test_plans_and_programs_are_the_same_in_every_process(tmp_path: Path):
    """Hashes of strings differ between processes, and must not matter."""
    subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from tests.test_api import emitted; emitted(sys.argv[1])",
            str(tmp_path / "other"),
        ],
        env={**os.environ, "PYTHONHASHSEED": "123", "PYTHONPATH": str(Path(__file__).parents[1])},
        check=True,
        timeout=120,
    )
    emitted(str(tmp_path / "this"))
    a, b = ({path.name: path.read_bytes() for path in (tmp_path / each).iterdir()} for each in ("this", "other"))
    assert a == b
    assert {"blocks.py", "plan.json", "stage_0.py"} <= a.keys()
    assert Plan.load(tmp_path / "this" / "plan.json").to_json().encode() == a["plan.json"]


def test_a_plan_that_is_given_is_not_searched_for(planned: autoptd.Parallel, tmp_path: Path):
    class Steps(Silent):
        def __init__(self) -> None:
            self.seen: list[str] = []

        def stage(self, name: str) -> Any:
            self.seen.append(name)
            return super().stage(name)

    planned.plan.save(tmp_path / "plan.json")
    steps = Steps()
    again = autoptd.parallelize(llama(), plan=tmp_path / "plan.json", progress=steps)
    assert again.program.files == planned.program.files
    assert not any("mesh" in step or "split tensors" in step for step in steps.seen)


@cache
def traced() -> autoptd.TracedModel:
    return autoptd.trace(gpt())


SEARCHED: list[dict[str, Any]] = [
    {},
    {"exact": True, "fix": {"pp": 1}},
    {"time_limit_s": 60},
]


@pytest.mark.parametrize("constraints", SEARCHED, ids=str)
def test_both_calls_search_alike(constraints: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    """`parallelize` without a plan finds what `plan` finds, and passes its options on."""
    tasks: list[Any] = []
    honest = Planner.__init__
    monkeypatch.setattr(
        Planner, "__init__", lambda self, task, *r, **k: tasks.append(task) or honest(self, task, *r, **k)
    )
    asked: dict[str, Any] = {"world": 4, "cluster": "dgx-h100", "batch": 16, **constraints}
    plan = autoptd.plan(traced(), **asked)
    assert autoptd.parallelize(traced(), **asked).plan == plan
    ours, theirs = tasks
    assert ours == theirs


def test_no_plan_needs_more_than_a_device_has():
    traced = autoptd.trace(llama(), seq=512)
    for world, micro in ((1, 1), (2, 4), (8, 2)):
        plan = autoptd.plan(traced, world=world, cluster="dgx-a100-40gb", batch=32, fix={"micro": micro})
        assert plan.predicted.memory_bytes <= plan.cluster.device.memory_bytes
        assert plan.predicted.memory_bytes == max(sum(row.values()) for row in plan.predicted.memory)


def test_a_world_of_one_trains_here():
    parallel = autoptd.parallelize(
        gpt(),
        world=1,
        cluster="dgx-h100",
        batch=4,
        precision="fp32",
        optimizer=torch.optim.Adam,
        optimizer_options={"lr": 0.01},
    )
    assert "tokens.weight" in parallel.state_dict()
    assert isinstance(parallel.optimizer, torch.optim.Adam)
    assert parallel.optimizer.param_groups[0]["lr"] == 0.01
    ids = torch.arange(64).view(4, 16)
    losses = [float(parallel.train_step({"idx": ids, "targets": ids})) for _ in range(15)]
    assert losses[-1] < 0.8 * losses[0]
    assert float(parallel.eval_step({"idx": ids, "targets": ids})) < losses[0]
    assert (parallel.dp_rank, parallel.dp_size) == (0, 1)


def test_ranks_that_made_different_programs_refuse_to_start():
    from autoptd.runtime.comm.threaded import run_lockstep

    parts = [
        autoptd.parallelize(gpt(), world=2, cluster="local", batch=4, precision="fp32", fix={"tp": 2, "recompute": how})
        for how in ("none", "full")
    ]
    with pytest.raises(autoptd.AutoptdError, match="different plans or programs"):
        run_lockstep(parts[0].layout.mesh, lambda c: parts[c.world.rank].start(c))
