"""Models of timm: of every architecture module the variant with the fewest parameters that its names promise.

Batch norms are replaced by group norms, except in the cases that are named after them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from benchmarks.coverage.vision_zoo import CLASSES, Picture, without_batch_norm

# name -> side of its pictures, and the options that make it smaller
SMALL: dict[str, tuple[int, dict[str, Any]]] = {
    "beit_base_patch16_224": (32, {"img_size": 32, "embed_dim": 48, "num_heads": 4, "depth": 2}),
    "cait_xxs24_224": (32, {"img_size": 32, "depth": 2}),
    "coat_tiny": (32, {"img_size": 32}),
    "coatnet_nano_rw_224": (64, {"img_size": 64}),
    "convit_tiny": (32, {"img_size": 32, "depth": 3}),
    "convmixer_768_32": (32, {}),
    "convnext_atto": (32, {}),
    "convnextv2_atto": (32, {}),
    "crossvit_tiny_240": (240, {}),
    "cspresnet50": (32, {}),
    "davit_tiny": (64, {}),
    "deit_tiny_patch16_224": (32, {"img_size": 32, "depth": 2}),
    "densenet121": (32, {}),
    "dla34": (32, {}),
    "dpn48b": (32, {}),
    "edgenext_xx_small": (64, {}),
    "efficientformer_l1": (224, {}),
    "efficientformerv2_s0": (64, {"img_size": 64}),
    "efficientnet_b0": (32, {}),
    "efficientvit_b0": (64, {}),
    "efficientvit_m0": (64, {"img_size": 64}),
    "eva02_tiny_patch14_224": (28, {"img_size": 28, "depth": 2}),
    "fastvit_t8": (64, {}),
    "fasternet_t0": (64, {}),
    "focalnet_tiny_srf": (64, {}),
    "gcvit_xxtiny": (64, {"img_size": 64}),
    "ghostnet_050": (32, {}),
    "hardcorenas_a": (32, {}),
    "hgnet_tiny": (64, {}),
    "hiera_tiny_224": (64, {"img_size": 64}),
    "hrnet_w18_small": (64, {}),
    "inception_next_atto": (64, {}),
    "inception_v4": (96, {}),
    "levit_128s": (64, {"img_size": 64}),
    "maxvit_rmlp_pico_rw_256": (64, {"img_size": 64}),
    "mambaout_femto": (32, {}),
    "mixer_s32_224": (64, {"img_size": 64}),
    "mobilenetv3_small_050": (32, {}),
    "mobilenetv4_conv_small_035": (32, {}),
    "mobileone_s0": (32, {}),
    "mobilevit_xxs": (64, {}),
    "mvitv2_tiny": (64, {"img_size": 64}),
    "nest_tiny": (64, {"img_size": 64}),
    "nextvit_small": (64, {}),
    "nf_resnet26": (32, {}),
    "pit_ti_224": (64, {"img_size": 64}),
    "poolformer_s12": (64, {}),
    "pvt_v2_b0": (64, {}),
    "rdnet_tiny": (32, {}),
    "regnetx_002": (32, {}),
    "repghostnet_050": (32, {}),
    "repvgg_a0": (32, {}),
    "repvit_m0_9": (32, {}),
    "res2net50_14w_8s": (32, {}),
    "resmlp_12_224": (32, {"img_size": 32}),
    "resnest14d": (32, {}),
    "resnet10t": (32, {}),
    "resnetv2_18": (32, {}),
    "rexnet_100": (32, {}),
    "selecsls42": (32, {}),
    "seresnet18": (32, {}),
    "sequencer2d_s": (32, {"layers": (1, 1, 1, 1)}),
    "shvit_s1": (64, {}),
    "skresnet18": (32, {}),
    "starnet_s050": (32, {}),
    "swin_tiny_patch4_window7_224": (56, {"img_size": 56, "depths": (1, 1, 1, 1)}),
    "swinv2_cr_tiny_224": (64, {"img_size": 64, "depths": (1, 1, 1, 1)}),
    "swinv2_tiny_window8_256": (64, {"img_size": 64, "depths": (1, 1, 1, 1)}),
    "test_vit": (160, {}),
    "tiny_vit_5m_224": (224, {}),
    "tinynet_e": (32, {}),
    "tnt_s_legacy_patch16_224": (32, {"img_size": 32, "depth": 2}),
    "twins_svt_small": (64, {"img_size": 64}),
    "vgg11": (32, {}),
    "visformer_tiny": (64, {"img_size": 64}),
    "vit_tiny_patch16_224": (32, {"img_size": 32, "depth": 2}),
    "vit_relpos_small_patch16_224": (32, {"img_size": 32, "depth": 2}),
    "volo_d1_224": (64, {"img_size": 64}),
    "vovnet39a": (32, {}),
    "xception41": (64, {}),
    "xcit_nano_12_p8_224": (32, {"img_size": 32, "depth": 2}),
}


def made(name: str, change: Callable[[nn.Module], nn.Module] = lambda net: net) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import timm

        return change(timm.create_model(name, num_classes=CLASSES, **SMALL[name][1]))

    return make


AS_IT_IS = ("efficientnet_b0", "levit_128s", "mobilenetv3_small_050", "regnetx_002", "resnet10t")
CASES = [
    *(Picture(f"timm {n}", "timm", made(n, without_batch_norm), side) for n, (side, _) in SMALL.items()),
    *(Picture(f"timm {n} BatchNorm", "timm", made(n), SMALL[n][0]) for n in AS_IT_IS),
]
