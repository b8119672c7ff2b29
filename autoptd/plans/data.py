"""The plan: every choice of the search as data, written to and read from JSON.

A plan file is one object. `format` and `version` are checked first, so that a foreign or newer file causes one error
and not a list of field errors. Equal plans have equal bytes: keys sorted, indent 1, floats as `repr` writes them, one
newline at the end.

    stages[i].first .. stages[i].last    inclusive indices into `segments`, the smallest pieces the model is cut into
    batch                                dp * micro * (microbatches - 1) < batch <= dp * micro * microbatches
    world                                dp * cp * tp * pp

The error for a bad file names the path of the field (`stages[2].first`), what is wrong, and what would be right.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from autoptd.cost_models.cluster import Cluster, Device, Name
from autoptd.errors import PlanError, PlanFileError
from autoptd.layout.execution import ExecutionOptions
from autoptd.schedule import RUNNABLE, StageMap, route_of

FORMAT: Literal["autoptd-plan"] = "autoptd-plan"
VERSION: Literal[1] = 1
STAGES = 2**11  # limit; more would take more than seconds to simulate

Count = Annotated[int, Field(ge=1, lt=2**63)]
Index = Annotated[int, Field(ge=0, lt=2**63)]
Word = Annotated[str, Field(max_length=200)]
Dotted = Annotated[str, Field(max_length=1000)]  # name of a parameter or tensor
Amount = Annotated[float, Field(ge=0, le=1e40)]  # seconds, tokens per second, FLOPs or a fraction
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]


class Part(BaseModel):
    """Base of a plan's parts: frozen, no unknown fields, no silent conversions (`"8"` is not 8), no NaN or infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class MeshSizes(Part):
    """Sizes of the axes. Rank = ((pp_i * dp + dp_i) * cp + cp_i) * tp + tp_i: tp is fastest."""

    dp: Count
    tp: Count
    pp: Count
    cp: Count = 1
    ep: Count = 1  # ranks that hold different experts
    etp: Literal[0, 1] = 0  # tp ranks that share each expert; 0: all of them

    @property
    def ranks(self) -> int:
        return self.dp * self.cp * self.tp * self.pp

    def __str__(self) -> str:
        cp = f" × cp {self.cp}" if self.cp > 1 else ""
        ep = f" × ep {self.ep}" if self.ep > 1 else ""
        ep += f" × etp {self.etp}" if self.etp else ""
        return f"dp {self.dp} × tp {self.tp} × pp {self.pp}{cp}{ep}"


class Schedule(Part):
    """The pipeline schedule, and the microbatches of one step."""

    kind: Literal["1f1b", "gpipe", "interleaved", "zero-bubble", "zero-bubble-v"]
    microbatches: Count
    virtual: Count = 1  # chunks of the model per pipeline rank


class StagePlan(Part):
    """Segments `first` to `last` (inclusive), named by `modules`. `Plan.route` says which pipeline rank holds them."""

    first: Index
    last: Index
    modules: str
    recompute: tuple[Index, ...] = ()  # segments with a policy: recomputed in backward, or offloaded
    device: str = ""  # device type, in a cluster of several types
    policies: tuple[
        Literal["full", "selective", "ops", "logits", "offload"], ...
    ] = ()  # per `recompute`; (): all method.recompute


class Splits(Part):
    """Placement on the tp axis, by parameter name and by activation name."""

    parameters: dict[Dotted, str]
    activations: dict[Dotted, str]


class Collectives(Part):
    """Collectives on the tp axis of one segment of a kind and one microbatch; `count` segments are of that kind.

    Maps names of collectives to how often they are issued. Recomputation repeats those of its forward pass that its
    second run comes to.
    """

    count: Count
    forward: dict[str, Count]
    backward: dict[str, Count]


class Predicted(Part):
    """Predictions of the cost models: times in seconds per step, memory in bytes of one rank."""

    step_time_s: Amount
    tokens_per_s: Amount
    mfu: Amount
    memory_bytes: Index  # of the fullest rank
    time_s: Annotated[dict[Word, Amount], Field(max_length=100)]  # category -> seconds per step
    memory: tuple[Annotated[dict[Word, Index], Field(max_length=100)], ...]  # per stage: category -> bytes of one rank
    model_flops_per_step: Amount
    times: tuple[dict[str, Amount], ...] = ()  # per stage: times of a microbatch, from `simulate.times_to_data`
    host: tuple[Index, ...] = ()  # per stage: bytes of one rank in host memory; left out of the file if ()
    # of the choices that this was predicted for (`PlanData.choices`); "", left out of the file: unknown
    choices: Annotated[str, Field(pattern=r"^(sha256:[0-9a-f]{64})?$")] = ""


