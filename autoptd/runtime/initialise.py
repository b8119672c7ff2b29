"""Initial values of parameters: the model's own, or, for tensors on meta, those of its modules' initialisers.

The initialisers are rerun for the tensors of one module at a time, in a copy of the model whose other tensors are on
meta, where initialisation has no effect:

    1. the module's reset_parameters, then that of each enclosing module, innermost first
    2. `_init_weights(module)` of the nearest module that defines it, on the module and on each enclosing one up to that
       one, innermost first (GPT-2's attention and MLP rescale the residual projections within them)

The random seed is derived from (seed, the module's dotted name). Every stage of every plan that holds a part of a
module therefore starts from the same values, and a process holds at most one module's tensors besides its own.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autoptd.errors import PlanError
from autoptd.layout.layout import Layout
from autoptd.runtime.batch import digest
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.lazy_tensor import Stored

_SHOWN = 12  # tensors named in an error
_WORD = 8  # bytes that are added at once
_PARTS = 1024  # of a tensor, which are summed by themselves: their order counts


def values_for(
    model: nn.Module, names: Iterable[str], seed: int, extra: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return full values of the named parameters and buffers; tied names share one tensor.

    `extra`: values outside the model's tensors, such as constants. Raises PlanError naming tensors without a value.
    """
    first: dict[int, str] = {}
    canonical = {n: first.setdefault(id(p), n) for n, p in model.named_parameters(remove_duplicate=False)}
    asked = list(names)
    wanted = dict.fromkeys(canonical.get(n, n) for n in asked)
    held = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    found: dict[str, Tensor] = {n: x for n, x in (extra or {}).items() if n in wanted}
    found |= {n: held[n].detach() for n in wanted if n in held and not held[n].is_meta}
    empty = [n for n in wanted if n not in found]
    if empty:
        outline = _outline(model)
        for path in dict.fromkeys(n.rpartition(".")[0] for n in empty):
            found |= {n: x for n, x in _initialised(outline, path, seed).items() if n in wanted and n not in found}
    missing = [n for n in empty if n not in found]
    if missing:
        more = [f"and {len(missing) - _SHOWN} more"] if len(missing) > _SHOWN else []
        raise PlanError(
            f"{len(missing)} tensors of a model on the meta device have no initialiser",
            where="\n".join([*missing[:_SHOWN], *more]),
            fix="give the modules that own them reset_parameters(), or build the model on the CPU, where it has values",
        )
    return {n: found[canonical.get(n, n)] for n in asked}


def check_same_values(values: Mapping[str, Tensor | Stored], layout: Layout, c: Communicators) -> None:
    """Compare the ranks' values of each tensor, by a digest. Collective. Raises PlanError naming those that differ.

    `values`: full tensors by name, also of other stages. Those on meta or in files are not compared.
    """
    specs = {**layout.parameters, **layout.buffers}
    if c.world.size == 1 or not specs:
        return
    least = torch.full((2, len(specs)), -(2**20), dtype=torch.int64)
    for place, name in enumerate(specs):
        x = values.get(name)
        if isinstance(x, Tensor) and x.numel() and not x.is_meta:
            number = int(_digest(x.detach()))
            least[0, place], least[1, place] = number, -number
    most, minus_least = c.world.all_reduce(least.to(c.device), "max").tolist()
    held = zip(specs, most, minus_least, strict=True)
    if wrong := [name for name, high, low in held if high != -low and low != -(2**20)]:
        more = [f"and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
        raise PlanError(
            "the model has other values on some ranks than on others",
            where="\n".join([*wrong[:_SHOWN], *more]),
            fix="build the model alike on all ranks: torch.manual_seed(0) before it is made, the same file of weights "
            "after; or build it on meta, where seed= gives the values",
        )


def _digest(x: Tensor) -> Tensor:
    """Hash all bytes of a tensor as `digest` does, at the speed of memory: sums of its parts, by eight bytes."""
    x = torch.view_as_real(x) if x.is_complex() else x
    flat = x.contiguous().reshape(-1).view(torch.uint8)
    flat = flat.clone() if flat.storage_offset() % _WORD else flat
    words = flat[: len(flat) // _WORD * _WORD].view(torch.int64)
    size = max(1, len(words) // _PARTS)
    even = len(words) // size * size
    parts = (words[:even].view(-1, size).sum(1), words[even:], flat[len(words) * _WORD :])
    return digest([part for part in parts if len(part)])


def _outline(model: nn.Module) -> nn.Module:
    """Return a copy of the model with every tensor on meta."""
    memo: dict[int, Any] = {}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
    for b in model.buffers():
        memo[id(b)] = torch.empty_like(b, device="meta")
    return copy.deepcopy(model, memo)


def _initialised(outline: nn.Module, path: str, seed: int) -> dict[str, Tensor]:
    """Return a module's own tensors as its initialisers set them, without those that they do not write."""
    made = _run(outline, path, seed, fill=False)
    if any(x.dtype == torch.bool for x in made.values()):  # no boolean value marks an element as unwritten
        other = _run(outline, path, seed, fill=True)
        made = {n: x for n, x in made.items() if x.dtype != torch.bool or torch.equal(x, other[n])}
    return {n: x for n, x in made.items() if not _has_blanks(x)}


def _run(outline: nn.Module, path: str, seed: int, *, fill: bool) -> dict[str, Tensor]:
    """Run a module's initialisers; return its own tensors by full name. The outline is restored."""
    owner = outline.get_submodule(path)
    parameters, buffers = owner._parameters, owner._buffers
    owner._parameters = {
        k: None if p is None else nn.Parameter(_blank(p, fill), p.requires_grad) for k, p in parameters.items()
    }
    owner._buffers = {k: None if b is None else _blank(b, fill) for k, b in buffers.items()}
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
            torch.manual_seed(_module_seed(seed, path))
            _run_initialisers(outline, path)
        prefix = f"{path}." if path else ""
        made = {**owner._parameters, **owner._buffers}
        return {prefix + k: x.detach() for k, x in made.items() if x is not None}
    finally:
        owner._parameters, owner._buffers = parameters, buffers


def _run_initialisers(model: nn.Module, path: str) -> None:
    """Run steps 1 and 2 for the module at `path`."""
    parts = path.split(".") if path else []
    around = [model.get_submodule(".".join(parts[:length])) for length in range(len(parts), -1, -1)]
    for module in around:
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if callable(reset):
            reset()
    whole = next((i for i, m in enumerate(around) if callable(getattr(m, "_init_weights", None))), None)
    if whole is not None:
        for module in around[: whole + 1]:
            around[whole]._init_weights(module)  # type: ignore[operator]


def _module_seed(seed: int, path: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{path}".encode()).digest()[:7], "big")


def _blank(x: Tensor, fill: bool) -> Tensor:
    """Return a tensor of a value that marks unwritten elements: NaN or the least integer; `fill` for booleans."""
    empty = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    if x.dtype == torch.bool:
        return empty.fill_(fill)
    return empty.fill_(float("nan") if x.is_floating_point() or x.is_complex() else torch.iinfo(x.dtype).min)


def _has_blanks(x: Tensor) -> bool:
    if x.dtype == torch.bool or x.numel() == 0:
        return False
    if x.is_floating_point() or x.is_complex():
        return bool(x.isnan().any())
    return bool((x == torch.iinfo(x.dtype).min).any())
