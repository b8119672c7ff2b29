"""The plain model in one process, step by step: what the plan's ranks are held to.

Dropout of the plain model draws what the emitted program draws: the k-th call of dropout in a forward pass is the k-th
node of the graph that drops, and an element's key is that node's (`runtime.randomness`).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from autoptd.codegen.emit import Program
from autoptd.compile import TracedModel
from autoptd.errors import RuntimeFault
from autoptd.passes.graph import info
from autoptd.passes.samples import counts_samples, sample_place
from autoptd.passes.trace import BATCH, loss_of
from autoptd.runtime import ops
from autoptd.runtime.optimizer import NAMED
from autoptd.runtime.randomness import DropoutKey, Samples, Where

aten = torch.ops.aten
Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Step:
    """One step of the plain model; tensors by original name."""

    loss: float
    norm: float  # before clipping
    gradients: dict[str, Tensor]  # before clipping; without those of parameters that nothing reaches
    state: dict[str, Tensor]  # parameters after the step


@dataclass(frozen=True)
class Draw:
    """A node that drops elements: its key, and where samples lie in what it draws."""

    key: str
    samples: Where


def draws_of(source: TracedModel, batch: Batch) -> list[Draw] | None:
    """Every node that drops, in program order; None where what one drops depends on how the batch is cut."""
    sizes = {BATCH: next(x.shape[0] for x in batch.values() if x.ndim)} | {
        symbol: batch[name].shape[dim] for symbol, (name, dim) in source.folded.traced.sizes.items() if name in batch
    }
    found = []
    for segment in source.folded.segments:
        for i, node in enumerate(segment.nodes):
            if not draw_of(node):
                continue
            samples = _samples(node, sizes)
            if samples == ops.MICROBATCH:
                return None
            found.append(Draw(f"{segment.index}.{i}", samples))
    return found


def draw_of(node: fx.Node) -> bool:
    """Whether a node drops elements."""
    if node.target is aten.dropout.default:
        return bool(node.args[1] and node.args[2])
    return node.target is aten.scaled_dot_product_attention.default and len(node.args) > 4 and bool(node.args[4])


def _samples(node: fx.Node, sizes: Mapping[Any, int]) -> Where:
    place = sample_place(node)
    width = info(node).ndim - 1 if node.target is not aten.dropout.default else None
    if place is None or place.dim == width:
        return ops.MICROBATCH if counts_samples(info(node)) else None
    outer, inner = (n if isinstance(n, int) else int(n.subs(sizes)) for n in (place.outer, place.inner))
    return Samples(place.dim, outer, inner)


@dataclass
class Keyed(TorchFunctionMode):
    """Meanwhile dropout draws by key, and what asks for a narrower float type gets float64.

    Raises RuntimeFault where the model drops more often than its graph.
    """

    draws: Sequence[Draw]
    rng: DropoutKey
    left: Iterator[Draw] = field(init=False)

    def __post_init__(self) -> None:
        super().__init__()
        self.left = iter(self.draws)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        args = as_float64(tuple(args))
        options: dict[str, Any] = as_float64(dict(kwargs or {}))
        func = torch.Tensor.double if func in _NARROW else func
        if func is torch._grouped_mm:  # whose kernel does not know float64
            return _each_group(args[0], args[1], options["offs"])
        if func is F.dropout:
            given = signature(F.dropout).bind(*args, **options)
            given.apply_defaults()
            if given.arguments["training"] and given.arguments["p"]:
                draw = self._next()
                x, p = given.arguments["input"], given.arguments["p"]
                return ops.dropout(x, p, key=draw.key, rng=self.rng, samples=draw.samples)
        if func is F.scaled_dot_product_attention:
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
            named = dict(zip(names, args, strict=False)) | options
            if named.get("dropout_p"):
                draw = self._next()
                return ops.attention(
                    named["query"],
                    named["key"],
                    named["value"],
                    named.get("attn_mask"),
                    named["dropout_p"],
                    named.get("is_causal", False),
                    named.get("scale"),
                    key=draw.key,
                    rng=self.rng,
                    samples=draw.samples,
                    enable_gqa=named.get("enable_gqa", False),
                )
        return func(*args, **options)

    def _next(self) -> Draw:
        draw = next(self.left, None)
        if draw is None:
            raise RuntimeFault(f"the model drops elements more than the {len(self.draws)} times of its graph")
        return draw


def _each_group(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """x [r, k], weight [e, k, n], offs [e], where each group's rows end -> [r, n]; rows after the last are zero."""
    ends = offs.tolist()
    parts = [x[a:b] @ w for a, b, w in zip([0, *ends], ends, weight, strict=False)]
    return torch.cat([*parts, x.new_zeros(x.shape[0] - ends[-1], weight.shape[2])])


_NARROW = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16)
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def as_float64(value: Any) -> Any:
    """float64 in place of narrower types among arguments."""
    if isinstance(value, torch.dtype) and value in _TYPES:
        return torch.float64
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(map(as_float64, value))
    return {k: as_float64(v) for k, v in value.items()} if isinstance(value, dict) else value


def widened(program: Program) -> Program:
    """An emitted program in which every float type is float64, and nothing else is another."""
    return replace(program, files={name: _WORDS.sub("torch.float64", text) for name, text in program.files.items()})


_WORDS = re.compile("|".join(rf"{re.escape(str(dtype))}\b" for dtype in _TYPES))


def train_plain(
    source: TracedModel,
    batches: Sequence[Batch],
    loss: Callable[..., Tensor] | None,
    optimizer: str,
    options: Mapping[str, Any],
    draws: Sequence[Draw],
) -> tuple[list[Step], float]:
    """Steps on whole batches, and the norm to which they were clipped: half the first."""
    model = copy.deepcopy(source.model).train()
    stepper = NAMED[optimizer](model.parameters(), **options)
    steps: list[Step] = []
    clip = 0.0
    for number, batch in enumerate(batches):
        stepper.zero_grad()
        rng = DropoutKey(0, step=number)
        with Keyed(draws, rng):
            value = loss_of(model(**batch), loss, batch)
        value.backward()
        gradients = {n: p.grad.clone() for n, p in _named(model) if p.grad is not None}
        whole = nn.utils.get_total_norm(list(gradients.values()))
        clip = clip or float(whole) / 2
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        stepper.step()
        state = {n: p.detach().clone() for n, p in _named(model)}
        steps.append(Step(float(value.detach()), float(whole), gradients, state))
    return steps, clip


def _named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters())
