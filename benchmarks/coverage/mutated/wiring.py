"""Wiring: what is put around a layer [b, s, d] -> [b, s, d], and how layers are joined into a trunk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from benchmarks.coverage.mutated.attention import drawn_attention
from benchmarks.coverage.mutated.channels import drawn_channels, drawn_norm
from benchmarks.coverage.mutated.draw import Draw, Shape
from benchmarks.coverage.mutated.mixers import drawn_mixer
from benchmarks.coverage.mutated.ops import drawn_op


class Around(nn.Module):
    """A layer with something around it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Checkpointed(Around):
    def __init__(self, layer: nn.Module, reentrant: bool) -> None:
        super().__init__(layer)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=self.reentrant)


class Twice(Around):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(0.5 * self.layer(x))


class Functional(Around):
    """The layer by its parameters, each slightly smaller."""

    def forward(self, x: Tensor) -> Tensor:
        smaller = {name: 0.9 * p for name, p in self.layer.named_parameters()}
        return torch.func.functional_call(self.layer, smaller, (x,))


class Mapped(Around):
    """The layer for each sample, by vmap."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: self.layer(row.unsqueeze(0)).squeeze(0), randomness="different")(x)


class BySample(Around):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.layer(row.unsqueeze(0)) for row in x])


class InPieces(Around):
    """The layer for pieces of the tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.layer(piece) for piece in x.chunk(2, 1)], 1)


class Detached(Around):
    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() + self.layer(x.detach())


class WithoutGradient(Around):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.layer(x)
        return x * (1 + y.sigmoid())


class SampleDropped(Around):
    """Stochastic depth, by sample."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self.layer(x)
        return self.layer(x) * x.new_empty(x.size(0), 1, 1).bernoulli_(0.8) / 0.8


class Averaged(Around):
    """The layer, centred by a running mean, which is updated in place."""

    def __init__(self, layer: nn.Module, width: int, reads: bool) -> None:
        super().__init__(layer)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(0.1 * y.mean((0, 1)))
                self.steps += 1
        return y - 0.1 * self.mean if self.reads else y


class Remembered(Around):
    """The layer, and its last output on the module, as people keep for plots."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.last = y.detach()
        return y


class Scaled(Around):
    """A layer scale, and a parameter that nothing reads."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__(layer)
        self.scale, self.unused = nn.Parameter(torch.full((width,), 0.3)), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.layer(x)


class TimeFirst(Around):
    """The layer over time-first tensors that are turned for it and back."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.permute(1, 0, 2).contiguous().transpose(0, 1)).transpose(0, 1).contiguous().transpose(0, 1)


class Windows(Around):
    """The layer over windows of two tokens, padded."""

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        padded = F.pad(x, (0, 0, 0, s % 2))
        y = self.layer(padded.view(b, -1, 2, d).flatten(0, 1))
        return y.view(b, -1, d)[:, :s]


