"""The page about coverage: counts, models that train, reasons of the others, from results of every kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.coverage.__main__ import main
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