class OtherPlan(Part):
    """The best plan that was tried of another mesh, or of another value of one choice."""

    choice: Literal["mesh", "dp", "tp", "pp", "cp", "ep", "micro", "zero", "schedule"]
    mesh: MeshSizes
    micro: Count
    schedule: Schedule
    zero: Annotated[int, Field(ge=0, le=3)]
    step_time_s: Amount | None  # None: none that was tried fits
    least_s: Amount | None  # lower bound of the step time of all its plans; None: none of them fits


Proves = Literal[
    "that a run of `autoptd verify` on a plan, graph and program of these digests found no difference from the plain "
    "model; not who ran it: only a signature tells that, anybody who can write this file can write a certificate"
]


class Signature(Part):
    """An ed25519 signature of a certificate's `signed_text`, in hexadecimal digits."""

    by: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]  # the public key
    value: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]


class Certificate(Part):
    """The statement of `autoptd verify` that a plan computes what the model computes, with digests of what it checked.

    It holds no date, so that equal verifications have equal bytes.
    """

    plan: Digest  # of the plan's text without certificate
    graph: Digest
    program: Digest  # of the emitted stage files
    versions: dict[str, str]  # of autoptd and torch
    ranks: Count  # number that ran
    shown: tuple[str, ...] = ()  # descriptions of what was made smaller
    difference: Amount  # the largest relative difference found
    proves: Proves = get_args(Proves)[0]
    signature: Signature | None = None  # of all of the above; left out of the file if None

    def signed_text(self) -> str:
        """Return the text that is signed: all fields but the signature."""
        data = {"format": "autoptd-certificate", **self.model_dump(mode="json", exclude={"signature"})}
        return json.dumps(data, sort_keys=True, allow_nan=False)


def _digest(text: str) -> str:
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


