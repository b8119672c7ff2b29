"""A plan's tensor splits as styles of `torch.distributed.tensor.parallel`.

    role in the plan          style                                               placement of parameters
    column, first of a pair   ColwiseParallel()                                   S0, bias S0
    row, last of a pair       RowwiseParallel(output_layouts=hidden)              S1, bias B
    column, last of a pair    ColwiseParallel(input_layouts=Shard(-1), output_…)  S0, bias S0
    column, alone (a head)    ColwiseParallel(input_layouts=hidden, output_…)     S0
    table by rows             RowwiseParallel(input_layouts=Replicate(), …)       S0
    table by hidden size      ColwiseParallel(output_layouts=hidden)              S1
    norm on a split tensor    SequenceParallel()                                  B

hidden is Shard(1) if the plan splits hidden states by sequence, else Replicate(). Modules that these styles cannot
split (fused layers by groups, `Conv1D`, bare parameters) are replicated. A sequence-parallel plan that needs one of
them is exported without sequence parallelism: on a slice of the sequence their gradient would be a partial value.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from glob import escape

from torch import nn

from autoptd.export.layers import Layers, collectives_differ, is_sequence_parallel
from autoptd.export.roles import SplitModule, read_parts
from autoptd.plans.model import Plan
from autoptd.text import fold_table

_WHOLE, _LAST = "Replicate()", "Shard(-1)"
_ENDS = ("input", "output")
_SHOWN = 8


@dataclass(frozen=True)
class Styles:
    """Styles by folded module name, modules whose input is gathered once, and differences from the plan."""

    styles: dict[str, str]
    gathered: tuple[str, ...]
    differs: tuple[str, ...]


@dataclass(frozen=True)
class _Style:
    text: str
    weight: str  # the weight's placement under the style
    bias: str


def styles_of(plan: Plan, model: nn.Module, layers: Layers) -> Styles:
    """Return the styles of a plan; none if tp is 1. Raises PlanError if the plan is of another model."""
    parts = read_parts(plan, model)
    if plan.mesh.tp == 1:
        return Styles({}, (), ())
    obstacle = _obstacle(parts, model, layers)
    planned = is_sequence_parallel(plan, layers)
    found, gathered = _decide(parts, model, layers, plan.mesh.tp, planned and not obstacle)
    styles = _folded({path: style.text for path, style in found.items()}, layers)
    lines = [f"sequence parallelism is left out: {obstacle}"] if planned and obstacle else []
    inside = [style.text for path, style in found.items() if _is_inside(path, layers)]
    lines += collectives_differ(plan, layers, _collectives(inside, len(gathered), layers.count), "the program's")
    return Styles(
        styles,
        tuple(_folded(dict.fromkeys(gathered, ""), layers)),
        (*lines, *_differences(parts, found)),
    )


def _is_inside(path: str, layers: Layers) -> bool:
    prefix = f"{layers.stack}." if layers.stack else ""
    return path.startswith(prefix) and path.removeprefix(prefix).split(".")[0].isdecimal()


def _can_split(part: SplitModule) -> bool:
    return part.kind in ("linear", "embedding") and part.groups == 1 and part.role != "whole"


def _is_norm(part: SplitModule, model: nn.Module) -> bool:
    module = model.get_submodule(part.path)
    return part.kind == "other" and all(p.dim() == 1 for p in module.parameters(recurse=False))


def _obstacle(parts: list[SplitModule], model: nn.Module, layers: Layers) -> str:
    """Return why hidden states cannot be split by sequence; "" if they can."""
    if type(model).__module__.startswith("transformers."):
        return "models of transformers derive positions from the length of the hidden states"
    tables = [part.path for part in parts if part.kind == "embedding"]
    if len(tables) != 1:
        return f"the model must have one embedding table, and has {' and '.join(tables) or 'none'}"
    for part in parts:
        if _is_inside(part.path, layers) and not _can_split(part) and not _is_norm(part, model):
            return f"{part.path} is replicated ({part.text_of('weight') or 'no weight'})"
    return ""


def _decide(
    parts: list[SplitModule], model: nn.Module, layers: Layers, tp: int, sequence: bool
) -> tuple[dict[str, _Style], list[str]]:
    hidden = "Shard(1)" if sequence else _WHOLE
    found: dict[str, _Style] = {}
    gathered: list[str] = []
    groups = _groups(parts, layers)
    for part in parts:
        inside = _is_inside(part.path, layers)
        group = groups.get(part.parent, []) if inside else []
        if part.kind == "embedding":
            style = _table(part, model, tp, hidden, sequence)
        elif _is_norm(part, model):
            style = _norm(part, bool(group), sequence and not group)
        elif inside:
            style = _linear(part, group, hidden, _is_unit(part.parent, layers))
        else:
            style = _head(part, model, tp, hidden, sequence)
        if style is not None:
            found[part.path] = style
    if sequence:
        gathered = [parent for parent, group in groups.items() if _is_chain(group) and not _is_unit(parent, layers)]
    return found, gathered


def _is_unit(path: str, layers: Layers) -> bool:
    """Return whether a module is a whole layer: its input is the hidden state, which its norms need split."""
    return path.count(".") == layers.path(0).count(".")


def _groups(parts: list[SplitModule], layers: Layers) -> dict[str, list[SplitModule]]:
    """Return linear layers inside layers by parent, omitting parents with one that cannot be split as planned."""
    groups: dict[str, list[SplitModule]] = {}
    for part in parts:
        if part.kind in ("linear", "transposed") and _is_inside(part.path, layers):
            groups.setdefault(part.parent, []).append(part)
    return {parent: group for parent, group in groups.items() if all(_can_split(part) for part in group)}


def _is_chain(group: list[SplitModule]) -> bool:
    """Return whether column-parallel layers feed the group's last layer, which is usually row-parallel."""
    return len(group) > 1 and all(part.role == "column" for part in group[:-1])


