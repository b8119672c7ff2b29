"""Corrupted plans, clusters and checkpoints load, or are refused by the path of a field: some hundred of each sort.

`python -m tests.fuzz --files 10000` tries more of them. Below are regression tests for past findings.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autoptd
from autoptd.cost_models.cluster import Cluster
from autoptd.errors import ClusterError
from autoptd.testing.parity import Trained, train_in_lockstep
from tests.fuzz import checkpoint_json, damaged, loading, losses, networks, programs, trainings
from tests.fuzz import files as data_files
from tests.fuzz.__main__ import run, run_checkpoints
from tests.fuzz.bases import planned
from tests.fuzz.files import cluster_text
from tests.fuzz.loading import guarded, load
from tests.fuzz.pieces import PICTURES, TOKENS, Family


def test_corrupted_plans_and_clusters():
    ends, wrong = run(180, seed=7)
    assert [f"{number}: {outcome.text}" for number, outcome in wrong] == []
    assert min(ends[f"{kind} {end}"] for kind in ("plan", "cluster") for end in ("loaded", "refused")) > 4


def test_corrupted_files_of_every_sort_are_data():
    """`python -m tests.fuzz.files --count 75000` reads more of them."""
    ends, wrong = data_files.run(300, seed=7)
    assert wrong == []
    sorts = ("plan", "cluster", "config", "index")
    assert min(ends[f"{sort} {end}"] for sort in sorts for end in ("read", "refused")) > 2


def test_a_file_that_is_no_data_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The judge itself reports a file that is not treated as data."""

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(data_files, "read", fail)
    assert data_files.judged("plan", tmp_path, 0)[0] == "a traceback"
    monkeypatch.setattr(data_files, "_LONGEST_S", -1.0)
    assert data_files.judged("plan", tmp_path, 0)[0] == "slow"


def test_corrupted_checkpoints():
    ends, wrong = run_checkpoints(35, seed=7)
    assert [f"{number}: {outcome.text}" for number, outcome in wrong] == []
    assert sum(count for end, count in ends.items() if "refused" in end) > 15


def test_damage_to_a_checkpoint_is_found_or_harmless():
    """`python -m tests.fuzz.damaged --count 1000` runs more cases."""
    ends, wrong = damaged.run(44, 7, damaged.by_one_process)
    assert wrong == [] and ends["added harmless"] > 0 and sum(ends[f"{kind} found"] for kind in ("flip", "swapped")) > 5


def test_corrupted_json_of_a_checkpoint():
    """`python -m tests.fuzz.checkpoint_json --count 25000` runs more cases."""
    ends, wrong = checkpoint_json.run(200, 7)
    assert wrong == [] and min(ends.values()) > 10 and len(ends) == 4


def test_undetected_damage_is_seen(monkeypatch: pytest.MonkeyPatch):
    """The judges themselves: faults are reported if digests are not compared, or the index is not checked."""
    with monkeypatch.context() as patch:
        patch.setattr(damaged.folder, "damage", lambda *_: "")
        patch.setattr(damaged, "KINDS", [damaged.flip, damaged.of_another_step])
        assert "NOT FOUND" in "".join(damaged.run(20, 7, damaged.by_one_process)[1])
    monkeypatch.setattr("autoptd.checkpoint.index.check", lambda *_: None)
    assert checkpoint_json.run(100, 7)[1]


def test_a_file_that_starts_a_group_or_ends_in_a_traceback_is_seen(monkeypatch: pytest.MonkeyPatch):
    """The judge itself reports a started group, a traceback, and refusals that lack something."""
    monkeypatch.setattr(loading, "_load_cluster", lambda _: loading.dist.init_process_group("gloo"))
    ends, _ = run(3, seed=7)
    assert ends["cluster a traceback"] == 1
    error = ClusterError("bad", fix="mend it")
    assert loading._flaw(error, "dgx-h100") == "no place"
    assert loading._flaw(ClusterError("bad", where="levels[0]"), "dgx-h100") == "no way out"
    assert loading._flaw(ClusterError("bad" * 1000, where="levels[0]", fix="mend it"), "dgx-h100") == "unreadable"
    shown = ClusterError("bad \x1b[31m", where="levels[0]", fix="mend it")
    assert loading._flaw(shown, "dgx-h100") == ""  # errors escape what is not printable
    assert loading._flaw(ClusterError("bad", where="levels[0]", fix="mend it"), "dense") == "another error"


