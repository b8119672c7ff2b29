"""Strings of files as they are shown: none of them moves a cursor, or poses as a line of ours."""

from __future__ import annotations


def printable(text: str, keep: str = "\n") -> str:
    r"""The text with every character escaped that has no form of its own: `\x1b` for an escape, `\u202e` for a
    bidirectional override, `\ud800` for a surrogate. Those in `keep` stay; `keep=""` makes one line of it.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)
