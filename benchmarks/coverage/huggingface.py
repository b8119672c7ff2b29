"""The trainable heads of the installed transformers, each as a tiny model with a batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.coverage.batches import batch_for
from benchmarks.coverage.tiny import tiny_config

# transformers' table of heads -> family in our report, task
TABLES = {
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
    "IMAGE_TEXT_TO_TEXT": ("vision-language", "multimodal"),
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

    def build(self) -> tuple[nn.Module, dict[str, Tensor]]:
        """Return the tiny model in float64 and training mode, and a batch."""
        import transformers
        from transformers.integrations import moe

        moe._can_use_grouped_mm = lambda *_: False  # torch's kernel has no float64; use transformers' own loop
        cls = getattr(transformers, self.name)
        config = tiny_config(cls.config_class)
        torch.manual_seed(0)
        model = cls(config).double().train()
        return model, batch_for(model, self.task)


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