# --- regressions --------------------------------------------------------------------------------------------------


def refused(kind: str, text: str, folder: Path) -> str:
    path = folder / "file"
    path.write_text(text)
    with guarded():
        outcome = load(kind, path.rename(path.with_suffix(".json" if kind == "dense" else ".toml")))
    assert outcome.end == "refused", outcome
    return outcome.text


def changed(change: Callable[[dict[str, Any]], Any]) -> str:
    data = json.loads(planned("dense").to_json())
    change(data)
    return json.dumps(data)


LAST = "blocks.2.up.weight"  # the block is not the first of its kind


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d["splits"]["parameters"].pop(LAST), f"splits.parameters lacks {LAST!r}"),
        (
            lambda d: d["splits"]["parameters"].update({LAST: "Bp"}),
            f"splits.parameters[\"{LAST}\"]: is 'Bp'; it must be",
        ),
        (lambda d: d["splits"]["parameters"].update({LAST: "S5"}), "of shape [128, 32] cannot be placed as S5 on tp 2"),
        (lambda d: d["splits"]["parameters"].update({LAST: "S0/7"}), "cannot be placed as S0/7 on tp 2"),
        (lambda d: d["splits"]["parameters"].update({LAST: "P"}), "cannot be placed as P on tp 2"),
        (lambda d: d["splits"]["parameters"].update({"a..0": "B"}), 'splits.parameters["a..0"]: unknown key'),
        (lambda d: d["splits"]["activations"].popitem(), "missing; it must be"),
        (lambda d: d["segments"].__setitem__(1, "elsewhere"), "segments[1]: is 'elsewhere'; it must be"),
        (lambda d: d["stages"][0].update(modules="all of it"), "stages[0].modules: is 'all of it'"),
        (lambda d: d["collectives"].clear(), "missing; it must be"),
        (lambda d: d["sizes"].pop("s"), "predicted.tokens_per_s: is"),
        (lambda d: d["sizes"].update(t=4), "sizes.t: unknown key"),
        (lambda d: d["predicted"]["memory"][0].update(activations="x" * 5000), "predicted.memory[0].activations"),
        (
            lambda d: d["cluster"]["device"]["attention"]["triton"].update(speed=1),
            "cluster.device.attention.triton.speed",
        ),
        (lambda d: d.update({"a\nb\x1b": 1}), 'where  ["a\\nb\\u001b"]: unknown key'),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_plans_that_contradict_themselves(change: Callable[[dict[str, Any]], Any], said: str, tmp_path: Path):
    assert said in refused("dense", changed(change), tmp_path)


def test_tensors_that_are_received_in_two_placements(tmp_path: Path):
    def change(data: dict[str, Any]) -> None:
        kinds = [kind for kind, placements in data["boundaries"].items() if placements]
        for kind in kinds[:1]:
            first = data["boundaries"][kind]
            data["boundaries"][kind] = ["P" if first[0] != "P" else "B", *first[1:]]

    assert "boundaries[" in refused("dense", changed(change), tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("launch_s = ", "launch_s = " + "[" * 3000 + "]" * 3000 + " # ", "not a TOML file: "),
        ("launch_s = ", "launch_s = " + "1" * 5000 + " # ", "not a TOML file: "),
        ("dispatch_s = ", "dispatch_s = 1e308 # ", "device.dispatch_s: input should be less than or equal to 3600"),
        ("latency_s = ", "latency_s = 1e308 # ", "latency_s: input should be less than or equal to 3600"),
        ("memory_bytes_per_s = ", "memory_bytes_per_s = 1e-320 # ", "device.memory_bytes_per_s: input should be"),
        (
            "[device.attention.cudnn]\n",
            "[device.attention.cudnn]\nspeed = 1\n",
            "device.attention.cudnn.speed: unknown",
        ),
    ],
)
def test_clusters_that_would_end_in_a_traceback(old: str, new: str, said: str, tmp_path: Path):
    text = cluster_text("dgx-h100")
    assert old in text
    assert said in refused("dgx-h100", text.replace(old, new, 1), tmp_path)


