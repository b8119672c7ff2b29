"""The benchmark of hybrids: its configurations have the published sizes, and a line says what a model's plan costs."""

from __future__ import annotations

import pytest

from benchmarks.hybrids import MODELS, NEMOTRON_47B, NEMOTRON_56B, Hybrid, Timed, build, line, pattern


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_parameters_are_those_of_the_published_model(model: Hybrid) -> None:
    counted = sum(p.numel() for p in build(model).parameters()) / 1e9
    assert counted == pytest.approx(model.billions, rel=0.006)


def test_patterns_of_layers() -> None:
    assert (len(NEMOTRON_47B), len(NEMOTRON_56B)) == (98, 118)
    assert [NEMOTRON_56B.count(c) for c in "M-*"] == [54, 54, 10]
    assert pattern("M-*") == ["linear_attention", "mlp", "full_attention"]


def test_a_line_marks_what_misses_its_bar() -> None:
    model = MODELS[0]
    good = Timed(5.0, 4.0, 0.99, "dp 64 × tp 1 × pp 1")
    assert line(model, good) == "mamba-2.8b                  5.0      4.0    99.0 %   dp 64 × tp 1 × pp 1"
    assert "!" in line(model, Timed(5.0, 11.0, 0.99)) and "!" in line(model, Timed(5.0, 4.0, 0.89))
    assert line(model, Timed(error="no plan fits")).endswith("no plan fits")
