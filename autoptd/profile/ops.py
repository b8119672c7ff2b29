"""Timing of one case on one device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from autoptd.profile.host import dispatch_s, host_run
from autoptd.profile.record import Case
from autoptd.profile.timing import HostTimer, Run, Timer, median_s

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_ROW = 1024  # row width of layer_norm and softmax
_TINY = 8  # elements of an op whose time is its launch


def time_op(case: Case, device: torch.device, clock: Timer, share_s: float) -> tuple[float, int]:
    """Return (seconds, runs). Raises RuntimeError, such as OutOfMemoryError, if the device cannot run the case."""
    if case.family == "dispatch":
        return dispatch_s(device)
    return median_s(clock_of(case, clock), _run_of(case, device), share_s)


def clock_of(case: Case, clock: Timer) -> Timer:
    """Return the timer of a case: the host's for work there, else the device's `clock`."""
    return HostTimer() if case.op == "step" and case.family == "host" else clock


def _run_of(case: Case, device: torch.device) -> Run:
    match case.family:
        case "matmul":
            return _matmul(case, device)
        case "attention":
            return _attention(case, device)
        case "memory":
            return _memory(case, device)
        case "launch":
            return _tiny(device)
        case "host":
            return host_run(case, device)
        case _:
            raise ValueError(f"{case} is not an op of a device")


def _matmul(case: Case, device: torch.device) -> Run:
    """Return a linear layer's forward pass, or a batched product."""
    batch = () if case.op == "linear" else (case.batch,)
    a = _values(device, case.dtype, *batch, case.m, case.k)
    b = _values(device, case.dtype, *batch, *((case.n, case.k) if case.op == "linear" else (case.k, case.n)))
    return (lambda: F.linear(a, b)) if case.op == "linear" else (lambda: torch.bmm(a, b))


def _attention(case: Case, device: torch.device) -> Run:
    q, k, v = (_values(device, case.dtype, 1, case.batch, case.m, case.k) for _ in range(3))
    if not case.backward:
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    inputs = tuple(x.requires_grad_() for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    gradient = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True)


def _memory(case: Case, device: torch.device) -> Run:
    x = _values(device, case.dtype, case.n // _ROW, _ROW)
    match case.op:
        case "copy":
            out = torch.empty_like(x)
            return lambda: out.copy_(x)
        case "add":
            y, out = x.clone(), torch.empty_like(x)
            return lambda: torch.add(x, y, out=out)
        case "layer_norm":
            weight, bias = (torch.ones(_ROW, device=device, dtype=x.dtype) for _ in range(2))
            return lambda: F.layer_norm(x, (_ROW,), weight, bias)
        case "softmax":
            return lambda: F.softmax(x, -1)
        case "gelu":
            return lambda: F.gelu(x)
        case _:
            raise ValueError(f"unknown memory-bound op {case.op!r}")


def _tiny(device: torch.device) -> Callable[[], Tensor]:
    x = torch.zeros(_TINY, device=device)
    return lambda: x.add_(1.0)


def _values(device: torch.device, dtype: str, *shape: int) -> Tensor:
    """Return normally distributed values: on zeros a GPU draws less power and therefore runs faster."""
    return torch.randn(shape, device=device, dtype=DTYPES[dtype])
