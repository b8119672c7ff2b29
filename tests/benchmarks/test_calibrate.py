"""Constants of the cost models: where they are stored, what they change, and that fitting recovers planted values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest

from autoptd.cost_models.cluster import Cluster
from autoptd.search.pipeline.evaluate import under
from benchmarks.published.calibrate import Case, cases, fit, leave_out, loss, median_error
from benchmarks.published.constants import _KINDS, CONSTANTS, Constant, fitted, present, with_values
from tests.benchmarks.sample_runs import OF_ROW, tiny

PRESENT = present()
GPUS = [c for c in map(Cluster.load, Cluster.names()) if c.name != "local"]
# of widths at which products, memory and the host's launches each count
WIDE: dict[str, Any] = {"hidden_size": 2048, "ffn_hidden_size": 8192, "n_heads": 16, "n_kv_heads": 16, "head_dim": 128}
THIN: dict[str, Any] = {"hidden_size": 256, "ffn_hidden_size": 1024, "n_heads": 16, "n_kv_heads": 16, "head_dim": 16}
ALONE: dict[str, Any] = {"vocab_size": 1000, "seq_len_tokens": 1024, "n_gpus": 1, "dp": 1, "tp": 1}


def of_its_kind(constant: Constant, device: str) -> bool:
    """Return whether `constant` is the one that `device` takes its value from (the longest matching prefix)."""
    own = [c for c in CONSTANTS if c.kind == constant.kind and device.startswith(c.device)]
    return bool(own) and max(own, key=lambda c: len(c.device)) is constant


# ---- constants ----


@pytest.mark.parametrize("constant", CONSTANTS, ids=lambda c: c.name)
def test_a_constant_is_read_back_where_it_was_written(constant: Constant) -> None:
    where = [c for c in GPUS if of_its_kind(constant, c.device.name)]
    assert where, "no shipped device has it"
    for cluster in where:
        value = PRESENT[constant.name] * 0.9
        value = round(value) if constant.kind == "collective" else value  # multiprocessors are whole
        changed = with_values(cluster, {**PRESENT, constant.name: value}).device
        unchanged = with_values(cluster, PRESENT).device
        for kind, (read, _) in _KINDS.items():
            if kind == constant.kind:
                assert read(changed) == pytest.approx(value)
            elif kind not in ("triton", "cudnn") or kind in changed.attention:
                assert read(changed) == read(unchanged), f"{constant.name} changes {kind} too"


@pytest.mark.parametrize("constant", CONSTANTS, ids=lambda c: c.name)
def test_devices_of_a_constant_have_one_value(constant: Constant) -> None:
    """Otherwise writing the current values back would change predictions."""
    values = {c.device.name: _KINDS[constant.kind][0](c.device) for c in GPUS if of_its_kind(constant, c.device.name)}
    assert set(values.values()) == {PRESENT[constant.name]}, values


@pytest.mark.parametrize("cluster", GPUS, ids=lambda c: c.name)
def test_what_is_present_changes_nothing(cluster: Cluster) -> None:
    before, after = cluster.device, with_values(cluster, PRESENT).device
    for name, value in _numbers(before.model_dump()).items():
        assert _numbers(after.model_dump())[name] == pytest.approx(value, rel=5e-3), name  # backward rates are rounded
    assert cluster.levels == with_values(cluster, PRESENT).levels


def _numbers(data: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    found: dict[str, float] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            found |= _numbers(value, f"{prefix}{key}.")
        elif isinstance(value, (int, float)):
            found[f"{prefix}{key}"] = value
    return found


def test_constants_are_keyed_by_device_alone() -> None:
    assert {f.name for f in fields(Constant)} == {"name", "kind", "device", "fitted_on", "prior", "most"}
    devices = {c.device.name for c in GPUS}
    for constant in CONSTANTS:
        assert any(name.startswith(constant.device) for name in devices), constant
        assert constant.prior <= constant.most and PRESENT[constant.name] <= constant.most
    assert len({(c.kind, c.device) for c in CONSTANTS}) == len(CONSTANTS) == len({c.name for c in CONSTANTS})
    values = {c.name: c.prior for c in CONSTANTS}
    by_device: dict[str, object] = {}
    for cluster in GPUS:  # whatever the cluster is called and however large, the device decides
        got = with_values(cluster, values).device
        taken = {kind: read(got) for kind, (read, _) in _KINDS.items() if kind not in ("triton", "cudnn", "flash")}
        assert by_device.setdefault(cluster.device.name, taken) == taken


def test_the_longest_name_holds() -> None:
    values = {**PRESENT, "matmul rate, H100": 0.11, "matmul rate, H100 of 500 W": 0.22}
    rates = {c.device.name: with_values(c, values).device.matmul_sustained.fraction for c in GPUS}
    assert rates["H100-SXM5-80GB"] == 0.11 and rates["H100-SXM5-96GB-500W"] == 0.22
    assert rates["H200-SXM-141GB"] == Cluster.load("dgx-h200").device.matmul_sustained.fraction


def test_each_constant_says_what_it_was_fitted_on() -> None:
    assert list(fitted()) == [c.name for c in CONSTANTS]
    assert all(c.fitted_on and f"; {c.fitted_on}" in fitted()[c.name] for c in CONSTANTS)


# ---- fitting ----


@pytest.fixture(scope="module")
def groups() -> dict[str, list[Case]]:
    """Three kinds of runs on one A100; products, memory and launches have different shares of the step time."""
    rows = [
        tiny(id="many:0", group="many", **WIDE, **ALONE, micro_batch_size_seqs=4, global_batch_size_seqs=4),
        tiny(id="many:1", group="many", **WIDE, **ALONE, micro_batch_size_seqs=2, global_batch_size_seqs=8),
        tiny(id="few:0", group="few", **WIDE, **ALONE, micro_batch_size_seqs=1, global_batch_size_seqs=2),
        tiny(id="thin:0", group="thin", **THIN, **ALONE, micro_batch_size_seqs=16, global_batch_size_seqs=16),
        tiny(id="thin:1", group="thin", **THIN, **ALONE, complete_for_time=False),
    ]
    return cases(rows)


def measured(groups: Mapping[str, list[Case]], values: Mapping[str, float], factor: float = 1.0) -> dict[str, Any]:
    """Return the same runs, with the model's prediction under `values` in place of the measured time."""

    def of(case: Case) -> Case:
        seconds = factor * under(case.plan, with_values(case.cluster, values)).seconds
        return replace(case, row=case.row.model_copy(update={"iteration_time_s": seconds}))

    return {name: [of(case) for case in members] for name, members in groups.items()}


