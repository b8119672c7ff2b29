"""The handshakes before the first step: all ranks compare programs, neighbouring stages the messages of a step.

Without them, ranks with different programs would hang or train wrongly, and bytes in the wrong order, or of another
dtype of the same size, would be received without an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch

from autoptd.errors import PlanError, RuntimeFault
from autoptd.ops.group import Handle
from autoptd.runtime.comm.interfaces import Channel, Communicators


def check_same_program(files: Mapping[str, str], communicators: Communicators) -> None:
    """Compare the emitted files (name -> text) of all ranks. Collective. Raises PlanError if they differ."""
    text = "\0".join(files.values())
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")
    agreed = torch.tensor([digest, -digest], dtype=torch.int64, device=communicators.device)
    highest, lowest = communicators.world.all_reduce(agreed, "max").tolist()
    if (highest, -lowest) != (digest, digest):
        raise PlanError(
            "the ranks made different plans or programs",
            where=f"rank {communicators.world.rank}",
            fix="use the same model, torch and autoptd on all ranks, or pass one plan file: plan='plan.json'",
        )


def exchange(
    outgoing: Sequence[tuple[Channel, Sequence[str]]],
    incoming: Sequence[tuple[Channel, Sequence[str]]],
    device: torch.device,
) -> None:
    """Send the list of messages of each outgoing channel; compare those received. Raises RuntimeFault if two differ.

    A channel has one message under way at a time, the length and then the text, so that no send waits in a GPU's queue
    before the receives.
    """
    texts = [(channel, "\n".join(lines).encode() or b"\n") for channel, lines in outgoing]
    handles = [_send(channel, [len(raw)], torch.int64, device) for channel, raw in texts]
    lengths = [_receive(channel, 1, torch.int64, device)[0] for channel, _ in incoming]
    handles += [_send(channel, list(raw), torch.uint8, device) for channel, raw in texts]
    for (channel, expected), length in zip(incoming, lengths, strict=True):
        received = bytes(_receive(channel, length, torch.uint8, device)).decode()
        _compare([line for line in received.splitlines() if line], list(expected))
    for handle in handles:
        handle.wait()


def _send(channel: Channel, numbers: Sequence[int], dtype: torch.dtype, device: torch.device) -> Handle:
    return channel.send(torch.tensor(numbers, dtype=dtype, device=device))


def _receive(channel: Channel, count: int, dtype: torch.dtype, device: torch.device) -> list[int]:
    received = torch.empty(count, dtype=dtype, device=device)
    channel.receive(received).wait()
    numbers: list[int] = received.tolist()
    return numbers


def _compare(sent: list[str], expected: list[str]) -> None:
    if sent == expected:
        return
    pairs = zip([*sent, "nothing"], [*expected, "nothing"], strict=False)
    theirs, mine = next((a, b) for a, b in pairs if a != b)
    raise RuntimeFault(
        f"two stages disagree about a message: one sends {theirs}, the other expects {mine}",
        fix="emit all stages from the same plan and run them on batches of equal shape",
    )
