"""The page about coverage: counts, models that train, reasons of the others, from results of every kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.coverage.__main__ import main, mesh, of_mesh
from benchmarks.coverage.check import Outcome
from benchmarks.coverage.page import page
from tests.test_language import WIDTH, prose

REFUSED = "'aten.nonzero.default' gives a shape that depends on values. More about it"
RESULTS = (
    Outcome("LlamaForCausalLM", "decoder", "trained", difference=7e-16, split=0.99),
    Outcome("MixtralForCausalLM", "decoder", "trained", difference=9e-16, split=0.97, experts="ep"),
    Outcome("XForCausalLM", "decoder", "refused", REFUSED, "model.x", "use torch.where"),
    Outcome("YForCausalLM", "decoder", "refused", REFUSED.replace("nonzero", "unique"), "model.y", "use torch.where"),
    Outcome("ZForCausalLM", "decoder", "not built", "ImportError: Z requires the z library, which is not there"),
    Outcome("ViTForImageClassification", "vision", "crashed", "KeyError: 3", "passes/a.py:7, raised at torch/b.py:9"),
    Outcome("DiTForImageClassification", "vision", "differs", "off by 3.0e-02, first on rank 0", "loss"),
)
MIXES = "cp 2: conv1d mixes positions: it needs all tokens of x"
CUT = (  # on another mesh
    Outcome("LlamaForCausalLM", "decoder", "trained", difference=8e-16, tokens=True),
    Outcome("MambaForCausalLM", "decoder", "refused", MIXES, "model.x", "leave cp out", "plan", tokens=True),
    Outcome("ViTForImageClassification", "vision", "refused", "cp 2 cuts a sequence, but there is none", step="plan"),
    Outcome("XForCausalLM", "decoder", "refused", REFUSED, "model.x", "use torch.where", "trace"),
)


def rows() -> list[dict[str, Any]]:
    return [r.data() for r in RESULTS]


def test_the_table_counts_each_family_and_all() -> None:
    lines = page(rows(), "today").splitlines()
    assert "| decoder | 5 | 2 | 2 | 0 | 1 | 40.0% |" in lines
    assert "| vision | 2 | 0 | 0 | 2 | 0 | 0.0% |" in lines
    assert "| all | 7 | 2 | 2 | 2 | 1 | 28.6% |" in lines


def test_models_that_train_are_listed_with_their_difference_and_experts() -> None:
    text = " ".join(page(rows(), "today").split())
    assert "2 train; the largest difference is 9.0e-16, and tp splits 98% of the parameters in the median." in text
    assert "Experts: ep in 1. LlamaForCausalLM, MixtralForCausalLM" in text


def test_one_reason_of_several_models_is_said_once_with_its_way_out() -> None:
    text = " ".join(page(rows(), "today").split())
    assert text.count("gives a shape that depends on values") == 1
    assert "**2: … gives a shape that depends on values** Way out: use torch.where. XForCausalLM, YForCausalLM" in text


def test_defects_and_models_that_were_not_built_have_their_reason() -> None:
    text = " ".join(page(rows(), "today").split())
    assert "**1: crashed: KeyError: … (passes/a.py:7)** ViTForImageClassification" in text
    assert "**1: ImportError: Z requires the z library, which is not there** ZForCausalLM" in text


def test_the_page_is_wrapped_and_written_from_the_results_file(tmp_path: Path) -> None:
    results, to = tmp_path / "results.jsonl", tmp_path / "page.md"
    results.write_text("".join(json.dumps(r) + "\n" for r in rows()))
    main(["--results", str(results), "--page", str(to)])
    text = to.read_text("utf-8")
    assert "tp 2 × pp 2 × dp 2" in " ".join(text.split()) and "{" not in text
    assert [line for _, line in prose(text) if len(line) > WIDTH] == []


def test_results_on_another_mesh_have_a_file_and_a_section_of_their_own(tmp_path: Path) -> None:
    results, to = tmp_path / "coverage.jsonl", tmp_path / "page.md"
    other = of_mesh(results, mesh("cp=2,tp=2"))
    assert other.name == "coverage-cp2-tp2.jsonl"
    results.write_text("".join(json.dumps(r) + "\n" for r in rows()))
    other.write_text("".join(json.dumps(r.data()) + "\n" for r in CUT))
    main(["--results", str(results), "--page", str(to)])
    whole, _, section = to.read_text("utf-8").partition("\n## cp 2 × tp 2\n")
    assert "conv1d" not in whole and "| all | 7 | 2 | 2 | 2 | 1 | 28.6% |" in whole
    text = " ".join(section.split())
    assert "Of 3 models that can be traced, 2 have a sequence whose length their code leaves open" in text
    assert "1 of these train, and the largest difference is 8.0e-16." in text
    assert "**1: cp …: conv1d mixes positions" in text
    assert "Way out: leave cp out. MambaForCausalLM" in text
    assert text.index("### Refused") < text.index("MambaForCausalLM") < text.index("### Without such a sequence")
    assert text.index("### Without such a sequence") < text.index("ViTForImageClassification")
