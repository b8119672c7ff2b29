"""A small model in two forms: plain in one process, and hand-written pipeline stages in the emitted form.

Tokens -> tied embedding + positions -> layers of x + down(gelu(up(x * scale))) + bias -> tied head -> cross entropy.
Placements over tp: embedding S0 (vocabulary), positions B, up S0, down S1, scales and biases Bp (sequence-split
use), `idle` is trainable and never used, `gain` is frozen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from autoptd.layout.layout import Layout, TensorSpec
from autoptd.layout.mesh import Mesh
from autoptd.layout.placements import BP, B, Split
from autoptd.ops.dropout import DropoutKey
from autoptd.ops.library import dropout, valid_count, vocab_cross_entropy, vocab_embedding
from autoptd.ops.stage import Stage, Wire, parameter
from autoptd.ops.tp_axis import Axis

V, H, M, S, LAYERS = 12, 6, 10, 4, 4
INPUTS = ("ids", "labels")


def specs(pp: int) -> dict[str, TensorSpec]:
    """Return the specs of every parameter in forward order."""
    last = pp - 1
    result = {
        "embed.weight": TensorSpec(Split(0), (V, H), tuple(sorted({0, last}))),
        "positions": TensorSpec(B, (S, H)),
        "gain": TensorSpec(B, (H,), trainable=False),
        "idle": TensorSpec(B, (5,)),
    }
    for i in range(LAYERS):
        at = (i * pp // LAYERS,)
        result |= {
            f"layers.{i}.scale": TensorSpec(BP, (H,), at),
            f"layers.{i}.up.weight": TensorSpec(Split(0), (M, H), at),
            f"layers.{i}.down.weight": TensorSpec(Split(1), (H, M), at),
            f"layers.{i}.down.bias": TensorSpec(BP, (H,), at),
        }
    result["final.scale"] = TensorSpec(BP, (H,), (last,))
    return result


def layout(mesh: Mesh, micro: int = 2, microbatches: int = 3, **options: object) -> Layout:
    options = {"precision": "fp64", "bucket_elements": 40} | options
    return Layout(mesh, micro, microbatches, INPUTS, specs(mesh.stages), **options)  # type: ignore[arg-type]


def weights(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s.shape, dtype=torch.float64, generator=generator) * 0.5 for n, s in specs(1).items()}


def batch(samples: int, seed: int) -> dict[str, Tensor]:
    """Make a batch with ragged labels: some samples have many ignored positions, one has no valid one."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(V, (samples, S), generator=generator)
    labels = torch.randint(V, (samples, S), generator=generator)
    for i in range(samples):
        labels[i, : (i * 7 + seed) % (S + 1)] = -100
    return {"ids": ids, "labels": labels}


def plain_loss(w: dict[str, Tensor], ids: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of the model in one process: the mean over valid labels."""
    x = (F.embedding(ids, w["embed.weight"]) + w["positions"]) * w["gain"]
    for i in range(LAYERS):
        p = f"layers.{i}."
        x = x + F.gelu(x * w[p + "scale"] @ w[p + "up.weight"].T) @ w[p + "down.weight"].T + w[p + "down.bias"]
    logits = x * w["final.scale"] @ w["embed.weight"].T
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


@dataclass
class Reference:
    """Results of one process over several steps."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]  # of the first step
    weights: dict[str, Tensor]  # after the last step


def train_plain(
    optimizer: type[torch.optim.Optimizer], batches: list[dict[str, Tensor]], clip: float | None = None, **kwargs: float
) -> Reference:
    w = {name: x.clone().requires_grad_(name != "gain") for name, x in weights().items()}
    made = optimizer([x for x in w.values() if x.requires_grad], **kwargs)  # type: ignore[call-arg]
    result = Reference([], [], {}, {})
    for each in batches:
        made.zero_grad()
        loss = plain_loss(w, **each)
        loss.backward()
        result.gradients = result.gradients or {n: x.grad.clone() for n, x in w.items() if x.grad is not None}
        trained = [x for x in w.values() if x.grad is not None]
        result.norms.append(float(torch.nn.utils.clip_grad_norm_(trained, clip if clip is not None else 1e300)))
        made.step()
        result.losses.append(float(loss.detach()))
    result.weights = {n: x.detach() for n, x in w.items()}
    return result


def make_stage(
    tp: Axis, pp: int, index: int, rng: DropoutKey | None = None, p: float = 0.0, recompute: bool = False
) -> Stage:
    """Return stage `index` of `pp`, on meta; with `recompute`, every layer saves only its input."""
    mine = [i for i in range(LAYERS) if i * pp // LAYERS == index]
    first, last = index == 0, index == pp - 1
    wire = Wire("x", torch.float64, lambda b: (b, S // tp.size, H), requires_grad=True)

    class TinyStage(Stage):
        inputs = (("ids",) if first else ()) + (("labels",) if last else ())
        receives = () if first else (wire,)
        sends = () if last else (wire,)
        is_last = last
        draws = p > 0
        sizes: ClassVar = {"b": ("ids", 0)}
        count_inputs = ("labels",)

        @staticmethod
        def loss_counts(**inputs: Tensor) -> tuple[Tensor, ...]:
            return (valid_count(inputs["labels"]),)

        def layer(self, x: Tensor, i: int) -> Tensor:
            tp, layer = self.tp, self.layers.get_submodule(str(i))
            h = tp.all_gather(x * layer.scale, 1)
            h = dropout(F.gelu(h @ layer.up.weight.T), p, f"layers.{i}", self.dropout, parts=[tp.part(2)])
            return x + tp.reduce_scatter(h @ layer.down.weight.T, 1) + layer.down.bias

        def forward(self, *received: Tensor, **given: Tensor) -> Tensor | tuple[Tensor, ...]:
            tp = self.tp
            if first:
                x = tp.all_reduce(vocab_embedding(self.embed.weight, given["ids"], tp))
                x = tp.slice((x + self.positions) * self.gain, 1)
            else:
                (x,) = received
            for i in mine:
                x = checkpoint(self.layer, x, i, use_reentrant=False) if recompute else self.layer(x, i)
            if not last:
                return (x,)
            logits = tp.all_gather(x * self.final.scale, 1) @ self.embed.weight.T
            (count,) = given["counts"]
            return vocab_cross_entropy(logits, given["labels"], tp) / count

    with torch.device("meta"):
        stage = TinyStage(tp, rng)
        for name, spec in specs(pp).items():
            if index in spec.stages:
                parameter(stage, name, spec.local_shape(tp.size), torch.float64, spec.trainable)
    return stage
