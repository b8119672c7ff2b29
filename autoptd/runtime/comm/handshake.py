"""The handshake before the first step: neighbouring stages compare the messages that they will exchange.

Without it, bytes in the wrong order, or of another dtype of the same size, would be received without an error.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autoptd.errors import RuntimeFault
from autoptd.ops.group import Handle
from autoptd.runtime.comm.interfaces import Channel


def exchange(
    outgoing: Sequence[tuple[Channel, Sequence[str]]],
    incoming: Sequence[tuple[Channel, Sequence[str]]],
    device: torch.device,
) -> None:
    """Send the list of messages of each outgoing channel; compare those received. Raises RuntimeFault if two differ."""
    handles = [handle for channel, lines in outgoing for handle in _send(channel, lines, device)]
    for channel, expected in incoming:
        _compare(_receive(channel, device), list(expected))
    for handle in handles:
        handle.wait()


def _send(channel: Channel, lines: Sequence[str], device: torch.device) -> list[Handle]:
    raw = torch.frombuffer(bytearray("\n".join(lines).encode() or b"\n"), dtype=torch.uint8).to(device)
    return [channel.send(torch.tensor([raw.numel()], device=device)), channel.send(raw)]


def _receive(channel: Channel, device: torch.device) -> list[str]:
    length = torch.zeros(1, dtype=torch.int64, device=device)
    channel.receive(length).wait()
    raw = torch.empty(int(length), dtype=torch.uint8, device=device)
    channel.receive(raw).wait()
    return [line for line in bytes(raw.tolist()).decode().splitlines() if line]


def _compare(sent: list[str], expected: list[str]) -> None:
    if sent == expected:
        return
    pairs = zip([*sent, "nothing"], [*expected, "nothing"], strict=False)
    theirs, mine = next((a, b) for a, b in pairs if a != b)
    raise RuntimeFault(
        f"two stages disagree about a message: one sends {theirs}, the other expects {mine}",
        fix="emit all stages from the same plan and run them on batches of equal shape",
    )
