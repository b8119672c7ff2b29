"""Faults of plans and code, planted one by one: `autoptd verify` must detect each, and locate it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from autoptd.errors import PlanFileError
from autoptd.layout.packing import Bucket
from autoptd.ops.tp_axis import Axis
from autoptd.plans.model import Plan
from autoptd.runtime import executor, messages, trainer
from autoptd.runtime.comm.threaded import LockstepGroup
from autoptd.runtime.optimizers.step import OptimizerStep
from autoptd.runtime.zero import flat_buffer as storage
from autoptd.runtime.zero import grad_reduce as reduction
from autoptd.runtime.zero import param_buffers as buffers
from autoptd.schedule import Action
from autoptd.verification import verdict as verdicts
from autoptd.verification.verdict import Trial, first_line, replace_text
from tests.verification.verified import FIXED, plan, told, trial, verdict

Patch = pytest.MonkeyPatch
BLOCK = r"blocks\.py:\d+  "


@pytest.mark.parametrize("name", FIXED)
def test_a_right_plan_is_verified_and_no_line_of_it_is_blamed(name: str) -> None:
    found = verdict(name)
    assert found.agrees, told(found)
    assert found.difference < 1e-11
    assert first_line(trial(name), trial(name).parallel(1.0)) is None


TEXTS = [  # plan, the emitted text, the planted text in its place, the message of the first fault
    ("tensors", "tp.all_reduce_both(out)", "out", rf"blocks\.0.*Bp on ranks \[0, 1\].*\n{BLOCK}out = out"),
    ("tensors", "tp.all_reduce_both(down)", "tp.all_reduce(down)", r"gradient of its result.*\n.*blocks\.py"),
    ("tensors", "tp.pad(self.down.bias, dim=0)", "torch.cat([self.down.bias] * 2)", rf"{BLOCK}down"),
    ("tensors", "is_causal=True", "is_causal=False", rf"attention: scaled_dot_product_attention.*\n{BLOCK}y = "),
    ("tensors", "x_2 = x + dropout", "x_2 = dropout", rf"blocks\.0.*\n{BLOCK}x_2 = dropout"),
    ("tensors", "parts=[tp.part(dim=1)]", "parts=[]", rf"attention: scaled_dot_product_attention.*\n{BLOCK}y = "),
    ("tensors", "{self._first + 1}.4", "{self._first + 2}.4", rf"blocks\.0\.drop: dropout.*\n{BLOCK}dropout = "),
    ("tensors", "tp.all_gather(self.tokens.weight, dim=0)", "self.tokens.weight.repeat(2, 1)", r"stage_0\.py:\d+  tok"),
    ("tensors", "tp.all_gather_whole(head, dim=2)", "tp.all_gather(head, dim=2)", r"head: linear.*\n.*stage_0\.py"),
    ("tensors", "loss_sum / counts[0]", "loss_sum / (2 * counts[0])", r"div.*\nstage_0\.py:\d+  div = "),
    ("tensors", "for block in self.calls", "for block in reversed(self.calls)", r"stage 0, blocks\.0"),
    ("tensors", "chunk_1.reshape", "chunk_2.reshape", rf"\n{BLOCK}k = chunk_2"),
    ("tensors", "ignore_index=-1", "ignore_index=-2", r"(?s)stage_0\.py:\d+  loss_sum|rank \d"),
    ("stages", "F.embedding(idx,", "F.embedding(idx.roll(1, 1),", r"tokens: embedding.*\nstage_0\.py:\d+  tokens"),
    (
        "stages",
        "zip(range(2, 3), range(6, 7, 2))",
        "zip(range(2, 3), range(7, 8))",
        r"stage 1, blocks\.2\..*dropout|attention",
    ),
    ("parts", "add = x + dropout", "add = dropout", rf"stage 0, blocks\.0: add.*\n{BLOCK}add = dropout"),
    ("parts", "dropout, first + 1)", "dropout, first + 2)", rf"stage 0, blocks\.0\.drop: dropout.*\n{BLOCK}dropout = "),
    ("again", "recompute(core", "recompute(lambda *x: 1.5 * core(*x)", r"blocks\.0"),
]


@pytest.mark.parametrize(("name", "old", "new", "says"), TEXTS, ids=[f"{t[0]}-{t[2][:32]}" for t in TEXTS])
def test_a_wrong_line_is_found(name: str, old: str, new: str, says: str) -> None:
    found = verdict(name, replace_text(trial(name), old, new))
    assert not found.agrees
    assert re.search(says, told(found)), told(found)
    where, what = found.faults[0]
    assert re.search(says, f"{where}: {what}"), told(found)


def counted_twice(patch: Patch) -> None:
    whole = storage.Buffer.pieces
    patch.setattr(storage.Buffer, "pieces", lambda self, counts: whole(self, True))


def split_parts_uncounted(patch: Patch) -> None:
    whole = storage.Buffer.pieces
    patch.setattr(storage.Buffer, "pieces", lambda self, counts: whole(self, counts and not self.counts(tp_rank=1)))


def a_parameter_nobody_updates(patch: Patch) -> None:
    whole = storage.Buffer.pieces
    patch.setattr(storage.Buffer, "pieces", lambda self, counts: whole(self, counts)[1:])


def stale_gather(patch: Patch) -> None:
    """Do not gather updated shards."""

    def start_gather(self: Any, bucket: Bucket) -> Any:
        own = self.own_part(self.whole(bucket), bucket)
        if self.main is not None:
            own.copy_(self.shard(bucket))
        return type("Done", (), {"wait": lambda _: None})()

    patch.setattr(storage.Buffer, "start_gather", start_gather)


def not_reduced(patch: Patch) -> None:
    """Leave each dp rank with its own partial value."""

    def alone(self: Any, whole: Tensor, own: Tensor) -> Any:
        return type("Done", (), {"wait": lambda _: None})()

    patch.setattr(storage.Sharing, "sum_later", alone)


def stale_gradients(patch: Patch) -> None:
    """Add the first partial value of a step to the result of the previous step."""
    patch.setattr(buffers.Buffers, "start_step", lambda self: None)


def a_norm_not_summed_over_tp(patch: Patch) -> None:
    whole = storage.Buffer.__init__

    def init(self: Any, *args: Any) -> None:
        whole(self, *args)
        self.partial_over_tp = False

    patch.setattr(storage.Buffer, "__init__", init)


def tied_apart(patch: Patch) -> None:
    from autoptd.ops.group import SingleRankGroup

    build = buffers._build

    def apart(*args: Any) -> Any:
        found = build(*args)
        for buffer in found:
            buffer.tied = SingleRankGroup()
        return found

    patch.setattr(buffers, "_build", apart)


def own_norm(patch: Patch) -> None:
    """Use every rank's own squares as the global ones."""
    whole = LockstepGroup.all_reduce

    def all_reduce(self: Any, x: Tensor, op: str = "sum") -> Tensor:
        kept = x[1].clone() if x.dtype == torch.float64 and x.ndim == 1 and len(x) > 10 else None
        whole(self, x, op)  # type: ignore[arg-type]
        if kept is not None and self.size == 4:
            x[1] = kept
        return x

    patch.setattr(LockstepGroup, "all_reduce", all_reduce)


