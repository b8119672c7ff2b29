"""Data of a measurement: a case (an op and its sizes), its time, and the record of all of them with device and date.

A case prints as `matmul linear bf16 8192×1536×12288`. The record is a JSON file, so that constants can be refitted
later, for other models, without the machine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from autoptd.cost_models.complaints import describe_mistakes, parse_json, read_text
from autoptd.cost_models.op_time import OpWork
from autoptd.errors import ClusterError

FORMAT, VERSION = "autoptd-points", 1
ITEMSIZE = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
# FLOPs of the backward pass of fused attention over the forward pass's: 5 products against 2, since it recomputes one
# (Dao 2023, FlashAttention-2, section 4.1)
ATTENTION_BACKWARD = 2.5

Family = Literal["matmul", "attention", "memory", "launch", "dispatch", "collective", "p2p", "host"]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _RecordPart(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Case(_RecordPart):
    """An op, collective or message to time. Sizes are those of `OpWork`.

    Products are [batch] m×k times k×n; attention has `batch` heads (samples × heads), `m` tokens and head size `k`.
    Memory-bound ops, collectives and messages have `bytes_moved`. A collective has `ranks` members `stride` apart; a
    message goes from rank 0 to rank `stride`. On the host (`host`), `n` elements are copied there or back, or updated.
    """

    family: Family
    op: str
    dtype: Literal["fp64", "fp32", "bf16", "fp16"]
    batch: Count = 1
    m: Count = 0
    n: Count = 0
    k: Count = 0
    backward: bool = False
    bytes_moved: Count = 0
    ranks: Count = 1
    stride: Count = 1

    @property
    def flops(self) -> float:
        """FLOPs; those of attention are without the causal mask, which skips half of them."""
        match self.family:
            case "matmul":
                return 2.0 * self.batch * self.m * self.n * self.k
            case "attention":
                return 4.0 * self.batch * self.m * self.n * self.k * (ATTENTION_BACKWARD if self.backward else 1)
            case _:
                return 0.0

    @property
    def nbytes(self) -> int:
        """Bytes that an op reads and writes, of a collective's whole tensor, or of a message."""
        itemsize = ITEMSIZE[self.dtype]
        match self.family:
            case "matmul":
                return itemsize * self.batch * (self.m * self.k + self.k * self.n + self.m * self.n)
            case "attention":  # q, k, v, output; backward also reads and writes their gradients
                return itemsize * self.batch * self.m * self.k * (8 if self.backward else 4)
            case _:
                return self.bytes_moved

    @property
    def work(self) -> OpWork:
        """The op's description for the cost models. Raises ValueError for collectives, messages and overheads."""
        match self.family:
            case "matmul":
                return OpWork("matmul", self.flops, self.nbytes, self.dtype, self.m, self.n, self.k, self.batch)
            case "attention":
                sizes = (self.m, self.n, self.k, self.batch)
                return OpWork(
                    "attention",
                    self.flops,
                    self.nbytes,
                    self.dtype,
                    *sizes,
                    causal=True,
                    backward=self.backward,
                    implementation="torch",
                )
            case "memory":
                return OpWork("memory", 0.0, self.nbytes, self.dtype)
            case _:
                raise ValueError(f"{self} is not an op of a device")

    def __str__(self) -> str:
        words = [self.family, self.op, self.dtype]
        if self.family == "matmul":
            words.append(("" if self.batch == 1 else f"{self.batch}×") + f"{self.m}×{self.n}×{self.k}")
        elif self.family == "attention":
            words.append(f"{self.batch} heads of {self.k}, {self.m} tokens" + (", backward" if self.backward else ""))
        elif self.bytes_moved:
            words.append(f"{self.n} elements" if self.op == "step" else bytes_text(self.bytes_moved))
        if self.family in ("collective", "p2p"):
            words.append(f"{self.ranks} ranks" + (f", {self.stride} apart" if self.stride > 1 else ""))
        return " ".join(words)


class Measurement(_RecordPart):
    """A case and its time: the median of `repeats` runs, over all ranks that timed it."""

    case: Case
    seconds: Seconds
    repeats: Annotated[int, Field(gt=0)]


class Skipped(_RecordPart):
    """A case that was not timed, and why."""

    case: Case
    why: str


class ProfileRecord(_RecordPart):
    """All points of one machine, and the cases that were skipped."""

    format: Literal["autoptd-points"] = "autoptd-points"
    version: Literal[1] = 1
    date: str
    kind: Literal["cpu", "cuda"]
    device: str  # what torch.cuda.get_device_name says, or the name of the CPU
    torch: str
    backend: Literal["gloo", "nccl"]
    memory_bytes: Annotated[int, Field(gt=0)]  # of the GPU, or a process's share of the machine's memory
    context_bytes: Count  # memory in use by the driver and loaded kernels
    multiprocessors: Annotated[int, Field(gt=0)] | None = None
    host_bytes: Annotated[int, Field(gt=0)] | None = None  # memory of a node; None in files of earlier versions
    cache_bytes: Annotated[int, Field(gt=0)] | None = None  # of the last-level cache
    world: Annotated[int, Field(gt=0)] = 1
    node_ranks: Annotated[int, Field(gt=0)] = 1
    points: tuple[Measurement, ...]
    skipped: tuple[Skipped, ...] = ()

    def of(self, *families: Family) -> tuple[Measurement, ...]:
        return tuple(point for point in self.points if point.case.family in families)

    @property
    def origin(self) -> str:
        """The source of fitted constants: `measured on 2026-11-21, NVIDIA H200, torch 2.11.0`."""
        return f"measured on {self.date}, {self.device}, torch {self.torch}"

    def to_json(self) -> str:
        """Return the record as JSON with one line per point, for reading and diffing; `parse` reads it back."""
        head = self.model_dump(mode="json", exclude={"points", "skipped"})
        lines = [f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}," for key, value in head.items()]
        for key, rows in (("points", self.points), ("skipped", self.skipped)):
            texts = [f"  {json.dumps(row.model_dump(mode='json', exclude_defaults=True))}" for row in rows]
            lines += [f' "{key}": [' + ("\n" + ",\n".join(texts) + "\n " if texts else "") + "],"]
        return "{\n" + "\n".join(lines).removesuffix(",") + "\n}\n"

    @staticmethod
    def parse(text: str, where: str = "points") -> ProfileRecord:
        """Read the text that `to_json` wrote. Raises ClusterError with the path of every wrong field."""
        fix = "give a file that `autoptd profile --points FILE` wrote"
        data = parse_json(text, "file of points", ClusterError, where, fix)
        if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("version") != VERSION:
            raise ClusterError(
                f"not a file of measured points (format {FORMAT!r}, version {VERSION})", where=where, fix=fix
            )
        try:
            return ProfileRecord.model_validate(data)
        except ValidationError as error:
            what = f"the measured points are wrong in {error.error_count()} place(s)"
            raise ClusterError(what, where=f"{where}\n" + describe_mistakes(error, ProfileRecord), fix=fix) from error

    @staticmethod
    def load(path: Path) -> ProfileRecord:
        """Read a file of points. Raises ClusterError if there is none, or its content is wrong."""
        fix = "give a file that `autoptd profile --points` wrote"
        return ProfileRecord.parse(read_text(path, "file of points", ClusterError, fix), str(path))


def bytes_text(nbytes: float) -> str:
    """Return a number of bytes with a unit: `64 KiB`, `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    raise AssertionError
