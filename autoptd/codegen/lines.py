"""Text as a docstring may hold it; and what is too long for a line, broken at the arguments of its outermost call."""

from __future__ import annotations

WIDTH = 120


def in_docstring(text: str) -> str:
    """Text from a plan file, as a docstring may hold it: nothing in it ends the string or the line."""
    escaped = (c if c.isprintable() and c != "\\" else c.encode("unicode_escape").decode() for c in text)
    return "".join(escaped).replace('"', r"\"")


def wrapped(source: str) -> str:
    """The source with long statements over several lines; a comment stays with the first."""
    return "\n".join(text for line in source.split("\n") for text in _wrap(line))


def _wrap(line: str) -> list[str]:
    code, mark, comment = line.partition("  # ")
    span = _outermost(code)
    if len(line) <= WIDTH or span is None or '"""' in code:
        return [line]
    start, end = span
    indent = " " * (len(code) - len(code.lstrip()))
    arguments = code[start + 1 : end]
    inner = [f"{indent}    {arguments}"]
    if len(inner[0]) > WIDTH or code.lstrip().startswith("def "):
        inner = [f"{indent}    {part}," for part in _parts(arguments)]
    return [code[: start + 1] + mark + comment, *inner, indent + code[end:]]


def _outermost(code: str) -> tuple[int, int] | None:
    """Where the first parenthesis opens and closes."""
    depth, start = 0, code.find("(")
    for i in range(max(start, 0), len(code)):
        depth += (code[i] in "([{") - (code[i] in ")]}")
        if depth == 0:
            return (start, i) if start >= 0 and i > start + 1 else None
    return None


def _parts(arguments: str) -> list[str]:
    """Arguments, cut at the commas that are in no bracket."""
    depth, parts = 0, [""]
    for character in arguments:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]
