"""Formulas of a plan's memory, as text and as data."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers

import autoptd
from autoptd.cli.main import main
from autoptd.compile.program import read_sharding
from autoptd.compile.traced import TracedModel
from autoptd.explain.memory import explain_memory, memory_data, size_names
from autoptd.passes.sharding.sharding import Sharding
from autoptd.plans.model import Plan


def gpt2() -> torch.nn.Module:
    config = transformers.GPT2Config(n_embd=192, n_head=6, n_layer=3, vocab_size=640, n_positions=64)
    with torch.device("meta"):
        return transformers.GPT2LMHeadModel(config)


@pytest.fixture(scope="module")
def source() -> TracedModel:
    return autoptd.trace(gpt2(), seq=64)


@pytest.fixture(scope="module")
def planned(source: TracedModel) -> tuple[Plan, TracedModel, Sharding]:
    fix: dict[str, Any] = {"tp": 2, "pp": 1, "recompute": "none", "micro": 2, "zero": 1}
    plan = autoptd.plan(source, world=4, cluster="dgx-h100", batch=8, fix=fix)
    return plan, source, read_sharding(source, plan)


def test_data_are_formulas_with_their_values(planned: tuple[Plan, TracedModel, Sharding]) -> None:
    data = memory_data(*planned)
    assert data["state"] == {"parameters": "2*n", "gradients": "4*n", "optimizer": "12*n/d"}
    assert data["sizes"] == {"a": 6, "h": 192, "v": 640, "t": 2}
    assert data["in_flight"] == [1]
    layer = next(b for b in data["blocks"] if b["block"].startswith("transformer.h"))
    values = {"b": 2, "s": 64, "h": 192, "a": 6, "t": 2}
    assert eval(layer["kept"], {}, values) == layer["kept_bytes"] > 0
    assert layer["recompute"] == "none" and layer["fullest"]


def test_formulas_are_those_of_the_method(source: TracedModel) -> None:
    """Gathered activations and weights count as saved with `gathers` "kept", and not with "again"."""
    batch = 1024
    fix: dict[str, Any] = {"tp": 2, "pp": 1, "dp": 1, "recompute": "none", "micro": batch}
    found = []
    for gathers in ("kept", "again"):
        plan = autoptd.plan(source, world=2, cluster="dgx-h100", batch=batch, fix=fix | {"gathers": gathers})
        data = memory_data(plan, source, read_sharding(source, plan))
        found.append(next(b["kept"] for b in data["blocks"] if b["block"].startswith("transformer.h")))
    assert "h**2" in found[0] and re.search(r"^2\*b\*h\*s", found[0])
    assert re.fullmatch(r"b\*\([^()]*\)/t", found[1])


def test_formulas_of_a_cp_rank() -> None:
    """A rank of cp 2 has half of all tokens, and half the rows of the scores."""
    config = transformers.BertConfig(
        hidden_size=64, num_attention_heads=8, num_hidden_layers=2, vocab_size=640, attn_implementation="eager"
    )
    with torch.device("meta"):
        source = autoptd.trace(transformers.BertForMaskedLM(config), seq=64)
    fix: dict[str, Any] = {"tp": 1, "pp": 1, "recompute": "none", "micro": 2}
    found = []
    for cp in (1, 2):
        plan = autoptd.plan(source, world=2, cluster="dgx-h100", batch=8, fix=fix | {"cp": cp})
        data = memory_data(plan, source, read_sharding(source, plan))
        layer = max(data["blocks"], key=lambda block: "**2" in block["kept"])
        values = {"b": 2, "s": 64, **data["sizes"]}
        assert eval(layer["kept"], {}, values) == layer["kept_bytes"] and "s**2" in layer["kept"]
        assert ("/c" in layer["kept"]) == (cp == 2)
        found.append(layer["kept_bytes"])
    assert found[1] == found[0] / 2


def test_what_a_split_backward_pass_holds_is_said(source: TracedModel, planned: Any) -> None:
    fix = {"dp": 1, "pp": 3, "recompute": "none", "micro": 1, "schedule": "zero-bubble"}
    plan = autoptd.plan(source, world=3, cluster="dgx-h100", batch=8, fix=fix)
    data = memory_data(plan, source, sharding := read_sharding(source, plan))
    assert data["in_flight"] == [3, 3, 3] and data["waiting"] == [0, 2, 3]
    layer = next(b for b in data["blocks"] if b["block"].startswith("transformer.h"))
    assert layer["waiting_bytes"] == 11 * 64 * 192 * 2
    assert "of them between B and W: 0, 2, 3" in " ".join(explain_memory(plan, source, sharding).split())
    assert "between B and W" not in explain_memory(*planned)


def test_text(planned: tuple[Plan, TracedModel, Sharding]) -> None:
    text = explain_memory(*planned)
    assert "12 n/d" in text and "h = 192" in text and "transformer.h.*" in text
    assert all(len(line) <= 100 for line in text.splitlines())


def test_names_of_sizes() -> None:
    class Config:
        hidden_size, num_attention_heads, intermediate_size, vocab_size = 64, 4, 64, None

    assert {n: str(e) for n, e in size_names(Config()).items()} == {64: "h", 4: "a", 16: "h/a"}
    assert size_names(None) == {}


def test_the_command_asks_for_a_model_that_is_not_shipped(tmp_path: Any, capsys: Any, planned: Any) -> None:
    planned[0].save(tmp_path / "plan.json")
    assert main(["explain", str(tmp_path / "plan.json"), "--memory"]) == 2
    assert "give it as --model MODEL" in capsys.readouterr().err
