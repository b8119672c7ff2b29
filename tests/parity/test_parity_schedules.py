"""Every schedule computes what one plain process does, also with several chunks per rank and split backward (B and
W)."""

from __future__ import annotations

import weakref
from collections import defaultdict
from dataclasses import astuple, replace
from threading import get_ident
from typing import Any

import pytest
from torch import Tensor

from autoptd.compile.program import read_sharding
from autoptd.layout import layout
from autoptd.layout.mesh import Mesh
from autoptd.ops.stage import Wire
from autoptd.passes.analysis.dataflow import flow
from autoptd.passes.analysis.liveness import waiting_gradients
from autoptd.passes.opcall import Sizes
from autoptd.passes.trace.traced import BATCH
from autoptd.runtime import executor, messages, trainer
from autoptd.runtime import split_backward as splits_backward
from autoptd.runtime.executor import _StepState
from autoptd.runtime.split_backward import WeightBackward
from autoptd.schedule import SENDS, Action, Actions, Channel, Schedule, StageMap
from autoptd.testing.parity import train_in_lockstep
from tests.pairwise import pairwise
from tests.parity.parity_check import Variant, alone, batches, case, check, complaints, parallel, planned, source
from tests.parity.parity_models import FEW_MESHES, MODELS, OFTEN

WAYS = {
    "gpipe": Variant(schedule="gpipe", micro=1, bulk=True),
    "interleaved": Variant(schedule="interleaved", virtual=2, micro=1, bulk=True),
    "interleaved, recomputed": Variant(schedule="interleaved", virtual=2, micro=1, recompute="full", zero=0),
    "zero-bubble": Variant(schedule="zero-bubble", micro=1, bulk=True, clip_norm=0.7),
    "slices": Variant(sends="slices", micro=1, sequence_parallel=False, schedule="interleaved", virtual=2),
    "gathered later": Variant(overlap=("dp", "p2p"), micro=1, bulk=True),
    "zero-bubble, recomputed": Variant(schedule="zero-bubble", micro=1, recompute="full", zero=0),
    "vee": Variant(schedule="zero-bubble-v", virtual=2, micro=1, bulk=True, clip_norm=0.7, overlap=("dp", "p2p")),
    "vee, recomputed, slices": Variant(
        schedule="zero-bubble-v", virtual=2, micro=1, recompute="full", zero=0, sends="slices", sequence_parallel=False
    ),
}
PIPELINES = (Mesh(2, 2, 2), Mesh(1, 2, 4), Mesh(4, 1, 2))


def fitting(name: str, mesh: Mesh, variant: Variant) -> Variant:
    """Use microbatches of two where the last one is a sample short, or where 16 of one sample are more than needed."""
    return replace(variant, micro=2) if name == "skip_mlp" or mesh.dp == 1 else variant


def turn(name: str, way: str) -> tuple[Mesh, str, Variant]:
    """Return mesh, optimizer and variant in turn."""
    at = list(MODELS).index(name) + list(WAYS).index(way)
    mesh = PIPELINES[at % len(PIPELINES)]
    return mesh, ("sgd", "adamw")[at % 2], fitting(name, mesh, WAYS[way])


CASES = pairwise(
    [  # some models by every way, the others by every third
        (name, way) for i, name in enumerate(MODELS) for k, way in enumerate(WAYS) if name in OFTEN or (i + k) % 3 == 0
    ],
    lambda case: (case[0], *turn(*case)[:2], *astuple(turn(*case)[2])),
)


@pytest.mark.parametrize(("name", "way"), CASES)
def test_a_schedule_trains_like_one_process(name: str, way: str) -> None:
    mesh, optimizer, variant = turn(name, way)
    wrong = check(name, mesh, variant, optimizer)
    assert not wrong, (mesh, optimizer, wrong)


@pytest.mark.parametrize("way", ["interleaved", "zero-bubble", "vee"])
@pytest.mark.parametrize("name", FEW_MESHES)
def test_mixtures_and_encoder_decoders(name: str, way: str) -> None:
    assert not check(name, Mesh(2, 2, 2), WAYS[way], "adamw")