class PlanData(Part):
    """All choices for training one model on one cluster. `Plan` adds reading, checking and showing them.

    `sizes` gives the value of each symbol of the traced graph on one rank; `sizes["b"]` is the samples of a microbatch.
    """

    format: Literal["autoptd-plan"] = FORMAT
    version: Literal[1] = VERSION
    model: Name
    graph_hash: Digest
    world: Count
    cluster: Annotated[Cluster, Field(strict=False)]
    batch: Count
    sizes: Annotated[dict[Word, Count], Field(max_length=100)]
    precision: Literal["bf16", "fp16", "fp32", "fp64"]
    optimizer: Literal["adamw", "sgd", "lion", "adafactor", "muon", "custom", "custom-whole"]
    mesh: MeshSizes
    schedule: Schedule
    zero: Annotated[int, Field(ge=0, le=3)]
    # the samples that terms of the loss which are no sums are computed from
    loss_averaging: Literal["global", "per-microbatch", "per-microbatch-over-dp"] = "global"
    statistics: Annotated[int, Field(ge=0, lt=2**31)] = 0  # sums over the batch that samples are normalised by
    updates: tuple[Dotted, ...] = ()  # buffers that get a new value in each step, from sums over the whole batch
    whole: tuple[Dotted, ...] = ()  # parameters that the optimizer updates as whole tensors; left out if empty
    system: Word = ""  # the system whose plans were searched; left out if empty
    method: ExecutionOptions = ExecutionOptions()
    stages: Annotated[tuple[StagePlan, ...], Field(min_length=1, max_length=STAGES)]
    segments: Annotated[tuple[str, ...], Field(min_length=1)]
    splits: Splits
    strategies: dict[str, dict[Dotted, str]]
    boundaries: dict[str, tuple[str, ...]]  # kind of segment -> placements of its input tensors
    collectives: dict[str, Collectives] = {}  # by kind of segment; those that do not communicate are left out
    predicted: Predicted
    others: Annotated[tuple[OtherPlan, ...], Field(max_length=1000)] = ()  # runners-up; left out of the file if empty
    notes: tuple[str, ...] = ()
    certificate: Certificate | None = None  # of `autoptd verify`; left out of the file if None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlanData) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(self.to_json())

    @property
    def micro(self) -> int:
        """Samples per microbatch and data-parallel rank."""
        return self.sizes["b"]

    @property
    def unit(self) -> str:
        """The unit of throughput: "tokens", or "samples" of a model without a sequence whose length is a size."""
        return "tokens" if "s" in self.sizes else "samples"

    @property
    def units_per_step(self) -> int:
        """Tokens (or samples, see `unit`) of one step over all ranks."""
        return self.batch * self.sizes.get("s", 1)

    def to_json(self) -> str:
        """Return the text of the plan file: equal bytes for equal plans."""
        held = self.certificate
        left_out = {name for name in ("certificate", "others", "system", "whole") if not getattr(self, name)}
        data = self.model_dump(mode="json", exclude=left_out)
        for name in ("host", "choices"):
            if not getattr(self.predicted, name):
                del data["predicted"][name]
        if held is not None and held.signature is None:
            del data["certificate"]["signature"]
        return json.dumps(data, sort_keys=True, indent=1, allow_nan=False) + "\n"

    def check_graph(self, graph_hash: str) -> None:
        """Raise PlanFileError, naming both hashes, unless this plan was made for the graph with this hash."""
        if graph_hash != self.graph_hash:
            raise PlanFileError(
                f"the plan was made for another graph of {self.model}: "
                f"the plan has {self.graph_hash}, the traced model {graph_hash}",
                where="graph_hash",
                fix="plan again: the model's code, its sizes or the torch version have changed",
            )

    @property
    def digest(self) -> str:
        """Digest of the plan's text without the certificate."""
        return _digest(self.model_copy(update={"certificate": None}).to_json())

    @property
    def choices(self) -> str:
        """Digest of what the prediction depends on: all but names, notes, and what follows from the prediction."""
        left_out = {"model", "notes", "predicted", "others", "certificate"}
        return _digest(json.dumps(self.model_dump(mode="json", exclude=left_out), sort_keys=True, allow_nan=False))

    @property
    def was_changed(self) -> bool:
        """True if the plan was predicted for other choices than it has, as after a change by hand."""
        return self.predicted.choices not in ("", self.choices)

    def check_certificate(self) -> None:
        """Raise PlanFileError if the plan has a certificate, but was changed after it was verified."""
        held = self.certificate
        for field, mine, verified in (
            ("plan", self.digest, held and held.plan),
            ("graph", self.graph_hash, held and held.graph),
        ):
            if held is not None and mine != verified:
                raise PlanFileError(
                    f"the plan was changed after it was verified: it has {mine}, its certificate {verified}",
                    where=f"certificate.{field}",
                    fix="verify it again (autoptd verify PLAN), or remove the field `certificate`",
                )

    def check_world(self, world: int) -> None:
        """Raise PlanError, naming both worlds, unless this plan is for `world` ranks."""
        if world != self.world:
            raise PlanError(
                f"the plan is for a world of {self.world} ranks ({self.mesh}), but the world is {world}",
                where="world",
                fix=f"start {self.world} processes, or plan again with world={world}",
            )

    @property
    def route(self) -> StageMap:
        """Placement of the stages on pipeline ranks."""
        return route_of(self.schedule.kind, self.mesh.pp, self.schedule.virtual)

    @property
    def not_runnable(self) -> tuple[str, ...]:
        """Choices that the runtime cannot execute, which make the plan a prediction only. Empty for plans that run."""
        default, asked, narrow = ExecutionOptions(), self.method, self.precision in ("bf16", "fp16")
        reasons = {
            f"the {self.schedule.kind} schedule": self.schedule.kind not in RUNNABLE,
            f"overlap of {', '.join(asked.overlap) or 'nothing'}": set(asked.overlap) - {"dp", "tp"} != {"p2p"},
            f"{asked.kernels} kernels": asked.kernels not in (default.kernels, "compiled"),
            f"{asked.attention} attention": asked.attention not in (default.attention, "flash"),
            f"rows dispatched {'as slices' if asked.dispatch == 'slices' else 'merged'}": (
                asked.dispatch != default.dispatch and self.mesh.ep > 1
            ),
            f"products in fp8 ({asked.fp8})": asked.fp8 != default.fp8,
            f"rows of experts permuted by other kernels ({asked.permutation})": asked.permutation
            != default.permutation,
            "gradients in both types": asked.gradients == "both" and narrow,
            "gradients added by products": asked.gradients == "fused",
        }
        return tuple(reason for reason, holds in reasons.items() if holds)

    @property
    def partial(self) -> tuple[str, ...]:
        """Policies in use that recompute a part of a segment, sorted."""
        used = {policy for stage in self.stages for policy in self.policies(stage).values()}
        return tuple(sorted(used - {"full"}))

    def device_of(self, stage: int) -> Device:
        """Return the device type of a stage."""
        name = self.stages[stage].device
        return next((pool.device for pool in self.cluster.others if pool.device.name == name), self.cluster.device)

    def policies(self, stage: StagePlan) -> dict[int, str]:
        """Return the recomputation policy of each recomputed segment of a stage."""
        names = stage.policies or (self.method.recompute,) * len(stage.recompute)
        return dict(zip(stage.recompute, names, strict=True))

    def check_runnable(self) -> None:
        """Raise PlanError naming the choices that the runtime cannot execute."""
        if self.not_runnable:
            raise PlanError(
                f"the plan can be predicted, but not run: {'; '.join(self.not_runnable)}",
                where="plan",
                fix="plan again without assume=",
            )
