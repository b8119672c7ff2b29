"""The execution of a plan's stages, as far as mesh, stages, splits and schedule leave it open."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field


@dataclass(frozen=True)
class ExecutionOptions:
    """The options of an execution.

    recompute      policy of the segments in a stage's `recompute`
    overlap        communication that overlaps with compute: of "dp", "ep", "p2p", "tp"; see `rings` too
    kernels        "eager", "fused" (by hand, as in Megatron-LM), "compiled"; see passes/analysis/fusion.py
    loss           "kept": the gradient of the logits has its own buffer beside the probabilities; "in_place": it
                   overwrites them
    attention      implementation of fused attention: "torch" (what torch takes on the device), "flash" (version 2),
                   "triton" (version 1), "cudnn"
    gathers        tensors that tp gathers for a product: "kept" for backward, or re-gathered in it ("again")
    gradients      accumulated and reduced in the "main" type (float32 for bf16 parameters) or the "compute" type;
                   "both": in the main type, with a buffer of the compute type beside it; "fused": in the main type, by
                   the products that compute them (Megatron-LM's gradient accumulation fusion), as `kernels` "fused"
                   accumulate "main" ones
    bucket_bytes   size of a gradient bucket; 0: the default, see layout/state_bytes.py
    offload        share of the optimizer state and main parameters in host memory, by pipeline rank; (): none
    shards         data-parallel ranks that ZeRO shards state over; 0: all of them
    sends          P2P of tensors that every tp rank holds: "whole" by each rank, or as "slices" (scatter-gather P2P)
    context        attention over cp ranks: "ring" attention, or "ulysses" (all-to-all between heads and tokens)
    dropout        masks of dropout in attention: "exact", keyed by element, equal under every plan; "fast", drawn by
                   torch's fused kernel from a seed of the op, step, microbatch and part, which depend on the plan
    dispatch       rows sent to experts: all "rows" of a tp rank; "slices", of which each tp rank sends its own;
                   "merged", slices in which a token that several experts of a rank, or node, take is sent there once
    fp8            recipe of products with weights in fp8: "" (none), "mxfp8", "tensor" or "block" (size of the scaled
                   parts: 32 elements, the whole tensor, 128 elements)
    permutation    kernels that order rows for experts and restore their order: see search/permutation.py; "":
                   as the graph says, or fused if `kernels` are
    routing        of tokens to experts: "balanced", or "natural", which leaves the fullest rank more rows
    sums           computation of the sums that a loss is a function of: see `search.pipeline.evaluate.sums_of`
    """

    # read by pydantic where a plan holds these options
    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True, "revalidate_instances": "always"}

    recompute: Literal["full", "selective", "ops", "logits", "offload"] = "full"
    overlap: tuple[Literal["dp", "ep", "p2p", "tp"], ...] = ("dp", "p2p")
    kernels: Literal["eager", "fused", "compiled"] = "eager"
    loss: Literal["kept", "in_place"] = "kept"
    attention: Literal["torch", "flash", "triton", "cudnn"] = "torch"
    gathers: Literal["kept", "again"] = "kept"
    gradients: Literal["main", "compute", "both", "fused"] = "main"
    bucket_bytes: Annotated[int, Field(ge=0, lt=2**63)] = 0
    offload: tuple[Annotated[float, Field(ge=0, le=1)], ...] = ()
    shards: Annotated[int, Field(ge=0, lt=2**63)] = 0
    sends: Literal["whole", "slices"] = "whole"
    context: Literal["ring", "ulysses"] = "ring"
    dropout: Literal["exact", "fast"] = "exact"
    dispatch: Literal["rows", "slices", "merged"] = "rows"
    fp8: Literal["", "mxfp8", "tensor", "block"] = ""
    permutation: Literal["", "fused", "added", "weighted", "twice"] = ""
    routing: Literal["balanced", "natural"] = "balanced"
    sums: Literal["none", "held", "ahead"] = "none"

    def drops_fast(self, cp: int) -> bool:
        """Return whether attention over cp ranks draws masks by torch's kernel; tiles of a ring have exact ones."""
        return self.dropout == "fast" and not (cp > 1 and self.context == "ring")

    @property
    def rings(self) -> bool:
        """Return whether tp overlaps as in a program, which takes products apart around the ring and overlaps no more.

        By hand, and without "p2p", which every program overlaps, all communication of tp is predicted to overlap.
        """
        return {"p2p", "tp"} <= set(self.overlap) and self.kernels != "fused"
