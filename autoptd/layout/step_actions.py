"""The action lists of a layout's step, proved: no rank waits for ever for a message, or in a communicator."""

from __future__ import annotations

from autoptd.layout.layout import Layout
from autoptd.schedule import Communicates, Schedule, rank_queues, training_step


def step_actions(layout: Layout) -> Schedule:
    """Return the lists of all pipeline ranks. Raises StuckSchedule or StuckCommunicators if they cannot finish."""
    mesh = layout.mesh
    lists = training_step(layout.schedule, mesh.pp, layout.microbatches, mesh.virtual, layout.early)
    rank_queues(lists, mesh.route, communicates(layout)).prove()
    return lists


def communicates(layout: Layout) -> Communicates:
    """Return the communication of a layout's step besides messages."""
    mesh = layout.mesh
    axes = {"tp": mesh.tp > 1, "ep": mesh.ep > 1, "dp": layout.sums_over_dp and mesh.dp > 1}
    holders = {mesh.holders(spec.stages) for spec in layout.parameters.values()}
    return Communicates(
        passes=tuple(axis for axis, used in axes.items() if used),
        rings=tuple(axis for axis, used in {"cp": mesh.cp > 1, "tp": layout.rings}.items() if used),
        data=mesh.copies > 1,
        zero=layout.zero,
        tied=tuple(sorted(ranks for ranks in holders if len(ranks) > 1)),
        host=mesh.ep > 1,
        counts=mesh.dp > 1,
    )
