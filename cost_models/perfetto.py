"""Traces of simulated steps that Perfetto (ui.perfetto.dev) and chrome://tracing open.

In the Trace Event Format (Google, "Trace Event Format", JSON object form), a process is a pipeline rank and a thread
one of its streams. Work is complete events (`X`, microseconds); a flow (`s` to `f`) leads from a send to its receive;
`M` names processes and threads. Waiting shows as gaps.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from autoptd.cost_models.timeline import ActionLike, Message, Timeline

STREAMS = ("compute", "tp", "send forward", "receive forward", "send backward", "receive backward", "dp")
MICROSECONDS = 1e6


def trace_text(timeline: Timeline, names: Sequence[str] = ()) -> str:
    """Return the trace of a step as text for a file; `names` describes each pipeline rank."""
    return json.dumps(trace(timeline, names), separators=(",", ":"), allow_nan=False) + "\n"


def trace(timeline: Timeline, names: Sequence[str] = ()) -> dict[str, Any]:
    """Return the trace of a step as a JSON object."""
    events = [*_work(timeline), *_messages(timeline)]
    used = sorted({(event["pid"], event["tid"]) for event in events})
    return {"displayTimeUnit": "ms", "traceEvents": [*_names(used, names), *events]}


def _names(used: Sequence[tuple[int, int]], names: Sequence[str]) -> Iterator[dict[str, Any]]:
    for rank in sorted({rank for rank, _ in used}):
        name = f"stage {rank}" + (f": {names[rank]}" if rank < len(names) else "")
        yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
    for rank, stream in used:
        yield {"ph": "M", "pid": rank, "tid": stream, "name": "thread_name", "args": {"name": STREAMS[stream]}}
        yield {"ph": "M", "pid": rank, "tid": stream, "name": "thread_sort_index", "args": {"sort_index": stream}}


def _work(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for rank, action, start_s, end_s, stream in timeline.events + timeline.communication:
        communicates = action.kind in ("RF", "RB", "SF", "SB") or (stream == "compute" and action.kind in _DP)
        if end_s > start_s and not communicates:
            yield _slice(rank, stream, action, start_s, end_s)


_DP = ("REDUCE", "GATHER")  # on the dp stream; the compute stream waits for them


def _messages(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Yield each message as a slice at both ends, connected by a flow."""
    for number, message in enumerate(timeline.messages):
        for rank, action, stream, phase in _ends(message):
            piece = _slice(rank, stream, action, message.start_s, message.end_s)
            yield piece
            # `bp: e` binds the end of a flow to the enclosing slice, not to the next one
            flow = {"ph": phase, "id": number, "cat": "message", "name": "message"} | (
                {"bp": "e"} if phase == "f" else {}
            )
            yield flow | {key: piece[key] for key in ("pid", "tid", "ts")}


def _ends(message: Message) -> list[tuple[int, ActionLike, str, str]]:
    way = "forward" if message.sent.kind == "SF" else "backward"
    return [
        (message.source, message.sent, f"send {way}", "s"),
        (message.target, message.received, f"receive {way}", "f"),
    ]


def _slice(rank: int, stream: str, action: ActionLike, start_s: float, end_s: float) -> dict[str, Any]:
    args = {} if action.microbatch is None else {"microbatch": action.microbatch}
    return {
        "ph": "X",
        "pid": rank,
        "tid": STREAMS.index(stream),
        "cat": stream,
        "name": f"{action}",
        "ts": start_s * MICROSECONDS,
        "dur": (end_s - start_s) * MICROSECONDS,
        "args": args | {"chunk": action.chunk},
    }
