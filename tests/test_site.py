"""The documentation as a site: every page is in it, the reference is complete, and it needs no network."""

from __future__ import annotations

import argparse
import html
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import autoptd
from autoptd.cli.main import _parser
from docs.generator import pages
from docs.generator.reference import _commands, api, command_line

ROOT = Path(__file__).parents[1]


def test_every_page_is_in_the_navigation():
    found = pages.addresses()
    assert [path for path in (ROOT / "docs").rglob("*.md") if path.relative_to(ROOT).as_posix() not in found] == []
    listed = re.findall(r"^/(.+)$", pages.contents(), re.MULTILINE)
    addresses = {address.removesuffix(".md") for address in found.values()} - {"index"}
    assert sorted(listed) == sorted([*addresses, "reference/api", "reference/commands"])


def test_links_lead_to_pages_of_the_site(tmp_path: Path):
    pages.collect(tmp_path)  # raises BrokenLinkError
    for page in tmp_path.rglob("*.md"):
        for target in re.findall(r"\]\(([\w./-]+\.md)[#)]", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page}: {target}"


def test_links_are_adapted_outside_of_code():
    text = "[a](../SECURITY.md#files) [b](usage.md)\n```\n[c](../SECURITY.md)\n```\n[d](#here) [e](https://example.org)"
    moved = pages.adapted(text, "docs/safety.md", pages.addresses())
    assert moved == text.replace("../SECURITY.md#", "security.md#")
    picture = "![x](pictures/report.png)"
    assert pages.adapted(picture, "docs/report.md", pages.addresses()) == picture
    assert pages.adapted("![x](../pictures/report.png)", "docs/tutorials/megatron.md", pages.addresses()) == (
        "![x](../pictures/report.png)"
    )
    with pytest.raises(pages.BrokenLinkError, match="none"):
        pages.adapted("![x](pictures/none.png)", "docs/report.md", pages.addresses())
    with pytest.raises(pages.BrokenLinkError, match=r"docs/safety\.md: \.\./Makefile"):
        pages.adapted("[make](../Makefile)", "docs/safety.md", pages.addresses())


def test_the_reference_has_every_public_name():
    text = api()
    assert [name for name in autoptd.__all__ if f"\n## {name}\n" not in text] == []
    methods = [name for name in vars(autoptd.Parallel) if not name.startswith("_")]
    assert [name for name in methods if not re.search(rf"py:(method|property)}} {name}\b", text)] == []
    assert "py:method} model_dump" not in text  # of pydantic
    assert "Args:" not in text and "'" not in re.findall(r"{py:function} plan\((.*)\)", text)[0].replace("'adamw'", "")


def test_the_reference_has_every_option():
    text = command_line()
    for command in _commands(_parser()):
        section = text.partition(f"## {command.prog}\n")[2].partition("\n## ")[0]
        for action in command._actions:
            if not isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
                names = ", ".join(action.option_strings) or action.metavar or f"{{{','.join(action.choices or ())}}}"
                assert f"{{option}} {names}" in section, f"{command.prog}: {names}"
                assert action.help, f"{command.prog}: {names} has no help"


@pytest.mark.skipif(importlib.util.find_spec("furo") is None, reason="make docs installs the generator")
def test_the_site_is_built_without_a_warning_and_needs_no_network(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "docs.generator", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    built = list((tmp_path / "site").rglob("*.html"))
    assert len(built) > len(pages.addresses())
    for page in built:
        text = page.read_text("utf-8")
        loaded = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"([^\"]*)\"", text)
        loaded += re.findall(r"<link\b[^>]*\bhref=\"([^\"]*)\"", text)
        assert [url for url in map(html.unescape, loaded) if "//" in url] == [], page.name
    for sheet in (tmp_path / "site").rglob("*.css"):
        assert re.findall(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//", sheet.read_text("utf-8")) == [], sheet.name
    index = (tmp_path / "site" / "searchindex.js").read_text("utf-8")
    assert index.startswith("Search.setIndex(") and "megatron" in index
