"""Batches for tiny Hugging Face models: each argument of `forward` that training needs, by its name.

Several batches are proposed for a model (`proposals`), the first of which the model trains with is used: with padded
samples, then without; with mel bands before frames, then after.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.coverage.by_model import WIDTH
from benchmarks.coverage.images import images, placed, with_images
from benchmarks.coverage.sizes import FIRST_LEARNT, IGNORED, SAMPLES, SECONDS, TOKENS, Sizes


def text(s: Sizes) -> Tensor:
    """Return ids of a text: padding at the end of some samples, before it the token that ends a text."""
    ids, mask = s.ids(SAMPLES, TOKENS), s.mask()
    if isinstance(pad := getattr(s.config, "pad_token_id", None), int):
        ids = ids.masked_fill(mask == 0, pad)
    if isinstance(end := getattr(s.config, "eos_token_id", None), int) and s.config.is_encoder_decoder:
        ids[torch.arange(SAMPLES), mask.sum(1) - 1] = end
    if s.config.model_type == "longformer":
        ids[:, [4, 5, 9]] = s.config.sep_token_id  # its head for answers finds question and text by these
    return ids


def codes(s: Sizes) -> Tensor:
    """Return tokens of a codec: [samples, codebooks, frames]."""
    return s.ids(SAMPLES, s.number("num_codebooks", default=4), TOKENS)


def spoken(s: Sizes) -> Tensor:
    """Return the tokens of a text, each beside the codes of its frame of sound: [samples, frames, 1 + codebooks]."""
    books, below = s.number("num_codebooks", default=4), s.number("codebook_vocab_size", default=9)
    return torch.cat([s.ids(SAMPLES, TOKENS, 1), s.ids(SAMPLES, TOKENS, books, below=below)], -1)


def frames_of_codes(s: Sizes) -> Tensor:
    """Return codes of frames of sound: [samples, frames, codebooks]."""
    return s.ids(SAMPLES, TOKENS, s.number("num_channels", default=4))


def keys_and_values(s: Sizes) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the keys and values that a larger model computed, for each sort of layers."""
    text = s.config.get_text_config()
    found = {}
    for sort, layer in zip(text.layer_types, text.per_layer_config, strict=True):
        size = SAMPLES, layer.num_key_value_heads, TOKENS, layer.head_dim
        found[sort] = s.floats(*size), s.floats(*size)
    return found


def moves(s: Sizes) -> Tensor:
    """Return movements of a robot: [samples, steps, axes]."""
    return s.floats(SAMPLES, s.number("chunk_size", default=8), s.number("max_action_dim", default=WIDTH))


def wave(s: Sizes) -> Tensor:
    """Return sound, or its spectrogram where the model takes that under the same name."""
    if s.config.model_type == "audio-spectrogram-transformer":
        return s.floats(SAMPLES, s.number("max_length", default=64), s.bands)
    return s.floats(SAMPLES, SECONDS)