def _linear(part: SplitModule, group: list[SplitModule], hidden: str, parent_is_layer: bool) -> _Style | None:
    if not group:
        return None
    style = _column if part.role == "column" else _row
    if not _is_chain(group):
        return style(hidden, hidden)
    if part is group[-1]:
        return style(_LAST, hidden)
    return _column(hidden if parent_is_layer else _WHOLE, _LAST)


def _head(part: SplitModule, model: nn.Module, tp: int, hidden: str, sequence: bool) -> _Style | None:
    if part.kind != "linear" or (not _can_split(part) and not sequence):
        return None
    by_row = part.role == "row" or (part.role == "whole" and not _rows_divide(part, model, tp))
    return _row(hidden, _WHOLE) if by_row else _column(hidden, _WHOLE)


def _table(part: SplitModule, model: nn.Module, tp: int, hidden: str, sequence: bool) -> _Style | None:
    if part.role == "whole" and not sequence:
        return None
    by_hidden = part.text_of("weight") == "S1" or (part.role == "whole" and not _rows_divide(part, model, tp))
    style = _column(_WHOLE, hidden) if by_hidden else _row(_WHOLE, hidden)
    return _Style(style.text, "S1" if by_hidden else "S0", "")


def _rows_divide(part: SplitModule, model: nn.Module, tp: int) -> bool:
    weight = model.get_submodule(part.path).weight
    assert isinstance(weight, nn.Parameter)
    return weight.shape[0] % tp == 0


def _norm(part: SplitModule, in_group: bool, sequence: bool) -> _Style | None:
    """Return the style of a norm. A norm of heads, inside attention, has [b, s, heads, head size] split in dim 2."""
    if in_group and any(text == "Bp" for _, text in part.tensors):
        return _Style("SequenceParallel(sequence_dim=2, use_local_output=True)", "B", "B")
    return _Style("SequenceParallel()", "B", "B") if sequence else None


def _column(given: str, gives: str) -> _Style:
    return _Style(f"ColwiseParallel({_layouts((given, _WHOLE), (gives, _LAST))})", "S0", "S0")


def _row(given: str, gives: str) -> _Style:
    return _Style(f"RowwiseParallel({_layouts((given, _LAST), (gives, _WHOLE))})", "S1", "B")


def _layouts(given: tuple[str, str], gives: tuple[str, str]) -> str:
    """Return the keyword arguments for pairs of a layout and the style's default, without those at their default."""
    pairs = (("input_layouts", *given), ("output_layouts", *gives))
    return ", ".join(f"{name}={layout}" for name, layout, default in pairs if layout != default)


def _collectives(styles: list[str], gathered: int, layers: int) -> dict[str, float]:
    """Return the forward collectives of the styles, per layer. A column-parallel output that stays split needs none."""
    counts = Counter({"all_gather": gathered})
    for text in styles:
        given, gives = (
            match[1] if (match := re.search(rf"{end}_layouts=(\w+\(-?\d*\))", text)) else "" for end in _ENDS
        )
        if text.startswith("ColwiseParallel"):
            counts["all_gather"] += given.startswith("Shard")
            counts["all_gather"] += gives == _WHOLE
            counts["all_to_all"] += gives == "Shard(1)"
        elif text.startswith("RowwiseParallel"):
            counts["all_to_all"] += given == "Shard(1)"
            counts["reduce_scatter" if gives == "Shard(1)" else "all_reduce"] += 1
    return {name: counts[name] / layers for name in sorted(counts) if counts[name]}


def _folded(styles: dict[str, str], layers: Layers) -> dict[str, str]:
    """Fold names whose style is the same in all layers to `layers.*.q_proj`; escape the others as patterns."""
    prefix = re.escape(f"{layers.stack}." if layers.stack else "")
    pattern = re.compile(rf"^{prefix}\d+(?=\.|$)")

    def folded(path: str) -> str:
        match = pattern.match(path)
        return escape(path) if match is None else layers.pattern + escape(path[match.end() :])

    counts = Counter((folded(path), text) for path, text in styles.items())
    found: dict[str, str] = {}
    for path, text in styles.items():
        name = folded(path)
        found.setdefault(name if counts[name, text] == layers.count else escape(path), text)
    return found


def _differences(parts: list[SplitModule], found: dict[str, _Style]) -> Iterator[str]:
    rows: dict[tuple[str, str], None] = {}
    for part in parts:
        style = found.get(part.path)
        for name, text in part.tensors:
            placed = "B" if style is None else style.bias if name.endswith("bias") else style.weight
            if text.replace("Bp", "B") != placed:
                rows[name, f"{text} in the plan, {placed} in this program"] = None
    lines = [f"{name} is {text}" for name, text in fold_table(rows)]
    yield from lines[:_SHOWN]
    if len(lines) > _SHOWN:
        yield f"and {len(lines) - _SHOWN} more placements"