def test_a_cluster_that_is_a_folder_or_a_loop(tmp_path: Path):
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "loop.toml").symlink_to(tmp_path / "loop.toml")
    for name in ("folder.toml", "loop.toml"):
        with pytest.raises(ClusterError, match="does not exist"):
            Cluster.load(tmp_path / name)


@pytest.mark.parametrize(("updates", "count", "equal"), [(False, 40, 15), (True, 16, 3)])
def test_random_programs_train_as_on_one_process_or_are_refused(updates: bool, count: int, equal: int) -> None:
    """`python -m tests.fuzz.programs --count 2000` draws more of them."""
    faults: list[str] = []
    ends = programs.run(range(count), faults.append, updates=updates)
    assert faults == [] and ends["equal"] > equal and sum(n for end, n in ends.items() if end.startswith("refused")) > 3


def test_random_losses_train_as_on_one_process_or_are_refused() -> None:
    """`python -m tests.fuzz.losses --count 2000` draws more of them."""
    faults: list[str] = []
    ends = programs.counted(range(30), lambda seed: programs.outcome(losses.draw(seed)), faults.append)
    assert faults == [] and ends["equal"] > 15


@pytest.mark.parametrize("family", [TOKENS, PICTURES], ids=["tokens", "pictures"])
def test_random_networks_train_as_on_one_process_or_are_refused(family: Family) -> None:
    """`python -m tests.fuzz.networks --count 2000` draws more of them."""
    faults: list[str] = []
    ends = networks.run(range(20), faults.append, family)
    assert faults == [] and ends["equal"] > 8 and sum(n for end, n in ends.items() if end.startswith("refused")) > 3


def test_random_compiled_networks_train_as_on_one_process_or_are_refused() -> None:
    """`python -m tests.fuzz.networks --compiled --count 400` draws more of them."""
    faults: list[str] = []
    ends = networks.run(range(6), faults.append, judge=networks.compiled_outcome)
    assert faults == [] and ends["equal"] > 2


def test_a_wrong_number_of_a_network_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The judge itself reports a gradient that is a little wrong, and does not take it for rounding."""
    assert networks.outcome(1, tmp_path) == "equal"

    def spoilt(*given: Any) -> Trained:
        found = train_in_lockstep(*given)
        return replace(found, gradients={name: x * (1 + 1e-7) for name, x in found.gradients.items()})

    monkeypatch.setattr(programs, "train_in_lockstep", spoilt)
    assert networks.outcome(1, tmp_path).startswith("off by 1.0e-07 in the gradient of ")


def test_random_trainings_end_as_in_one_process_or_are_refused() -> None:
    """`python -m tests.fuzz.trainings --count 400` draws more of them."""
    faults: list[str] = []
    ends = networks.run(range(12), faults.append, judge=trainings.outcome)
    assert faults == [] and ends["equal"] > 5


def test_a_resumed_training_without_its_optimizer_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert trainings.outcome(6, tmp_path) == "equal"

    def resume(par: autoptd.Parallel, root: Path, others: Any) -> int:
        return par.load(root, others=others, optimizer=False) if any(root.iterdir()) else 0

    monkeypatch.setattr(autoptd.Parallel, "resume", resume)
    assert trainings.outcome(6, tmp_path).startswith("off by ")
