"""Plans made to mislead, to hang, or to exhaust a machine: shown harmlessly, answered quickly, or refused."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import autoptd.cli.main as cli
from autoptd.plans.model import Plan
from tests.hostile.bounded import plain, refused, run
from tests.sample_plan import sample_plan

Change = Callable[[Any], Any]
Spoilt = Callable[[Change], Path]

# --- strings of a plan on a terminal ------------------------------------------------------------------------------

STRINGS: dict[str, Callable[[dict[str, Any], str], Any]] = {
    "model": lambda d, s: d.update(model=s),
    "cluster": lambda d, s: d["cluster"].update(name=s),
    "device": lambda d, s: d["cluster"]["device"].update(name=s),
    "device of a stage": lambda d, s: d["stages"][0].update(device=s),
    "link": lambda d, s: d["cluster"]["levels"][0].update(name=s),
    "modules": lambda d, s: d["stages"][0].update(modules=s),
    "segment": lambda d, s: d["segments"].__setitem__(0, s),
    "parameter": lambda d, s: d["splits"]["parameters"].update({s: "S0"}),
    "activation": lambda d, s: d["splits"]["activations"].update({s: "S0"}),
    "placement": lambda d, s: d["splits"]["activations"].update({"embed.hidden": s}),
    "kind": lambda d, s: d["strategies"].update({s: {"op": "S0 -> S1"}}),
    "op": lambda d, s: d["strategies"]["head"].update({s: "S0 -> S1"}),
    "strategy": lambda d, s: d["strategies"]["head"].update({"linear": s}),
    "boundary": lambda d, s: d["boundaries"].update({s: ["S1"]}),
    "collective": lambda d, s: d["collectives"].update({s: {"count": 1, "forward": {s: 1}, "backward": {}}}),
    "term": lambda d, s: d["predicted"]["time_s"].update({s: 0.2}),
    "memory": lambda d, s: d["predicted"]["memory"][0].update({s: 2**33}),
    "size": lambda d, s: d["sizes"].update({s: 4}),
    "note": lambda d, s: d.update(notes=[s]),
    "unknown key": lambda d, s: d.update({s: 1}),
    "format": lambda d, s: d.update(format=s),
}
PAYLOADS = {
    "escape": "x\x1b[2J\x1b]0;pwned\x07\x9b31m",
    "override": "x\u202egnp.exe\u2066\u200f",
    "line": "x\nautoptd: the plan is verified\r\x85\u2028autoptd: the plan is verified",
    "surrogate": "x\ud800\x00\x7f",
}


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("place", STRINGS)
def test_strings_are_shown_as_they_are_written(
    place: str, payload: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = sample_plan().model_dump(mode="json", exclude={"certificate"})
    STRINGS[place](data, PAYLOADS[payload])
    path, other = tmp_path / "plan.json", tmp_path / "other.json"
    path.write_text(json.dumps(data))
    sample_plan().save(other)
    shown, codes = "", set()
    for words in (
        ["explain", str(path), "--all"],
        ["compare", str(path), str(other)],
        ["export", str(path), "--to=json"],
    ):
        codes.add(cli.main(words))
        said = capsys.readouterr()
        shown += said.out + said.err
    assert plain(shown)
    assert not re.search(r"^autoptd: the plan is verified", shown, re.MULTILINE)
    hidden = place in ("device of a stage", "segment")  # shown by --json only
    assert 2 in codes or hidden or re.search(r"x\\+(x1b|u202e|n)", shown)  # nothing is dropped silently


def test_a_notebook_shows_no_markup_of_a_plan() -> None:
    plan = sample_plan(notes=("<script>alert(1)</script>\x1b[31m\u202e",))
    framed, page = plan._repr_html_(), plan.to_html()
    assert framed.count("<") == framed.count("</iframe>") + 1  # of the frame alone
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page and plain(framed) and plain(page)


# --- what a plan may cost -----------------------------------------------------------------------------------------


def steps(count: int) -> Change:
    """Set this number of microbatches, and the matching batch."""

    def change(data: dict[str, Any]) -> None:
        data["schedule"]["microbatches"] = count
        data["batch"] = count * data["mesh"]["dp"] * data["sizes"]["b"]

    return change


def world(dp: int) -> Change:
    def change(data: dict[str, Any]) -> None:
        data["mesh"]["dp"], data["world"] = dp, 4 * dp
        data["batch"] = data["schedule"]["microbatches"] * dp * data["sizes"]["b"]

    return change


def times(value: float) -> Change:
    def change(data: dict[str, Any]) -> None:
        for row in data["predicted"]["times"]:
            row.update(dict.fromkeys(row, value))

    return change


def stages(count: int) -> Change:
    def change(data: dict[str, Any]) -> None:
        data["mesh"]["pp"], data["world"] = count, count * data["mesh"]["tp"]
        data["segments"] = ["x"] * count
        data["stages"] = [{"first": i, "last": i, "modules": "x"} for i in range(count)]
        data["predicted"]["memory"] = [{"parameters": i} for i in range(count)]
        data["predicted"]["times"] = [data["predicted"]["times"][0]] * count

    return change


def table(count: int, name: Callable[[int], str]) -> Change:
    return lambda d: d["splits"]["parameters"].update({name(i): "S0" for i in range(count)})


COSTLY: dict[str, Change] = {
    "10^7 microbatches": steps(10**7),
    "30,000 microbatches": steps(30_000),
    "2^60 microbatches": steps(2**60),
    "a world of 10^12": world(10**12),
    "300 stages": stages(300),
    "no time at all": times(0.0),
    "times that overflow": times(1e308),
    "30,000 parameters that do not fold": table(30_000, lambda i: f"h.{i}.x{i}"),
    "30,000 parameters on a diagonal": table(30_000, lambda i: f"h.{i}.{i}"),
    "a number of 900 digits": table(1, lambda _: f"h.{'1' * 900}"),
    "1,000 names of 500 parts": table(1000, lambda i: ".".join(["1"] * 499 + [str(i)])),
    "a segment of 10^7 characters": lambda d: d["segments"].__setitem__(0, "x" * 10**7),
    "30,000 kinds": lambda d: d["strategies"].update({f"k{i}": {"op": "S0 -> S1"} for i in range(30_000)}),
    "30,000 notes": lambda d: d.update(notes=["a note of some words"] * 30_000),
    "a note of 10^6 lines": lambda d: d.update(notes=["x\n" * 10**6]),
}
READ = [
    "explain --all",
    "explain --json",
    "compare",
    "simulate",
    "simulate --json",
    "export --to json",
    "export --to megatron",
]


@pytest.mark.parametrize("change", COSTLY)
def test_a_plan_costs_no_more_than_it_may(change: str, spoilt: Spoilt, plan_file: Path) -> None:
    path = spoilt(COSTLY[change])
    for words in READ:
        command, *rest = words.split()
        ended = run(command, path, *([plan_file] if command == "compare" else []), *rest)
        assert not ended.flaw, f"{words}: {ended.flaw}"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("10^7 microbatches", "emit -o out"),
        ("10^7 microbatches", "verify"),
        ("10^7 microbatches", "explain --memory"),
        ("a world of 10^12", "verify"),
        ("300 stages", "emit -o out"),
        ("300 stages", "explain --op lm_head"),
    ],
)
def test_with_its_model_it_costs_no_more(
    change: str, words: str, spoilt: Spoilt, config_file: Path, tmp_path: Path
) -> None:
    command, *rest = words.replace("out", str(tmp_path / "out")).split()
    ended = run(command, spoilt(COSTLY[change]), "--model", config_file, *rest)
    assert not ended.flaw, ended.flaw


def wide(fields: str) -> Change:
    """Return a text that begins like a plan and continues with `fields`."""
    return lambda d: f'{{"format": "autoptd-plan", "version": 1, {fields}}}'


REFUSED: dict[str, tuple[Change, str]] = {
    "10^5 levels": (wide(f'"notes": {"[" * 10**5}{"]" * 10**5}'), "is not JSON"),
    "990 levels": (lambda d: f'{{"format": {"[" * 980}{"]" * 980}}}', "not an autoptd plan"),
    "900 levels in a field": (wide(f'"notes": {"[" * 900}{"]" * 900}'), "mistake"),
    "10^6 digits": (wide(f'"world": {"9" * 10**6}'), "is not JSON"),
    "a version of 4,000 digits": (
        lambda d: f'{{"format": "autoptd-plan", "version": {"9" * 4000}}}',
        "has version 999",
    ),
    "10^6 twins": (
        lambda d: "{" + ",".join(['"a": 1', *(f'"k{i}": 1' for i in range(5 * 10**5)), '"a": 2']) + "}",
        "twice",
    ),
    "5 10^6 lists": (wide('"notes": [' + "[]," * (5 * 10**6) + "[]]"), "commas"),
    "500,000 mistakes": (wide('"segments": [' + "1," * 500_000 + "1]"), "and 500"),
    "200,000 unknown keys": (wide(",".join(f'"k{i}": 1' for i in range(200_000))), "more"),
    "a key of 10^7 characters": (lambda d: d.update({"k" * 10**7: 1}), "unknown key"),
    "10^5 stages": (lambda d: stages(10**5)(d), "at most"),
    "a name of 10^6 characters": (lambda d: d.update(model="x" * 10**6), "at most 200"),
    "a name of 10^5 parts": (table(1, lambda _: ".".join(["1"] * 10**5)), "at most 1000"),
    "10^5 sizes": (lambda d: d["sizes"].update({f"s{i}": 1 for i in range(10**5)}), "at most 100"),
    "10^5 devices": (
        lambda d: d["cluster"].update(others=[{"device": d["cluster"]["device"], "ranks": 1}] * 10**4),
        "16",
    ),
    "infinity": (wide('"batch": Infinity'), "Infinity is not a JSON number"),
    "2^63": (lambda d: d.update(batch=2**63), "batch"),
    "minus one rank": (lambda d: d["mesh"].update(dp=-1), "mesh.dp"),
    "chunks without end": (lambda d: d["schedule"].update(virtual=2**62), "stages"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_plan_is_refused_at_once(case: str, spoilt: Spoilt) -> None:
    change, said = REFUSED[case]
    message = refused("explain", spoilt(change))
    assert said in message and len(message) < 5000


def test_what_is_no_plain_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", 200 * 10**6)
    said = {
        "pipe": "not a regular file",
        "loop": "cannot read",
        "huge": "too large: 200,000,000 bytes",
        ".": "cannot read",
    }
    for name, text in said.items():
        for words in (["explain", tmp_path / name], ["compare", tmp_path / name, tmp_path / name]):
            assert text in refused(*words)
    assert "not a regular file" in refused("simulate", "/dev/zero")


def test_a_large_plan_of_many_parameters_is_still_read(spoilt: Spoilt) -> None:
    """The limits are far above the needs of a model of a thousand layers."""
    path = spoilt(table(50_000, lambda i: f"model.layers.{i // 50}.mlp.experts.{i % 50}.weight"))
    assert len(Plan.load(path).splits.parameters) > 50_000
    ended = run("explain", path)
    assert ended.code == 0 and "model.layers.{0..999}.mlp.experts.{0..49}.weight" in ended.out and not ended.flaw
