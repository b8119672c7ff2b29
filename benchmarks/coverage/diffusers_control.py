"""A training step of a ControlNet of diffusers: the trained copy adds to the features of a frozen denoiser."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.coverage.diffusers import unet
from benchmarks.coverage.made import Built, Made, normal, whole

ATTENTION = {"cross_attention_dim": 16, "attention_head_dim": 2}


class Controlled(nn.Module):
    """A frozen denoiser and the net that controls it."""

    def __init__(self, denoiser: nn.Module, control: nn.Module) -> None:
        super().__init__()
        self.denoiser, self.control = denoiser.requires_grad_(False), control

    def forward(self, sample: Tensor, timestep: Tensor, text: Tensor, picture: Tensor, noise: Tensor) -> Tensor:
        down, middle = self.control(
            sample, timestep, encoder_hidden_states=text, controlnet_cond=picture, return_dict=False
        )
        out = self.denoiser(
            sample,
            timestep,
            encoder_hidden_states=text,
            down_block_additional_residuals=down,
            mid_block_additional_residual=middle,
            return_dict=False,
        )
        return F.mse_loss(out[0], noise)


def control() -> Built:
    from diffusers import ControlNetModel, UNet2DConditionModel

    net = UNet2DConditionModel(**unet("CrossAttnDownBlock2D DownBlock2D", "UpBlock2D CrossAttnUpBlock2D", **ATTENTION))
    copy = ControlNetModel.from_unet(net, conditioning_embedding_out_channels=(8, 8))
    for parameter in copy.parameters():  # layers that begin at zero pass no gradient on
        if not parameter.any():
            nn.init.normal_(parameter, std=0.05)
    batch = {"sample": normal(4, 8, 8), "timestep": whole(1000), "text": normal(6, 16, seed=3)}
    return Controlled(net, copy), {**batch, "picture": normal(3, 16, 16, seed=4), "noise": normal(4, 8, 8, seed=5)}


CASES = [Made("ControlNetModel", "diffusers", control)]
