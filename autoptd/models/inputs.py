"""Example inputs for tracing, made from a model's configuration or its own `example_inputs`.

Each input is a separate meta tensor: one tensor object in two places would be traced as one input.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from autoptd.errors import InputsError
from autoptd.models.own_code import USER_ERRORS, first_line, place_of
from autoptd.text import printable

if TYPE_CHECKING:
    import torch
    from torch import nn

# Suffix of a Hugging Face class name -> kind of task, which decides the inputs.
_TASKS = {
    "ForCausalLM": "causal",
    "LMHeadModel": "causal",
    "ForMaskedLM": "masked",
    "ForImageClassification": "image",
    "ForConditionalGeneration": "conditional",
}
# Inputs that a collator makes for a text model of that kind, each [batch, seq]. An encoder-decoder without
# decoder_input_ids shifts its labels itself, with in-place writes that take four times as long to trace (t5-3b: 40 s
# instead of 10 s).
_TEXT = {
    "causal": ("input_ids", "labels"),
    "masked": ("input_ids", "attention_mask", "labels"),
    "conditional": ("input_ids", "decoder_input_ids", "labels"),
}
_SAMPLES = 2  # per traced batch
_LONGEST_NAME = 200
_CAP = 4096  # limit of the default tokens per sample
_HOW = "pass inputs={'name': tensor, …} as forward takes them, or define example_inputs(batch, seq) on the model"


def example_inputs(model: nn.Module, batch: int, seq: int | None = None) -> dict[str, Any]:
    """Return keyword tensors on the meta device for a batch of `batch` samples of `seq` tokens.

    `seq`: default, `default_sequence`; an encoder and its decoder get as many tokens each. Raises InputsError if the
    inputs of the model are unknown, or `seq` exceeds its positions.
    """
    task = _task(model)
    own = getattr(model, "example_inputs", None)
    if own is None and task is None:
        raise InputsError(f"the inputs of {type(model).__name__} are not known", fix=_HOW)
    if task == "image":
        return _image_inputs(model, batch)
    limit = sequence_limit(model)
    seq = seq if seq is not None else default_sequence(model)
    if limit is not None and seq > limit:
        what = f"a sequence of {seq} is longer than the {limit} positions of {type(model).__name__}"
        raise InputsError(what, where="seq", fix=f"use seq={limit} or less")
    if own is not None:
        return _own_inputs(own, batch, seq)
    return {name: _meta_ids(batch, seq) for name in _TEXT[str(task)]}


def inputs_beside(model: nn.Module, seq: int | None, targets: Mapping[str, Any]) -> dict[str, Any]:
    """Return example inputs with as many samples as `targets`, without those that are targets by name."""
    from autoptd.nest import tensors_of

    samples = next((x.shape[0] for x in tensors_of(targets) if x.ndim), _SAMPLES)
    return {name: x for name, x in example_inputs(model, samples, seq).items() if name not in targets}


def model_name(model: nn.Module) -> str:
    """Return the last part of the name or path in a model's configuration, or its class name."""
    path = getattr(getattr(model, "config", None), "name_or_path", "")
    name = PurePath(path).name if isinstance(path, str) else ""
    return printable(name if name and name.isprintable() else type(model).__name__, keep="")[:_LONGEST_NAME]


def sequence_limit(model: nn.Module) -> int | None:
    """Return the number of positions of a model, in tokens; None if it has no such field (an image model)."""
    config = getattr(model, "config", model)
    for field in ("max_position_embeddings", "n_positions", "max_seq"):
        limit = getattr(config, field, None)
        if isinstance(limit, int):
            return limit
    return None


def default_sequence(model: nn.Module) -> int:
    """Return the default tokens per sample, at most 4,096: the model's maximum, or its shipped configuration's `seq`
    (a T5 has no maximum)."""
    own = getattr(model, "default_seq", None)
    return min(own if isinstance(own, int) else sequence_limit(model) or _CAP, _CAP)


def _task(model: nn.Module) -> str | None:
    if not hasattr(model, "config"):
        return None
    names = [base.__name__ for base in type(model).__mro__]
    task = next((task for name in names for suffix, task in _TASKS.items() if name.endswith(suffix)), None)
    if task == "conditional" and not _from_text(model.config):
        return None
    return task


def _from_text(config: Any) -> bool:
    """Return whether generation is conditioned on text; other models with this class suffix take images or sound."""
    others = ("vision_config", "audio_config", "num_mel_bins")
    return bool(getattr(config, "is_encoder_decoder", False)) and not any(hasattr(config, name) for name in others)


def _image_inputs(model: nn.Module, batch: int) -> dict[str, torch.Tensor]:
    import torch

    config: Any = model.config
    size = config.image_size
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    dtype = next(model.parameters()).dtype
    pixels = torch.empty(batch, config.num_channels, height, width, dtype=dtype, device="meta")
    return {"pixel_values": pixels, "labels": _meta_ids(batch)}


def _own_inputs(own: Any, batch: int, seq: int) -> dict[str, Any]:
    import torch

    from autoptd.nest import mapped, tensors_of

    try:
        inputs = own(batch, seq)
    except USER_ERRORS as error:
        what = f"example_inputs({batch}, {seq}) of the model failed: {first_line(error)}"
        fix = "define it as example_inputs(self, batch, seq), or pass inputs={'name': tensor, …}"
        raise InputsError(what, where=place_of(error), fix=fix) from error
    tensors = list(tensors_of(inputs)) if isinstance(inputs, dict) else []
    if not tensors:
        what = f"example_inputs({batch}, {seq}) of the model did not return a mapping of keyword tensors"
        raise InputsError(what, fix="return {'name': tensor, …} as forward takes them")
    if len({id(x) for x in tensors}) < len(tensors):
        raise InputsError("two example inputs are the same tensor object", fix="make a separate tensor for each")
    found: dict[str, Any] = mapped(inputs, lambda x: _on_meta(x) if isinstance(x, torch.Tensor) else x)
    return found


def _on_meta(x: torch.Tensor) -> torch.Tensor:
    found = x.to("meta")
    found.__dict__.update(x.__dict__)  # such as the mark of `autoptd.shared`
    return found


def _meta_ids(*shape: int) -> torch.Tensor:
    import torch

    return torch.empty(shape, dtype=torch.int64, device="meta")
