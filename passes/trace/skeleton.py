"""Data-free copy of a model, traced in place of the user's model.

Norms of torch whose forward reads numbers at run time are prepared to be traced:

    momentum=None     divides by the number of steps: NaN in its place, which `rewrites/batch_norm.py` knows
    SyncBatchNorm     takes statistics over the ranks of a process group: traced as BatchNorm, whose statistics are
                      those of the whole batch under every plan
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from inspect import signature
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from autoptd.errors import InputsError, TraceError
from autoptd.passes.kept.copies import ModelCopy
from autoptd.passes.objectives.loss_modules import constants
from autoptd.passes.trace.traced import PRECISIONS


def skeleton(
    model: nn.Module, loss: object, precision: str, device: str, mode: AbstractContextManager[Any]
) -> ModelCopy:
    """Return a copy of the model without data, floating-point parameters in `precision`; tied parameters stay tied.

    A loss that is a module is copied with its constants, in the precision.

    Parameters and buffers are created under `mode`. Other tensor attributes keep their values, except those computed
    from parameters (the weight of a weight-normed layer): these are recomputed, or refused when they are read.
    """
    dtype = PRECISIONS[precision]
    memo: dict[int, Any] = {}
    with mode:
        for x in computed_tensors(model):
            memo[id(x)] = nn.Parameter(torch.empty(x.shape, dtype=dtype, device=device))
        for p in model.parameters():
            own = dtype if p.is_floating_point() else p.dtype
            memo[id(p)] = nn.Parameter(torch.empty(p.shape, dtype=own, device=device), requires_grad=p.requires_grad)
        for b in model.buffers():
            memo[id(b)] = torch.empty(b.shape, dtype=b.dtype, device=device)
    copies = ModelCopy(model, loss, memo | constants(loss, dtype, memo))
    prepare_norms(without_caches(copies.model))
    return copies


@torch.no_grad()
def settle(model: nn.Module, run: Callable[[], Any]) -> None:
    """Run a forward pass for the modules that it puts in place of others; buffers keep their values.

    Such as a block of BigBird, which attends to all tokens where a batch has few, from its first pass on. Raises
    InputsError if the model has other parameters afterwards.
    """
    held, trained = {name: b.clone() for name, b in model.named_buffers()}, dict(model.named_parameters())
    with suppress(Exception):  # modules may be replaced, and data be read later
        run()
    now = dict(model.named_parameters())
    if changed := next((n for n in now.keys() | trained.keys() if now.get(n) is not trained.get(n)), ""):
        raise InputsError("the first pass of forward changes which parameters the model has", where=changed)
    for name, b in model.named_buffers():
        if name in held:
            b.copy_(held[name])


def computed_tensors(model: nn.Module) -> list[Tensor]:
    """Return the tensor attributes of modules that require a gradient and are not parameters."""
    values = [value for module in model.modules() for value in vars(module).values()]
    return [x for x in values if isinstance(x, Tensor) and x.requires_grad]


def without_caches(model: nn.Module) -> nn.Module:
    """Disable the key-value caches of Hugging Face models: generation reads them, the loss does not.

    Raises TraceError where several places share an entry of the cache: the later one reads the earlier one's keys.
    """
    if shared := list(_sharing_entries(model)):
        raise TraceError(
            "layers with the same layer_idx share an entry of the key-value cache, which is made in training "
            "too: the later layer would attend to the keys of the earlier one as well",
            where="\n".join(shared),
            fix="set model.config.use_cache = False, or give each layer a layer_idx of its own",
        )
    for config in _caching(model):
        config.use_cache = False
    return model


def _sharing_entries(model: nn.Module) -> Iterator[str]:
    """Yield the paths of modules that have the number of another one, by which the cache of both knows them.

    Beside gradient checkpointing, transformers makes no cache. A module that is called with a number (Zamba's shared
    blocks) does not use its own.
    """
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        return
    found: dict[tuple[str, int], list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        number = None if "layer_idx" in signature(module.forward).parameters else getattr(module, "layer_idx", None)
        if isinstance(number, int) and getattr(getattr(module, "config", None), "use_cache", None) is True:
            found.setdefault((re.sub(r"\d+", "", path), number), []).append(path)
    yield from (f"{', '.join(paths)}: layer_idx {n}" for (_, n), paths in found.items() if len(paths) > 1)


def _caching(model: nn.Module) -> list[Any]:
    """Return the configurations of a model's modules that ask for a key-value cache."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    return [config for config in configs if getattr(config, "use_cache", None) is True]


@contextmanager
def refuse_packing_beside_cache(model: nn.Module, inputs: Collection[str]) -> Iterator[None]:
    """Wrap a trace of a copy of `model` made by `without_caches`: refuse packed sequences that `model` does not see.

    transformers reads from `position_ids` which tokens belong together, but only where no cache is made. The trace
    would therefore keep sequences apart that the user's model, with its cache, does not. Raises InputsError.
    `find_packed_sequence_indices` is private to transformers (seen in 5.23).
    """
    masks, reader = sys.modules.get("transformers.masking_utils"), "find_packed_sequence_indices"
    if "position_ids" not in inputs or not hasattr(masks, reader) or not _caching(model):
        yield
        return

    def refuse(*_: object, **__: object) -> None:
        raise InputsError(
            "position_ids are given to a model with config.use_cache=True: where transformers makes a cache, it "
            "ignores that positions start again, and packed sequences see each other",
            where="position_ids",
            fix="set model.config.use_cache = False to keep packed sequences apart; or pass attention_mask as well, "
            "which says the same for all tokens of a row",
        )

    kept = getattr(masks, reader)
    setattr(masks, reader, refuse)
    try:
        yield
    finally:
        setattr(masks, reader, kept)


def prepare_norms(model: nn.Module) -> nn.Module:
    """Prepare the batch norms of a skeleton; a subclass with a forward of its own stays as it is."""
    for module in model.modules():
        if not isinstance(module, _BatchNorm) or type(module).forward not in _TORCHS:
            continue
        if module.momentum is None and module.training and module.track_running_stats:
            module.momentum = math.nan
        module.forward = MethodType(_BatchNorm.forward, module)  # type: ignore[method-assign]
    return model


_TORCHS = (_BatchNorm.forward, nn.SyncBatchNorm.forward)
