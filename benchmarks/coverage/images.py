"""Images for models that read them with text: pixels as the processor of each sort of model gives them, and ids with
as many placeholder tokens for each image as the model makes features of it.

    square   [samples, channels, side, side]
    listed   [samples, images, channels, side, side]: a list of images, or of crops, for each sample
    patches  [samples * patches, values of a patch], with a grid (time, height, width in patches) for each image
    crops    [samples * patches, channels, side, side] of one patch each, with a grid
    blocks   [samples * blocks, side of a block, the same, channels], a block for each token, with a grid of blocks
    moments  [samples * patches, times, side of a patch, the same, channels], a patch for each token
    rows     [samples, patches, values of a patch], with a mask or positions of the patches
    pooled   the same, with the patches that each token is a mean of
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.coverage.by_model import PIXELS
from benchmarks.coverage.sizes import IGNORED, SAMPLES, TOKENS, Sizes

GRID = 4  # patches of an image along each side, where the model takes any number
MOST_TOKENS = 100  # of an image
EACH = {"pi0": 16}  # model type -> tokens of an image, where the model counts none
_BEFORE = 2  # tokens before an image
_FEATURES = re.compile(r"tokens:? *\d+.*?features:? *(\d+)|Got (\d+) feature vectors", re.DOTALL)


def images(s: Sizes, task: str, takes: Mapping[str, Any]) -> Iterator[dict[str, Tensor]]:
    """Yield pixels with what goes with them, of each sort that the model's arguments allow."""
    mixed = task == "multimodal" or "spatial_shapes" in takes or (task == "image" and "input_ids" in takes)
    if "pixel_values" not in takes or not mixed:
        return
    makers: list[Callable[[Sizes], dict[str, Tensor]]] = [square, plain, listed, tiles, tiled, rows, moments]
    if {"image_grid_thw", "image_grid_hw", "target_sizes"} & set(takes):
        makers = [patches, crops, strip, blocks]
    if "image_token_pooling" in takes:
        makers = [pooled]
    for make in makers:
        yield {n: x.bool() if _is_mask(takes[n]) else x for n, x in make(s).items() if n in takes}


def _is_mask(argument: inspect.Parameter) -> bool:
    """Return whether an argument is annotated as truth values."""
    return "BoolTensor" in str(argument.annotation)


def side(s: Sizes) -> int:
    vision = getattr(s.config, "vision_config", s.config)
    found = getattr(vision, "image_size", None) or s.pixels[1]
    return int(found[0] if isinstance(found, (list, tuple)) else found)


def sizes(n: int) -> Tensor:
    return torch.full((SAMPLES, 2), n)


def square(s: Sizes) -> dict[str, Tensor]:
    n = side(s)
    return {"pixel_values": s.floats(SAMPLES, s.pixels[0], n, n), "image_sizes": sizes(n)}


def plain(s: Sizes) -> dict[str, Tensor]:
    n, big = side(s), getattr(getattr(s.config, "high_res_vision_config", None), "image_size", PIXELS)
    more = {"pixel_attention_mask": torch.ones(SAMPLES, 1, dtype=torch.int64)}
    more |= {"high_res_pixel_values": s.floats(SAMPLES, s.pixels[0], big, big)}
    return {"pixel_values": s.floats(SAMPLES, s.pixels[0], n, n), **more}


def listed(s: Sizes) -> dict[str, Tensor]:
    n = side(s)
    masks = {"pixel_attention_mask": torch.ones(SAMPLES, 1, n, n, dtype=torch.int64)}
    return {"pixel_values": s.floats(SAMPLES, 1, s.pixels[0], n, n), **masks}


def tiles(s: Sizes) -> dict[str, Tensor]:
    """Return two tiles for each image: all of it, and one crop."""
    n = side(s)
    masks = {"pixel_attention_mask": torch.ones(SAMPLES, 2, dtype=torch.int64)}
    return {"pixel_values": s.floats(SAMPLES, 2, s.pixels[0], n, n), "image_sizes": sizes(n), **masks}


def tiled(s: Sizes) -> dict[str, Tensor]:
    """Return one image of several tiles for each sample, with its aspect ratio."""
    n, most = side(s), s.number("max_num_tiles", default=4)
    return {
        "pixel_values": s.floats(SAMPLES, 1, most, s.pixels[0], n, n),
        "aspect_ratio_ids": torch.ones(SAMPLES, 1, dtype=torch.int64),
        "aspect_ratio_mask": torch.ones(SAMPLES, 1, most, dtype=torch.int64),
        "cross_attention_mask": torch.ones(SAMPLES, TOKENS, 1, most, dtype=torch.int64),
    }


def rows(s: Sizes) -> dict[str, Tensor]:
    """Return patches of one image in each sample."""
    values = s.pixels[0] * s.number("model_patch_size", "patch_size", default=8) ** 2
    at = torch.stack(torch.meshgrid(torch.arange(GRID), torch.arange(GRID), indexing="xy"), -1).reshape(1, -1, 2)
    return {
        "pixel_values": s.floats(SAMPLES, GRID**2, values),
        "pixel_attention_mask": torch.ones(SAMPLES, GRID**2, dtype=torch.int64),
        "spatial_shapes": sizes(GRID),
        "image_position_ids": at.expand(SAMPLES, -1, -1).clone(),
    }


