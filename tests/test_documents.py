"""Documents: their links lead somewhere, their commands parse, their Python compiles, the README's example is run."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from autoptd.cli.main import _parser
from autoptd.errors import AutoptdError

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("benchmarks/**/*.md")]
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def anchors(page: Path) -> set[str]:
    """Headings of a document as links name them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


def missing_files(page: Path, text: str) -> list[str]:
    """Links of a document, and paths of the project that it quotes, that lead nowhere."""
    missing = []
    for target, anchor in re.findall(r"\]\(([\w./-]*)(?:#([\w-]+))?\)", text):
        path = page.parent / target if target else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            missing.append(f"{target}#{anchor}")
    for name in re.findall(r"`(\w+/[\w./]*)`", text):
        homes = [home for home in (ROOT, ROOT / "autoptd") if (home / name.partition("/")[0]).is_dir()]
        if homes and not any((home / name).exists() for home in homes):
            missing.append(name)
    return missing


def wrong_commands(text: str) -> list[str]:
    """Indented commands that the command line refuses, modules and targets of make that do not exist."""
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
def test_python_of_a_document_compiles(page: Path):
    for block in re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
        compile(block, page.name, "exec")


def test_what_is_missing_is_seen():
    text = "[here](docs/nowhere.md#part), `passes/nowhere.py`, `search/nowhere.py`, [there](SECURITY.md#nothing)"
    assert len(missing_files(ROOT / "README.md", text)) == 4
    commands = (
        "    autoptd plan gpt2 --wrold 8\n    autoptd plan gpt2 --world 8  # fine\n`make nothing`\npython -m tests.no"
    )
    assert wrong_commands(commands) == ["make nothing", "-m tests.no", "plan gpt2 --wrold 8"]


def test_the_readme_links_every_document():
    readme = (ROOT / "README.md").read_text("utf-8")
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"(docs/{page.name})" not in readme] == []


def test_the_first_example_of_the_readme_prints_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    readme = (ROOT / "README.md").read_text("utf-8")
    code, shown = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", readme, re.DOTALL)[0]
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out == shown
