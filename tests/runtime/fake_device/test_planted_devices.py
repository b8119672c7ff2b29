"""Faults that only a GPU shows, planted one by one: each is an error of the steps of `run.py`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from autoptd.layout.mesh import Mesh
from autoptd.ops import expert_axis, offload
from autoptd.ops.group import on_device
from autoptd.parallel import Parallel
from autoptd.runtime import batch_counts, executor, trainer
from autoptd.runtime.optimizers.step import OptimizerStep
from autoptd.runtime.trainer import Trainer
from autoptd.runtime.zero import flat_buffer, param_buffers
from tests.parity.parity_check import with_files
from tests.runtime.fake_device.allowed import ALLOWED, too_often
from tests.runtime.fake_device.device import BlockingCopy, DeviceFault, HostWaits, MemoryRace, WrongDevice
from tests.runtime.fake_device.plans import Ask, given, made
from tests.runtime.fake_device.run import steps

DENSE = Ask("nanogpt", Mesh(2, 1, 2), "fp32")
EXPERTS = Ask("mixtral", Mesh(2, ep=2), "bf16")
HOSTED = Ask("nanogpt", Mesh(2), "bf16", fix={"offload": 1.0})
Patch = pytest.MonkeyPatch


def fault_of(ask: Ask, kind: type[DeviceFault], parallel: Parallel | None = None) -> str:
    """Return the text of the fault that two steps end with."""
    with pytest.raises(kind) as caught:
        steps(parallel or made(ask), given(ask, 2))
    return str(caught.value)


def edited(ask: Ask, pattern: str, by: str) -> Parallel:
    """Return a program with an edited line in its files."""
    parallel = made(ask)
    files = {name: re.sub(pattern, by, text) for name, text in parallel.program.files.items()}
    assert files != dict(parallel.program.files), "nothing was planted"
    return with_files(parallel, files)


@pytest.mark.fault("a constant on the host")
@pytest.mark.parametrize(
    ("pattern", "by"),
    [
        (r"x_2 = x \+ out", "x_2 = x + out * torch.ones(32)"),
        (r"x_2 = x \+ out", "x_2 = torch.stack((x[0, 0, 0], torch.ones(())))[0] + x + out"),
    ],
    ids=["a vector", "a number, stacked"],
)
def test_a_constant_of_the_host_in_forward(pattern: str, by: str) -> None:
    assert "of the host beside tensors of the device, in forward of an emitted program" in fault_of(
        DENSE, WrongDevice, edited(DENSE, pattern, by)
    )


@pytest.mark.fault("the host waits in a step")
@pytest.mark.parametrize(
    "by",
    [
        "x_2 = x + out if out.sum().item() != 7 else x",
        "x_2 = x + out if bool((out != 7).any()) else x",
        "x_2 = x + out[out == out].view_as(out)",
        "x_2 = x + out * len(out.flatten().tolist()) / out.numel()",
        "x_2 = x + out + 0 * out.flatten().nonzero().sum()",
        "x_2 = x + out.cpu().to(x.device)",
        "x_2 = x + out if not torch.equal(x, out) else x",
        "x_2 = x + out if str(out) else x",
    ],
)
def test_a_wait_in_forward(by: str) -> None:
    assert "forward of an emitted program waits for" in fault_of(DENSE, HostWaits, edited(DENSE, r"x_2 = x \+ out", by))


@pytest.mark.fault("the host waits in a step")
def test_a_loss_that_is_read_in_every_microbatch(monkeypatch: Patch) -> None:
    whole = executor._StepState.forward

    def forward(self: Any, action: Any) -> None:
        whole(self, action)
        float(self.loss.values)

    monkeypatch.setattr(executor._StepState, "forward", forward)
    assert "run of runtime/executor.py waits for" in fault_of(DENSE, HostWaits)


@pytest.mark.fault("the host waits in a step")
def test_a_norm_that_is_read_by_itself(monkeypatch: Patch) -> None:
    """Reading twice where once is allowed is counted."""
    whole = Trainer._finish

    def _finish(self: Trainer, *args: Any) -> Tensor:
        float(trainer.squared_norm(self._pieces))
        return whole(self, *args)

    monkeypatch.setattr(Trainer, "_finish", _finish)
    place = next(place for place in ALLOWED if place[1] == "_finish")
    with pytest.raises(HostWaits, match=r"finish of runtime/trainer\.py"):  # by the caller of the patched function
        steps(made(DENSE), given(DENSE, 1))
    monkeypatch.setitem(ALLOWED, ("runtime/trainer.py", "finish"), ALLOWED[place])
    ran = steps(made(DENSE), given(DENSE, 1))
    ran.waits[0][0][place] += ran.waits[0][0]["runtime/trainer.py", "finish"]
    assert too_often(ran.waits[0][0]) == ["_finish of runtime/trainer.py: 2 times instead of 1"]


def _left(numbers: Tensor | Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.as_tensor(numbers, dtype=dtype)


def _pageable(numbers: Tensor | Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.as_tensor(numbers, dtype=dtype).to(device)


def _waiting(numbers: Tensor | Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    found = torch.as_tensor(numbers, dtype=dtype)
    return found.to(device) if found.is_cuda else found.pin_memory().to(device)


@pytest.mark.fault("a collective of the host's tensors")
def test_counts_that_stay_on_the_host(monkeypatch: Patch) -> None:
    ask = Ask("skip_mlp", Mesh(2), "fp32")
    monkeypatch.setattr(batch_counts, "on_device", _left)
    assert re.search(r"all_gather of world .* gets torch.float64 \[\d+\] of the host", fault_of(ask, WrongDevice))


@pytest.mark.fault("a collective of the host's tensors")
def test_flags_that_stay_on_the_host(monkeypatch: Patch) -> None:
    monkeypatch.setattr(param_buffers, "on_device", _left)
    assert "_finish of runtime/trainer.py" in fault_of(DENSE, WrongDevice)


@pytest.mark.fault("a copy from pageable memory")
def test_flags_from_pageable_memory(monkeypatch: Patch) -> None:
    monkeypatch.setattr(param_buffers, "on_device", _pageable)
    assert "flags of runtime/zero/param_buffers.py copies float64" in (text := fault_of(DENSE, BlockingCopy))
    assert text.endswith("from pageable memory")


@pytest.mark.fault("a copy from pageable memory")
def test_a_copy_that_waits(monkeypatch: Patch) -> None:
    monkeypatch.setattr(param_buffers, "on_device", _waiting)
    assert "from pinned memory, but waits for it" in fault_of(DENSE, BlockingCopy)


@pytest.mark.fault("a copy from pageable memory")
def test_the_order_of_rows_from_pageable_memory(monkeypatch: Patch) -> None:
    monkeypatch.setattr(expert_axis, "on_device", _pageable)
    assert "ops/expert_axis.py copies" in fault_of(EXPERTS, BlockingCopy)


@pytest.mark.fault("a copy from pageable memory")
def test_a_rank_whose_norm_counts_nothing(monkeypatch: Patch) -> None:
    """Only the first rank's pieces count without sharding, and the norm of none is made on the host."""
    monkeypatch.setattr(
        trainer,
        "on_device",
        lambda numbers, dtype, device: (_pageable if isinstance(numbers, Tensor) else on_device)(
            numbers, dtype, device
        ),
    )
    assert "_finish of runtime/trainer.py" in fault_of(Ask("nanogpt", Mesh(2), "fp32", fix={"zero": 0}), BlockingCopy)