def test_cases_are_the_timed_runs_by_group(groups: dict[str, list[Case]]) -> None:
    ids = {name: [case.row.id for case in members] for name, members in groups.items()}
    assert ids == {"many": ["many:0", "many:1"], "few": ["few:0"], "thin": ["thin:0"]}


def test_present_constants_leave_predictions_as_they_are(groups: dict[str, list[Case]]) -> None:
    for members in [*groups.values(), *cases([OF_ROW["torchtitan_2024:0001"]]).values()]:
        for case in members:
            again = under(case.plan, with_values(case.cluster, PRESENT)).seconds
            assert again == pytest.approx(case.plan.seconds, rel=1e-3)


def test_constants_that_made_the_measurements_are_found(groups: dict[str, list[Case]]) -> None:
    changed = {"matmul rate, A100": 1 / 1.12, "memory rate of softmax and norms": 1.12}
    truth = {name: value * changed.get(name, 1.0) for name, value in PRESENT.items()}
    runs = measured(groups, truth)
    assert loss(runs, truth) < 1e-9 and loss(runs, PRESENT) > 0.03
    found = fit(runs, PRESENT)
    assert found == pytest.approx(truth) and loss(runs, found) < 1e-9


def test_fitting_comes_near_between_its_steps(groups: dict[str, list[Case]]) -> None:
    """Constants may compensate for each other a little: so few runs cannot tell them apart."""
    changed = {"matmul rate, A100": 1 / 1.1, "host time of a launch, s": 1 / 1.15}
    truth = {name: value * changed.get(name, 1.0) for name, value in PRESENT.items()}
    runs = measured(groups, truth)
    found = fit(runs, PRESENT)
    assert loss(runs, PRESENT) > 0.03 and loss(runs, found) < 0.01
    assert all(found[name] == pytest.approx(truth[name], rel=0.05) for name in changed)
    assert {n: found[n] for n in PRESENT if "H100" in n} == {n: PRESENT[n] for n in PRESENT if "H100" in n}


def test_no_constant_leaves_its_range(groups: dict[str, list[Case]]) -> None:
    fast = measured(groups, PRESENT, factor=0.75)  # faster than any product rate below the peak explains
    found = fit(fast, PRESENT, steps=(0.05,))
    assert all(found[c.name] <= c.most for c in CONSTANTS)
    assert 1 / 1.05 < found["matmul rate, A100"] <= 1


def test_an_outlier_is_clipped() -> None:
    def case(ratio: float) -> Any:
        return SimpleNamespace(ratio=lambda values, made: ratio)

    # |log 1.1| and |log 1/1.1| average to one group's mean; a run that is off by a factor of 1000 counts 0.5, not 6.9
    good, bad = math.log(1.1), 0.5
    assert loss({"a": [case(1.1), case(1 / 1.1)]}, {}) == pytest.approx(good)
    assert loss({"a": [case(1.1), case(1000.0)]}, {}) == pytest.approx((good + bad) / 2)
    assert loss({"a": [case(1e-6)], "b": [case(1.1)] * 9}, {}) == pytest.approx((bad + good) / 2), "groups weigh alike"
    assert median_error([case(1.1), case(0.7), case(1000.0)], {}) == pytest.approx(0.3)


def test_a_group_left_out_does_not_enter_its_own_fit(
    groups: dict[str, list[Case]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[set[str], Mapping[str, float]]] = []

    def spy(others: Mapping[str, Any], start: Mapping[str, float]) -> Mapping[str, float]:
        seen.append((set(others), start))
        return PRESENT

    monkeypatch.setattr("benchmarks.published.calibrate.fit", spy)
    found = leave_out(measured(groups, PRESENT), ["thin", "few"], PRESENT)
    assert [others for others, _ in seen] == [{"many", "few"}, {"many", "thin"}]
    assert all(start == {c.name: c.prior for c in CONSTANTS} for _, start in seen)
    assert found == {"thin": pytest.approx((0.0, 0.0)), "few": pytest.approx((0.0, 0.0))}