def with_sound(s: Sizes, batch: dict[str, Any], takes: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """Return a batch of text with sound in it, where the model reads a wave and its padding: a token for each frame."""
    frame, token = s.number("hop_length", default=0), getattr(s.config, "audio_token_id", None)
    if not frame or token is None or not {"input_ids", "input_values", "padding_mask"} <= set(takes):
        return dict(batch)
    sound = {"input_values": s.floats(SAMPLES, 1, SECONDS), "padding_mask": torch.ones(SAMPLES, SECONDS).bool()}
    return placed(batch, token, -(-SECONDS // frame), takes, s) | sound


def features(s: Sizes) -> Tensor:
    return s.floats(SAMPLES, *((s.frames, s.bands) if s.bands_last else (s.bands, s.frames)))


def patches(s: Sizes) -> Tensor:
    return torch.rand(SAMPLES, (s.pixels[1] // s.number("patch_size", default=8)) ** 2, generator=s.draw) < 0.4


INPUTS: dict[str, Callable[[Sizes], Any]] = {
    "input_ids": text,
    "decoder_input_ids": lambda s: s.ids(SAMPLES, TOKENS),
    "bbox": lambda s: s.ids(SAMPLES, TOKENS, 4, below=30).sort(-1).values,
    "pixel_values": lambda s: s.floats(SAMPLES, *s.pixels),
    "pixel_values_videos": lambda s: s.floats(SAMPLES, s.number("num_frames", default=4), *s.pixels),
    "input_values": wave,
    "input_features": features,
    "bool_masked_pos": patches,
    "qformer_input_ids": lambda s: s.ids(SAMPLES, TOKENS),
    "flattened_patches": lambda s: s.floats(
        SAMPLES, TOKENS, 2 + s.number("patch_embed_hidden_size", default=WIDTH)
    ).abs(),
    "inputs_embeds": lambda s: s.floats(SAMPLES, TOKENS, 2 * s.number("backbone_hidden_size", default=WIDTH)),
    "shared_kv_states": keys_and_values,
    "state": lambda s: s.floats(SAMPLES, s.number("max_state_dim", default=WIDTH)),
    "actions": moves,
    "noise": moves,
    "timestep": lambda s: s.floats(SAMPLES).sigmoid(),
    "visual_feats": lambda s: s.floats(SAMPLES, 6, s.number("visual_feat_dim", default=2048)),
    "visual_pos": lambda s: s.floats(SAMPLES, 6, 4).abs(),
}
# argument -> the input that it masks
MASKED_DECODERS = ("fsmt",)  # model types that else look for padding in the data, by a branch
MASKS = {"attention_mask": "", "input_features_mask": "input_features"}
EXTRA = {  # task -> optional arguments that training needs
    "seq2seq": ("decoder_input_ids",),
    "speech": ("decoder_input_ids",),
    "reconstruct": ("bool_masked_pos",),
    "multimodal": ("input_ids", "qformer_input_ids"),
}
ALSO = {  # model type -> the same
    "git": ("pixel_values",),
    "voxtral_realtime": ("input_features",),
    "gemma4_unified_assistant": ("inputs_embeds", "shared_kv_states"),
    "diffusion_gemma": ("decoder_input_ids",),
    "pi0": ("actions", "noise", "timestep"),
}
# (model type, argument) -> its values, where they differ from those that other models take under that name
OTHERS: dict[tuple[str, str], Callable[[Sizes], Any]] = {
    ("musicgen_decoder", "input_ids"): codes,
    ("musicgen_melody_decoder", "input_ids"): codes,
    ("kyutai_speech_to_text", "input_ids"): spoken,
    ("dia", "decoder_input_ids"): frames_of_codes,
}
WHOLE = ("longformer", "led")  # model types that branch on the values of a mask: trained on whole documents, with none
NO_MASK = ("audio-spectrogram-transformer",)  # model types whose processor gives none
CODECS = ("musicgen_decoder", "musicgen_melody_decoder")  # model types whose tokens are those of several codebooks


def labels(task: str, s: Sizes) -> dict[str, Tensor]:
    """Return the targets of a task, under the names that transformers' heads give them."""
    classes = max(2, int(getattr(s.config, "num_labels", 2) or 2))
    if task in ("causal", "masked", "seq2seq", "speech", "multimodal"):
        found = s.ids(SAMPLES, TOKENS).masked_fill(s.mask() == 0, IGNORED)
        found[:, :FIRST_LEARNT] = IGNORED if task in ("causal", "masked") else found[:, :FIRST_LEARNT]
        if s.config.model_type in CODECS:
            found = found[..., None].repeat(1, 1, s.number("num_codebooks", default=4))
        if s.config.model_type == "dia":
            found = found.repeat_interleave(s.number("num_channels", default=4), 0)  # a row for each codebook
        return {"labels": found}
    if task in ("classes", "image", "audio", "video"):
        return {"labels": torch.arange(SAMPLES) % classes}
    if task == "tokens":
        return {"labels": s.ids(SAMPLES, TOKENS, below=classes, first=0).masked_fill(s.mask() == 0, IGNORED)}
    if task == "answers" and "start_positions" not in inspect.signature(s.model.forward).parameters:
        return {"labels": torch.arange(SAMPLES) % 2}
    if task == "answers":
        return {n: s.ids(SAMPLES, below=TOKENS - 5, first=0) for n in ("start_positions", "end_positions")}
    if task == "ctc":
        return {"labels": s.ids(SAMPLES, 3)}
    if task == "segments":
        return {"labels": s.ids(SAMPLES, *s.pixels[1:], below=classes, first=0)}
    if task == "depth":
        return {"labels": s.floats(SAMPLES, *s.pixels[1:]).abs() + 0.1}
    return {}


def proposals(
    model: nn.Module, task: str, targets: Sequence[str] = (), seed: int = 0
) -> Iterator[Callable[[], dict[str, Any]]]:
    """Yield makers of global batches for a model and its task, the one nearest to a user's first.

    targets: entries that only the loss takes. Raises LookupError for a needed argument that is not known.
    """
    takes = inspect.signature(model.forward).parameters
    layouts = (False, True) if "input_features" in takes else (False,)
    ways = ((True, True), (False, True), (False, False))[-1 if model.config.model_type in WHOLE else 0 :]
    for (padded, masked), bands_last in product(ways, layouts):
        s = Sizes(model, model.config, torch.Generator().manual_seed(seed), padded, masked, bands_last)
        batch = _batch(s, task, takes, targets)
        makers = [partial(with_images, s, batch, pixels, takes) for pixels in images(s, task, takes)]
        yield from makers or [partial(with_sound, s, batch, takes)]


def _batch(s: Sizes, task: str, takes: Mapping[str, inspect.Parameter], targets: Sequence[str] = ()) -> dict[str, Any]:
    """Return one batch: the arguments that the model needs, its main input, those of the task, masks and labels."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = {n for n, p in takes.items() if p.default is p.empty and p.kind in kinds}
    main = getattr(s.model, "main_input_name", "input_ids")
    wanted = {main, "bbox", "visual_feats", "visual_pos", *EXTRA.get(task, ()), *ALSO.get(s.config.model_type, ())}
    if task == "multimodal" and s.config.is_encoder_decoder:
        wanted.add("decoder_input_ids")
    found = {}
    for name in (n for n in takes if n in needed or n in wanted):
        if name in MASKS:
            continue
        if other := OTHERS.get((s.config.model_type, name)):
            found[name] = other(s)
            continue
        if name not in INPUTS and not (name == "inputs" and task in _MEANS):
            raise LookupError(f"no way to make the input {name!r} of {type(s.model).__name__}")
        found[name] = INPUTS[_MEANS.get(task, "input_ids") if name == "inputs" else name](s)
    if task == "video" and "pixel_values" in found:
        found["pixel_values"] = INPUTS["pixel_values_videos"](s)
    if "inputs_embeds" in found:
        found.pop("input_ids", None)
    return found | _masks(s, found, takes) | {n: x for n, x in labels(task, s).items() if n in takes or n in targets}


_MEANS = {
    "speech": "input_values",
    "image": "pixel_values",
    "masked": "input_ids",
    "classes": "input_ids",
}  # task -> what `inputs` are


def _masks(s: Sizes, found: Mapping[str, Any], takes: Mapping[str, inspect.Parameter]) -> dict[str, Tensor]:
    """Return the masks that the model takes, as long as the inputs that they mask."""
    made = {}
    masked = MASKS | ({"decoder_attention_mask": "decoder_input_ids"} if s.config.model_type in MASKED_DECODERS else {})
    for name, masks in masked.items() if s.masked and s.config.model_type not in NO_MASK else ():
        main = masks or getattr(s.model, "main_input_name", "input_ids")
        if name == "attention_mask" and (main not in found or main == "state"):
            main = "inputs_embeds" if "inputs_embeds" in found else "input_ids"
        if name not in takes or main not in found or (found[main].is_floating_point() and found[main].ndim >= 4):
            continue
        made[name] = s.mask(length_of(s, main, found[main]))
    return made


def length_of(s: Sizes, name: str, x: Tensor) -> int:
    """Return the number of positions of an input, which its mask has too."""
    if name == "input_features":
        return s.frames
    return x.shape[-1 if s.config.model_type in CODECS else 1]