@pytest.mark.parametrize("way", ["interleaved", "zero-bubble", "vee"])
def test_one_rank_and_no_other(way: str) -> None:
    """Chunks that hand over to each other on one rank, without another rank to send gradients to."""
    assert not check("nanogpt", Mesh(8, 1, 1), WAYS[way], "sgd")


def test_a_tied_parameter_on_two_chunks_of_a_rank() -> None:
    """Embedding and head of a pipeline of one rank are its first and its last chunk: one tensor, two gradients."""
    plan = planned("gpt2", Mesh(4, 2, 1), WAYS["interleaved"])
    made = parallel("gpt2", plan, "adamw")
    table = made.layout.parameters["transformer.wte.weight"]
    assert len(table.stages) == 2 and made.layout.mesh.holders(table.stages) == (0,)
    assert not complaints("gpt2", train_in_lockstep(made, batches("gpt2")), alone("gpt2", "adamw"))


def test_most_of_the_weights_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """W passes that all ran with their B passes would make the schedule 1F1B under another name."""
    put_off: set[int] = set()
    call = WeightBackward.__call__
    monkeypatch.setattr(
        WeightBackward,
        "__call__",
        lambda self, before=None: (
            put_off.update(id(p) for j in self._intermediates for p in j.branch) or call(self, before)
        ),
    )
    assert not check("llama", Mesh(1, 2, 4), WAYS["zero-bubble"], "sgd")
    assert len(put_off) > 30
    put_off.clear()
    assert not check("llama", Mesh(1, 2, 4), WAYS["zero-bubble, recomputed"], "sgd")
    assert len(put_off) < 10, "what is recomputed is not put off"


