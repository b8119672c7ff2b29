"""Traced model: one forward pass to the loss as an fx graph, with the meaning of its placeholders and sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import sympy
import torch
from torch import Tensor, fx, nn

from autoptd.layout.sample_rows import PLAIN, SampleRows, samples_first
from autoptd.layout.size_conditions import SizeCondition
from autoptd.passes.custom_grad.trace_calls import OwnCalls
from autoptd.passes.graph import source_line
from autoptd.passes.trace.loss import Objective

PRECISIONS: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}

# samples that a loss which is no sum is computed from: the whole batch, a microbatch of one dp rank, or those of all dp
# ranks that are computed at a time
Averaging = Literal["global", "per-microbatch", "per-microbatch-over-dp"]
AVERAGINGS: tuple[Averaging, ...] = get_args(Averaging)

BATCH = sympy.Symbol("b", integer=True, positive=True)
SEQUENCE = sympy.Symbol("s", integer=True, positive=True)
LOCAL = sympy.Symbol("s_local", integer=True, positive=True)  # tokens of one cp rank

_SHOWN = 8  # numbers of an input that a note names


@dataclass
class Traced:
    """One forward pass up to the loss.

    `graph` has placeholders for parameters, buffers and inputs, in that order, and one scalar output. Each node's
    `meta["val"]` is a fake tensor whose sizes are torch symbols; `symbol` maps those to `b`, `s` and named sizes.
    """

    graph: fx.GraphModule
    parameters: dict[str, str]  # placeholder -> original dotted name
    buffers: dict[str, str]  # placeholder -> original dotted name
    inputs: dict[str, str]  # placeholder -> name of the model's input
    constants: dict[str, Tensor]  # placeholder -> value, for closed-over tensors and buffers not on meta
    symbol: dict[sympy.Symbol, sympy.Expr]  # torch's symbol -> ours
    sizes: dict[sympy.Symbol, tuple[str, int]]  # our symbol -> (input, dim) that it is read from
    example: dict[sympy.Symbol, int]  # our symbol -> its value in the example inputs
    aliases: dict[str, str] = field(default_factory=dict)  # other names of tied parameters -> the canonical one
    frozen: frozenset[str] = frozenset()  # parameters with requires_grad=False
    resolved: dict[sympy.Expr, Any] = field(default_factory=dict)  # cache: size in torch's symbols -> in ours
    transient: frozenset[str] = frozenset()  # buffers that are not part of the state dict
    averaging: Averaging = "global"  # the user's option
    objective: Objective = field(default_factory=Objective)
    own: OwnCalls = field(default_factory=OwnCalls)  # calls with a user-defined backward pass
    rows: dict[str, SampleRows] = field(default_factory=dict)  # input -> its samples, if they are not rows of dim 0
    known: dict[str, Tensor] = field(default_factory=dict)  # input -> its row in every sample, if the graph is for that
    left_out: tuple[str, ...] = ()  # places of checks of data, which are not in the graph
    left: set[tuple[str, str]] = field(default_factory=set)  # Python values where a pass leaves a tensor, by `Name`
    written: frozenset[str] = frozenset()  # inputs that forward writes to; in the graph, to copies of them
    settled: bool = False  # whether forward replaces modules in its first pass: the graph is of the model after that
    conditions: tuple[SizeCondition, ...] = ()  # under which the graph is what the model computes
    random_calls: list[str] = field(default_factory=list)  # modules of these calls; a node's number is `meta[CALL]`
    length_fixed: str = ""  # what made a number of the length of sequences, if none is a symbol
    read_whole: frozenset[str] = frozenset()  # inputs that the end of a loss over the whole batch reads as they are
    of_turns: dict[str, tuple[int, ...]] = field(default_factory=dict)  # parameter -> the sums that count its only rows
    loops: bool = False  # loops over samples were written as one pass
    as_numbers: set[sympy.Symbol] = field(default_factory=set)  # sizes that a refused op could be computed with, fixed

    @property
    def notes(self) -> list[str]:
        """Notes on inputs whose values or rows are fixed by the trace, and on checks of data that it leaves out."""
        notes = [f"{name} has {rows}" for name, rows in sorted(self.rows.items())]
        for name, row in sorted(self.known.items()):
            numbers = str(row.tolist()) if row.numel() <= _SHOWN else f"{row.flatten()[:_SHOWN].tolist()} …"
            notes.append(f"{name} must be {numbers} in every sample: the model reads these numbers in Python")
        for name in sorted(self.written):
            notes.append(
                f"forward writes to the input {name}: here to a copy, so that the caller's tensor stays as it is"
            )
        if self.settled:
            notes.append("forward replaces modules of the model in its first pass: planned is the model after that")
        if self.left_out:
            notes.append(f"checks of data in forward are left out: {', '.join(self.left_out)}")
        return notes

    @property
    def outside(self) -> dict[str, Tensor]:
        """Tensors with values that are neither of the model nor of a batch, by a description of each."""
        line = {n.name: source_line(user) for n in self.graph.graph.nodes if n.op == "placeholder" for user in n.users}
        found: dict[str, Tensor] = {}
        for name, x in self.constants.items():
            if name not in self.buffers and not x.is_meta:
                read = f" that {line[name]} reads" if name in line else ""
                text = f"a tensor {list(x.shape)} from outside{read}"
                found[f"{text}, {name}" if text in found else text] = x
        return found

    @property
    def dims_as_numbers(self) -> frozenset[tuple[str, int]]:
        """Inputs and dims of the sizes `as_numbers`, which are known once the graph is annotated."""
        if not self.as_numbers:
            return frozenset()
        given = [(self.inputs[n.name], n.meta["info"]) for n in self.graph.graph.nodes if n.name in self.inputs]
        return frozenset((name, d) for name, x in given for d, size in enumerate(x.shape) if size in self.as_numbers)

    @property
    def fixed_dims(self) -> frozenset[tuple[str, int]]:
        """Inputs and dims whose sizes are numbers in the graph, which is normalised."""
        given = [(self.inputs[n.name], n.meta["info"]) for n in self.graph.graph.nodes if n.name in self.inputs]
        return frozenset((name, d) for name, x in given for d, size in enumerate(x.shape) if isinstance(size, int))

    def by_sample(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a batch with a row of dim 0 for each sample in every tensor."""
        return {name: self.rows.get(name, PLAIN).apart(batch[name]) for name in samples_first(batch, self.rows)}

    def as_given(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a batch as the user's model takes it, of one with a row of dim 0 for each sample."""
        return {name: self.rows.get(name, PLAIN).joined(x) for name, x in batch.items()}


def canonical_names(model: nn.Module) -> dict[str, str]:
    """Map every name of a parameter or buffer to the first name of the same tensor."""
    first: dict[int, str] = {}
    held = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: first.setdefault(id(x), name) for name, x in held}
