"""`autoptd export`: destinations, and output as text and as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from autoptd.cli.main import BAD, DONE, main
from autoptd.export.mapping import mapping
from autoptd.plans.data import MeshSizes
from tests.export.export_plans import gpt3_plan, llama_plan, plan_of


@pytest.fixture
def plan_file(tmp_path: Path) -> str:
    path = tmp_path / "plan.json"
    llama_plan((5,), mesh=MeshSizes(dp=2, tp=2, pp=2), zero=3).save(path)
    return str(path)


def test_megatron_to_standard_output(plan_file: str, capsys: pytest.CaptureFixture[str]):
    assert main(["export", plan_file, "--to", "megatron"]) == DONE
    text = capsys.readouterr().out
    assert "    --pipeline-model-parallel-size 2\n" in text
    bash = subprocess.run(
        ["bash", "-c", f'{text}\nprintf "%s\\n" "${{MEGATRON_ARGS[@]}}"'], capture_output=True, text=True, check=True
    )
    assert main(["export", plan_file, "--to", "megatron", "--json"]) == DONE
    assert bash.stdout.split() == json.loads(capsys.readouterr().out)["arguments"]


def test_torch_needs_a_model(plan_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["export", plan_file, "--to", "torch"]) == BAD
    assert "which is not a shipped model" in capsys.readouterr().err
    out = tmp_path / "program.py"
    model = "tests.export.export_plans:Llama"
    assert main(["export", plan_file, "--to", "torch", "--model", model, "-o", str(out)]) == DONE
    said = capsys.readouterr().out
    assert said.endswith(f"saved to {out}\n")
    assert said.startswith("differs: ")
    assert out.read_text().startswith('"""by-hand on 8 devices')


def test_a_path_that_cannot_be_written_is_refused_first(plan_file: str, tmp_path: Path):
    assert main(["export", plan_file, "--to", "json", "-o", str(tmp_path / "none" / "x.json")]) == BAD


def test_the_table_of_tensors(plan_file: str, capsys: pytest.CaptureFixture[str]):
    assert main(["export", plan_file, "--to", "json"]) == DONE
    found = json.loads(capsys.readouterr().out)
    assert found["mesh"] == {"axes": ["pp", "dp", "cp", "tp"], "sizes": [2, 2, 1, 2], "ep": 1}
    rows = found["parameters"]
    assert rows["layers.0.mlp.up_proj.weight"] == {"dp": "F", "cp": "F", "tp": "S0", "stages": [0]}
    assert rows["layers.3.attention.o_proj.weight"] == {"dp": "F", "cp": "F", "tp": "S1", "stages": [1]}
    assert rows["embed.weight"]["stages"] == [0]
    assert found["stages"][1]["segments"][0] == "layers.2.{input_norm,attention}"
    assert found["stages"][1]["rank"] == 1


def test_a_table_keeps_cuts_inside_layers():
    rows = mapping(gpt3_plan((25,), mesh=MeshSizes(dp=1, tp=8, pp=2)))["parameters"]
    assert rows["transformer.h.11.attn.c_attn.weight"]["stages"] == [0]
    assert rows["transformer.h.11.mlp.c_fc.weight"]["stages"] == [1]
    assert rows["transformer.wte.weight"] == {"dp": "B", "cp": "B", "tp": "S0", "stages": [0]}


def test_a_parameter_belongs_to_the_nearest_module():
    segments = ("model", "model.layers.0", "model.layers.1", "head")
    plan = plan_of(
        {"model.layers.1.w": "B", "model.scale": "B", "bare": "B"}, segments, (2,), mesh=MeshSizes(dp=1, tp=1, pp=2)
    )
    rows = mapping(plan)["parameters"]
    assert {name: row["stages"] for name, row in rows.items()} == {
        "bare": [],
        "model.layers.1.w": [1],
        "model.scale": [0],
    }


def test_help_imports_no_torch():
    code = (
        "import sys\nfrom autoptd.cli.main import main\n"
        "try: main(['export', '--help'])\nexcept SystemExit: sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0
