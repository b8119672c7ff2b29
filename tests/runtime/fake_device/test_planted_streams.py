"""Faults between streams, planted one by one: each is an error of the steps of `run.py`."""

from __future__ import annotations

import re
from typing import Any

import pytest
from torch import Tensor

from autoptd.layout.mesh import Mesh
from autoptd.ops.axis import ring
from autoptd.runtime import messages
from autoptd.runtime.comm import process_group, processes
from autoptd.runtime.comm.process_group import Works
from autoptd.runtime.zero import flat_buffer, grad_reduce, param_gather
from autoptd.runtime.zero.param_buffers import Buffers
from tests.runtime.fake_device.plans import Ask
from tests.runtime.fake_device.streams import CURRENT, EarlyReuse, StreamRace, Streams
from tests.runtime.fake_device.test_planted_devices import fault_of

DENSE = Ask("nanogpt", Mesh(2, 1, 2), "fp32")
LATER = Ask("nanogpt", Mesh(2, 1, 2), "fp32", fix={"overlap": ["dp", "p2p"]})
ZERO2 = Ask("nanogpt", Mesh(2), "fp32", fix={"zero": 2})
ZERO3 = Ask("nanogpt", Mesh(2), "fp32", fix={"zero": 3})
RING = Ask("nanogpt", Mesh(cp=2), "fp32")
Patch = pytest.MonkeyPatch


@pytest.mark.fault("a stream that does not wait")
def test_activations_read_before_they_arrive(monkeypatch: Patch) -> None:
    def take(self: messages.Inbox, at: Any) -> Any:
        while len(self.posted) < 2 and self.expected:
            self._post()
        _, parts, _ = self.posted.popleft()
        return tuple(part.whole(out, self.tp) for part, out in parts)

    monkeypatch.setattr(messages.Inbox, "take", take)
    assert re.search("reads what message of edge 0 (forward|backward)", fault_of(DENSE, StreamRace))


@pytest.mark.fault("a stream that does not wait")
def test_gradients_read_before_they_are_summed(monkeypatch: Patch) -> None:
    def settle(self: grad_reduce.Reduction, left: int) -> None:
        self._under_way.clear() if not left else None

    monkeypatch.setattr(grad_reduce.Reduction, "_settle", settle)
    assert "without a wait for it" in fault_of(DENSE, StreamRace)


@pytest.mark.fault("a stream that does not wait")
def test_parameters_read_before_they_are_gathered(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Buffers, "gather_before", lambda *_: None)
    assert "reads what all_gather" in fault_of(LATER, StreamRace)


@pytest.mark.fault("a stream that does not wait")
def test_prefetched_parameters_read_before_they_arrive(monkeypatch: Patch) -> None:
    class Ready:
        def wait(self) -> None:
            return None

    whole = flat_buffer.Buffer.start_gather

    def start_gather(self: flat_buffer.Buffer, bucket: Any) -> Any:
        kept.append(whole(self, bucket))
        return Ready()

    kept: list[Any] = []
    monkeypatch.setattr(flat_buffer.Buffer, "start_gather", start_gather)
    assert "reads what all_gather" in fault_of(ZERO3, StreamRace)


@pytest.mark.fault("a stream that does not wait")
def test_keys_read_before_they_come_round(monkeypatch: Patch) -> None:
    """The handles stay alive, so that memory does too."""
    kept: list[Any] = []

    def wait(self: ring.RingMessage) -> Any:
        kept.append(self.handles)
        return self.coming

    monkeypatch.setattr(ring.RingMessage, "wait", wait)
    assert "reads what shift" in fault_of(RING, StreamRace)


@pytest.mark.fault("a collective on the wrong stream")
def test_a_reduction_that_starts_before_its_gradients_are_there(monkeypatch: Patch) -> None:
    """Let a communicator's stream start without the event of the current one."""
    whole = Streams.event

    def event(self: Streams, stream: str) -> Any:
        return {} if stream == CURRENT else whole(self, stream)

    monkeypatch.setattr(Streams, "event", event)
    assert "without a wait for it" in fault_of(DENSE, StreamRace)


@pytest.mark.fault("a collective on the wrong stream")
@pytest.mark.parametrize("ask", [ZERO2, ZERO3], ids=["reduced", "gathered"])
def test_a_wait_on_another_stream(ask: Ask, monkeypatch: Patch) -> None:
    """A stream beside the current one waits; the kernels that read what arrives do not."""
    whole, kept = Works.wait, []

    def wait(self: Works) -> None:
        kept.append(self.tensors)
        for work in self.works:
            with work.nccl.streams.on("a side stream"):  # type: ignore[union-attr]
                whole(self)

    monkeypatch.setattr(process_group.Works, "wait", wait)
    assert "on the current stream reads what" in fault_of(ask, StreamRace)


@pytest.mark.fault("a buffer reused too early")
def test_a_buffer_of_gradients_that_is_not_kept(monkeypatch: Patch) -> None:
    """The buffer that is being summed is freed."""
    whole = grad_reduce.BucketState.start_sum

    def start_sum(self: grad_reduce.BucketState) -> Any:
        handle = whole(self)
        self.free()
        return handle

    monkeypatch.setattr(grad_reduce.BucketState, "start_sum", start_sum)
    assert "reduce_scatter of" in fault_of(ZERO2, EarlyReuse)


@pytest.mark.fault("a buffer reused too early")
def test_parameters_that_are_freed_while_they_are_gathered(monkeypatch: Patch) -> None:
    whole = param_gather.Gathering._prefetch

    def _prefetch(self: param_gather.Gathering, now: Any, unit: Any) -> None:
        whole(self, now, unit)
        for state in self._in_flight:
            state.buffer.free(state.bucket)

    monkeypatch.setattr(param_gather.Gathering, "_prefetch", _prefetch)
    assert "all_gather of" in fault_of(ZERO3, EarlyReuse)


@pytest.mark.fault("a buffer reused too early")
def test_a_sent_tensor_that_is_overwritten(monkeypatch: Patch) -> None:
    whole = processes.ProcessChannel.send

    def send(self: processes.ProcessChannel, *xs: Tensor) -> Any:
        handle = whole(self, *xs)
        xs[0].add_(1)
        return handle

    monkeypatch.setattr(processes.ProcessChannel, "send", send)
    assert "aten.add_.Tensor on the current stream writes what message" in fault_of(DENSE, StreamRace)


@pytest.mark.fault("a buffer reused too early")
def test_a_sent_tensor_that_is_not_kept(monkeypatch: Patch) -> None:
    whole = processes.ProcessChannel.send

    def send(self: processes.ProcessChannel, *xs: Tensor) -> Any:
        handle = whole(self, *(x.clone() for x in xs))
        handle.tensors = ()
        return handle

    monkeypatch.setattr(processes.ProcessChannel, "send", send)
    assert "message of edge" in fault_of(DENSE, EarlyReuse)
