"""The trainable heads of the installed transformers, each as a tiny model with a batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.coverage.alone import first_that_trains
from benchmarks.coverage.batches import proposals
from benchmarks.coverage.head_losses import LOSSES, TARGET, lacks_loss
from benchmarks.coverage.tiny import tiny_config

# transformers' table of heads -> family in our report, task
TABLES = {  # a head that is in several of these is tested once, as in the first
    "IMAGE_TEXT_TO_TEXT": ("vision-language", "multimodal"),
    "CAUSAL_LM": ("decoder", "causal"),
    "MASKED_LM": ("encoder", "masked"),
    "SEQ_TO_SEQ_CAUSAL_LM": ("encoder-decoder", "seq2seq"),
    "IMAGE_CLASSIFICATION": ("vision", "image"),
    "VIDEO_CLASSIFICATION": ("vision", "video"),
    "SEMANTIC_SEGMENTATION": ("vision", "segments"),
    "DEPTH_ESTIMATION": ("vision", "depth"),
    "MASKED_IMAGE_MODELING": ("vision", "reconstruct"),
    "CTC": ("audio", "ctc"),
    "AUDIO_CLASSIFICATION": ("audio", "audio"),
    "SPEECH_SEQ_2_SEQ": ("audio", "speech"),
    "SEQUENCE_CLASSIFICATION": ("classifier", "classes"),
    "TOKEN_CLASSIFICATION": ("classifier", "tokens"),
    "QUESTION_ANSWERING": ("classifier", "answers"),
}
MAIN = [n for n, (family, _) in TABLES.items() if family != "classifier"]


@dataclass(frozen=True)
class Head:
    """A model class of transformers, by name, with the model type whose configuration it takes."""

    name: str
    kind: str
    family: str
    task: str

    @property
    def loss(self) -> Callable[..., Tensor] | None:
        """The loss of a head that computes none; None for the others."""
        import transformers

        return LOSSES.get(self.task) if lacks_loss(getattr(transformers, self.name)) else None

    @property
    def targets(self) -> tuple[str, ...]:
        """Entries of the batch that only that loss takes."""
        return (TARGET,) if self.loss else ()

    def build(self) -> tuple[nn.Module, dict[str, Any]]:
        """Return the tiny model in training mode, and a batch with which it trains by itself.

        In float64, or in float32 where the model's own code does not train in float64 (masks of float32's infinity).
        """
        import transformers
        from transformers.integrations import moe

        # torch's grouped product has no float64; transformers' fallback for it traces to the same op
        moe._can_use_grouped_mm = lambda *_: False
        cls = getattr(transformers, self.name)
        causal = {"is_decoder": True} if self.kind == "reformer" and self.task == "causal" else {}
        config = tiny_config(cls.config_class, causal)
        if self.task == "classes":
            set_padding(config)
        torch.manual_seed(0)
        model = cls(config).train()
        tried = (model.float,) if getattr(config, "router_dtype", "") == "float32" else (model.double, model.float)
        first: Exception | None = None
        for cast in tried:
            try:
                return model, self._batch(cast())
            except Exception as error:  # noqa: BLE001  a model refuses a dtype in its own way
                first = first or error
        assert first is not None
        raise first

    def _batch(self, model: nn.Module) -> dict[str, Any]:
        tried = copy.deepcopy(model)  # a first forward pass leaves hooks and buffers in some models
        return first_that_trains(tried, proposals(tried, self.task, self.targets), self.loss, self.targets)


def set_padding(config: Any) -> None:
    """Give a configuration a padding token, without which heads that classify texts take one sample only."""
    for part in (config, config.get_text_config()):
        if getattr(part, "pad_token_id", None) is None:
            part.pad_token_id = 0


def heads(tables: list[str]) -> Iterator[Head]:
    """Yield every head of these tables once."""
    from transformers.models.auto import modeling_auto

    seen = set()
    for table in tables:
        family, task = TABLES[table]
        for kind, names in getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES").items():
            for name in [names] if isinstance(names, str) else names:
                if name not in seen:
                    seen.add(name)
                    yield Head(name, kind, family, task)