def gradient_lost_between_stages(patch: Patch) -> None:
    whole = executor._StepState._returned
    patch.setattr(executor._StepState, "_returned", lambda self, *at: tuple(0 * x for x in whole(self, *at)))


def spoilt_message(patch: Patch) -> None:
    whole = messages.Inbox.take
    patch.setattr(messages.Inbox, "take", lambda self, at: tuple(x.flip(1) for x in whole(self, at)))


def swapped_stages(patch: Patch) -> None:
    """Run the stage of rank 1 on pipeline rank 0, and the other way round."""
    import autoptd.parallel

    whole = autoptd.parallel.load_stage
    patch.setattr(autoptd.parallel, "load_stage", lambda program, stage: whole(program, 1 - stage))


def slices_of_a_neighbour(patch: Patch) -> None:
    """Load the other tensor-parallel rank's part of every split parameter."""
    known = trainer.own_part

    def of_a_neighbour(full: Any, spec: Any, mesh: Any, rank: int) -> Any:
        return known(full, spec, mesh, rank + mesh.tp - 1 - 2 * (rank % mesh.tp))

    patch.setattr(trainer, "own_part", of_a_neighbour)


def one_tp_rank_elsewhere(patch: Patch) -> None:
    """Skip a collective on one rank of an axis: the others wait forever."""
    whole = Axis.all_reduce_both
    patch.setattr(Axis, "all_reduce_both", lambda self, x: x if self.rank else whole(self, x))


def a_gradient_taken_twice(patch: Patch) -> None:
    whole = reduction.BucketState.start_sum

    def start_sum(self: Any) -> Any:
        if "norm.weight" in self.names:
            self.views["norm.weight"].mul_(2)
        return whole(self)

    patch.setattr(reduction.BucketState, "start_sum", start_sum)


