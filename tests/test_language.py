"""Prose: how docstrings open, words that have a standard term, and the width of documents."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("autoptd", "passes", "cost_models", "benchmarks", "docs", "examples", "tests")
WIDTH = 100  # columns of a document, outside tables and code

# A docstring opens with a verb phrase (functions) or a noun phrase (classes and modules), its subject stated.
OPENINGS = re.compile(
    r"(Of|What|Whether|Where|Which|How|Whose|Who|When|Why|The same|That|"
    r"As|If|From|In|With|Without|For|By|Among|On|At|To)\b"
)
_OPENED = re.compile(rf"""["']\s*{OPENINGS.pattern}""")  # only files that match are parsed
# Words of prose, as regular expressions, and the term that the field has for them.
TERMS = {
    r"addends?": "partial value",
    r"as they come": "in order",
    r"asleep": "waiting",
    r"at the least": "at least",
    r"gather(s|ed)? again": "re-gather in backward",
    r"lean(er|est)?": "memory-saving",
    r"menus?": "options",
    r"nobody": "no rank, no caller",
    r"ramps?": "pipeline fill (drain)",
    r"sends? in slices": "scatter-gather P2P",
    r"told": "reported, given",
    r"wish(es|ed)?": "constraint, option",
}
_TERM = re.compile(rf"\b({'|'.join(TERMS)})\b", re.IGNORECASE)


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text is not None:
                yield node.body[0].lineno, text.strip()


def comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def documents() -> list[Path]:
    return [
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted(ROOT.glob("*.md")),
        *sorted(ROOT.glob("benchmarks/**/*.md")),
    ]


def prose(document: str) -> Iterator[tuple[int, str]]:
    """The lines of a document outside tables and fenced code."""
    fenced = False
    for number, line in enumerate(document.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.lstrip().startswith(("|", "<")):
            yield number, line


def wrong_openings(path: Path) -> list[str]:
    source = path.read_text(encoding="utf-8")
    if not _OPENED.search(source):
        return []
    return [f"{path}:{at}: {text.splitlines()[0]}" for at, text in docstrings(source) if OPENINGS.match(text)]


def wrong_terms(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    if not _TERM.search(text):
        return []
    pieces = [*docstrings(text), *comments(text)] if path.suffix == ".py" else list(enumerate(text.splitlines(), 1))
    return [
        f"{path}:{at}: {m.group()!r} (say: {next(t for w, t in TERMS.items() if re.fullmatch(w, m.group(), re.I))})"
        for at, piece in pieces
        for m in _TERM.finditer(piece)
    ]


def wide_lines(path: Path) -> list[str]:
    lines = prose(path.read_text(encoding="utf-8"))
    return [f"{path}:{at}: {len(line)} columns" for at, line in lines if len(line) > WIDTH and " " in line[:WIDTH]]


def test_docstrings_open_with_a_verb_or_a_noun() -> None:
    assert [wrong for path in sources(*FOLDERS) for wrong in wrong_openings(path)] == []


def test_prose_uses_the_terms_of_the_field() -> None:
    paths = [path for path in (*sources(*FOLDERS), *documents()) if path != Path(__file__)]
    assert [wrong for path in paths for wrong in wrong_terms(path)] == []


def test_documents_are_wrapped() -> None:
    assert [wrong for path in documents() for wrong in wide_lines(path)] == []