@pytest.mark.fault("a copy from pageable memory")
def test_activations_that_come_back_from_pageable_memory(monkeypatch: Patch) -> None:
    def to_host(x: Tensor) -> Tensor:
        return torch.empty_like(x, device="cpu").copy_(x, non_blocking=True)

    monkeypatch.setattr(offload, "_to_host", to_host)
    ask = Ask("nanogpt", Mesh(2), "fp32", fix={"recompute": "offload"})
    assert "ops/offload.py waits for a copy of uint8" in fault_of(ask, HostWaits)


@pytest.mark.fault("gradients still on their way")
def test_a_host_that_steps_before_gradients_are_there(monkeypatch: Patch) -> None:
    whole = OptimizerStep.run

    def run(self: OptimizerStep, used: Any) -> None:
        self._waits = False
        whole(self, used)

    monkeypatch.setattr(OptimizerStep, "run", run)
    assert "to which the device is still copying" in fault_of(HOSTED, MemoryRace)


@pytest.mark.fault("gradients still on their way")
def test_host_memory_that_is_written_while_it_is_copied(monkeypatch: Patch) -> None:
    whole = flat_buffer.Buffer.start_gather

    def start_gather(self: Any, bucket: Any) -> Any:
        handle = whole(self, bucket)
        self._host_grad.zero_()
        return handle

    monkeypatch.setattr(flat_buffer.Buffer, "start_gather", start_gather)
    assert "which the device is still reading" in fault_of(HOSTED, MemoryRace)


@pytest.mark.fault("a constant on the host")
def test_state_that_is_left_on_the_host(monkeypatch: Patch) -> None:
    whole = Trainer.__init__

    def init(self: Trainer, *args: Any, **kwargs: Any) -> None:
        whole(self, *args, **kwargs)
        for piece in self.pieces:
            self.optimizer.state[piece.param] |= {
                "step": torch.zeros((), device=piece.param.device),
                "exp_avg": torch.zeros(piece.param.shape),
                "exp_avg_sq": torch.zeros_like(piece.param),
            }

    monkeypatch.setattr(Trainer, "__init__", init)
    assert "_fused_adamw" in fault_of(DENSE, WrongDevice)


def test_right_steps_have_no_fault() -> None:
    for ask in (DENSE, EXPERTS, HOSTED):
        steps(made(ask), given(ask, 2))
