"""How a training program lies on its ranks: the part of a plan that the runtime reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from autoptd.errors import PlanError, nearest
from autoptd.layout.mesh import Mesh
from autoptd.layout.placements import Placement, Split
from autoptd.schedule import RUNNABLE, row_of

PRECISIONS = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class TensorSpec:
    """One parameter or buffer of the model: its placement on tp, global shape, and the stages that hold it."""

    placement: Placement  # B, Bp or Split; Bp: each rank's gradient is a partial value
    shape: tuple[int, ...]
    stages: tuple[int, ...] = (0,)  # ascending; more than one: tied, every stage holds a copy
    trainable: bool = True
    dtype: torch.dtype | None = None  # None: the layout's
    recomputed: bool = False  # by a block that runs again in the backward pass
    block: str = ""  # the emitted block that alone reads it, by its path; "": the stage itself does
    idle: bool = False  # no gradient reaches it

    @property
    def unit(self) -> tuple[str, tuple[int, ...]]:
        """What it is gathered with, where parameters are sharded."""
        return self.block, self.stages

    def local_shape(self, tp: int) -> tuple[int, ...]:
        """The shape on each of `tp` ranks."""
        if not isinstance(self.placement, Split):
            return self.shape
        dim = self.placement.dim
        return (*self.shape[:dim], self.shape[dim] // tp, *self.shape[dim + 1 :])


@dataclass(frozen=True)
class InputSpec:
    """One input of the model: its dims after the samples, as planned. `symbols`: what varies with it, "" if nothing."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    symbols: tuple[str, ...]

    @property
    def text(self) -> str:
        """`[samples, s up to 1024] of torch.int64`."""
        dims = [f"{symbol} up to {n}" if symbol else str(n) for symbol, n in zip(self.symbols, self.sizes, strict=True)]
        return f"[{', '.join(['samples', *dims])}] of {self.dtype}"


@dataclass(frozen=True)
class Layout:
    """Mesh, microbatches, and where each tensor of the model lies. Identical on every rank.

    `parameters` is in the model's forward order. Raises PlanError for what the runtime cannot run.
    """

    mesh: Mesh
    micro: int  # samples per microbatch per dp rank; the last one may hold fewer
    microbatches: int  # per step
    inputs: tuple[str, ...]  # all model inputs that any stage reads; dim 0 counts samples
    parameters: Mapping[str, TensorSpec]
    buffers: Mapping[str, TensorSpec] = field(default_factory=dict)
    zero: int = 1  # what dp ranks share out: 1 optimizer state, 2 gradients too, 3 parameters too; 0 nothing
    shards: int = 0  # dp ranks that share one copy, neighbours on the axis; 0: all of them
    precision: str = "fp32"
    schedule: str = "1f1b"
    overlap: bool = True  # reduce gradients while the last microbatch's backward runs
    sums_ahead: bool = False  # forward passes of the whole batch first, for sums that the loss is a function of
    one_microbatch: bool = False  # of a loss that no more than one microbatch and rank can have
    gather_later: bool = False  # collect updated parameters while the next step begins
    zigzag: bool = False  # which tokens of a sample a cp rank has: see `tokens.py`
    multiples: Mapping[tuple[str, int], int] = field(default_factory=dict)  # (input, dim) -> what must divide its size
    specs: Mapping[str, InputSpec] = field(default_factory=dict)  # of `inputs`, where a batch is held to them
    slices: bool = False  # of what all tp ranks hold alike, each sends its slice, and the receivers gather
    modules: tuple[str, ...] = ()  # of each stage, in words: names for a profiler
    gradients: str = "main"  # the type they are added up and summed in: "main", or "compute", that of the parameters
    bucket_elements: int = 8 * 1024 * 1024  # a bucket closes when it holds this many gradient elements

    def __post_init__(self) -> None:
        if self.zero not in (0, 1, 2, 3):
            raise PlanError(f"zero={self.zero} is not supported by the runtime", fix="use zero 0, 1, 2 or 3")
        if self.shards and self.mesh.copies % self.shards:
            raise PlanError(
                f"shards of {self.shards} ranks do not divide dp × cp {self.mesh.copies}",
                fix="use a divisor of it, or 0 for all",
            )
        shape = row_of(self.schedule, self.mesh.virtual).shape
        if shape != self.mesh.way:
            raise PlanError(f"the schedule {self.schedule} is one of a {shape}, the mesh of a {self.mesh.way}")
        if self.schedule not in RUNNABLE:
            raise PlanError(
                f"the runtime cannot run the schedule {self.schedule!r}", fix=f"use {' or '.join(RUNNABLE)}"
            )
        if self.precision not in PRECISIONS:
            raise PlanError(f"unknown precision {self.precision!r}", fix=nearest(self.precision, PRECISIONS))

    @property
    def sharing(self) -> int:
        """Dp ranks that share one copy of what is sharded."""
        return (self.shards or self.mesh.copies) if self.zero else 1

    @property
    def dtype(self) -> torch.dtype:
        """Of parameters and activations."""
        return PRECISIONS[self.precision]

    @property
    def main_dtype(self) -> torch.dtype:
        """Of what the optimizer updates: float32 at least."""
        return torch.promote_types(self.dtype, torch.float32)
