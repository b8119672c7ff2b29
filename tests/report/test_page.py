"""The report page: its numbers are the plan's, it asks for nothing, and it answers a newcomer's questions."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

import autoptd
from autoptd.cli.main import main
from autoptd.cost_models.memory import MOST_MEASURED
from autoptd.explain.choices import recompute_text
from autoptd.explain.compare import compare
from autoptd.explain.tables import GIB, seconds, signed
from autoptd.explain.timeline import simulate_plan
from autoptd.models.load import load_model
from autoptd.plans.data import Schedule
from autoptd.plans.model import Plan
from autoptd.report.accuracy import MEMORY, STEP_TIME
from autoptd.report.drawing import KINDS, UNITS, drawing
from autoptd.report.facts import axes, facts, layers, limits, ranks_of
from autoptd.report.in_words import in_words
from autoptd.report.page import comparison_page
from autoptd.text import ranges
from tests.sample_plan import sample_plan

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
# a deep pipeline with recomputation; one of chunks; experts; an encoder-decoder on a part of a node
QUESTIONS = {
    "llama3-70b": {"world": 512, "fix": {"tp": 8, "pp": 8, "micro": 1, "cp": 1, "zero": 1, "schedule": "1f1b"}},
    "gpt3-175b": {"world": 64, "fix": {"tp": 4, "pp": 16, "micro": 1, "cp": 1, "zero": 1, "virtual": 2, "offload": 0}},
    "mixtral-8x7b": {"world": 64, "fix": {"ep": 8, "tp": 1, "pp": 4, "micro": 1, "zero": 1, "cp": 1, "virtual": 4}},
    "t5-3b": {"world": 4, "batch": 32, "fix": {"micro": 2, "zero": 1, "cp": 1, "schedule": "1f1b"}},
}
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Plans(dict[str, Plan]):
    """Plans of `QUESTIONS` by name, each made when it is first asked for."""

    def __missing__(self, name: str) -> Plan:
        model, _ = load_model(name)
        given = {"cluster": "dgx-h100", "others": name == "t5-3b", **QUESTIONS[name]}
        self[name] = autoptd.plan(model, **given).model_copy(update={"model": name})
        return self[name]


@pytest.fixture(scope="module")
def plans() -> Plans:
    return Plans()


class Page(HTMLParser):
    """The elements of a page with their attributes and texts; fails for elements that are not closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.shown: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open) and data.strip():
            self.shown.append(" ".join(data.split()))

    @property
    def text(self) -> str:
        return " ".join(self.shown)


@pytest.mark.parametrize("name", QUESTIONS)
def test_its_numbers_are_those_of_the_plan(name: str, plans: dict[str, Plan]):
    plan, page = plans[name], Page(plans[name].to_html())
    for sentence in plan.explain().split("\n\n")[0].replace("\n", " ").split("  "):
        assert sentence.split(", ZeRO")[0] in page.text
    for value in plan.predicted.time_s.values():
        assert not value or seconds(value) in page.text
    rows = facts(plan)["memory"]["rows"]
    for row, held in zip(rows, plan.predicted.memory, strict=True):
        assert row["total"] == pytest.approx(sum(held.values()) / GIB)
        assert sum(size for _, size, _ in row["parts"]) == pytest.approx(row["total"])
        assert row["sure"] == pytest.approx(MOST_MEASURED * row["total"])
        assert all(share <= 1 for _, _, share in row["parts"])
        assert f"{row['total']:.1f} {100 * row['of_device']:.0f}% {row['sure']:.1f}" in page.text
    assert {row["name"] for row in facts(plan)["parameters"]} <= set(page.shown)
    for note in plan.notes:
        assert " ".join(note.split()) in page.text
    for other in plan.others:
        assert str(other.mesh) in page.text
        assert other.step_time_s is None or seconds(other.step_time_s) in page.text


@pytest.mark.parametrize("name", QUESTIONS)
def test_it_asks_for_nothing_and_is_small(name: str, plans: dict[str, Plan]):
    page = plans[name].to_html()
    assert len(page.encode()) <= 1_500_000
    for tag, attributes in Page(page).elements:
        assert tag not in ("img", "iframe", "object", "embed")
        asked = {attributes.get(key, "") for key in ("src", "href", "srcset", "data", "action")}
        assert all(not url or url.startswith(("#", "data:,")) for url in asked), (tag, attributes)
    assert "http:" not in page
    assert "https:" not in page.split("<main>")[0]
    assert not re.search(r"@import|url\(", page)


