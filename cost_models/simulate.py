"""Simulation of one training step from the action lists that its pipeline ranks execute.

Each rank has concurrent streams: compute, tp, p2p (one per edge and direction), dp. The schedule's route
(`autoptd.schedule.stage_map`) defines which ranks an edge joins.

    F, B, W   forward, backward, weight gradients of a microbatch on a chunk, on the compute stream. Collectives on the
              tp axis add to them: F takes forward_s + forward_tp_s; with `Overlap.tp`, the longer of the two.
              If the rank has W, B takes backward_s - weight_s, and W weight_s.
    SF, SB    sends. With `Overlap.p2p` the rank continues at once; the message leaves when its edge and direction are
              free, and arrives `send_*_s` later. Without, it blocks the sender's compute stream for that time, as
              Megatron-LM's batched send and receive does without --overlap-p2p-communication (a batch sends one way
              and receives the other at once: it costs the ranks at either end the time of one message each, as here).
    RF, RB    receives: the rank waits until the message arrives
    REDUCE    the reduction of gradients on the dp axis. A chunk that has a SUM is reduced on the dp stream during the
              next pass: in n buckets, of which the k-th starts when k/n of that pass is done and the stream is free.
              REDUCE waits for the rest. A chunk's share of the reduction is its share of the rank's backward_s.
    STEP      the optimizer. No rank starts it before all have finished REDUCE: the gradient norm is global.
    GATHER    the parameters' all-gather. As the first action it takes no time of the compute stream: it runs on the dp
              stream, and the first forward of each chunk waits for the buckets that it needs.

A pass takes longer by `Overlap.slowdown` of the seconds in which the dp stream works for its chunk beside it, since the
kernels of a collective take a share of the device.

Not modelled: messages, and what is left of dp communication in later passes, slow nothing down; streams do not share
links; a sender never waits for a receiver (the executor allows two messages of a channel in flight).

Each rank executes its list in order, and the two directions of an edge are separate FIFO queues. Such a network has one
outcome in whatever order ranks are visited (Kahn 1974), so no clock or event queue is needed: run a rank until it waits
for a message, then any rank that can continue.

1F1B, 3 stages, 4 microbatches, forward 1 s, backward 2 s, messages free; a column is a second, (4 + 3 - 1) * 3 of them:

    F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3
    .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3 .  .
    .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  .  .  .
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NoReturn, TypeAlias

from autoptd.cost_models.step_times import ChunkTimes as ChunkTimes
from autoptd.cost_models.step_times import Overlap, StageTimes
from autoptd.cost_models.timeline import ActionLike, RankRecord, Timeline
from autoptd.errors import PlanError
from autoptd.schedule import Action, Channel, StageMap, channel_of, peer_of

KINDS = ("F", "B", "W", "SF", "SB", "RF", "RB", "SUM", "REDUCE", "STEP", "GATHER")


_Message: TypeAlias = tuple[int | None, int, float, float]  # microbatch, chunk, sent, arrives


class _SimulatedRank:
    """One rank and the state of its execution."""

    def __init__(self, actions: Sequence[ActionLike], times: StageTimes, overlap: Overlap) -> None:
        self.actions, self.times, self.overlap = actions, times, overlap
        self.record = RankRecord(actions, overlap.tp)
        self.now_s = 0.0
        self.dp_free_s = 0.0
        splits = any(action.kind == "W" for action in actions)
        deferred_s = [c.weight_s if splits else 0.0 for c in times.chunks]
        compute_s = {
            "F": [c.forward_s for c in times.chunks],
            "B": [c.backward_s - w for c, w in zip(times.chunks, deferred_s, strict=True)],
        }
        tp_s = {"F": [c.forward_tp_s for c in times.chunks], "B": [c.backward_tp_s for c in times.chunks]}
        self.seconds = {
            kind: [max(c, t) if overlap.tp else c + t for c, t in zip(compute_s[kind], tp_s[kind], strict=True)]
            for kind in "FB"
        }
        self.record.tp_s = {
            kind: [(t, s - c) for t, s, c in zip(tp_s[kind], self.seconds[kind], compute_s[kind], strict=True)]
            for kind in "FB"
        }
        self.seconds["W"] = deferred_s
        gathers = times.gather_s > 0 and bool(actions) and actions[0].kind == "GATHER"
        self.firsts = dict(self._first_forwards()) if gathers else {}
        sums = (at for at, action in enumerate(actions) if action.kind == "SUM") if times.reduce_s else ()
        self.lasts = {at + 1: actions[at].chunk for at in sums}
        self.share = times.shares()
        self.piece = 1 / times.buckets if times.buckets else 0.0
        self._gather_from_the_start()

    def _first_forwards(self) -> Iterator[tuple[int, int]]:
        """Yield (index, chunk) of the first forward of each chunk."""
        missing = set(range(len(self.times.chunks)))
        for at, action in enumerate(self.actions):
            if action.kind == "F" and action.chunk in missing:
                missing.remove(action.chunk)
                yield at, action.chunk
            if not missing:
                return

    def _gather_from_the_start(self) -> None:
        self.gathered_from_s: dict[int, float] = {}
        for chunk in self.firsts.values():
            self.gathered_from_s[chunk] = self.dp_free_s
            self.dp_free_s += self.times.gather_s * self.share[chunk]
            self.record.dp.append((Action("GATHER", None, chunk), self.gathered_from_s[chunk], self.dp_free_s))

    def end_with_dp(self, at: int, start_s: float, end_s: float) -> float:
        """Return the end of an action that dp communication overlaps with."""
        if at in self.firsts:
            chunk = self.firsts[at]
            from_s, gather_s = self.gathered_from_s[chunk], self.times.gather_s * self.share[chunk]
            end_s += self._slowed(min(end_s, from_s + gather_s) - max(start_s, from_s))
            forward_s = end_s - start_s
            begins_s = from_s + gather_s * self.piece + forward_s
            waited_s = max(end_s, begins_s, from_s + gather_s + forward_s * self.piece) - end_s
            self.record.dp_exposed_s += waited_s
            return end_s + waited_s
        chunk = self.lasts[at]
        reduce_s = self.times.reduce_s * self.share[chunk]
        from_s = max(self.dp_free_s, start_s + (end_s - start_s) * self.piece)
        end_s += self._slowed(min(end_s - from_s, reduce_s))
        self.dp_free_s = max(from_s + reduce_s, end_s + reduce_s * self.piece)
        self.record.dp.append((Action("REDUCE", None, chunk), from_s, self.dp_free_s))
        return end_s

    def _slowed(self, together_s: float) -> float:
        """Return the seconds by which a pass takes longer that dp communication runs beside for `together_s`."""
        added_s = self.overlap.slowdown * max(0.0, together_s)
        self.record.dp_exposed_s += added_s
        return added_s

    def end_of_step(self, kind: str) -> float:
        """Return the end of a REDUCE, STEP or GATHER that starts now."""
        match kind:
            case "REDUCE" if self.lasts:
                return max(self.now_s, self.dp_free_s)
            case "REDUCE":
                return self.now_s + self.times.reduce_s
            case "STEP":
                return self.now_s + self.times.step_s
            case "SUM":
                return self.now_s
            case _:
                return self.now_s + (0.0 if self.firsts else self.times.gather_s)


class _Queue:
    """One direction of an edge: the messages in flight, and the arrival of the last one."""

    def __init__(self) -> None:
        self.messages: deque[_Message] = deque()
        self.free_s = 0.0


_End: TypeAlias = tuple[_Queue, int, int]  # queue of a chunk's send or receive, and rank and chunk at the other end


class _Simulation:
    def __init__(
        self, schedule: Sequence[Sequence[ActionLike]], times: Sequence[StageTimes], overlap: Overlap, route: StageMap
    ) -> None:
        self.schedule, self.overlap, self.route = schedule, overlap, route
        for stage, own in enumerate(times):
            if len(own.chunks) < route.virtual:
                raise ValueError(f"stage {stage}: {route.virtual} chunks, but times for {len(own.chunks)}")
        self.ranks = [_SimulatedRank(actions, own, overlap) for actions, own in zip(schedule, times, strict=True)]
        self.ends = self._ends()
        self.to_step = {s for s, actions in enumerate(schedule) if any(a.kind == "STEP" for a in reversed(actions))}
        self.at_step_s: dict[int, float] = {}

    def run(self) -> None:
        ready = deque(range(len(self.ranks)))
        while ready:
            ready.extend(self._advance(ready.popleft()))
        blocked = [s for s, rank in enumerate(self.ranks) if len(rank.record.ends_s) < len(rank.actions)]
        if blocked:
            # ranks at STEP only wait for the others
            blocked = [s for s in blocked if self._next(s).kind != "STEP"] or blocked
            raise PlanError(
                f"the schedule cannot finish: {len(blocked)} of {len(self.schedule)} stages wait for messages that "
                "no rank sends",
                where="\n".join(self._position(s) for s in blocked),
                fix="every receive needs its send, and no two stages may wait for each other",
            )

    def _advance(self, stage: int) -> set[int]:
        """Run one rank until it waits or is done; return the ranks that may now continue.

        It is one loop over local names for speed, since its body runs once per action of the schedule.
        """
        rank, woken = self.ranks[stage], set()
        actions, record, now_s = rank.actions, rank.record, rank.now_s
        starts_s, ends_s = record.starts_s, record.ends_s
        forward_s, backward_s, weight_s = (rank.seconds[kind] for kind in "FBW")
        marked = {**rank.firsts, **rank.lasts}
        ends = self.ends[stage]
        busy_s = record.busy_s
        for at in range(len(ends_s), len(actions)):
            action, start_s = actions[at], now_s
            kind = action.kind
            if kind == "RF" or kind == "RB":
                messages = (ends.get((kind, action.chunk)) or self._no_peer(stage, at))[0].messages
                if not messages:
                    break
                microbatch, chunk, sent_s, arrives_s = messages.popleft()
                if microbatch != action.microbatch or chunk != action.chunk:
                    raise self._wrong(stage, at, f"the message that arrives is for {_at(microbatch, chunk)}")
                if arrives_s > now_s:
                    record.awaited_s += arrives_s - max(now_s, sent_s)
                    now_s = arrives_s
            elif kind == "SF" or kind == "SB":
                target, arrives_s = self._send(stage, at, now_s)
                woken.add(target)
                if not self.overlap.p2p:
                    record.exposed_sends_s += arrives_s - now_s
                    busy_s += arrives_s - now_s
                    now_s = arrives_s
            else:
                if kind == "F":
                    now_s += forward_s[action.chunk]
                elif kind == "B":
                    now_s += backward_s[action.chunk]
                elif kind == "W":
                    now_s += weight_s[action.chunk]
                elif kind not in KINDS:
                    raise self._wrong(stage, at, f"known kinds: {', '.join(KINDS)}")
                else:
                    if kind == "STEP":
                        self.at_step_s.setdefault(stage, now_s)
                        if len(self.at_step_s) < len(self.to_step):
                            break
                        woken |= self.to_step
                        start_s = now_s = max(self.at_step_s.values())
                    rank.now_s = now_s
                    now_s = rank.end_of_step(kind)
                if at in marked:
                    now_s = rank.end_with_dp(at, start_s, now_s)
                busy_s += now_s - start_s
            starts_s.append(start_s)
            ends_s.append(now_s)
        rank.now_s, record.busy_s = now_s, busy_s
        return woken - {stage}

    def _send(self, stage: int, at: int, now_s: float) -> tuple[int, float]:
        """Put the message on its edge; return its target rank and its arrival."""
        action = self.schedule[stage][at]
        queue, target, chunk = self.ends[stage].get((action.kind, action.chunk)) or self._no_peer(stage, at)
        own = self.ranks[stage].times.chunks[action.chunk]
        leaves_s = max(now_s, queue.free_s)
        arrives_s = leaves_s + (own.send_forward_s if action.kind == "SF" else own.send_backward_s)
        queue.free_s = arrives_s
        queue.messages.append((action.microbatch, chunk, now_s, arrives_s))
        self.ranks[stage].record.sent.append((at, leaves_s, arrives_s))
        return target, arrives_s

    def _ends(self) -> list[dict[tuple[str, int], _End]]:
        """Return each rank's ends of edges, by kind of message and chunk."""
        queues: dict[Channel, _Queue] = {}
        found: list[dict[tuple[str, int], _End]] = [{} for _ in self.ranks]
        for rank, mine in enumerate(found):
            for kind, chunk in product(("SF", "SB", "RF", "RB"), range(self.route.virtual)):
                action = Action(kind, 0, chunk)
                if (peer := peer_of(rank, action, self.route)) is not None:
                    queue = queues.setdefault(channel_of(rank, action, self.route), _Queue())
                    mine[kind, chunk] = queue, peer[0], peer[1].chunk
        return found

    def _no_peer(self, stage: int, at: int) -> NoReturn:
        raise self._wrong(stage, at, "there is no stage on that side")

    def _next(self, stage: int) -> ActionLike:
        return self.schedule[stage][len(self.ranks[stage].record.ends_s)]

    def _position(self, stage: int) -> str:
        at = len(self.ranks[stage].record.ends_s)
        return f"stage {stage} at {_text(self._next(stage))}, action {at} of {len(self.schedule[stage])}"

    def _wrong(self, stage: int, at: int, why: str) -> PlanError:
        return PlanError(
            f"the schedule is wrong at {_text(self.schedule[stage][at])}: {why}",
            where=f"stage {stage}, action {at} of {len(self.schedule[stage])}",
            fix="make the lists of both stages of this edge send and receive in the same order",
        )


