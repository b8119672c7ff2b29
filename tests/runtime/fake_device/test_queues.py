"""Ranks queue what the proof at the start of training derives from their action lists."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor

from autoptd.layout.mesh import Mesh
from autoptd.layout.step_actions import communicates, step_actions
from autoptd.runtime.comm import handshake, processes
from autoptd.schedule import Queued, StuckCommunicators, rank_queues
from tests.runtime.fake_device.plans import Ask, given, made
from tests.runtime.fake_device.run import steps

WAYS = (
    Ask("nanogpt", Mesh(2, 1, 2), "fp32", fix={"overlap": ["dp", "p2p"]}),
    Ask("nanogpt", Mesh(2, 1, 2), "fp32", fix={"zero": 0, "schedule": "gpipe"}),
    Ask("nanogpt", Mesh(2, 1, 2), "fp32", fix={"zero": 2, "schedule": "zero-bubble"}),
    Ask("nanogpt", Mesh(1, 2, 2), "fp32", fix={"schedule": "interleaved", "virtual": 2}),
    Ask("nanogpt", Mesh(1, 1, 2), "fp32", fix={"schedule": "zero-bubble-v", "virtual": 2}),
    Ask("skip_mlp", Mesh(2, 1, 2), "fp32", fix={"overlap": ["dp", "p2p"]}),
)
DENSE, SEVERAL = WAYS[0], WAYS[-1]  # SEVERAL: a message has several tensors


def _of_edges_and_dp(queued: Iterable[Queued]) -> Iterator[str]:
    """Yield messages, their waits, and what starts on dp, the world and tied stages, without names of ops."""
    for sign, name, _ in queued:
        short = re.sub(r"^edge (\d+) (\w+) of .*", r"edge\1\2", name)
        short = re.sub(r"^(dp|world|stages).*", r"\1", short)
        if short.startswith("edge") or (short in ("dp", "world", "stages") and sign != "-"):
            yield sign + short


def second_step(queued: Iterable[Queued]) -> list[str]:
    """Return what is queued after the first sum over the world, up to the second; equal neighbours count once."""
    parts = " ".join(_of_edges_and_dp(queued)).split("world")
    return [word for word, _ in groupby(parts[1].split())]


@pytest.mark.parametrize("ask", WAYS, ids=str)
def test_the_lists_are_those_that_are_proved(ask: Ask) -> None:
    parallel = made(ask)
    layout = parallel.layout
    ran = steps(parallel, given(ask, 2))
    derived = rank_queues(step_actions(layout), layout.mesh.route, communicates(layout), steps=2)
    for rank, queued in ran.queued.items():
        stage = layout.mesh.coordinates(rank)[0]
        assert second_step(queued) == second_step(derived.lists[stage]), f"rank {rank}"


@pytest.mark.fault("communicators in a circle")
def test_two_messages_of_a_handshake_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two messages in one hardware queue: the second keeps the receive from starting, on both ranks."""

    def exchange(outgoing: Any, incoming: Any, device: torch.device) -> None:
        handles = [channel.send(torch.ones(1, device=device)) for channel, _ in outgoing for _ in range(2)]
        for channel, _ in incoming:
            for _ in range(2):
                channel.receive(torch.empty(1, device=device)).wait()
        for handle in handles:
            handle.wait()

    monkeypatch.setattr(handshake, "exchange", exchange)
    monkeypatch.setattr("autoptd.runtime.executor.exchange", exchange)
    with pytest.raises(StuckCommunicators, match=r"rank 0 edge 0 forward .* -> rank 2 edge 0 backward .* -> rank 0"):
        steps(made(DENSE), given(DENSE, 1))


@pytest.mark.fault("communicators in a circle")
def test_a_message_in_several_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second tensor of a receive that is posted ahead keeps this rank's own sends from starting."""
    whole = processes.ProcessChannel._start

    def _start(self: Any, op: Any, tensors: Sequence[Tensor], pending: Any) -> processes.Works:
        works = [work for x in tensors for work in whole(self, op, (x,), pending).works]
        return processes.Works(works, tuple(tensors), pending)

    monkeypatch.setattr(processes.ProcessChannel, "_start", _start)
    with pytest.raises(StuckCommunicators, match=r"rank 0 edge 0 backward .* -> rank 2 edge 0 forward .* -> rank 0"):
        steps(made(SEVERAL), given(SEVERAL, 1))