def test_text_of_a_plan_file_cannot_become_markup(plans: dict[str, Plan]):
    hostile = "</script><script>alert(1)</script><b onclick='x'>&amp;"
    plan = plans["t5-3b"].model_copy(update={"model": hostile, "notes": (hostile,)})
    for page in (plan.to_html(), comparison_page(plan, plans["t5-3b"], (hostile, "B"))):
        assert "<script>alert" not in page
        assert "<b onclick" not in page
        assert hostile in " ".join(Page(page).shown) or "</script><script>alert(1)</script>" in Page(page).text
    assert "<script>alert" not in plan._repr_html_()


def test_a_newcomer_finds_the_answers(plans: dict[str, Plan]):
    plan = plans["llama3-70b"]
    text = Page(plan.to_html()).text
    held = [i for i, segment in enumerate(plan.segments) if ".layers.40." in segment]
    stages = [i for i, s in enumerate(plan.stages) if any(s.first <= at <= s.last for at in held)]
    spans = " and ".join(f"{ranks_of(plan, stage)[0]}–{ranks_of(plan, stage)[-1]}" for stage in stages)
    assert f"model.layers.40 {ranges(stages)} {spans}" in text  # which ranks hold layer 40
    assert "activations, which grow with the samples of a microbatch" in text  # what limits the batch
    assert re.search(r"With twice the devices \(1,024\) .* times as fast", text)  # what twice the GPUs would give
    assert f"{MOST_MEASURED * max(sum(row.values()) for row in plan.predicted.memory) / GIB:.1f} GiB" in text
    assert f"median error of {MEMORY.median:.1%}" in text  # how sure is the memory


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_term_of_the_first_lines_is_said_in_words(name: str, plans: dict[str, Plan]):
    plan = plans[name]
    said = dict(in_words(plan))
    text = Page(plan.to_html()).text
    for term, meaning_ in said.items():
        assert f"{term} {meaning_}" in text
    first = " ".join([facts(plan)["title"], *facts(plan)["sentences"]])
    for axis in ("dp", "tp", "pp", "cp", "ep"):
        size = getattr(plan.mesh, axis)
        assert any(term.startswith(f"{axis} {size},") for term in said) == (size > 1)
    assert f"{plan.batch // plan.mesh.dp:,}" in " ".join(said.values())
    assert any(term.startswith("recompute") for term in said) == ("recompute none" not in first)
    assert any(term.startswith("ZeRO") for term in said) == (plan.mesh.dp > 1 and plan.zero > 0)
    for term in said:  # each is quoted from the first lines, before its name
        quoted = term.partition(",")[0] if re.match(r"[dtpce]p \d", term) else term.removesuffix(" in host memory")
        assert quoted.replace(",", "") in first.replace(",", ""), term


def test_activations_on_the_host_are_not_said_to_be_computed_again(plans: dict[str, Plan]):
    plan = plans["gpt3-175b"]
    assert any(stage.recompute for stage in plan.stages)
    moved = [stage.model_copy(update={"policies": ("offload",) * len(stage.recompute)}) for stage in plan.stages]
    assert "computed again in the backward pass instead" in dict(in_words(plan))[f"recompute {recompute_text(plan)}"]
    other = plan.model_copy(update={"stages": tuple(moved)})
    assert "moved to the host instead" in dict(in_words(other))[f"recompute {recompute_text(other)}"]


def test_two_plans_side_by_side_say_all_that_compare_says(plans: dict[str, Plan]):
    a, b = plans["mixtral-8x7b"], plans["t5-3b"]
    page, text = Page(comparison_page(a, b)).text, compare(a, b, width=400)
    said = [line.split() for line in text.splitlines() if line.strip()]
    assert len(said) > 20
    missing = [line for line in said if " ".join(line) not in page and line[0] != "A" and line[-1] != "difference"]
    assert missing == []
    assert "ep communication" in page and "tp communication" not in page
    assert "ep communication" in text and "tp communication" not in text


