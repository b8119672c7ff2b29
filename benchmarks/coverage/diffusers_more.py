"""Denoisers of diffusers for videos and sound, and its autoencoders, each with a small configuration."""

from __future__ import annotations

from typing import Any

from benchmarks.coverage.denoisers import FRACTION, STEPS, Denoiser
from benchmarks.coverage.diffusers_pictures import NARROW, TEXT

VIDEO = (4, 2, 8, 8)
FRAMES = (2, 4, 8, 8)  # frames before channels
WAN: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 16,
    "ffn_dim": 32,
    "num_layers": 2,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "rope_max_seq_len": 32,
}
FILM = {"hidden_states": VIDEO, "timestep": STEPS, "encoder_hidden_states": TEXT}

VIDEOS = (
    Denoiser(
        "CogVideoXTransformer3DModel",
        {
            **NARROW,
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 4,
            "text_embed_dim": 16,
            "num_layers": 2,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 5,
            "max_text_seq_length": 6,
        },
        {**FILM, "hidden_states": FRAMES},
    ),
    Denoiser("WanTransformer3DModel", WAN, FILM),
    Denoiser("SkyReelsV2Transformer3DModel", WAN, FILM),
    Denoiser(
        "WanVACETransformer3DModel",
        {**WAN, "num_layers": 2, "vace_layers": [0], "vace_in_channels": 8},
        {**FILM, "control_hidden_states": (8, 2, 8, 8)},
    ),
    Denoiser(
        "LTXVideoTransformer3DModel",
        {
            **NARROW,
            "in_channels": 4,
            "out_channels": 4,
            "cross_attention_dim": 16,
            "num_layers": 2,
            "caption_channels": 16,
        },
        {
            "hidden_states": (32, 4),
            "timestep": STEPS,
            "encoder_hidden_states": TEXT,
            "encoder_attention_mask": "real 6",
        },
        fixed={"num_frames": 2, "height": 4, "width": 4},
    ),
    Denoiser(
        "LatteTransformer3DModel",
        {
            **NARROW,
            "sample_size": 8,
            "num_layers": 2,
            "patch_size": 2,
            "caption_channels": 16,
            "in_channels": 4,
            "cross_attention_dim": 16,
            "out_channels": 8,
            "attention_bias": True,
            "activation_fn": "gelu-approximate",
            "num_embeds_ada_norm": 1000,
            "norm_type": "ada_norm_single",
            "norm_elementwise_affine": False,
            "video_length": 2,
        },
        FILM,
    ),
    Denoiser(
        "AllegroTransformer3DModel",
        {
            **NARROW,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "cross_attention_dim": 16,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 2,
            "caption_channels": 16,
        },
        FILM,
    ),
    Denoiser(
        "MochiTransformer3DModel",
        {
            **NARROW,
            "num_layers": 2,
            "pooled_projection_dim": 16,
            "in_channels": 4,
            "text_embed_dim": 16,
            "time_embed_dim": 4,
            "max_sequence_length": 6,
        },
        {**FILM, "encoder_attention_mask": "real 6"},
    ),
    Denoiser(
        "HunyuanVideoTransformer3DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 10,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "num_refiner_layers": 1,
            "patch_size": 2,
            "patch_size_t": 1,
            "guidance_embeds": True,
            "text_embed_dim": 16,
            "pooled_projection_dim": 8,
            "rope_axes_dim": (2, 4, 4),
        },
        {**FILM, "pooled_projections": (8,), "encoder_attention_mask": "real 6", "guidance": FRACTION},
    ),
    Denoiser(
        "EasyAnimateTransformer3DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "mmdit_layers": 2,
            "patch_size": 2,
            "sample_height": 8,
            "sample_width": 8,
            "text_embed_dim": 16,
            "time_embed_dim": 8,
            "time_position_encoding_type": "3d_rope",
        },
        FILM,
    ),
    Denoiser(
        "SanaVideoTransformer3DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 12,
            "cross_attention_dim": 24,
            "caption_channels": 16,
            "sample_size": 8,
            "qk_norm": "rms_norm_across_heads",
            "rope_max_seq_len": 32,
        },
        FILM,
    ),
    Denoiser(
        "StableAudioDiTModel",
        {
            **NARROW,
            "sample_size": 16,
            "in_channels": 4,
            "num_layers": 2,
            "num_key_value_attention_heads": 2,
            "out_channels": 4,
            "cross_attention_dim": 16,
            "time_proj_dim": 8,
            "global_states_input_dim": 16,
            "cross_attention_input_dim": 16,
        },
        {
            "hidden_states": (4, 16),
            "timestep": FRACTION,
            "encoder_hidden_states": TEXT,
            "global_hidden_states": (1, 16),
        },
        fixed={"rotary_embedding": None},
    ),
    Denoiser(
        "AceStepTransformer1DModel",
        {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "in_channels": 24,
            "audio_acoustic_hidden_dim": 8,
            "patch_size": 2,
            "sliding_window": 4,
        },
        {
            "hidden_states": (8, 8),
            "timestep": FRACTION,
            "timestep_r": FRACTION,
            "encoder_hidden_states": (6, 32),
            "context_latents": (8, 16),
        },
    ),
)

CODERS = (
    Denoiser(
        "AutoencoderKL",
        {
            "block_out_channels": (8, 16),
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "latent_channels": 4,
            "norm_num_groups": 4,
        },
        {"sample": (3, 16, 16)},
    ),
    Denoiser(
        "VQModel",
        {
            "block_out_channels": (8, 16),
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "latent_channels": 4,
            "norm_num_groups": 4,
        },
        {"sample": (3, 16, 16)},
    ),
    Denoiser(
        "AutoencoderKLWan",
        {
            "base_dim": 4,
            "z_dim": 4,
            "dim_mult": [1, 1, 1, 1],
            "num_res_blocks": 1,
            "temperal_downsample": [False, True, True],
        },
        {"sample": (3, 5, 16, 16)},
    ),
)

CASES = [*VIDEOS, *CODERS]
