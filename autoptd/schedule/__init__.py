"""Pipeline schedules as data: the actions that each pipeline rank executes in one step, in order. Simulator, deadlock
proof, explanations and executor read these lists. Every name below may be imported from here. Imports errors only.

    text    action                                                   channel
    F0      forward of microbatch 0
    B0      backward of microbatch 0
    W0      gradients of the parameters, if B0 computes those of the input alone (zero-bubble)
    RF0     receive its activation from the previous stage           (s-1, forward)
    SF0     send its activation to the next stage                    (s, forward)
    RB0     receive its gradient from the next stage                 (s, backward)
    SB0     send its gradient to the previous stage                  (s-1, backward)
    SUM     from here on, sum the gradients of chunk 0 over dp, bucket by bucket, as the next pass completes them
    REDUCE  sum what is left, and wait for it
    STEP    clip and run the optimizer on this rank's share
    GATHER  all-gather the updated parameters; as the first action, those of the last step, while passes run

    F3.1    forward of microbatch 3 on this rank's chunk 1; without a dot, on chunk 0

Each of p ranks holds v chunks of the model, each of which is a stage. The `StageMap` of the schedule's kind
(`stage_map.py`) says which ones, and which ranks communicate. With v = 1 a stage is a rank. Tensors between two chunks
of one rank are not sent.

A schedule is a row of `SCHEDULES`: a pure function of (ranks, microbatches, chunks) that returns the F, B and W of each
rank. `with_communication` derives the rest.

    gpipe          all forwards, then all backwards                      Huang et al. 2019 (its figure drains backwards)
    1f1b           one forward, one backward                             Narayanan et al. 2019, PipeDream-flush
    interleaved    1F1B over v chunks per rank, in groups of p           Narayanan et al. 2021, section 2.2
    zero-bubble    1F1B with W in the drain; memory as 1F1B's            Qi et al. 2023, ZB-H1
    zero-bubble-v  two chunks per rank, down the ranks and up again      Qi et al. 2023, ZB-V
"""

from __future__ import annotations

from autoptd.schedule.actions import (
    EARLY,
    RECEIVES,
    SENDS,
    Action,
    Actions,
    Alive,
    Schedule,
    chunks_of,
    in_flight,
    parse,
    parse_action,
    text,
)
from autoptd.schedule.build import step_lists, training_step, with_communication, with_step_end
from autoptd.schedule.communicators import (
    Queued,
    StuckCommunicators,
    most_kernels,
    parse_queued,
    prove_communicators,
)
from autoptd.schedule.proof import SENDS_UNDER_WAY, StuckSchedule, UncountedActivations, grid, prove, prove_memory
from autoptd.schedule.rank_queues import Communicates, RankQueues, rank_queues, receives_posted
from autoptd.schedule.schedules import (
    RUNNABLE,
    SCHEDULES,
    ScheduleKind,
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
    period_of,
    route_of,
    row_of,
    zero_bubble,
    zero_bubble_v,
)
from autoptd.schedule.stage_map import Channel, StageMap, channel_of, peer_of

__all__ = [
    "EARLY",
    "RECEIVES",
    "RUNNABLE",
    "SCHEDULES",
    "SENDS",
    "SENDS_UNDER_WAY",
    "Action",
    "Actions",
    "Alive",
    "Channel",
    "Communicates",
    "Queued",
    "RankQueues",
    "Schedule",
    "ScheduleKind",
    "StageMap",
    "StuckCommunicators",
    "StuckSchedule",
    "UncountedActivations",
    "channel_of",
    "chunks_of",
    "forward_only",
    "gpipe",
    "grid",
    "in_flight",
    "interleaved",
    "most_kernels",
    "one_f_one_b",
    "parse",
    "parse_action",
    "parse_queued",
    "peer_of",
    "period_of",
    "prove",
    "prove_communicators",
    "prove_memory",
    "rank_queues",
    "receives_posted",
    "route_of",
    "row_of",
    "step_lists",
    "text",
    "training_step",
    "with_communication",
    "with_step_end",
    "zero_bubble",
    "zero_bubble_v",
]