@pytest.mark.parametrize("mesh", [Mesh(2, 1, 2), Mesh(1, 2, 2)], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit", "awkward", "t5"])
def test_what_a_backward_pass_holds_for_its_second_half_is_predicted(
    name: str, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare to the byte, on the last stage. The first has no received tensor: all its gradients are made at once."""
    held, call = set[int](), WeightBackward.__call__

    def noted(self: WeightBackward, before: Any = None) -> None:
        arrived = {_storage(x): x for entry in self._intermediates for x in entry.arrived if x is not None}
        held.add(sum(x.untyped_storage().nbytes() for x in arrived.values()))
        call(self, before)

    monkeypatch.setattr(WeightBackward, "__call__", noted)
    plan, origin = planned(name, mesh, Variant(schedule="zero-bubble", micro=1)), source(name)
    train_in_lockstep(parallel(name, plan, "sgd"), batches(name, 1))
    decided, tokens = read_sharding(origin, plan).kinds, next(iter(case(name).batch.values())).shape[-1]
    sizes = Sizes({**dict.fromkeys(origin.folded.traced.sizes, tokens), BATCH: 1})
    blocks = ([origin.folded.segments[i]] for i in range(plan.stages[1].first, plan.stages[1].last + 1))
    waiting = [storage for block in blocks for storage in waiting_gradients(flow(block, decided))]
    assert held == {0, sum(storage.nbytes(sizes, mesh.tp) for storage in waiting)}


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


@pytest.mark.parametrize("way", ["gpipe", "zero-bubble", "vee"])
def test_what_a_stage_sent_is_not_held_until_backward(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold no output of a microbatch in flight, which no plan counts; in a V, one waits to be handed over."""
    made, held = defaultdict[int, list[weakref.ref[Tensor]]](list), list[int]()
    forward, backward = _StepState.forward, _StepState.backward

    def noted(self: _StepState, action: Action) -> None:
        forward(self, action)
        at = action.microbatch, action.chunk
        made[get_ident()] += [weakref.ref(x) for x in self.outputs[at]] if not self.chunks[at[1]].stage.is_last else []

    def counted(self: _StepState, action: Action) -> None:
        held.append(sum(ref() is not None for ref in made[get_ident()]))
        backward(self, action)

    monkeypatch.setattr(_StepState, "forward", noted)
    monkeypatch.setattr(_StepState, "backward", counted)
    assert not check("nanogpt", Mesh(4, 1, 2), replace(WAYS[way], bulk=False), "sgd")
    assert sum(map(len, made.values())) > 0 and max(held) <= (way == "vee")


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_what_all_tp_ranks_hold_is_sent_in_slices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: set[int] = set()
    cut = messages.MessagePart.cut

    def noted(self: messages.MessagePart, x: Tensor, rank: int) -> Tensor:
        sent.add(self.slices)
        return cut(self, x, rank)

    monkeypatch.setattr(messages.MessagePart, "cut", noted)
    variant = Variant(sends="slices", sequence_parallel=False, micro=2, bulk=True)
    assert not check(name, Mesh(1, 4, 2), variant, "sgd")
    assert 4 in sent


# ---- planted bugs ----


def found_wrong(name: str, way: str) -> bool:
    try:
        return bool(check(name, Mesh(2, 2, 2), WAYS[way], "sgd"))
    except Exception:  # noqa: BLE001  found out another way
        return True


@pytest.mark.fault("weights put off for ever")
def test_gradients_that_never_come_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WeightBackward, "__call__", lambda self, before=None: None)
    assert found_wrong("llama", "zero-bubble")


@pytest.mark.fault("gradients counted at every node")
def test_parameters_of_several_nodes_are_done_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's own gradient is also passed on to the next node of the parameter, and counted there a second time."""
    honest = splits_backward._find_path

    def twice(graph, received):  # type: ignore[no-untyped-def]
        path, leads_to = honest(graph, received)  # below, with keys that are never seen twice
        return path, {node: {key + id(node): p for key, p in found.items()} for node, found in leads_to.items()}

    monkeypatch.setattr(splits_backward, "_find_path", twice)
    assert found_wrong("oddities", "zero-bubble")


def test_partial_gradients_are_not_sent_by_scatter_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank holds a partial gradient under placement `Bp`, which scatter-gather P2P must not slice."""
    monkeypatch.setattr(Wire, "is_whole", lambda self, *, gradient: self.placement in ("B", "Bp"))
    assert found_wrong("bert", "slices") and found_wrong("vit", "slices")


@pytest.mark.fault("chunks elsewhere")
@pytest.mark.parametrize("way", ["interleaved", "vee"])
def test_chunks_on_the_wrong_ranks_are_caught(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        layout.Mesh, "stages_of", lambda self, pp: tuple(range(pp * self.virtual, (pp + 1) * self.virtual))
    )
    assert found_wrong("nanogpt", way)


def test_a_loop_where_a_vee_is_planned_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout.Mesh, "stages_of", lambda self, pp: StageMap(self.pp, self.virtual).stages_of(pp))
    assert found_wrong("nanogpt", "vee")


def test_swapped_channels_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations and gradients that go the same way between two ranks are swapped on their channels."""
    honest = executor.channel_of

    def swapped(rank: int, action: Action, route: StageMap) -> Channel:
        edge, way = honest(rank, action, route)
        if action.kind not in SENDS:
            return edge, way
        return 2 * route.ranks - 2 - edge, {"forward": "backward", "backward": "forward"}[way]

    monkeypatch.setattr(executor, "channel_of", swapped)
    assert found_wrong("nanogpt", "vee")


def test_weights_before_their_backward_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Swapped in the rank's list only, since the proof would refuse the schedule."""
    honest = trainer.step_actions

    def early(*args: Any) -> Schedule:
        def turned(actions: Actions) -> Actions:
            first = next(a for a in actions if a.kind == "W")
            others = [a for a in actions if a != first]
            return (*others[:1], first, *others[1:])

        return tuple(turned(actions) for actions in honest(*args))

    monkeypatch.setattr(trainer, "step_actions", early)
    assert found_wrong("nanogpt", "vee")


def test_first_and_last_stage_of_a_vee_share_their_table() -> None:
    """Embedding and head are chunks 0 and 1 of the first rank: one tensor, no exchange with another rank."""
    plan = planned("gpt2", Mesh(2, 2, 2), WAYS["vee"])
    made = parallel("gpt2", plan, "adamw")
    table = made.layout.parameters["transformer.wte.weight"]
    assert table.stages == (0, 3) and made.layout.mesh.holders(table.stages) == (0,)
