"""Devices of cluster files: one accelerator, or one CPU process, with its rates, memory, price and power."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from autoptd.cost_models.complaints import one_line
from autoptd.errors import nearest

Rate = Annotated[float, Field(ge=1, le=1e24, allow_inf_nan=False)]  # larger ones would overflow in predictions
Seconds = Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)]  # of one launch, hop or message
Name = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(one_line)]  # quoted in other files
Fraction = Annotated[float, Field(ge=1e-6, le=1, allow_inf_nan=False)]
Ranks = Annotated[int, Field(gt=0, lt=2**31)]
Processors = Annotated[int, Field(ge=0, lt=2**20)]
Overhead = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Price = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
Watts = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
Currency = Annotated[str, Field(pattern=r"^([^\W\d_]{1,12}|[€$£¥₩₹])?$")]
_PRICES = {"price_per_hour": None, "currency": "", "watts": None}  # their values if they are not stated


class ClusterPart(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_truth_value(cls, value: Any) -> Any:
        """Refuse `true`, which pydantic would read as the number 1."""
        if isinstance(value, bool):
            raise ValueError("should be a number or text, not true or false")
        return value


class Peaks(ClusterPart):
    """Dense matmul peak of one device in flop/s, by the precision of its operands."""

    fp64: Rate
    fp32: Rate
    bf16: Rate
    fp16: Rate
    fp8: Rate | None = None  # None: the device has no such rate

    def of(self, dtype: str) -> float:
        """Return the peak for a precision. Raises ValueError naming the known ones."""
        if dtype not in type(self).model_fields:
            raise ValueError(f"no matmul peak for precision {dtype!r}; {nearest(dtype, type(self).model_fields)}")
        if getattr(self, dtype) is None:
            raise ValueError(f"the device has no matmul peak for precision {dtype!r}")
        return float(getattr(self, dtype))


class Sustained(ClusterPart):
    """The fraction of a peak that real programs reach, and the source of its measurement."""

    fraction: Fraction = 1.0
    source: str = ""


class AttentionRates(ClusterPart):
    """Fractions of the matmul peak that one implementation of fused attention sustains, and its tiles' start."""

    forward: Fraction
    backward: Fraction
    head_overhead: Overhead | None = None  # None: the device's
    start: Overhead = 0.0  # of a tile of the forward pass, in keys
    backward_start: Overhead = 0.0  # of a tile of the backward pass, in queries
    rows: Annotated[Processors, Field(gt=0)] = 128  # queries of a tile of the forward pass
    source: str = ""


class HostMemory(ClusterPart):
    """The memory of a node's host, and rates of one device's share of it: of copies there and back while all devices of
    the host copy, and of the optimizer step there, which reads and writes the host's memory."""

    memory_bytes: Annotated[int, Field(gt=0, lt=2**63)] | None = None  # of a node; None: unknown, and not checked
    memory_source: str = ""
    to_bytes_per_s: Rate = 5.8e9
    from_bytes_per_s: Rate = 5.4e9
    step_bytes_per_s: Rate = 16e9
    source: str = (
        "copies: 8 A100 on PCIe, all at once (github.com/Dazz993/Mist, tuned_configs); step: 10e9 parameters in 2.2 s "
        "on two Xeon 8168 (Ren et al. 2021, ZeRO-Offload, table of CPU-Adam; quoted from memory), for 8 devices"
    )


class Device(ClusterPart):
    """One accelerator (or one CPU process). Sizes in bytes, rates per second, times in seconds."""

    name: Name
    source: str = ""
    reported_names: Annotated[tuple[str, ...], Field(max_length=64)] = ()  # results of torch.cuda.get_device_name
    memory_bytes: Annotated[int, Field(gt=0, lt=2**63)]
    context_bytes: Annotated[int, Field(ge=0, lt=2**63)] = 0  # driver and loaded kernels, before the first tensor
    memory_bytes_per_s: Rate
    launch_s: Seconds = 0.0  # added to every kernel
    dispatch_s: Seconds = 0.0  # of the host per op that it launches: a lower bound of the step's time
    multiprocessors: Annotated[Processors, Field(gt=0)] | None = None  # None: matmuls of all shapes run at one rate
    collective_multiprocessors: Processors = 0  # taken by collectives from kernels that run at the same time
    k_overhead: Overhead = 0.0  # of a tile of a matmul, in steps along k
    head_overhead: Overhead = 0.0  # of attention, in elements of a head
    matmul_flops_per_s: Peaks
    matmul_sustained: Sustained = Sustained()
    fp8_sustained: Sustained | None = None  # of products in fp8; None: the fraction of the others
    attention_sustained: Sustained = Sustained()  # forward
    attention_backward_sustained: Sustained | None = None  # None: as forward
    attention: Annotated[dict[Name, AttentionRates], Field(max_length=64)] = {}  # implementations by name
    memory_sustained: Sustained = Sustained()
    rows_sustained: Sustained | None = None  # by kernels that need whole rows (softmax, norms); None: as by others
    additions_per_s: Rate | None = None  # of elements that are added up by index; None: as fast as they are read
    host: HostMemory = HostMemory()
    price_per_hour: Price | None = None  # of one device; None: not stated
    currency: Currency = ""  # of the price
    watts: Watts | None = None  # that one device draws while it trains, with its share of the node if you count that

    @model_serializer(mode="wrap")
    def _without_unstated_prices(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out prices that are not stated, so that plans without them have the bytes that they always had."""
        data: dict[str, Any] = write(self)
        return {name: value for name, value in data.items() if name not in _PRICES or value != _PRICES[name]}

    @property
    def unpriced(self) -> Device:
        """The device without price and watts."""
        return self.model_copy(update=_PRICES)

    @model_validator(mode="after")
    def _has_usable_memory(self) -> Device:
        if self.context_bytes >= self.memory_bytes:
            raise ValueError(f"context_bytes {self.context_bytes} must be less than memory_bytes {self.memory_bytes}")
        return self

    @property
    def kind(self) -> str:
        """The torch device type: "cpu" for a process on a CPU, which has no multiprocessors, else "cuda"."""
        return "cuda" if self.multiprocessors else "cpu"

    @property
    def collective_share(self) -> float:
        """The fraction of the device that collectives take while they overlap with kernels."""
        return self.collective_multiprocessors / self.multiprocessors if self.multiprocessors else 0.0

    def matmul_fraction(self, dtype: str) -> float:
        """Return the fraction of the matmul peak that products of a precision sustain."""
        found = self.fp8_sustained if dtype == "fp8" else None
        return (found or self.matmul_sustained).fraction

    @property
    def usable_bytes(self) -> int:
        """Memory available to tensors and the allocator."""
        return self.memory_bytes - self.context_bytes
