"""Batches for tiny Hugging Face models: each argument of `forward` that training needs, by its name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.coverage.tiny import PIXELS, WORDS

SAMPLES, TOKENS, SECONDS = 8, 16, 1600  # SECONDS: samples of a sound wave


@dataclass(frozen=True)
class Sizes:
    """The model, its configuration and a random source: what sizes of inputs are read from."""

    model: nn.Module
    config: Any
    draw: torch.Generator

    def number(self, *names: str, default: int) -> int:
        """The first of these fields that the configuration or one of its parts has, as a number."""
        parts = [self.config, *(getattr(self.config, n, None) for n in getattr(self.config, "sub_configs", {}))]
        for name in names:
            for part in parts:
                value = getattr(part, name, None)
                if isinstance(value, (list, tuple)) and value and isinstance(value[0], int):
                    value = value[0]
                if isinstance(value, int) and not isinstance(value, bool):
                    return value
        return default

    def ids(self, *shape: int, below: int = WORDS - 45, first: int = 3) -> Tensor:
        """Token ids: none of the special ones, which `tiny` puts into the upper half or below 3."""
        return torch.randint(first, max(first + 1, below), shape, generator=self.draw)

    def floats(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.draw, dtype=torch.float64)

    @property
    def pixels(self) -> tuple[int, int, int]:
        channels = self.number("num_channels", "in_channels", "in_chans", "num_input_channels", default=3)
        side = self.number("image_size", "img_size", "input_size", default=PIXELS)
        return channels, side, side


INPUTS: dict[str, Callable[[Sizes], Tensor]] = {
    "input_ids": lambda s: s.ids(SAMPLES, TOKENS),
    "decoder_input_ids": lambda s: s.ids(SAMPLES, TOKENS),
    "attention_mask": lambda s: torch.ones(SAMPLES, TOKENS, dtype=torch.int64),
    "bbox": lambda s: s.ids(SAMPLES, TOKENS, 4, below=30).sort(-1).values,
    "pixel_values": lambda s: s.floats(SAMPLES, *s.pixels),
    "input_values": lambda s: s.floats(SAMPLES, SECONDS),
    "input_features": lambda s: s.floats(
        SAMPLES,
        s.number("num_mel_bins", "feature_size", "input_feat_per_channel", default=16),
        2 * s.number("max_source_positions", default=32),
    ),
    "bool_masked_pos": lambda s: (
        torch.rand(SAMPLES, (s.pixels[1] // s.number("patch_size", default=8)) ** 2, generator=s.draw) < 0.4
    ),
}


def wave(s: Sizes) -> Tensor:
    return s.floats(SAMPLES, SECONDS)


def spectrogram(s: Sizes) -> Tensor:
    """Frames of mel bands, [samples, frames, bands]: Whisper's are [samples, bands, frames]."""
    return s.floats(SAMPLES, 64, s.number("num_mel_bins", "feature_size", "input_feat_per_channel", default=16))


def video(s: Sizes) -> Tensor:
    return s.floats(SAMPLES, s.number("num_frames", default=4), *s.pixels)


def labels(task: str, s: Sizes) -> dict[str, Tensor]:
    """Return the targets of a task, under the names that transformers' heads give them."""
    classes = max(2, int(getattr(s.config, "num_labels", 2) or 2))
    if task in ("causal", "masked", "seq2seq", "speech", "multimodal"):
        return {"labels": s.ids(SAMPLES, TOKENS)}
    if task in ("classes", "image", "audio", "video"):
        return {"labels": torch.arange(SAMPLES) % classes}
    if task == "tokens":
        return {"labels": s.ids(SAMPLES, TOKENS, below=classes, first=0)}
    if task == "answers":
        return {n: s.ids(SAMPLES, below=TOKENS, first=0) for n in ("start_positions", "end_positions")}
    if task == "ctc":
        return {"labels": s.ids(SAMPLES, 3)}
    if task == "segments":
        return {"labels": s.ids(SAMPLES, *s.pixels[1:], below=classes, first=0)}
    if task == "depth":
        return {"labels": s.floats(SAMPLES, *s.pixels[1:]).abs() + 0.1}
    return {}


def batch_for(model: nn.Module, task: str, seed: int = 0) -> dict[str, Tensor]:
    """Return a global batch for a model and its task. Raises LookupError for a needed argument that is not known."""
    s = Sizes(model, model.config, torch.Generator().manual_seed(seed))
    takes = inspect.signature(model.forward).parameters
    needed = {
        n for n, p in takes.items() if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    main = getattr(model, "main_input_name", "input_ids")
    names = [n for n in takes if n in needed or n == main]
    if task == "seq2seq" and "decoder_input_ids" in takes:
        names.append("decoder_input_ids")
    if task == "speech" and "decoder_input_ids" in takes:
        names.append("decoder_input_ids")
    if task == "reconstruct" and "bool_masked_pos" in takes:
        names.append("bool_masked_pos")
    if "bbox" in takes:
        names.append("bbox")
    found = {}
    for name in dict.fromkeys(names):
        if name not in INPUTS:
            raise LookupError(f"no way to make the input {name!r} of {type(model).__name__}")
        found[name] = INPUTS[name](s)
    wanted = labels(task, s)
    return found | {n: x for n, x in wanted.items() if n in takes}
