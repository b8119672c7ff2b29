"""Quoting of text from outside in emitted source: as a literal, as a checked name, or as one printable line.

    literal, numbered      a Python string: names of parameters, modules and inputs, arguments of ops
    checked_name, …        a Python name, checked, or derived from any text
    in_docstring           a line of a docstring; for a comment of Python or a shell, `printable(text, keep="")`

Searches in emitted source use `code_of`, which blanks literals and comments, or `replace_code`.
"""

from __future__ import annotations

import keyword
import re
import unicodedata
from collections.abc import Callable

from autoptd.errors import TraceError
from autoptd.text import printable

_ANY_TEXT = re.compile(
    r'"""(?:[^\\]|\\.)*?"""'
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'(?:[^'\\\n]|\\.)*'"
    r"|#[^\n]*",
    re.DOTALL,
)


def literal(text: str) -> str:
    """Return the `repr` of a text, in double quotes unless it contains one."""
    written = str.__repr__(text)
    return written if '"' in text or written[0] == '"' else f'"{written[1:-1]}"'


def numbered(before: str, after: str) -> str:
    """Return a literal with the variable `i` between two texts: `f"transformer.h.{i}.attn"`."""
    parts = (part.replace("{", "{{").replace("}", "}}") for part in (before, after))
    return "f" + literal("{i}".join(parts))


def is_name(text: str) -> bool:
    """Return whether Python reads a text as exactly this name, as a variable and as an attribute within a class.

    False for keywords, for names that Python normalises (`ﬁ` to `fi`), and for names private to a class (`__x`).
    """
    usual = text.isidentifier() and unicodedata.normalize("NFKC", text) == text
    return usual and not keyword.iskeyword(text) and not text.startswith("__")


def checked_name(text: str, what: str) -> str:
    """Return a name that is fixed by the model. Raises TraceError, which calls it `what`, if Python cannot use it."""
    if not is_name(text):
        raise TraceError(f"{what} is called {text!r}, which is not a Python name", fix="rename it")
    return text


def dotted_name(text: str, what: str) -> str:
    """Return a name with dots, whose parts are checked. Raises TraceError."""
    if not all(map(is_name, text.split("."))):
        checked_name(text, what)
    return text


def plain_name(text: str) -> str:
    """Return a name made from a text by replacing other characters with `_`; "" if nothing is left."""
    plain = re.sub(r"\W", "_", unicodedata.normalize("NFKC", text)).strip("_")
    plain = plain if f"_{plain}".isidentifier() else re.sub(r"[^0-9A-Za-z_]", "_", plain).strip("_")
    return f"x_{plain}" if plain and not plain.isidentifier() else plain


def in_docstring(text: str) -> str:
    """Escape a text for a docstring, so that it ends neither the string nor the line."""
    return printable(text, keep="").replace("\\", r"\\").replace('"', r"\"")


def code_of(source: str) -> str:
    """Return the source with the contents of literals and comments replaced by `_`, of equal length and lines."""
    return _ANY_TEXT.sub(lambda match: _blank(match[0]), source)


def replace_code(pattern: re.Pattern[str], new: Callable[[re.Match[str]], str], source: str) -> str:
    """Return `pattern.sub(new, source)` restricted to code outside literals and comments."""
    parts, at = list[str](), 0
    for match in pattern.finditer(code_of(source)):
        parts += [source[at : match.start()], new(match)]
        at = match.end()
    return "".join([*parts, source[at:]])


def _blank(text: str) -> str:
    width = 0 if text[0] == "#" else 3 if text.startswith('"""') else 1
    end = len(text) - width
    return text[: width or 1] + re.sub(r"[^\n]", "_", text[width or 1 : end]) + text[end:]
