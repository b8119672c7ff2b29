"""Exports for other systems: torch programs, shell arguments, tables."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from autoptd.errors import AutoptdError, InputsError, PlanFileError
from autoptd.export.mapping import mapping
from autoptd.export.megatron import megatron
from autoptd.export.torch_program import torch_program
from autoptd.passes.trace.unwrap import refuse_unsuitable
from autoptd.plans.data import Splits
from autoptd.plans.model import Plan
from autoptd.text import printable
from tests.sample_plan import sample_plan

from .hostile_models import MARK, PAYLOADS
from .test_source import shape

LAYERS = 4
WRITABLE = {name: text for name, text in PAYLOADS.items() if text.encode(errors="ignore").decode() == text}


@pytest.fixture(autouse=True)
def no_mark_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No payload has run by the end of a test."""
    monkeypatch.chdir(tmp_path)
    yield
    assert not (tmp_path / MARK).exists()


class Layer(nn.Module):
    def __init__(self, child: str) -> None:
        super().__init__()
        self.add_module(child, nn.Linear(4, 4, bias=False))
        self.add_module(f"{child}2", nn.Linear(4, 4, bias=False))


def model(stack: str, child: str) -> nn.Module:
    with torch.device("meta"):
        made = nn.Module()
        made.add_module("embed", nn.Embedding(8, 4))
        made.add_module(stack, nn.ModuleList([Layer(child) for _ in range(LAYERS)]))
        made.add_module("head", nn.Linear(4, 8, bias=False))
    return made


def plan(stack: str = "h", child: str = "fc", **changes: Any) -> Plan:
    """Return a plan of the model; stage 1 begins within a layer, and part of another layer is recomputed."""
    names = [f"{stack}.{i}.{child}" for i in range(LAYERS)]
    segments = ("embed", *(part for name in names for part in (name, f"{name}2")), "head")
    splits = {f"{name}.weight": "S0" for name in names} | {f"{name}2.weight": "S1" for name in names}
    splits |= {"embed.weight": "S0", "head.weight": "S0"}
    stages = [
        {"first": 0, "last": 3, "modules": segments[0], "recompute": (1,)},
        {"first": 4, "last": len(segments) - 1, "modules": segments[4]},
    ]
    fields = {
        "segments": segments,
        "splits": Splits(parameters=splits, activations={}),
        "stages": tuple(map(type(sample_plan().stages[0]).model_validate, stages)),
        "boundaries": {},
        "strategies": {},
        "collectives": {},
    }
    return sample_plan(**(fields | changes))


def loaded(text: str) -> Any:
    module = sys.modules["exported"] = ModuleType("exported")
    exec(compile(text, "exported", "exec"), vars(module))
    return module


def ours(text: str) -> str:
    """Return the text without its docstring, whose lines list the differences."""
    tree = ast.parse(text)
    assert isinstance(tree.body.pop(0), ast.Expr)
    return ast.unparse(tree)


@pytest.mark.parametrize("text", ["\udc80", "x" * 1000])
def test_names_that_no_file_can_hold_are_refused(text: str):
    with pytest.raises(InputsError, match="have names that are not valid Unicode") as error:
        refuse_unsuitable(model("h", text))
    assert error.value.fix == "rename them"


@pytest.mark.parametrize("text", WRITABLE.values(), ids=WRITABLE)
def test_modules_of_a_torch_program_are_literals(text: str):
    usual = torch_program(plan(), model("h", "fc")).text
    for stack, child in (("h", text), (text, "fc"), (f"a{text}", f"b{text}")):
        try:
            found = torch_program(plan(stack, child), model(stack, child))
        except AutoptdError as error:  # names that do not identify a segment
            assert set(text) & set("{}") or text.isdecimal(), error
            continue
        lost = any("is not a module: it is not recomputed" in what for what in found.differs)
        assert lost == bool(set(child) & set("{}"))
        assert lost or shape(ours(found.text)) == shape(ours(usual))
        program = loaded(found.text)
        names = [f"{stack}.{i}.{part}" for i in range(LAYERS) for part in (child, f"{child}2")]
        known = dict(model(stack, child).named_modules())
        assert set(names) <= known.keys()
        listed = [name for names in program.STAGES for name in names]
        assert set(listed) <= known.keys()
        reached = {p: program.present(model(stack, child), (p,)) for p in program.TENSOR_PARALLEL}
        assert sorted(chain(*reached.values())) == sorted(["embed", "head", *names])
        assert program.present(model(stack, child), tuple(program.RECOMPUTED)) == [f"{stack}.0.{child}"] * (not lost)
        assert len(program.present(model(stack, child), program.SHARDED)) == LAYERS


@pytest.mark.parametrize("text", WRITABLE.values(), ids=WRITABLE)
def test_a_shell_reads_arguments_and_comments_alone(text: str, tmp_path: Path):
    """Names of segments appear in comments only; the plan's own name is refused if it is not one line."""
    said = megatron(plan(child=text)).to_text()
    assert (
        any(text[:1].isprintable() and printable(text) in line for line in said.splitlines()) or not text.isprintable()
    )
    done = subprocess.run(
        ["bash", "-c", 'source /dev/stdin; printf "%s\\n" "${MEGATRON_ARGS[0]}"; ls -A'],
        input=said.encode(),
        capture_output=True,
        check=False,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr, done.stdout.split(b"\n")) == (0, b"", [b"--tensor-model-parallel-size", b""])


@pytest.mark.parametrize("text", PAYLOADS.values(), ids=PAYLOADS)
def test_a_plan_s_model_is_one_line(text: str):
    try:
        named = Plan.from_json(json.dumps(json.loads(plan().to_json()) | {"model": text}))
    except PlanFileError as error:
        assert not text.isprintable() or len(text) > 200
        assert error.fix
        return
    assert text.isprintable()
    ast.parse(torch_program(named, model("h", "fc")).text)
    first, *rest = megatron(named).to_text().splitlines()
    assert (first[:2], rest) == ("# ", megatron(plan()).to_text().splitlines()[1:])


@pytest.mark.parametrize("text", WRITABLE.values(), ids=WRITABLE)
def test_what_a_plan_shows_is_printable(text: str):
    """Segments, parameters, notes and modules of stages may have any name; no terminal escapes are printed."""
    named = plan(child=text, notes=(f"a note \x1b]0;{text}",))
    for shown in (named.explain(all=True), named.compare(named)):
        assert all(line.isprintable() for line in shown.split("\n"))
    assert mapping(named)["parameters"].keys() == named.splits.parameters.keys()
    json.dumps(mapping(named))


class Config:
    """A model's configuration as stored in a file."""

    model_type = "gpt2"
    n_layer, n_embd, n_head, n_inner, n_positions = 2, 8, 2, None, 16
    layer_norm_epsilon, attn_pdrop, resid_pdrop, embd_pdrop, tie_word_embeddings = 1e-5, 0.0, 0.0, 0.0, True

    def __init__(self, text: str) -> None:
        self.vocab_size: Any = 512
        self.activation_function = text


@pytest.mark.parametrize("text", PAYLOADS.values(), ids=PAYLOADS)
def test_a_model_s_configuration_is_quoted(text: str, tmp_path: Path):
    made = model("h", "fc")
    made.config = Config(text)  # type: ignore[assignment]
    said = megatron(plan(), made).to_text()
    command = ["bash", "-c", "source /dev/stdin; echo ${#MEGATRON_ARGS[@]}; ls -A"]
    done = subprocess.run(command, input=said.encode(), capture_output=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr, len(done.stdout.split())) == (0, b"", 1)
