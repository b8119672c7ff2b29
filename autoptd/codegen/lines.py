"""Comments of lines that communicate, and wrapping of long lines at the arguments of the outermost call."""

from __future__ import annotations

from torch import fx

from autoptd.codegen.quoting import code_of
from autoptd.layout.placements import Placement, Split, conversion
from autoptd.ops import library as ops
from autoptd.passes.graph import info
from autoptd.passes.rules.factors import Strategy

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


def conversion_args(given: Placement, needed: Placement) -> list[str]:
    """Return the arguments of the axis' method after the tensor."""

    def dim(split: Split) -> list[str]:
        return [f"dim={split.dim}"] + ([f"groups={split.groups}"] if split.groups > 1 else [])

    match given, needed:
        case Split(), Split():
            return [f"source=({given.dim}, {given.groups})", f"target=({needed.dim}, {needed.groups})"]
        case Split(), _:
            return dim(given)
        case _, Split():
            return dim(needed)
        case _:
            return []


def conversion_note(given: Placement, needed: Placement, grad: bool) -> str:
    """Return a comment such as `S1 -> Bp: all-gather; backward reduce-scatter`."""
    row = conversion(given, needed)
    forward = (row.forward or "local").replace("_", "-")
    backward = (row.backward or "local").replace("_", "-")
    return f"{given} -> {needed}: {forward}" + (f"; backward {backward}" if grad else "")


def implementation_note(strategy: Strategy) -> str:
    """Return a comment such as `vocabulary-parallel: S2, B -> B, all-reduce × 2`."""
    word = strategy.implementation.replace("vocab_", "vocabulary-").replace("own_", "own ")
    issued = [name.replace("_", "-") for name, _ in strategy.collectives]
    return f"{word}: {str(strategy).split(' [')[0]}" + (f", {', '.join(issued)}" if issued else ", local")


def summed_note(node: fx.Node) -> str:
    """Return the comment of a sum over the batch; "" for other ops."""
    if node.target is not ops.sum_over_batch:
        return ""
    return "  # over all samples: all-reduce over dp" + "; backward all-reduce" * info(node).requires_grad