def pooled(s: Sizes) -> dict[str, Tensor]:
    """Return patches of one image in each sample, of which each token takes the mean of 2 * 2."""
    first = torch.arange(GRID**2).view(GRID // 2, 2, GRID // 2, 2).transpose(1, 2).reshape(-1, 4)
    at = first + GRID**2 * torch.arange(SAMPLES)[:, None, None]
    return {
        "pixel_values": rows(s)["pixel_values"],
        "image_token_pooling": at.flatten(0, 1),
        "image_grids": torch.tensor([[GRID // 2, GRID // 2, 0, 0]]).repeat(SAMPLES, 1),
    }


def grids() -> dict[str, Tensor]:
    return {
        "image_grid_thw": torch.tensor([[1, GRID, GRID]]).repeat(SAMPLES, 1),
        "image_grid_hw": sizes(GRID),
        "target_sizes": sizes(GRID),
    }


def patches(s: Sizes) -> dict[str, Tensor]:
    time = s.number("temporal_patch_size", "patch_temporal", default=1)
    values = s.pixels[0] * time * s.number("patch_size", default=8) ** 2
    merged = torch.full((SAMPLES,), s.number("spatial_merge_size", default=2))
    return {"pixel_values": s.floats(SAMPLES * GRID**2, values), "image_merge_sizes": merged, **grids()}


def crops(s: Sizes) -> dict[str, Tensor]:
    n = s.number("patch_size", default=8)
    return {"pixel_values": s.floats(SAMPLES * GRID**2, s.pixels[0], n, n), **grids()}


def blocks(s: Sizes) -> dict[str, Tensor]:
    n = s.number("patch_size", default=8) * s.number("spatial_merge_size", default=2)
    return {"pixel_values": s.floats(SAMPLES * GRID**2, n, n, s.pixels[0]), **grids()}


def moments(s: Sizes) -> dict[str, Tensor]:
    n = s.number("patch_size", default=8)
    return {"pixel_values": s.floats(SAMPLES * GRID, s.number("temporal_patch_size", default=1), n, n, s.pixels[0])}


def strip(s: Sizes) -> dict[str, Tensor]:
    """Return the patches of all images beside one another, as one image as high as a patch."""
    n = s.number("patch_size", default=8)
    return {"pixel_values": s.floats(1, s.pixels[0], n, SAMPLES * GRID**2 * n), **grids()}


def with_images(s: Sizes, batch: dict[str, Tensor], pixels: Mapping[str, Tensor], takes: Mapping[str, Any]) -> Any:
    """Return a batch of text with images in it."""
    names = ("image_token_id", "image_token_index", "video_token_id")
    token = next((t for part in s.parts for n in names if isinstance(t := getattr(part, n, None), int)), None)
    if "image_attention_mask" in takes:
        pixels = {**pixels, "image_attention_mask": torch.ones(*batch["input_ids"].shape, 1, dtype=torch.int64)}
    if "image_embeds_position_mask" in takes:
        at = torch.arange(batch["input_ids"].shape[1])
        at = (at > 0) & (at <= s.number("latent_query_num", default=4))
        pixels = {**pixels, "image_embeds_position_mask": at.long().repeat(SAMPLES, 1)}
    if token is None or "input_ids" not in batch:
        return {**batch, **pixels}
    made = placed(batch, token, features_of(s, batch, pixels, token, takes), takes, s) | dict(pixels)
    return made | positions(s.model, made) if "position_ids" in takes else made


def positions(model: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return positions of tokens that the model computes from where pictures are, as a data loader gives them."""
    found: list[Tensor] = []
    owners = [m for m in model.modules() if hasattr(m, "get_rope_index")]

    def recorded(compute: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            made = compute(*args, **kwargs)
            found.append(made[0] if isinstance(made, tuple) else made)
            return made

        return call

    for owner in owners:
        owner.get_rope_index = recorded(owner.get_rope_index)
    try:
        with torch.no_grad():
            model(**batch) if owners else None
    finally:
        for owner in owners:
            del owner.get_rope_index
    return {"position_ids": found[0]} if found else {}


def features_of(s: Sizes, batch: dict[str, Tensor], pixels: Mapping[str, Tensor], token: int, takes: Any) -> int:
    """Return how many features the model makes of one image, by asking it. Raises what the model raises."""
    tried = placed(batch, token, 1, takes, s) | dict(pixels)
    try:
        with torch.no_grad():
            s.model(**tried)
    except (RuntimeError, ValueError) as error:
        if (said := _FEATURES.search(str(error))) is None:
            raise
        each = int(said.group(1) or said.group(2)) // SAMPLES
        if each <= MOST_TOKENS:
            return each
        width = s.model.get_input_embeddings().weight.shape[1]
        return each // width if each % width == 0 else each  # some models count elements
    frames = next((x.shape[1] for x in pixels.values() if x.ndim == 5), 1)
    each = s.number("num_query_tokens", default=EACH.get(s.config.model_type, 1))
    return each * frames  # models with a query former count nothing


def placed(batch: Mapping[str, Tensor], token: int, n: int, takes: Any, s: Sizes) -> dict[str, Tensor]:
    """Return the batch with n placeholder tokens in every sample; they are attended to and have no label."""
    fill = {"input_ids": token, "attention_mask": 1} | ({} if s.config.is_encoder_decoder else {"labels": IGNORED})
    made = {}
    for name, x in batch.items():
        if name in fill and x.ndim == 2:
            new = torch.full((x.shape[0], n), fill[name])
            x = torch.cat([x[:, :_BEFORE], new, x[:, _BEFORE:]], 1)
        made[name] = x
    kinds = (made["input_ids"] == token).long()
    for name in ("mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids"):
        if name in takes:
            made[name] = kinds
    return made
