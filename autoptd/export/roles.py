"""Roles of modules in systems that split by type of module: column- or row-parallel layer, table, replicated.

    role        weight of y = x Wᵀ  [out, in]    of y = x W  [in, out]    collective
    column      S0                               S1                       none after it: y is split
    row         S1                               S0                       all-reduce of y
    table       S0 by rows, S1 by hidden size                             all-reduce, or all-gather
    whole       B, Bp                                                     none

(Shoeybi et al. 2019, section 3: a pair of a column- and a row-parallel layer needs one all-reduce each way.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import nn

from autoptd.errors import PlanError
from autoptd.layout.placements import Split, parse_placement
from autoptd.plans.model import Plan

Role = Literal["column", "row", "table", "whole"]
_TRANSPOSED = "Conv1D"  # transformers' name for a linear layer whose weight is [in, out]


@dataclass(frozen=True)
class SplitModule:
    """A module that holds parameters of its own, and its placement in the plan.

    path       "model.layers.0.self_attn.q_proj"
    kind       "linear" (weight [out, in]), "transposed" (weight [in, out]), "embedding", or "other"
    role       given by the placement of its weight
    groups     groups of the split: 3 for a fused query-key-value layer that is split by heads
    tensors    pairs of a parameter's name and its placement in the plan
    """

    path: str
    kind: Literal["linear", "transposed", "embedding", "other"]
    role: Role
    groups: int
    tensors: tuple[tuple[str, str], ...]

    @property
    def parent(self) -> str:
        return self.path.rpartition(".")[0]

    def text_of(self, leaf: str) -> str:
        """Return the plan's placement of `weight` or `bias`; "" if there is none."""
        return dict(self.tensors).get(f"{self.path}.{leaf}" if self.path else leaf, "")


def read_parts(plan: Plan, model: nn.Module) -> list[SplitModule]:
    """Return all modules with parameters, in module order. Raises PlanError if the plan is of another model."""
    check_names(plan, model)
    return list(_parts(plan, model))


def check_names(plan: Plan, model: nn.Module) -> None:
    """Raise PlanError if the plan is of another model."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if missing := sorted(set(plan.splits.parameters) - names):
        raise PlanError(
            f"the plan splits {missing[0]}, which the model lacks ({len(missing)} in all)",
            where="splits.parameters",
            fix="give the model that the plan was made for: --model MODEL",
        )


def _parts(plan: Plan, model: nn.Module) -> Iterator[SplitModule]:
    planned = plan.splits.parameters
    canonical = {id(p): name for name, p in model.named_parameters(remove_duplicate=False) if name in planned}
    for path, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if not own:
            continue
        dot = f"{path}." if path else ""
        tensors = tuple((dot + leaf, planned[canonical[id(p)]]) for leaf, p in own.items() if id(p) in canonical)
        kind = _kind(module)
        weight = dict(tensors).get(f"{dot}weight", "B")
        role, groups = _role(kind, weight)
        yield SplitModule(path, kind, role, groups, tensors)


def _kind(module: nn.Module) -> Literal["linear", "transposed", "embedding", "other"]:
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, nn.Embedding):
        return "embedding"
    return "transposed" if type(module).__name__ == _TRANSPOSED else "other"


def _role(kind: str, weight: str) -> tuple[Role, int]:
    match parse_placement(weight), kind:
        case Split(groups=groups), "embedding":
            return "table", groups
        case Split(dim=dim, groups=groups), "linear" | "transposed":
            return ("column" if dim == (kind == "transposed") else "row"), groups
        case _:
            return "whole", 1


def tied(model: nn.Module) -> dict[str, str]:
    """Return, for each further name of a tied parameter, the tensor's first name."""
    first: dict[int, str] = {}
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        source = first.setdefault(id(parameter), name)
        if source != name:
            found[name] = source
    return found
