"""The only way of text from outside into emitted source: as a literal, as a checked name, or as one printable line.

    literal, numbered      a string of Python: names of parameters, modules and inputs, arguments of ops
    checked_name, …        a name of Python, refused if it is none, or made from any text
    in_docstring           a line of a docstring; of a comment, of Python or a shell, `printable(text, keep="")`

Who looks for something in emitted source asks `code_of`, which leaves literals and comments out, or `replace_code`.
"""

from __future__ import annotations

import keyword
import re
import unicodedata
from collections.abc import Callable

from autoptd.errors import TraceError
from autoptd.printable import printable

_ANY_TEXT = re.compile(
    r'"""(?:[^\\]|\\.)*?"""'
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'(?:[^'\\\n]|\\.)*'"
    r"|#[^\n]*",
    re.DOTALL,
)


def literal(text: str) -> str:
    """`repr`, in double quotes unless the text holds one."""
    written = str.__repr__(text)
    return written if '"' in text or written[0] == '"' else f'"{written[1:-1]}"'


def numbered(before: str, after: str) -> str:
    """`f"transformer.h.{i}.attn"`: a literal with the variable `i` between two texts."""
    parts = (part.replace("{", "{{").replace("}", "}}") for part in (before, after))
    return "f" + literal("{i}".join(parts))


def is_name(text: str) -> bool:
    """Whether Python reads a text as that name, as a variable and as an attribute within a class.

    No keyword, not spelled otherwise once normalised (Python reads `ﬁ` as `fi`), not private to a class (`__x`).
    """
    usual = text.isidentifier() and unicodedata.normalize("NFKC", text) == text
    return usual and not keyword.iskeyword(text) and not text.startswith("__")


def checked_name(text: str, what: str, where: str = "") -> str:
    """A name that is not ours to choose. Raises TraceError, which calls it `what`."""
    if not is_name(text):
        raise TraceError(f"{what} is called {text!r}, which is no name in Python", where=where, fix="rename it")
    return text


def dotted_name(text: str, what: str, where: str = "") -> str:
    """Names with dots between them. Raises TraceError."""
    for part in text.split("."):
        if not is_name(part):
            checked_name(text, what, where)
    return text


def plain_name(text: str) -> str:
    """The nearest name: what cannot be part of one is `_`; "" where nothing is left."""
    plain = re.sub(r"\W", "_", unicodedata.normalize("NFKC", text)).strip("_")
    plain = plain if f"_{plain}".isidentifier() else re.sub(r"[^0-9A-Za-z_]", "_", plain).strip("_")
    return f"x_{plain}" if plain and not plain.isidentifier() else plain


def in_docstring(text: str) -> str:
    """Text as a docstring may hold it: nothing in it ends the string or the line."""
    return printable(text, keep="").replace("\\", r"\\").replace('"', r"\"")


def code_of(source: str) -> str:
    """Source of the same length and lines, with `_` for what literals and comments hold."""
    return _ANY_TEXT.sub(lambda match: _blank(match[0]), source)


def replace_code(pattern: re.Pattern[str], new: Callable[[re.Match[str]], str], source: str) -> str:
    """`pattern.sub(new, source)`, where it is neither in a literal nor in a comment."""
    parts, at = list[str](), 0
    for match in pattern.finditer(code_of(source)):
        parts += [source[at : match.start()], new(match)]
        at = match.end()
    return "".join([*parts, source[at:]])


def _blank(text: str) -> str:
    width = 0 if text[0] == "#" else 3 if text.startswith('"""') else 1
    end = len(text) - width
    return text[: width or 1] + re.sub(r"[^\n]", "_", text[width or 1 : end]) + text[end:]
