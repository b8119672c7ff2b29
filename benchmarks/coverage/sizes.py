"""Sizes of batches, read from a model's configuration, and the random numbers that fill them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.coverage.by_model import PIXELS, WORDS

SAMPLES, TOKENS = 8, 16
SECONDS = 4000  # samples of a sound wave
PADDED = {1: 3, 4: 5, 6: 1}  # sample -> positions of padding at its end
IGNORED = -100
STACKED = {"granite_speech5_ctc": 4}  # model type -> spectra in a frame: of two moments, each with its changes
SIDES = {"depth_pro": 128, "fast_vlm": 128, "gemma3n": 64}  # model type -> side of a picture that no field names
FIRST_LEARNT = 2  # positions at the start of a sample, as of a prompt, that have no label


@dataclass(frozen=True)
class Sizes:
    """The model, its configuration and a random source: what sizes of inputs are read from.

    padded: whether some samples end in padding. masked: whether masks are given at all. bands_last: layout of features.
    """

    model: nn.Module
    config: Any
    draw: torch.Generator
    padded: bool = True
    masked: bool = True
    bands_last: bool = False

    def number(self, *names: str, default: int) -> int:
        """Return the first of these fields that the configuration or one of its parts has, as a number."""
        for name in names:
            for part in self.parts:
                value = getattr(part, name, None)
                if isinstance(value, (list, tuple)) and value and isinstance(value[0], int):
                    value = value[0]
                if isinstance(value, int) and not isinstance(value, bool):
                    return value
        return default

    @property
    def parts(self) -> list[Any]:
        """The configuration and those of its parts, and of theirs."""
        found = [self.config]
        for part in found:
            found += [x for n in getattr(part, "sub_configs", {}) if hasattr(x := getattr(part, n, None), "to_dict")]
        return found

    def ids(self, *shape: int, below: int = 0, first: int = 3) -> Tensor:
        """Token ids: none of the special ones, which `tiny` puts into the upper half or below 3."""
        below = below or min(WORDS - 45, self.number("vocab_size", default=WORDS))
        return torch.randint(first, max(first + 1, below), shape, generator=self.draw)

    def floats(self, *shape: int) -> Tensor:
        """Normal numbers in the dtype of the model's weights."""
        return torch.randn(shape, generator=self.draw, dtype=torch.float64).to(dtype_of(self.model))

    def mask(self, length: int = TOKENS) -> Tensor:
        """Return 1 for positions with data, 0 for padding."""
        found = torch.ones(SAMPLES, length, dtype=torch.int64)
        for sample, positions in PADDED.items() if self.padded else ():
            found[sample, length - positions * length // TOKENS :] = 0
        return found

    @property
    def pixels(self) -> tuple[int, int, int]:
        channels = self.number("num_channels", "in_channels", "in_chans", "num_input_channels", default=3)
        side = SIDES.get(self.config.model_type) or self.number("image_size", "img_size", "input_size", default=PIXELS)
        return channels, side, side

    @property
    def bands(self) -> int:
        names = ("num_mel_bins", "feature_size", "input_feat_per_channel", "feature_projection_input_dim")
        return STACKED.get(self.config.model_type, 1) * self.number(*names, "input_dim", "mel_dim", default=16)

    @property
    def frames(self) -> int:
        """Frames of sound, of which some models take a fixed number for each token of the text."""
        each = self.number("audio_length_per_tok", default=0)
        most = self.number("max_source_positions", default=32)
        relative = getattr(self.config, "position_embeddings_type", "") == "relative"  # a table for each distance
        return each * TOKENS or (most if relative else 2 * most)


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype of the model's first parameter of floats."""
    return next(p.dtype for p in model.parameters() if p.is_floating_point())