def steps_once(patch: Patch) -> None:
    """Drop all steps of the optimizer but the first."""
    whole = OptimizerStep.run

    def run(self: Any, used: Any) -> None:
        if not vars(self).setdefault("stepped", False):
            whole(self, used)
        self.stepped = True

    patch.setattr(OptimizerStep, "run", run)


CODE = [  # plan, planted fault, message of the first fault
    ("tensors", counted_twice, r"norm_1\.weight: elements 0 to 7 counted in the norm twice, not once"),
    ("tensors", split_parts_uncounted, r"tokens\.weight: elements .* rank 0's part counted in the norm never"),
    ("tensors", a_parameter_nobody_updates, r"(bias|weight): elements? .* updated never on pipeline rank 0"),
    ("tensors", stale_gather, r"ranks 0 and 2 hold different copies"),
    ("tensors", not_reduced, r"(bias|weight): gradient off by .*first on rank 0"),
    ("tensors", stale_gradients, r"gradient of norm\.weight after its bucket was reduced"),
    ("tensors", a_norm_not_summed_over_tp, r"norm\.bias: gradient off by"),
    ("stages", tied_apart, r"tokens\.weight: gradient off by"),
    ("tensors", own_norm, r"gradient norm: off by .*rank 0"),
    ("stages", gradient_lost_between_stages, r"stage 0, blocks\.1: add: the gradient of its result"),
    ("stages", spoilt_message, r"stage 1.*\nstage_1\.py:\d+  x, an argument of Stage1\.forward"),
    ("stages", swapped_stages, r"parameter .*: in the (plan|stage), not in the (plan|stage)"),
    ("tensors", slices_of_a_neighbour, r"stage 0, tokens\.weight: its result"),
    ("tensors", one_tp_rank_elsewhere, r"disagree|deadlock"),
    ("tensors", a_gradient_taken_twice, r"norm\.weight: gradient off by .*it is 2 × the right one"),
    ("tensors", steps_once, r"weight|bias: after the step off by .*in step 2, though step 1 was right"),
    ("thirds", not_reduced, r"(bias|weight): gradient off by"),
]


@pytest.mark.parametrize(("name", "plant", "says"), CODE, ids=[f"{c[0]}-{c[1].__name__}" for c in CODE])
def test_wrong_code_is_found(name: str, plant: Callable[[Patch], None], says: str, monkeypatch: Patch) -> None:
    plant(monkeypatch)
    found = verdict(name)
    assert not found.agrees
    where, what = found.faults[0]
    assert re.search(says, f"{where}: {what}"), told(found)


def with_plan(made: Trial, changed: Plan) -> Trial:
    """Return the same program under another plan."""
    return replace(made, subject=replace(made.subject, plan=changed))


def test_a_placement_that_the_program_does_not_have_is_refused() -> None:
    made = trial("tensors")
    splits = made.subject.plan.splits
    placed = {**splits.parameters, "norm.weight": "B"}  # its gradient is a partial value, which is never summed
    wrong = made.subject.plan.model_copy(update={"splits": splits.model_copy(update={"parameters": placed})})
    with pytest.raises(PlanFileError, match=r"collectives.norm: missing"):
        verdict("tensors", with_plan(made, wrong))


def test_a_split_that_the_program_does_not_have_is_refused() -> None:
    made = trial("tensors")
    splits = made.subject.plan.splits
    placed = {**splits.parameters, "blocks.0.up.weight": "S1"}
    wrong = made.subject.plan.model_copy(update={"splits": splits.model_copy(update={"parameters": placed})})
    found = verdict("tensors", with_plan(made, wrong))
    assert "blocks.0.up.weight: [16, 8] in the stage, [32, 4] in the plan" in told(found)


def test_a_schedule_that_waits_for_ever_is_found_without_running_it(monkeypatch: Patch) -> None:
    def crossed(*how: Any) -> Any:
        lists = step_lists(*how)
        first = [a for a in lists[0] if a.kind != "SF"]
        return [first, *lists[1:]]

    step_lists = verdicts.step_lists
    monkeypatch.setattr(verdicts, "step_lists", crossed)
    found = verdict("stages")
    assert found.compared is None
    where, what = found.faults[0]
    assert where == "schedule"
    assert "cannot finish" in what
    assert str(Action("RF", 0)) in what


def test_more_than_twenty_faults_are_planted() -> None:
    assert len(TEXTS) + len(CODE) >= 30
    assert {plan(name).world for name in FIXED} == {2, 4}