def test_choices_without_effect_do_not_differ(plans: dict[str, Plan]):
    plan = plans["t5-3b"]
    assert (plan.mesh.ep, plan.mesh.cp, plan.mesh.pp) == (1, 1, 1)
    options = replace(plan.method, dispatch="slices", context="ulysses", sends="slices")
    assert "Choices that differ" not in compare(plan, plan.model_copy(update={"method": options}))


def test_it_says_why_by_what_other_values_take(plans: dict[str, Plan]):
    plan = plans["t5-3b"]
    others = {o.mesh.tp: o.step_time_s for o in plan.others if o.choice == "tp" and o.step_time_s}
    assert others
    line = next(line for line in facts(plan)["why"] if line.startswith(f"tp {plan.mesh.tp}:"))
    for tp, time_s in others.items():
        assert f"{time_s / plan.predicted.step_time_s - 1:+.1%} with {tp}" in line


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_rank_holds_what_the_page_says(name: str, plans: dict[str, Plan]):
    plan = plans[name]
    drawn = {place["rank"]: place for node in facts(plan)["nodes"]["drawn"] for place in node["places"]}
    mesh = plan.mesh
    for rank, place in drawn.items():
        own = ((place["pp"] * mesh.dp + place["dp"]) * mesh.cp + place["cp"]) * mesh.tp + place["tp"]
        assert own == rank
        for stage in plan.route.stages_of(place["pp"]):
            assert rank in ranks_of(plan, stage)
    assert len(drawn) == (plan.world if plan.world <= 64 else 64)  # of many nodes one for each pipeline rank
    held = sum(len(plan.route.stages_of(rank)) for rank in range(mesh.pp))
    assert held == len(plan.stages)
    assert [row["layer"] for row in layers(plan)]


def test_axes_lie_on_the_links_that_their_groups_span(plans: dict[str, Plan]):
    found = {axis["axis"]: (axis["size"], axis["apart"], axis["link"]) for axis in axes(plans["llama3-70b"])}
    assert found["tp"] == (8, "neighbours", "NVLink 4")
    assert found["dp"] == (8, "8 ranks apart", "InfiniBand NDR")
    assert found["pp"] == (8, "64 ranks apart", "InfiniBand NDR")
    experts = {axis["axis"]: axis for axis in axes(plans["mixtral-8x7b"])}
    assert experts["ep"] == {"axis": "ep", "size": 8, "apart": "neighbours", "link": "NVLink 4"}


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_timeline_is_the_simulated_step(name: str, plans: dict[str, Plan]):
    plan = plans[name]
    drawn = drawing(plan)
    assert drawn is not None
    _, timeline = simulate_plan(plan)
    assert drawn["seconds"] == timeline.makespan_s
    for rank, row in enumerate(drawn["ranks"]):
        record = timeline.records[rank]
        wanted = {
            (KINDS.index(a.kind), a.chunk, -1 if a.microbatch is None else a.microbatch): (start_s, end_s)
            for a, start_s, end_s in zip(record.actions, record.starts_s, record.ends_s, strict=True)
            if a.kind in KINDS and end_s > start_s
        }
        events = [tuple(row[i : i + 5]) for i in range(0, len(row), 5)]
        assert drawn["hidden"] or len(events) == len(wanted)
        for kind, chunk, microbatch, start, length in events:
            start_s, end_s = wanted[kind, chunk, microbatch]
            assert start * timeline.makespan_s / UNITS == pytest.approx(start_s, abs=2e-6 * timeline.makespan_s)
            assert (start + length) * timeline.makespan_s / UNITS == pytest.approx(
                end_s, abs=3e-6 * timeline.makespan_s
            )
        assert all(a[3] <= b[3] for a, b in pairwise(events))
    again = sum(chunk[1] for rank in drawn["shares"] for chunk in rank)
    assert (again > 0) == any(stage.recompute for stage in plan.stages)


