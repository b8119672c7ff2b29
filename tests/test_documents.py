"""Documents: links resolve, commands parse, Python compiles, and examples print what the pages show."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from autoptd.cli.main import _parser
from autoptd.errors import AutoptdError
from tests.examples import EXECUTED, LONG, agree, examples, refreshed, run
from tests.fragments import python_of, wrong_inline_commands, wrong_names

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("benchmarks/**/*.md")]


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


every_page = pytest.mark.parametrize("page", PAGES, ids=named)


def anchors(page: Path) -> set[str]:
    """Return the headings of a document as GitHub's link anchors: the second of two equal ones ends in -1."""
    prose = re.sub(r"^ *```.*?^ *```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    found: set[str] = set()
    for title in re.findall(r"^#+ (.+)$", prose, re.MULTILINE):
        name = re.sub(r"[^\w -]", "", re.sub(r"\]\(.*?\)", "", title)).lower().replace(" ", "-")
        found.add(next(new for new in (name, *(f"{name}-{i}" for i in range(1, 99))) if new not in found))
    return found


def missing_files(page: Path, text: str) -> list[str]:
    """Return the links of a document, and the project paths it quotes, that do not exist."""
    missing = []
    for link in re.findall(r"\]\(([^()]*)\)", text) + re.findall(r"^ *\[[^\]]+\]: *(.+)$", text, re.MULTILINE):
        target, _, anchor = link.partition("#")
        path = page.parent / target if target else page
        if re.match(r"https?://\S+$", link):
            continue
        if not path.exists() or ("#" in link and anchor not in anchors(path)):
            missing.append(link)
    for name in re.findall(r"`(\w+/[\w./]*)`", text):
        homes = [home for home in (ROOT, ROOT / "autoptd") if (home / name.partition("/")[0]).is_dir()]
        if homes and not any((home / name).exists() for home in homes):
            missing.append(name)
    return missing


def wrong_commands(text: str) -> list[str]:
    """Return indented commands that the command line refuses, and modules and targets of make that do not exist."""
    wrong = []
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    wrong += [f"make {name}" for name in re.findall(r"\bmake (\w+)\b(?= {2,}#|`|$)", text, re.M) if name not in targets]
    wrong += [
        f"-m {name}" for name in re.findall(r"python -m ([\w.]+)", text) if importlib.util.find_spec(name) is None
    ]
    for words in re.findall(r"^    (?:autoptd|torchrun.* -m autoptd\.cli\.main) (.+)$", text.replace("\\\n", ""), re.M):
        try:
            _parser().parse_args(shlex.split(words, comments=True))
        except (AutoptdError, SystemExit):
            wrong.append(words)
    return wrong


@every_page
def test_files_that_a_document_names_exist(page: Path):
    assert missing_files(page, page.read_text("utf-8")) == []


@every_page
def test_commands_of_a_document_exist(page: Path):
    assert wrong_commands(page.read_text("utf-8")) == []


@every_page
def test_code_that_is_not_run_uses_what_exists(page: Path):
    text = page.read_text("utf-8")
    assert [name for code in python_of(text) for name in wrong_names(code)] == []
    assert wrong_inline_commands(text) == []


def test_every_block_of_code_is_run_or_checked():
    """Blocks are run, of files or outputs, or fragments; pages with blocks that are run are those that tests run."""
    for page in PAGES:
        kinds = set(re.findall(r"^```(\S+)$", page.read_text("utf-8"), re.MULTILINE))
        assert kinds <= {"python", "console", "text", "toml", "py"}, page.name
        assert page in EXECUTED or not kinds & {"python", "console"}, page.name
    assert set(LONG) <= set(EXECUTED)


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("autoptd.plan(model, world=8, bacth=2)", ["autoptd.plan(bacth=…)"]),
        ("autoptd.plan(model, world=8).explian()", ["autoptd.plan(model, world=8).explian"]),
        ("p = autoptd.parallelize(model)\np.report().to_date()", ["p.report().to_date"]),
        ("from autoptd.trackers import Konsole", ["from autoptd.trackers import Konsole"]),
        ("import autoptd.nothing", ["import autoptd.nothing"]),
        ("autoptd.export.magnetron", ["autoptd.export.magnetron"]),
        ("f(par.save('x', others=a, kept=3))", ["par.save(kept=…)"]),
        ("par.plan.mesh.qp", ["par.plan.mesh.qp"]),
        ("if par.dp_rnk == 0:\n    par.rank", ["par.dp_rnk"]),
        ("plan = make()\nplan.anything(a=1)", []),
        ("par.plan.mesh.dp, par.optimizer.step(), plan.predicted.mfu, par.report().to_data()", []),
    ],
)
def test_names_that_do_not_exist_are_seen(code: str, wrong: list[str]):
    assert wrong_names(code) == wrong


