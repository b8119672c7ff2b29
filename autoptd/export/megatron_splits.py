"""Differences between the plan's placements and Megatron-LM's tensor parallelism.

Megatron-LM (Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.2): in every layer the projections to
heads and to the FFN width are column-parallel, those back to the hidden width row-parallel. The embedding and the
output layer are split by the vocabulary. Norms, biases of row-parallel layers and position embeddings are replicated.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from autoptd.export.layers import Layers
from autoptd.export.roles import SplitModule, read_parts
from autoptd.plans.model import Plan
from autoptd.text import fold_table

_SHOWN = 8


def split_differences(plan: Plan, model: nn.Module, layers: Layers) -> list[str]:
    """Return a sentence per folded group of parameters with other placements. Raises PlanError for another model."""
    if plan.mesh.tp == 1:
        return []
    parts = read_parts(plan, model)
    rows = [
        (name, f"{text}: Megatron-LM's is {theirs}")
        for part in parts
        for name, text, theirs in _of_part(part, model, layers)
        if text.replace("Bp", "B").split("/")[0] != theirs
    ]
    lines = [f"{name} is {text}" for name, text in fold_table(dict.fromkeys(rows))]
    return [*lines[:_SHOWN], f"and {len(lines) - _SHOWN} more placements"] if len(lines) > _SHOWN else lines


def _of_part(part: SplitModule, model: nn.Module, layers: Layers) -> Iterator[tuple[str, str, str]]:
    """Yield (parameter, the plan's placement, Megatron-LM's)."""
    module = model.get_submodule(part.path)
    inside = part.path.startswith(f"{layers.stack}." if layers.stack else "") and _within(part.path, layers)
    for name, text in part.tensors:
        leaf = name.rpartition(".")[2]
        if part.kind == "other" and getattr(module, leaf).dim() == 3:
            continue  # experts, which have arguments of their own
        yield name, text, _theirs(part, leaf, module, model, inside)


def _within(path: str, layers: Layers) -> bool:
    rest = path.removeprefix(f"{layers.stack}." if layers.stack else "")
    return rest.split(".")[0].isdecimal()


def _theirs(part: SplitModule, leaf: str, module: nn.Module, model: nn.Module, inside: bool) -> str:
    if part.kind == "embedding":
        return "S0" if _is_first_table(part.path, model) else "B"
    if part.kind == "other":
        return "B"
    column = not inside or not _is_output(part.path, module, model)
    out_dim, in_dim = (1, 0) if part.kind == "transposed" else (0, 1)
    if leaf == "bias":
        return "S0" if column else "B"
    return f"S{out_dim}" if column else f"S{in_dim}"


def _is_first_table(path: str, model: nn.Module) -> bool:
    """Return whether this is the vocabulary's embedding, which is the first one whatever its name."""
    return path == next(name for name, module in model.named_modules() if isinstance(module, nn.Embedding))


def _is_output(path: str, module: nn.Module, model: nn.Module) -> bool:
    """Return whether a linear layer is its parent's last: attention's output projection, the MLP's second layer."""
    parent, _, _ = path.rpartition(".")
    linear = [name for name, child in model.get_submodule(parent).named_children() if type(child) is type(module)]
    return len(linear) > 1 and path.rpartition(".")[2] == linear[-1]