def _at(microbatch: int | None, chunk: int) -> str:
    return f"microbatch {microbatch}" + (f" on chunk {chunk}" if chunk else "")


def _text(action: ActionLike) -> str:
    number = "" if action.microbatch is None else f"{action.microbatch}"
    return f"{action.kind}{number}" + (f".{action.chunk}" if action.chunk else "")


def simulate(
    schedule: Sequence[Sequence[ActionLike]],
    times: Sequence[StageTimes],
    overlap: Overlap | None = None,
    route: StageMap | None = None,
) -> Timeline:
    """Simulate one step: `schedule[r]` is the action list of pipeline rank r, `times[r]` the durations of its actions.

    `route`: the map from stages to ranks, by default a loop. Raises PlanError for lists that cannot finish (naming the
    actions at which ranks are blocked), receive a message for another microbatch or chunk, or have an unknown kind;
    ValueError for missing times.
    """
    if len(schedule) != len(times):
        raise ValueError(f"{len(schedule)} stages, but times for {len(times)}")
    chunks = 1 + max((action.chunk for actions in schedule for action in actions), default=0)
    route = route or StageMap(len(schedule), chunks)
    simulation = _Simulation(schedule, times, overlap or Overlap(), route)
    simulation.run()
    return Timeline(
        makespan_s=max((rank.now_s for rank in simulation.ranks), default=0.0),
        busy_s=tuple(rank.record.busy_s for rank in simulation.ranks),
        records=tuple(rank.record for rank in simulation.ranks),
        route=route,
    )


def makespan_bound(stage_s: Sequence[float], microbatches: int, p2p_s: float = 0.0) -> float:
    """Return the seconds of a 1F1B step in closed form: the slowest stage's steady state, and one pass of all stages.

        (m - 1) * (slowest + 2 (p - 1)/p * p2p)  +  sum of all stages + 2 (p - 1) * p2p

    `stage_s`: forward plus backward of one microbatch on each stage; `p2p_s`: one message between neighbours. The
    steady state has a p2p term because at most p microbatches are in flight: p of them take one way down and back.
    Exact for equal stages with free messages, (m + p - 1) * stage; an upper bound on `simulate` if all stages spend the
    same fraction of their time on the backward. If fractions differ, the step may take longer: the slowest forward and
    the slowest backward are then on different stages, and (m - 1) * their sum + sum of all is the bound.
    """
    if not stage_s or microbatches < 1:
        raise ValueError(f"a step needs a stage and a microbatch, got {len(stage_s)} and {microbatches}")
    stages = len(stage_s)
    round_trip_s = 2 * (stages - 1) * p2p_s
    return (microbatches - 1) * (max(stage_s) + round_trip_s / stages) + sum(stage_s) + round_trip_s
