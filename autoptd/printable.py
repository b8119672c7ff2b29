"""Escaping of text from files before it is printed, so that it cannot move a cursor or pose as autoptd's output."""

from __future__ import annotations


def printable(text: str, keep: str = "\n") -> str:
    r"""Escape every character that is not printable: `\x1b` for an escape, `\u202e` for a bidirectional override,
    `\ud800` for a surrogate. Characters in `keep` stay as they are; `keep=""` returns a single line.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)
