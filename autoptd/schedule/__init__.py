"""Pipeline schedules as data: for every rank of the pipeline the list of actions that one step executes in order.

    text    action                                                   channel
    F0      forward of microbatch 0
    B0      backward of microbatch 0
    W0      gradients of the parameters, where B0 makes those of the input alone (zero-bubble)
    RF0     receive its activation from the previous stage           (s-1, forward)
    SF0     send its activation to the next stage                    (s, forward)
    RB0     receive its gradient from the next stage                 (s, backward)
    SB0     send its gradient to the previous stage                  (s-1, backward)
    REDUCE  finish the reduction of the parameters' gradients
    STEP    clip and run the optimizer on this rank's share
    GATHER  collect the updated parameters

    F3.1    the same on this rank's chunk 1; without a dot, on chunk 0

A rank of p may hold v chunks of the model, which are stages of it; which ones, and who sends to whom, is said by the
`StageMap` of the kind (`route.py`). With v = 1 a stage is a rank. What a rank hands on to itself is not sent.

The simulator, the picture and the executor read the same lists. A schedule is one row of `SCHEDULES`: a pure function
of (ranks, microbatches, chunks) that gives F, B and W of each rank; `with_communication` adds the rest mechanically.

    gpipe          all forwards, then all backwards                      Huang et al. 2019 (its figure drains backwards)
    1f1b           one forward, one backward                             Narayanan et al. 2019, PipeDream-flush
    interleaved    1F1B over v chunks per rank, in groups of p           Narayanan et al. 2021, section 2.2
    zero-bubble    1F1B whose W fill the drain; memory as 1F1B's         Qi et al. 2023, ZB-H1
    zero-bubble-v  two chunks per rank, down the ranks and up again      Qi et al. 2023, ZB-V
"""

from __future__ import annotations

from autoptd.schedule.actions import (
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
from autoptd.schedule.proof import SENDS_UNDER_WAY, StuckSchedule, UncountedActivations, grid, prove, prove_memory
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
    "RUNNABLE",
    "SCHEDULES",
    "SENDS",
    "SENDS_UNDER_WAY",
    "Action",
    "Actions",
    "Alive",
    "Channel",
    "Schedule",
    "ScheduleKind",
    "StageMap",
    "StuckSchedule",
    "UncountedActivations",
    "channel_of",
    "chunks_of",
    "forward_only",
    "gpipe",
    "grid",
    "in_flight",
    "interleaved",
    "one_f_one_b",
    "parse",
    "parse_action",
    "peer_of",
    "period_of",
    "prove",
    "prove_memory",
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
