"""Wrapping of long lines of source at the arguments of the outermost call."""

from __future__ import annotations

from autoptd.codegen.quoting import code_of

WIDTH = 120


def wrapped(source: str) -> str:
    """Wrap long statements over several lines; a comment stays on the first."""
    return "\n".join(text for line in source.split("\n") for text in _wrap(line))


def _wrap(line: str) -> list[str]:
    width = len(code_of(line).partition("  #")[0])
    code, comment = line[:width], line[width:]
    span = _outermost(code)
    if len(line) <= WIDTH or span is None or '"""' in code:
        return [line]
    start, end = span
    indent = " " * (len(code) - len(code.lstrip()))
    arguments = code[start + 1 : end]
    inner = [f"{indent}    {arguments}"]
    if len(inner[0]) > WIDTH or code.lstrip().startswith("def "):
        inner = [f"{indent}    {part}," for part in _parts(arguments)]
    return [code[: start + 1] + comment, *inner, indent + code[end:]]


def _outermost(code: str) -> tuple[int, int] | None:
    """Return the positions of the first parenthesis and its closing one; None if there is nothing between them."""
    plain = code_of(code)
    depth, start = 0, plain.find("(")
    for i in range(max(start, 0), len(code)):
        depth += (plain[i] in "([{") - (plain[i] in ")]}")
        if depth == 0:
            return (start, i) if start >= 0 and i > start + 1 else None
    return None


def _parts(arguments: str) -> list[str]:
    """Split arguments at commas outside brackets."""
    depth, parts = 0, [""]
    for character, plain in zip(arguments, code_of(arguments), strict=True):
        depth += (plain in "([{") - (plain in ")]}")
        if plain == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]