class Doubled(torch.autograd.Function):
    """A scaling with a backward pass of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g.clamp(-1, 1)


class OwnGradient(Around):
    def forward(self, x: Tensor) -> Tensor:
        return Doubled.apply(self.layer(x))


def hooked(layer: nn.Module) -> nn.Module:
    layer.register_forward_hook(lambda module, given, y: y * 0.7)
    layer.register_forward_pre_hook(lambda module, given: (given[0] + 0.1,))
    return layer


def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(False)


def normed_weights(layer: nn.Module) -> nn.Module:
    for module in list(layer.modules()):
        if isinstance(module, nn.Linear) and module.weight.numel():
            parametrizations.weight_norm(module)
    return layer


def evaluated(layer: nn.Module) -> nn.Module:
    """Keep a layer in evaluation mode, whatever its model is set to."""
    layer.train = lambda mode=True: layer  # type: ignore[method-assign]
    for part in layer.modules():
        part.training = False
    return layer


def wrapped(layer: nn.Module, draw: Draw, shape: Shape) -> nn.Module:
    """Return the layer with something around it, drawn."""
    table: Mapping[str, Callable[[], nn.Module]] = {
        "checkpoint": lambda: Checkpointed(layer, False),
        "checkpoint reentrant": lambda: Checkpointed(layer, True),
        "twice": lambda: Twice(layer),
        "functional": lambda: Functional(layer),
        "vmap": lambda: Mapped(layer),
        "by sample": lambda: BySample(layer),
        "in pieces": lambda: InPieces(layer),
        "detached": lambda: Detached(layer),
        "no gradient": lambda: WithoutGradient(layer),
        "stochastic depth": lambda: SampleDropped(layer),
        "running mean": lambda: Averaged(layer, shape.width, False),
        "running mean read": lambda: Averaged(layer, shape.width, True),
        "remembered": lambda: Remembered(layer),
        "scaled": lambda: Scaled(layer, shape.width),
        "time first": lambda: TimeFirst(layer),
        "windows": lambda: Windows(layer),
        "own gradient": lambda: OwnGradient(layer),
        "hooks": lambda: hooked(layer),
        "frozen": lambda: frozen(layer),
        "weight norm": lambda: normed_weights(layer),
        "evaluated": lambda: evaluated(layer),
        "compiled": lambda: torch.compile(layer, backend="eager"),  # type: ignore[dict-item,return-value]
        "dropout": lambda: nn.Sequential(nn.Dropout(0.2), layer),
        "op after": lambda: nn.Sequential(layer, drawn_op(draw)),
        "op before": lambda: nn.Sequential(drawn_op(draw), layer),
    }
    return draw.named(table, "around ")()


def maybe_wrapped(layer: nn.Module, draw: Draw, shape: Shape, spice: float = 1.0) -> nn.Module:
    return wrapped(layer, draw, shape) if draw.chance(spice * draw.spice) else layer


class Block(nn.Module):
    """A token mixer and a layer over features, with their norms before, after or both, in a row or in parallel."""

    def __init__(self, draw: Draw, shape: Shape, causal: bool) -> None:
        super().__init__()
        mixer = drawn_mixer(draw, shape) if draw.chance(0.2) else drawn_attention(draw, shape, causal)
        self.mixer = maybe_wrapped(mixer, draw, shape, 0.3)
        self.channels = maybe_wrapped(drawn_channels(draw, shape), draw, shape, 0.5)
        self.norms = nn.ModuleList(drawn_norm(draw, shape.width) for _ in range(2))
        self.form = draw.one("before", "before", "after", "parallel")

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "parallel":
            y = self.norms[0](x)
            return self.norms[1](x + self.mixer(y) + self.channels(y))
        if self.form == "after":
            x = self.norms[0](x + self.mixer(x))
            return self.norms[1](x + self.channels(x))
        x = x + self.mixer(self.norms[0](x))
        return x + self.channels(self.norms[1](x))


class Trunk(nn.Module):
    """Layers, joined in one of several ways. `early` is set to the first layer's output if `keeps_early`."""

    def __init__(self, layers: list[nn.Module], draw: Draw, form: str = "") -> None:
        super().__init__()
        self.form = form or (draw.one("skips", "shared", "u", "mean", "nested", "joined") if draw.odd() else "row")
        draw.notes.append(f"trunk {self.form}")
        if self.form == "shared":
            layers = layers[:1] * max(2, len(layers))
        self.layers = nn.ModuleList(layers)
        if self.form == "nested":
            self.layers = nn.ModuleList([nn.ModuleDict({"a": layer, "b": nn.Identity()}) for layer in layers])

    def forward(self, x: Tensor) -> Tensor:
        return self.outputs(x)[-1]

    def outputs(self, x: Tensor) -> list[Tensor]:
        """Return the trunk's input and the output of each layer."""
        found = [x]
        for i, layer in enumerate(self.layers):
            if isinstance(layer, nn.ModuleDict):
                found.append(layer["b"](layer["a"](found[-1])))
            elif self.form == "skips":
                found.append(layer(found[-1]) + 0.5 * found[max(0, i - 1)])
            elif self.form == "u":
                twin = found[len(self.layers) - 1 - i] if i > len(self.layers) // 2 else 0.0
                found.append(layer(found[-1] + twin))
            elif self.form == "mean":
                found.append(layer(torch.stack(found).mean(0)))
            elif self.form == "joined":
                found.append(layer(torch.cat(found, -1).unflatten(-1, (len(found), -1)).sum(-2)))
            else:
                found.append(layer(found[-1]))
        return found


def drawn_trunk(draw: Draw, shape: Shape, causal: bool) -> Trunk:
    """Draw a trunk: layers that are alike, mostly, or each of its own."""
    if draw.chance(0.7):
        choices, notes = draw.random.getstate(), list(draw.notes)
        layers: list[nn.Module] = []
        for _ in range(shape.layers):
            draw.random.setstate(choices)
            draw.notes[:] = notes
            layers.append(Block(draw, shape, causal))
    else:
        layers = [Block(draw, shape, causal) for _ in range(shape.layers)]
    for at in draw.some(range(len(layers) + 1), 2)[::-1]:
        layers.insert(at, drawn_op(draw))
    return Trunk([maybe_wrapped(layer, draw, shape, 0.3) for layer in layers], draw)
