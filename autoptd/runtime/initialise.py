"""Where parameters get their first values: the model's own, or, on meta, its modules' own initialisers.

Each module is initialised by itself, whole, from a seed made of (seed, its dotted name): any stage of any plan that
holds a part of it starts from the same numbers, and no process ever holds more than one module's tensors besides its own.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from autoptd.errors import PlanError


def values_for(
    model: nn.Module, names: Iterable[str], seed: int, extra: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Full values of the named parameters and buffers. Raises PlanError naming every tensor that has none.

    `extra`: values that are no tensors of the model, such as constants.
    """
    wanted = dict.fromkeys(names)
    held = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    found: dict[str, Tensor] = {n: x for n, x in (extra or {}).items() if n in wanted}
    found |= {n: held[n].detach() for n in wanted if n in held and not held[n].is_meta}
    empty = [n for n in wanted if n not in found]
    for path in dict.fromkeys(n.rpartition(".")[0] for n in empty):
        found |= {n: x for n, x in _initialised(model, path, seed).items() if n in wanted}
    missing = [n for n in empty if n not in found]
    if missing:
        raise PlanError(
            f"{len(missing)} tensors of a model on the meta device have no initialiser",
            where="\n".join(missing[:20]),
            fix="give their modules reset_parameters(), or build the model on the CPU",
        )
    return found


def _initialised(model: nn.Module, path: str, seed: int) -> dict[str, Tensor]:
    """The tensors that one module owns itself, made by its own initialiser; those it leaves alone are left out."""
    owner = model.get_submodule(path)
    module = copy.copy(owner)
    module.__dict__ = dict(owner.__dict__)
    parameters = {k: p for k, p in owner._parameters.items() if p is not None}
    buffers = {k: b for k, b in owner._buffers.items() if b is not None}
    module._parameters = {k: nn.Parameter(_blank(p), p.requires_grad) for k, p in parameters.items()}
    module._buffers = {k: _blank(b) for k, b in buffers.items()}
    module._modules = {}
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
        torch.manual_seed(_module_seed(seed, path))
        _run_initialiser(model, path, module)
    made = {**module._parameters, **module._buffers}
    prefix = f"{path}." if path else ""
    return {prefix + k: x.detach() for k, x in made.items() if x is not None and not _is_blank(x)}


def _run_initialiser(model: nn.Module, path: str, module: nn.Module) -> None:
    """`reset_parameters` where there is one, and then what the model does to its modules, as Hugging Face models do."""
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()
    parts = path.split(".") if path else []
    for length in range(len(parts), -1, -1):
        ancestor = model.get_submodule(".".join(parts[:length]))
        whole = getattr(ancestor, "_init_weights", None)
        if callable(whole):
            whole(module)
            return


def _module_seed(seed: int, path: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{path}".encode()).digest()[:7], "big")


def _blank(x: Tensor) -> Tensor:
    """A tensor full of a value that no initialiser leaves: NaN, or the least integer."""
    empty = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    if x.dtype == torch.bool:
        return empty.zero_()
    return empty.fill_(float("nan") if x.is_floating_point() or x.is_complex() else torch.iinfo(x.dtype).min)


def _is_blank(x: Tensor) -> bool:
    if x.dtype == torch.bool or x.numel() == 0:
        return False
    return bool(x.isnan().any()) if x.is_floating_point() or x.is_complex() else bool((x == torch.iinfo(x.dtype).min).any())