def test_unrun_code_of_a_page_is_found():
    page = "```py\na.b\n```\n\n    par = autoptd.trace(\n        model,\n    )\n\n"
    page += "text `par.x(…, y=…)`, `other.x`, `par.`\n"
    assert list(python_of(page)) == ["a.b\n", "par = autoptd.trace(\n    model,\n)", "par.x(..., y=...)"]
    inline = "`autoptd plan --wrold 8`, `autoptd plan MODEL -o FILE`, `autoptd checkpoint inspect DIR`, `autoptd plam`"
    assert wrong_inline_commands(inline) == ["autoptd plan --wrold 8", "autoptd plam"]


def test_what_is_missing_is_seen():
    text = "[here](docs/nowhere.md#part), `passes/nowhere.py`, `search/nowhere.py`, [there](SECURITY.md#nothing)"
    text += ", [title](SECURITY.md 'title'), [none](SECURITY.md#), [web](https://example.org/x)\n[later]: nowhere.md\n"
    assert len(missing_files(ROOT / "README.md", text)) == 7
    commands = (
        "    autoptd plan gpt2 --wrold 8\n    autoptd plan gpt2 --world 8  # fine\n`make nothing`\npython -m tests.no"
    )
    assert wrong_commands(commands) == ["make nothing", "-m tests.no", "plan gpt2 --wrold 8"]


def test_the_readme_links_every_document():
    readme = (ROOT / "README.md").read_text("utf-8")
    names = [page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md")]
    assert [name for name in names if f"({name})" not in readme] == []


@pytest.mark.ranks  # some examples start processes
@pytest.mark.parametrize("page", [page for page in EXECUTED if page not in LONG], ids=named)
def test_examples_print_what_the_page_shows(page: Path):
    compare(page)


@pytest.mark.parametrize("page", LONG, ids=named)
def test_examples_of_long_pages_print_what_the_page_shows(page: Path):
    compare(page)


def compare(page: Path) -> None:
    for example, printed in run(page):
        assert example.shown is None or agree(example.shown, printed), f"{example.code}\nprints\n{printed}"


def test_every_example_of_a_tutorial_that_prints_shows_it():
    """Commands that write nothing show nothing; a `python` block may print what the page leaves out."""
    for page in EXECUTED:
        shown = [example.shown for example in examples(page.read_text("utf-8")) if example.kind != "file"]
        assert any(shown), page.name
        assert "…\n" not in shown, f"{page.name} shows nothing of an output"


def test_what_a_page_shows_must_be_printed():
    assert agree("a  1\n…\nd … 2\n", "a  1\nb\nc\nd  7 and 2 \n")
    assert agree("…\nb\n", "b\n")
    for printed in ("a  2\nd  2\n", "a  1\nd  3\n", "a  1\nd  2\nc\n", ""):
        assert not agree("a  1\n…\nd … 2\n", printed)


def test_a_page_whose_outputs_are_no_longer_true_keeps_what_it_leaves_out():
    assert refreshed("time 5 s\n…\nnote  3\n", "time 6 s\nx\nnote  4\n") == "time 6 s\n…\nnote  4\n"
    assert refreshed("a 1\nb 2\n", "a 1\nnew\nb 2\n") == "a 1\nnew\nb 2\n"


def test_an_example_that_fails_is_seen(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("```console\n$ ls nothing\n```\n", "utf-8")
    with pytest.raises(AssertionError, match="does not expect this to fail: ls nothing"):
        list(run(page))
    page.write_text("```console\n$ ls nothing\n…\n$ echo $?\n2\n```\n", "utf-8")
    assert [printed for _, printed in run(page)][1] == "2\n"
