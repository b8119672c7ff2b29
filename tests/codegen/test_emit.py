"""Emitted programs: golden text, accepted by ruff, and reproducible."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from autoptd.codegen.emit import Program, load_stage
from autoptd.ops.tp_axis import Axis
from autoptd.passes.analysis.activations import POLICIES
from autoptd.passes.fold import Folded
from autoptd.text import printable
from tests.codegen.programs import folded_of, gpt2, llama, meta, program_of, text_of

GOLDEN = Path(__file__).parents[1] / "golden"
MODELS = {"gpt2": gpt2, "llama": llama, "gpt2_dropout": partial(gpt2, 0.1)}
CASES = {
    "gpt2_tp2_pp2": ("gpt2", 2, 2, ()),
    "gpt2_tp4_pp8": ("gpt2", 4, 8, ()),
    "gpt2_dropout_tp2_pp1": ("gpt2_dropout", 2, 1, (2, 3)),
    "llama_tp2_pp2": ("llama", 2, 2, (1, 2)),
    "llama_selective": ("llama", 2, 1, (1, 2)),
    "llama_ops": ("llama", 2, 1, (1, 2)),
    "llama_tp4_pp4": ("llama", 4, 4, ()),
}


@cache
def folded(name: str) -> Folded:
    return folded_of(meta(MODELS[name]))


@cache
def program(case: str) -> Program:
    name, tp, pp, recompute = CASES[case]
    policy = case.rpartition("_")[2]
    policy = policy if policy in POLICIES else "full"
    return program_of(folded(name), name, tp=tp, pp=pp, recompute=recompute, policy=policy)


@pytest.mark.parametrize("case", ["gpt2_tp2_pp2", "llama_tp2_pp2", "llama_selective", "llama_ops"])
def test_golden(case: str, rewrite_golden: bool) -> None:
    """After an intended change run with --rewrite-golden, and read the difference."""
    path, text = GOLDEN / f"{case}.txt", text_of(program(case))
    if rewrite_golden:
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("case", CASES)
def test_ruff_accepts_it(case: str, tmp_path: Path) -> None:
    program(case).write(tmp_path)
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--isolated",
        "--select",
        "E,F,W",
        "--line-length",
        "120",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("case", CASES)
def test_every_line_that_talks_says_what_it_converts(case: str) -> None:
    for source in program(case).files.values():
        for line in source.splitlines():
            if (
                re.search(r"\btp\.(?!rank\b|part\b)\w+\(|, tp[,)]", line)
                and "__init__" not in line
                and "self." not in line[:20]
            ):
                assert re.search(r"  # (\S+ -> |vocabulary-)", line), line


@pytest.mark.parametrize("case", CASES)
def test_parameters_have_their_names_and_every_one_is_held(case: str) -> None:
    name, tp, pp, _ = CASES[case]
    traced = folded(name).traced
    held: set[str] = set()
    for stage in range(pp):
        with torch.device("meta"):
            module = load_stage(program(case), stage)(Axis(Alone(tp)))  # type: ignore[arg-type]
        held |= {n for n, _ in module.named_parameters(remove_duplicate=False)}
    assert held == set(traced.parameters.values())


class Alone:
    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size


@pytest.mark.parametrize("case", CASES)
def test_names_are_words(case: str) -> None:
    """Names contain no node numbers: a suffix only separates two variables of one name."""
    for source in program(case).files.values():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Name) and (match := re.search(r"_(\d+)$", node.id)):
                assert int(match[1]) < 12, node.id


def test_classes_differ_and_stages_that_differ_in_numbers_share_a_file() -> None:
    made = program("gpt2_tp4_pp8")
    classes = re.findall(r"^class (\w+).*?(?=^class |^def |\Z)", made.files["blocks.py"], re.M | re.S)
    assert len(classes) == len(set(classes))
    assert len({name for name, _ in made.stages}) < len(made.stages)
    assert len(made.stages) == 8


def test_bodies_of_block_classes_differ() -> None:
    for case in CASES:
        source = program(case).files["blocks.py"]
        bodies = [ast.dump(ast.Module(n.body[1:], [])) for n in ast.parse(source).body if isinstance(n, ast.ClassDef)]
        assert len(bodies) == len(set(bodies)), case


def calls(text: str) -> Counter[str]:
    """Count the calls of each op and collective."""
    functions = (ast.unparse(n.func) for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call))
    return Counter(name for name in functions if re.match(r"(F|ops|torch|tp)\.", name))


@pytest.mark.parametrize("case", ["llama_tp2_pp2", "llama_tp4_pp4", "gpt2_tp4_pp8", "gpt2_dropout_tp4_pp7"])
def test_a_layer_that_stages_cut_has_each_op_once(case: str) -> None:
    name, tp, pp = re.fullmatch(r"(\w+)_tp(\d)_pp(\d)", case).groups()  # type: ignore[union-attr]
    whole = program_of(folded(name), name, tp=int(tp), pp=1).files["blocks.py"]
    cut = program_of(folded(name), name, tp=int(tp), pp=int(pp)).files["blocks.py"]
    parts = re.findall(r"^class (\w+)(?=(?:SelfAttn|Attn|Mlp)\()", cut, re.M)
    assert len(parts) == 2 and "compose" not in whole
    assert calls(cut) == calls(whole)


def test_users_words_are_used() -> None:
    blocks = program("llama_tp2_pp2").files["blocks.py"]
    assert "def forward(self, hidden_states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:" in blocks
    for line in ("query_states = ", "key_states = ", "gate_proj = F.linear(", "self.mlp.down_proj.weight"):
        assert line in blocks


def test_dropout_is_keyed_by_place() -> None:
    blocks = program("gpt2_dropout_tp2_pp1").files["blocks.py"]
    keys = re.findall(r'key=(f"[^"]+")', blocks)
    assert keys and all("first" in key for key in keys)


@pytest.mark.parametrize(
    "name", ['"""\nraise SystemExit', "\0", "ends in \\", 'ends in "', "\ud800", "größer 模型"], ids=ascii
)
def test_a_model_s_name_is_text_and_nothing_else(name: str, tmp_path: Path) -> None:
    """The name comes from a plan file, which may have any origin."""
    made = program_of(folded("gpt2"), name, tp=1, pp=1)
    for text in made.files.values():
        first, *rest = ast.parse(text).body
        assert isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        assert printable(name, keep="") in first.value.value
        assert "SystemExit" not in "".join(map(ast.dump, rest))
    load_stage(made, 0, tmp_path)
