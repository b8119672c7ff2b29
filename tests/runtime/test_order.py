"""Simulation and execution agree: each rank runs the simulated actions, in the simulated order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import autoptd.runtime.executor as executor
from autoptd.cost_models.simulate import simulate
from autoptd.cost_models.step_times import ChunkTimes, StageTimes
from autoptd.layout.mesh import Mesh
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import run_lockstep
from autoptd.schedule import RUNNABLE, Action, row_of, step_lists
from tests.runtime import test_trainer
from tests.runtime import tiny_model as tiny

DOES = {
    "receive_activations": "RF",
    "forward": "F",
    "send_activations": "SF",
    "receive_gradients": "RB",
    "backward": "B",
    "send_gradients": "SB",
    "weights": "W",
}
ENDS = {"finish_reduction": "REDUCE", "_finish": "STEP", "gather_parameters": "GATHER"}


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """List (pipeline rank, action) in the order in which the ranks of this process finished them."""
    done: list[tuple[int, str]] = []

    def recorded(method: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def call(self: Any, action: Action) -> Any:
            assert action.kind == kind
            result = method(self, action)
            done.append((self.comm.stage, str(action)))
            return result

        return call

    for name, kind in DOES.items():
        monkeypatch.setattr(executor._StepState, name, recorded(getattr(executor._StepState, name), kind))
    return done


@pytest.mark.parametrize("kind", RUNNABLE)
@pytest.mark.parametrize(("pp", "microbatches"), [(2, 5), (4, 3), (4, 8)])
def test_executed_order_is_simulated_order(order: list[tuple[int, str]], kind: str, pp: int, microbatches: int):
    row = row_of(kind)
    mesh = Mesh(pp=pp, virtual=row.chunks or 2, stage_order=row.shape)
    microbatches = -(-microbatches // pp) * pp if row.groups else microbatches

    def body(c: Communicators) -> None:
        layout = tiny.layout(mesh, micro=1, microbatches=microbatches, schedule=kind)
        trainer = test_trainer.build(c, layout)
        ends = {name: getattr(trainer if name == "_finish" else trainer._buffers, name) for name in ENDS}
        for name, end in ends.items():

            def recorded(*given: Any, end: Callable[..., Any] = end, name: str = name) -> Any:
                result = end(*given)
                order.append((c.stage, ENDS[name]))
                return result

            setattr(trainer if name == "_finish" else trainer._buffers, name, recorded)
        whole = trainer._buffers.start_sum

        def start_sum(chunk: int) -> None:
            whole(chunk)
            order.append((c.stage, str(Action("SUM", None, chunk))))

        trainer._buffers.start_sum = start_sum  # type: ignore[method-assign]
        trainer.train_step(tiny.batch(microbatches, 0))

    run_lockstep(mesh, body)
    chunk = ChunkTimes(1, 2, 1 if row.splits_backward else 0, send_forward_s=0.1, send_backward_s=0.1)
    times = StageTimes((chunk,) * mesh.virtual, 1, 1, 1)
    timeline = simulate(step_lists(kind, pp, microbatches, mesh.virtual, ("SUM",)), [times] * pp, route=mesh.route)
    for stage in range(pp):
        simulated = [str(e.action) for e in timeline.events if e.stage == stage]
        assert [action for rank, action in order if rank == stage] == simulated
        starts = [e.start_s for e in timeline.events if e.stage == stage]
        assert starts == sorted(starts)
    # across ranks too: both receive a message only after it was sent
    for message in timeline.messages:
        computed, received = str(message.sent).removeprefix("S"), str(message.received)
        assert order.index((message.source, computed)) < order.index((message.target, received))