def test_of_a_long_step_the_start_and_the_end_are_drawn(plans: dict[str, Plan]):
    plan = plans["gpt3-175b"]
    drawn = drawing(plan)
    assert drawn is not None
    assert drawn["hidden"]
    start, end = drawn["hidden"]
    assert 0 < start < end < UNITS
    for row in drawn["ranks"]:
        assert all(row[i + 3] + row[i + 4] <= start or row[i + 3] >= end for i in range(0, len(row), 5))
        assert row[3] < start
        assert row[-2] >= end


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours `#rrggbb` (WCAG 2.2, relative luminance)."""

    def luminance(color: str) -> float:
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_text_is_readable_in_light_and_dark():
    style = (ROOT / "autoptd" / "report" / "templates" / "page.css").read_text("utf-8")
    light, dark = (dict(re.findall(r"--([a-z]+): (#[0-9a-f]{6})", part)) for part in style.split("@media")[:2])
    for colors in (light, dark):
        for text, ground in (
            ("text", "page"),
            ("text", "panel"),
            ("soft", "page"),
            ("soft", "panel"),
            ("accent", "page"),
        ):
            assert contrast(colors[text], colors[ground]) >= 4.5, (text, ground)
        for mark in ("forward", "backward", "again", "comm", "optimizer", "limit"):
            assert contrast(colors[mark], colors["page"]) >= 3, mark


def test_everything_is_labelled(plans: dict[str, Plan]):
    for page in (plans["llama3-70b"].to_html(), comparison_page(plans["t5-3b"], plans["llama3-70b"])):
        found = Page(page).elements
        assert ("html", {"lang": "en"}) in found
        ids = [attributes["id"] for _, attributes in found if "id" in attributes]
        assert len(ids) == len(set(ids))
        for tag, attributes in found:
            if tag == "canvas":
                assert attributes["aria-label"]
                assert attributes["tabindex"] == "0"
                assert {attributes["data-from"], attributes["data-says"]} <= set(ids)
            if tag == "a":
                assert attributes["href"].removeprefix("#") in ids
        levels = [int(tag[1]) for tag, _ in found if re.fullmatch(r"h\d", tag)]
        assert levels[0] == 1
        assert all(b <= a + 1 for a, b in pairwise(levels))


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
@pytest.mark.parametrize("name", [*QUESTIONS, "two plans"])
def test_a_browser_opens_it(name: str, plans: dict[str, Plan], tmp_path: Path):
    file = tmp_path / "plan.html"
    two = comparison_page(plans["t5-3b"], plans["llama3-70b"])
    file.write_text(two if name == "two plans" else plans[name].to_html(), "utf-8")
    # the page's own script tells that it has drawn, and whether a row of the page is wider than a telephone: in a frame
    # of that width, since a window of the browser is never so narrow
    probe = (
        "<script>document.title=[...document.querySelectorAll('canvas')].map(c=>c.height>20).join()+'|'"
        "+(document.documentElement.scrollWidth<=window.innerWidth)+'|'+window.innerWidth;"
        "parent.document.title=document.title</script></body>"
    )
    framed = file.read_text("utf-8").replace("</body>", probe)
    file.write_text(
        f'<iframe style="width:390px;height:800px;border:0" srcdoc="{html.escape(framed)}"></iframe>', "utf-8"
    )
    log = tmp_path / "log"
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=500,900", f"--log-net-log={log}"]
    found = subprocess.run(
        [*command, "--virtual-time-budget=2000", "--dump-dom", file.as_uri()],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert "CONSOLE" not in found.stderr
    drawn, narrow, width = re.findall(r"<title>(.*?)</title>", found.stdout)[0].split("|")
    assert set(drawn.split(",")) == {"true"}
    assert (narrow, width) == ("true", "390")


def test_the_commands_write_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    given = ["--world", "8", "--cluster", "dgx-h100", "--fix", "tp=1,cp=1,zero=1,schedule=1f1b"]
    assert main(["plan", "nanogpt", *given, "-o", "a.json", "--html", "a.html"]) == 0
    assert "a.json and a.html" in capsys.readouterr().out
    assert Plan.load("a.json").others
    assert main(["report", "a.json", "-o", "b.html"]) == 0
    assert without_constraints(Path("a.html")) == Path("b.html").read_text("utf-8")
    assert main(["plan", "nanogpt", *given, "--batch", "128", "-o", "c.json"]) == 0
    assert not Plan.load("c.json").others
    assert "--others" in Page(Plan.load("c.json").to_html()).text
    assert main(["compare", "a.json", "c.json", "--html", "d.html"]) == 1
    assert "than" in Page(Path("d.html").read_text("utf-8")).text
    capsys.readouterr()
    assert main(["report", "a.json", "-o", "missing/x.html"]) == 2
    assert "missing" in capsys.readouterr().err
    assert main(["report", "a.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"page": "a.html"}


def without_constraints(page: Path) -> str:
    """Return the page without what the constraints cost, which only the command that plans knows."""
    text = page.read_text("utf-8")
    first, last = text.index("<h3>What each constraint costs</h3>"), text.index("</section>", text.index('id="why"'))
    return text[:first] + text[last:]


def test_it_says_what_each_constraint_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    page, given = tmp_path / "plan.html", ["plan", "nanogpt", "--world", "4", "--fix", "tp=2,pp=1,cp=1", "--pins"]
    assert main([*given, "--html", str(page), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["without"]
    shown = Page(page.read_text("utf-8")).shown
    at = shown.index("What each constraint costs")
    for row in rows[:3]:
        k = shown.index(row["dropped"][0], at)
        assert shown[k + 1] == seconds(row["step_time_s"])
        assert shown[k + 3] == (", ".join(row["changes"]) or "unchanged")
    assert main(["plan", "nanogpt", "--world", "4", "--html", str(page)]) == 0
    assert "What each constraint costs" not in page.read_text("utf-8")


def test_quoted_errors_are_those_of_the_accuracy_page():
    lines = (ROOT / "docs" / "accuracy.md").read_text("utf-8").splitlines()
    for name, known in STEP_TIME.items():
        (row,) = (line for line in lines if line.startswith(f"| {name} "))
        cells = [cell.strip() for cell in row.split("|")]
        assert cells[2].startswith(f"{known.runs} of")
        assert [float(cell[:-1]) / 100 for cell in cells[3:5]] == pytest.approx([known.median, known.most])
        if name == "all rows":
            assert cells[7:9] == [f"{MEMORY.median:.1%}", f"{MEMORY.most:.1%}"]


def test_it_says_what_other_placements_would_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    plan, page = tmp_path / "plan.json", tmp_path / "plan.html"
    fixed = "tp=2,pp=1,cp=1,zero=1,micro=4,offload=0"
    assert main(["plan", "nanogpt", "--world", "4", "--fix", fixed, "-o", str(plan), "--html", str(page)]) == 0
    capsys.readouterr()
    assert main(["explain", str(plan), "--op", "blocks.0.attention.out.weight", "--json"]) == 0
    (slot,) = json.loads(capsys.readouterr().out)["found"]
    other = next(row for row in slot["alternatives"] if not row["chosen"])
    shown = Page(page.read_text("utf-8"))
    at = next(i for i, text in enumerate(shown.shown) if ".attention.out.weight" in text)
    assert shown.shown[at + 1] == slot["chosen"]
    takes = "same" if abs(other["total_s"]) < 1e-9 else signed(other["total_s"], seconds(other["total_s"]))
    assert f"{other['choice']}: {takes}" in shown.shown[at + 3]
    assert main(["report", str(plan), "--why", "-o", str(tmp_path / "again.html")]) == 0
    assert (tmp_path / "again.html").read_text("utf-8") == without_constraints(page)
    assert main(["report", str(plan), "-o", str(tmp_path / "short.html")]) == 0
    assert "--why" in Page((tmp_path / "short.html").read_text("utf-8")).text


@pytest.mark.parametrize(
    ("kind", "microbatches", "virtual", "more"),
    [("1f1b", 4, 1, False), ("1f1b", 1, 1, True), ("gpipe", 4, 1, True), ("interleaved", 6, 4, False)],
)
def test_it_says_whether_a_larger_batch_takes_memory(kind: str, microbatches: int, virtual: int, more: bool):
    schedule = Schedule(kind=kind, microbatches=microbatches, virtual=virtual)  # type: ignore[arg-type]
    plan = sample_plan().model_copy(update={"schedule": schedule})
    said = " ".join(limits(plan))
    assert ("and keeps more of them in memory" in said) == more
    assert ("and needs no more memory" in said) == (not more)
