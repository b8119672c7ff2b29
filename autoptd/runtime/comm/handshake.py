"""Handshakes before the first step: all ranks compare programs and arguments, neighbouring stages their messages.

Without them, ranks with different programs or options would hang or train wrongly, and bytes in the wrong order, or of
another dtype of the same size, would be received without an error.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

import torch

from autoptd.errors import PlanError, RuntimeFault
from autoptd.ops.group import Handle
from autoptd.runtime.comm.interfaces import Channel, Communicators, all_gather_text

SHOWN = 200  # characters of each rank's argument in an error


def check_same_program(files: Mapping[str, str], communicators: Communicators) -> None:
    """Compare the emitted files (name -> text) of all ranks. Collective. Raises PlanError if they differ."""
    if differing({"files": "\0".join(files.values())}, communicators):
        raise PlanError(
            "the ranks made different plans or programs",
            where=f"rank {communicators.world.rank}",
            fix="use the same model, torch and autoptd on all ranks, or pass one plan file: plan='plan.json'",
        )


def check_same_arguments(arguments: Mapping[str, object], communicators: Communicators) -> None:
    """Compare arguments of all ranks, by name. Collective. Raises PlanError naming the first that differs."""
    for name in differing(arguments, communicators):
        each = all_gather_text(text_of(arguments[name]), communicators.world, communicators.device, SHOWN)
        raise PlanError(
            f"the ranks were given different {name}",
            where="\n".join(apart(each)),
            fix=f"give all ranks the same {name}",
        )


def differing(values: Mapping[str, object], communicators: Communicators) -> list[str]:
    """Return the names of values that are not the same on all ranks, which have the same names. Collective."""
    texts = (text_of(value).encode() for value in values.values())
    digests = [int.from_bytes(hashlib.sha256(text).digest()[:6], "big") for text in texts]
    if not digests:
        return []
    both = torch.tensor([digests, [-x for x in digests]], dtype=torch.int64, device=communicators.device)
    highest, lowest = communicators.world.all_reduce(both, "max").tolist()
    return [name for name, high, low in zip(values, highest, lowest, strict=True) if high != -low]


def apart(each: Sequence[str]) -> list[str]:
    """Return a line for each of the first different texts, with the ranks that have it; `each`: by rank."""
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(each):
        ranks.setdefault(text, []).append(rank)
    named = ((f"rank {r[0]}" if len(r) == 1 else f"ranks {', '.join(map(str, r[:8]))}", t) for t, r in ranks.items())
    return [f"{who}{', …' * (len(ranks[text]) > 8)}: {text}" for who, text in named][:4]


def text_of(value: object) -> str:
    """Return a text that is the same in another process; functions and classes by their names."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {text_of(value[key])}" for key in sorted(value, key=repr)) + "}"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(map(text_of, value)) + ")"
    if isinstance(value, (set, frozenset)):
        return text_of(sorted(map(text_of, value)))
    if isinstance(value, torch.Tensor):
        return str(value.tolist())
    return getattr(value, "__qualname__", None) or re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


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
