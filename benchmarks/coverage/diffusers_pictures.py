"""Transformers of diffusers for pictures, each with a small configuration."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.coverage.denoisers import FRACTION, STEPS, Denoiser

HEADS: dict[str, Any] = {"num_attention_heads": 2}
NARROW: dict[str, Any] = {**HEADS, "attention_head_dim": 8}
PICTURE, TEXT = (4, 8, 8), (6, 16)


def numbers(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(7))


def places(height: int, width: int, columns: int = 3) -> torch.Tensor:
    """Rows of positions: zero, row and column of every patch."""
    grid = torch.cartesian_prod(torch.arange(1), torch.arange(height), torch.arange(width), torch.arange(1))
    return grid[:, :columns]


def unet(down: str, up: str, **more: Any) -> dict[str, Any]:
    sizes = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1, "sample_size": 8}
    first, second = down.split()
    return sizes | {"down_block_types": (first, second), "up_block_types": tuple(up.split())} | more


CASES = (
    Denoiser(
        "DiTTransformer2DModel",
        {**NARROW, "in_channels": 4, "out_channels": 8, "num_layers": 2, "num_embeds_ada_norm": 1000, "sample_size": 8},
        {"hidden_states": PICTURE, "timestep": STEPS, "class_labels": STEPS},
    ),
    Denoiser(
        "Transformer2DModel",
        {**NARROW, "in_channels": 16, "num_layers": 2, "norm_num_groups": 4, "cross_attention_dim": 16},
        {"hidden_states": (16, 8, 8), "encoder_hidden_states": TEXT},
    ),
    Denoiser(
        "PixArtTransformer2DModel",
        {
            **NARROW,
            "sample_size": 8,
            "num_layers": 2,
            "in_channels": 4,
            "cross_attention_dim": 16,
            "out_channels": 8,
            "caption_channels": 16,
            "use_additional_conditions": False,
        },
        {"hidden_states": PICTURE, "timestep": STEPS, "encoder_hidden_states": TEXT},
        fixed={"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
    ),
    Denoiser(
        "SD3Transformer2DModel",
        {
            **NARROW,
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "num_layers": 2,
            "caption_projection_dim": 16,
            "joint_attention_dim": 16,
            "pooled_projection_dim": 24,
            "out_channels": 4,
            "pos_embed_max_size": 8,
            "qk_norm": "rms_norm",
        },
        {"hidden_states": PICTURE, "timestep": STEPS, "encoder_hidden_states": TEXT, "pooled_projections": (24,)},
    ),
    Denoiser(
        "FluxTransformer2DModel",
        {
            **HEADS,
            "attention_head_dim": 16,
            "in_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "joint_attention_dim": 16,
            "pooled_projection_dim": 16,
            "axes_dims_rope": (4, 4, 8),
            "guidance_embeds": True,
        },
        {
            "hidden_states": (16, 4),
            "timestep": FRACTION,
            "encoder_hidden_states": TEXT,
            "pooled_projections": (16,),
            "guidance": FRACTION,
        },
        fixed={"img_ids": places(4, 4), "txt_ids": torch.zeros(6, 3)},
    ),
    Denoiser(
        "Flux2Transformer2DModel",
        {
            **HEADS,
            "attention_head_dim": 16,
            "in_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "joint_attention_dim": 16,
            "timestep_guidance_channels": 16,
            "axes_dims_rope": (4, 4, 4, 4),
        },
        {"hidden_states": (16, 4), "timestep": FRACTION, "encoder_hidden_states": TEXT, "guidance": FRACTION},
        fixed={"img_ids": places(4, 4, 4), "txt_ids": places(1, 6, 4)},
    ),
    Denoiser(
        "ChromaTransformer2DModel",
        {
            **HEADS,
            "attention_head_dim": 16,
            "in_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "joint_attention_dim": 16,
            "axes_dims_rope": (4, 4, 8),
            "approximator_num_channels": 8,
            "approximator_hidden_dim": 16,
            "approximator_layers": 1,
        },
        {"hidden_states": (16, 4), "timestep": FRACTION, "encoder_hidden_states": TEXT},
        fixed={"img_ids": places(4, 4), "txt_ids": torch.zeros(6, 3)},
    ),
    Denoiser(
        "BriaTransformer2DModel",
        {
            **NARROW,
            "in_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "joint_attention_dim": 16,
            "axes_dims_rope": [0, 4, 4],
        },
        {"hidden_states": (16, 4), "timestep": FRACTION, "encoder_hidden_states": TEXT},
        fixed={"img_ids": places(4, 4), "txt_ids": torch.zeros(6, 3)},
    ),
    Denoiser(
        "AuraFlowTransformer2DModel",
        {
            **NARROW,
            "sample_size": 8,
            "in_channels": 4,
            "num_mmdit_layers": 1,
            "num_single_dit_layers": 1,
            "caption_projection_dim": 16,
            "joint_attention_dim": 16,
            "pos_embed_max_size": 64,
        },
        {"hidden_states": PICTURE, "timestep": FRACTION, "encoder_hidden_states": TEXT},
    ),
    Denoiser(
        "SanaTransformer2DModel",
        {
            **NARROW,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 8,
            "cross_attention_dim": 16,
            "caption_channels": 16,
            "sample_size": 8,
        },
        {"hidden_states": PICTURE, "timestep": STEPS, "encoder_hidden_states": TEXT},
    ),
    Denoiser(
        "HunyuanDiT2DModel",
        {
            **NARROW,
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "num_layers": 2,
            "cross_attention_dim": 16,
            "cross_attention_dim_t5": 16,
            "pooled_projection_dim": 16,
            "hidden_size": 16,
            "text_len": 6,
            "text_len_t5": 6,
            "use_style_cond_and_image_meta_size": False,
            "activation_fn": "gelu-approximate",
        },
        {
            "hidden_states": PICTURE,
            "timestep": FRACTION,
            "encoder_hidden_states": TEXT,
            "text_embedding_mask": (6,),
            "encoder_hidden_states_t5": TEXT,
            "text_embedding_mask_t5": (6,),
        },
        fixed={"image_rotary_emb": [torch.ones(16, 8), torch.zeros(16, 8)]},
    ),
    Denoiser(
        "Lumina2Transformer2DModel",
        {
            **HEADS,
            "sample_size": 8,
            "in_channels": 4,
            "hidden_size": 16,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "num_kv_heads": 1,
            "multiple_of": 2,
            "axes_dim_rope": (4, 2, 2),
            "axes_lens": (32, 32, 32),
            "cap_feat_dim": 16,
        },
        {
            "hidden_states": PICTURE,
            "timestep": FRACTION,
            "encoder_hidden_states": TEXT,
            "encoder_attention_mask": "real 6",
        },
    ),
    Denoiser(
        "LuminaNextDiT2DModel",
        {
            **HEADS,
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "hidden_size": 16,
            "num_layers": 2,
            "num_kv_heads": 1,
            "multiple_of": 16,
            "learn_sigma": False,
            "cross_attention_dim": 16,
        },
        {
            "hidden_states": PICTURE,
            "timestep": FRACTION,
            "encoder_hidden_states": TEXT,
            "encoder_mask": "real 6",
        },
        fixed={"image_rotary_emb": torch.polar(torch.ones(8, 8, 4), numbers(8, 8, 4)), "cross_attention_kwargs": {}},
    ),
    Denoiser(
        "QwenImageTransformer2DModel",
        {
            **HEADS,
            "in_channels": 16,
            "out_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 16,
            "joint_attention_dim": 16,
            "axes_dims_rope": (8, 4, 4),
        },
        {
            "hidden_states": (16, 16),
            "timestep": FRACTION,
            "encoder_hidden_states": TEXT,
            "encoder_hidden_states_mask": "real 6",
        },
        fixed={"img_shapes": [(1, 4, 4)]},
    ),
    Denoiser(
        "CogView3PlusTransformer2DModel",
        {
            **NARROW,
            "in_channels": 4,
            "num_layers": 2,
            "out_channels": 4,
            "text_embed_dim": 16,
            "time_embed_dim": 8,
            "condition_dim": 2,
            "pos_embed_max_size": 8,
            "sample_size": 8,
        },
        {
            "hidden_states": PICTURE,
            "timestep": STEPS,
            "encoder_hidden_states": TEXT,
            "original_size": (2,),
            "target_size": (2,),
            "crop_coords": (2,),
        },
    ),
    Denoiser(
        "CogView4Transformer2DModel",
        {
            **NARROW,
            "in_channels": 4,
            "num_layers": 2,
            "out_channels": 4,
            "text_embed_dim": 16,
            "time_embed_dim": 8,
            "condition_dim": 4,
        },
        {
            "hidden_states": PICTURE,
            "timestep": STEPS,
            "encoder_hidden_states": TEXT,
            "original_size": (2,),
            "target_size": (2,),
            "crop_coords": (2,),
        },
    ),
    Denoiser(
        "PRXTransformer2DModel",
        {
            "in_channels": 4,
            "context_in_dim": 16,
            "hidden_size": 32,
            "mlp_ratio": 2.0,
            "num_heads": 2,
            "depth": 2,
            "axes_dim": [8, 8],
        },
        {"hidden_states": PICTURE, "timestep": FRACTION, "encoder_hidden_states": TEXT},
    ),
    Denoiser(
        "PriorTransformer",
        {**NARROW, "num_layers": 2, "embedding_dim": 8, "num_embeddings": 7, "additional_embeddings": 4},
        {"hidden_states": (8,), "timestep": STEPS, "proj_embedding": (8,), "encoder_hidden_states": (7, 8)},
    ),
)
