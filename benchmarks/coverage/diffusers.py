"""Convolutional denoisers of diffusers, each with a small configuration."""

from __future__ import annotations

from typing import Any

from benchmarks.coverage.denoisers import STEPS, Denoiser

PICTURE, VIDEO, TEXT = (4, 8, 8), (4, 2, 8, 8), (6, 16)


def unet(down: str, up: str, **more: Any) -> dict[str, Any]:
    sizes = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1, "sample_size": 8}
    first, second = down.split()
    return sizes | {"down_block_types": (first, second), "up_block_types": tuple(up.split())} | more


CASES = (
    Denoiser(
        "UNet2DModel",
        unet("DownBlock2D AttnDownBlock2D", "AttnUpBlock2D UpBlock2D", attention_head_dim=4),
        {"sample": (3, 8, 8), "timestep": STEPS},
    ),
    Denoiser(
        "UNet2DModel",
        unet("DownBlock2D DownBlock2D", "UpBlock2D UpBlock2D", in_channels=4, out_channels=4, num_class_embeds=1000),
        {"sample": PICTURE, "timestep": STEPS, "class_labels": STEPS},
        variant="classes",
    ),
    Denoiser(
        "UNet2DConditionModel",
        unet(
            "CrossAttnDownBlock2D DownBlock2D",
            "UpBlock2D CrossAttnUpBlock2D",
            cross_attention_dim=16,
            attention_head_dim=2,
        ),
        {"sample": PICTURE, "timestep": STEPS, "encoder_hidden_states": TEXT},
    ),
    Denoiser(
        "UNet2DConditionModel",
        unet(
            "DownBlock2D CrossAttnDownBlock2D",
            "CrossAttnUpBlock2D UpBlock2D",
            cross_attention_dim=16,
            attention_head_dim=(2, 4),
            transformer_layers_per_block=(1, 2),
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=64,
        ),
        {
            "sample": PICTURE,
            "timestep": STEPS,
            "encoder_hidden_states": TEXT,
            "added_cond_kwargs__text_embeds": (16,),
            "added_cond_kwargs__time_ids": (6,),
        },
        variant="SDXL",
    ),
    Denoiser(
        "UNet3DConditionModel",
        unet(
            "CrossAttnDownBlock3D DownBlock3D",
            "UpBlock3D CrossAttnUpBlock3D",
            cross_attention_dim=16,
            attention_head_dim=2,
        ),
        {"sample": VIDEO, "timestep": STEPS, "encoder_hidden_states": TEXT},
    ),
    Denoiser(
        "UNetSpatioTemporalConditionModel",
        {
            "block_out_channels": (32, 64),
            "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
            "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
            "cross_attention_dim": 16,
            "num_attention_heads": 4,
            "in_channels": 4,
            "layers_per_block": 1,
            "projection_class_embeddings_input_dim": 24,
            "addition_time_embed_dim": 8,
        },
        {"sample": (2, 4, 8, 8), "timestep": STEPS, "encoder_hidden_states": (1, 16), "added_time_ids": (3,)},
    ),
    Denoiser(
        "UNet1DModel",
        {
            "block_out_channels": (8, 8, 16, 16),
            "in_channels": 14,
            "out_channels": 14,
            "time_embedding_type": "positional",
            "use_timestep_embedding": True,
            "flip_sin_to_cos": False,
            "freq_shift": 1.0,
            "out_block_type": "OutConv1DBlock",
            "mid_block_type": "MidResTemporalBlock1D",
            "down_block_types": ("DownResnetBlock1D",) * 4,
            "up_block_types": ("UpResnetBlock1D",) * 3,
            "act_fn": "swish",
        },
        {"sample": (14, 16), "timestep": STEPS},
    ),
)
