"""Sequences split over cp ranks: equal to one plain process; planted mistakes are detected."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from autoptd.api import Parallel
from autoptd.errors import AutoptdError, InputsError, PlanError
from autoptd.layout.mesh import Mesh
from autoptd.ops import fused_attention
from autoptd.runtime.comm import interfaces as comm
from autoptd.runtime.comm import threaded as lockstep
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.testing.parity import train_alone, train_in_lockstep
from tests.parity.parity_check import (
    OPTIONS,
    STEPS,
    Variant,
    alone,
    batches,
    case,
    check,
    complaints,
    parallel,
    planned,
    spoil_ring,
    with_files,
)

BULK = Variant(bulk=True, micro=4)
WAYS = [
    ("gpt2", Mesh(dp=2, pp=2, cp=2), Variant(recompute="full", clip_norm=0.7, micro=4), "adamw"),
    ("gpt2", Mesh(dp=2, cp=4), Variant(zero=0, context="ulysses", micro=8, recompute="ops"), "sgd"),
    ("llama", Mesh(tp=2, cp=4), Variant(sequence_parallel=False, micro=8, recompute="selective"), "sgd"),
    ("llama", Mesh(dp=2, tp=2, cp=2), replace(BULK, context="ulysses"), "adamw"),
    ("llama", Mesh(tp=2, pp=2, cp=2), replace(BULK, schedule="interleaved", virtual=2, recompute="ops"), "adamw"),
    ("llama_2_kv", Mesh(pp=2, cp=4), replace(BULK, micro=8), "sgd"),
    ("llama_2_kv", Mesh(tp=4, cp=2), replace(BULK, sequence_parallel=False), "sgd"),
    ("llama_2_kv", Mesh(tp=4, cp=2), replace(BULK, context="ulysses", recompute="selective"), "adamw"),
    ("llama_2_kv", Mesh(dp=2, cp=4), replace(BULK, context="ulysses", micro=8), "sgd"),
    ("bert", Mesh(dp=2, tp=2, cp=2), BULK, "adamw"),
    ("bert", Mesh(dp=2, cp=4), Variant(zero=0, micro=8), "sgd"),
    ("bert", Mesh(tp=2, pp=2, cp=2), replace(BULK, context="ulysses", recompute="selective"), "sgd"),
    ("nanogpt", Mesh(pp=4, cp=2), Variant(schedule="zero-bubble", micro=4, recompute="ops"), "adamw"),
    ("nanogpt", Mesh(dp=4, cp=2), Variant(overlap=("dp", "p2p"), micro=4), "adamw"),
    ("nanogpt", Mesh(tp=2, pp=2, cp=2), replace(BULK, schedule="zero-bubble-v", virtual=2), "sgd"),
    ("oddities", Mesh(dp=2, tp=2, cp=2), replace(BULK, recompute="full", zero=3), "adamw"),
    ("oddities", Mesh(pp=2, cp=2), replace(BULK, recompute="selective", zero=2), "sgd"),
    ("bert", Mesh(dp=2, cp=4), Variant(zero=2, shards=2, micro=8), "adamw"),
    ("mixtral", Mesh(dp=2, tp=2, cp=2), BULK, "adamw"),
    ("mixtral", Mesh(pp=2, cp=4), replace(BULK, context="ulysses", recompute="full", zero=3), "sgd"),
    ("mixtral", Mesh(tp=2, pp=2, cp=2), replace(BULK, schedule="interleaved", virtual=2, recompute="ops"), "sgd"),
]


@pytest.mark.parametrize(("name", "mesh", "variant", "optimizer"), WAYS, ids=[f"{n}-{m}" for n, m, _, _ in WAYS])
def test_cut_sequences_train_like_one_process(name: str, mesh: Mesh, variant: Variant, optimizer: str) -> None:
    assert not check(name, mesh, variant, optimizer)


def test_a_model_without_a_sequence_is_not_cut() -> None:
    says = "cp 2 cuts a sequence, but no input of the model has one"
    with pytest.raises(PlanError, match=says) as error:
        planned("vit", Mesh(cp=2), BULK)
    assert error.value.where == "fix['cp']"


def test_heads_must_divide_for_ulysses() -> None:
    with pytest.raises(PlanError, match=r"8 heads are not divisible by tp 4 × cp 4"):
        parallel("nanogpt", planned("nanogpt", Mesh(tp=4, cp=4), Variant(context="ulysses")), "sgd")


def of_length(tokens: int) -> list[dict[str, Tensor]]:
    """Return a batch for each step, of another length than the traced one."""
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 64, (STEPS, 16, tokens), generator=draw)
    return [{"idx": x, "targets": x.roll(-1, 1)} for x in ids]


@pytest.mark.parametrize("mesh", [Mesh(pp=2, cp=2), Mesh(tp=2, cp=2)], ids=str)
def test_other_lengths_than_the_traced_one(mesh: Mesh) -> None:
    """Blocks, messages and rings take their sizes from their inputs."""
    made = parallel("nanogpt", planned("nanogpt", mesh, BULK), "sgd")
    found = train_in_lockstep(made, of_length(4))
    expected = train_alone(case("nanogpt").model, of_length(4), optimizer="sgd", optimizer_options=OPTIONS["sgd"])
    assert not complaints("nanogpt", found, expected)


def test_lengths_that_cannot_be_shared_are_refused() -> None:
    made = parallel("nanogpt", planned("nanogpt", Mesh(cp=2), BULK), "sgd")
    with pytest.raises(AutoptdError, match="10 tokens cannot be shared: they are cut into 4 equal parts") as error:
        train_in_lockstep(made, of_length(10))
    assert isinstance(error.value.__cause__, InputsError)


@pytest.mark.parametrize(("mesh", "tokens"), [(Mesh(tp=2), 5), (Mesh(tp=4, cp=2), 4)], ids=str)
def test_lengths_that_tp_cannot_cut_are_refused(mesh: Mesh, tokens: int) -> None:
    made = parallel("nanogpt", planned("nanogpt", mesh, BULK), "sgd")
    own = f"{tokens // mesh.cp} tokens{' of a cp rank' * (mesh.cp > 1)}"
    with pytest.raises(AutoptdError, match=f"{own} cannot be cut into {mesh.tp} equal parts for tp") as error:
        train_in_lockstep(made, of_length(tokens))
    assert isinstance(error.value.__cause__, InputsError)
    assert "dim 1 of 'idx'" in str(error.value) and f"a multiple of {mesh.tp * mesh.cp}" in str(error.value)


# ---- planted mistakes ----

RING = Mesh(cp=4)
WHOLE = Variant(bulk=True, micro=16)  # one microbatch


def verdict(name: str, made: Parallel) -> list[str]:
    try:
        return complaints(name, train_in_lockstep(made, batches(name)), alone(name, "sgd"))
    except AutoptdError as error:
        return [str(error)]


def sound(name: str, mesh: Mesh = RING) -> Parallel:
    return parallel(name, planned(name, mesh, WHOLE), "sgd")


def test_the_unchanged_program_passes() -> None:
    assert not verdict("nanogpt", sound("nanogpt"))


@pytest.mark.parametrize(
    ("name", "pattern", "by", "sees"),
    [
        pytest.param(
            "nanogpt",
            r"cp\.slice\(positions, dim=0\)",
            "positions[: s // 4]",
            "loss of step 0",
            marks=pytest.mark.fault("positions of a rank"),
        ),  # a rank's own count
        pytest.param(
            "llama",
            r"cp\.slice\((cos\w*), dim=2\)",
            r"\1[:, :, : s // 4]",
            "loss of step 0",
            marks=pytest.mark.fault("positions of a rank"),
        ),
        pytest.param(
            "nanogpt",
            r"return div\b",
            "return cp.all_reduce(div)",
            "loss of step 0",
            marks=pytest.mark.fault("a loss for each cp rank"),
        ),  # each rank's loss is taken for the whole
        pytest.param(
            "nanogpt",
            r"/ counts\[0\]",
            "/ (counts[0] / cp.size)",
            "loss of step 0",
            marks=pytest.mark.fault("a factor too many"),
        ),
        pytest.param(
            "nanogpt",
            r"cp\.slice\(targets, dim=1\)",
            "targets[:, : s // 4]",
            "loss of step 0",
            marks=pytest.mark.fault("labels of other tokens"),
        ),
    ],
)
def test_an_edited_line_is_seen(name: str, pattern: str, by: str, sees: str) -> None:
    made = sound(name)
    files = {n: re.sub(pattern, by, text) if n.endswith(".py") else text for n, text in made.program.files.items()}
    assert files != made.program.files, "nothing was planted"
    assert any(sees in complaint for complaint in verdict(name, with_files(made, files)))


@pytest.mark.parametrize(
    ("pattern", "by", "sees"),
    [
        pytest.param(
            r"\(\(owner, unpacked",
            "(((2 * cp.rank - owner) % cp.size, unpacked",
            "loss",
            marks=pytest.mark.fault("keys of another rank"),
        ),  # keys of another rank
        pytest.param(
            r"_ratio\(before, both\)", "1", "loss", marks=pytest.mark.fault("sums of other maxima")
        ),  # results of other sums
        pytest.param(r"before\.copy_\(both\)", "pass", "loss", marks=pytest.mark.fault("sums of other maxima")),
        pytest.param(
            r"tile\.on_diagonal, scale",
            "False, scale",
            "loss",
            marks=pytest.mark.fault("mask off the diagonal"),
        ),
        pytest.param(
            r"chunk < mine\[-1\]", "True", "loss", marks=pytest.mark.fault("mask off the diagonal")
        ),  # keys of later chunks
        pytest.param(r"chunk < theirs\[0\]", "False", "loss", marks=pytest.mark.fault("mask off the diagonal")),
        pytest.param(
            r"unpacked\(arriving\.wait\(\)\)",
            "unpacked(sums)",
            "gradient",
            marks=pytest.mark.fault("gradients of keys stay"),
        ),  # the last gradients of keys are not returned
        pytest.param(
            r"sums = arriving\.wait\(\)",
            "sums = tuple(x * 0 for x in arriving.wait())",
            "gradient",
            marks=pytest.mark.fault("gradients of keys stay"),
        ),
    ],
)
def test_an_edited_ring_is_seen(monkeypatch: pytest.MonkeyPatch, pattern: str, by: str, sees: str) -> None:
    spoil_ring(monkeypatch, pattern, by)
    mesh = Mesh(cp=2) if "on_diagonal" in pattern else RING  # chunks of more than one token
    assert any(complaint.startswith(sees) for complaint in verdict("nanogpt", sound("nanogpt", mesh)))


@pytest.mark.parametrize(
    ("pattern", "by", "sees"),
    [
        pytest.param(
            r"\(highest\[\.\.\., query, :\] - _finite\(above\)\)\.exp_\(\)",
            "torch.ones_like(above)",
            "loss",
            marks=pytest.mark.fault("sums of other maxima"),
        ),
        pytest.param(
            r"total\[\.\.\., query, :\] \* decay",
            "total[..., query, :]",
            "loss",
            marks=pytest.mark.fault("sums of other maxima"),
        ),
        pytest.param(r"mine \+= theirs", "pass", "gradient", marks=pytest.mark.fault("gradients of keys stay")),
        pytest.param(r"tril\(query\.start\)", "tril()", "loss", marks=pytest.mark.fault("mask off the diagonal")),
    ],
)
def test_an_edited_ring_without_fused_kernels_is_seen(
    monkeypatch: pytest.MonkeyPatch, pattern: str, by: str, sees: str
) -> None:
    monkeypatch.setattr(fused_attention, "takes", lambda *args: False)
    made = sound("nanogpt", Mesh(cp=2))
    assert not verdict("nanogpt", made)
    spoil_ring(monkeypatch, pattern, by)
    assert any(complaint.startswith(sees) for complaint in verdict("nanogpt", made))


@pytest.mark.parametrize(
    ("spoil", "sees"),
    [
        pytest.param(
            lambda c: replace(c, data=c.dp), "gradient", marks=pytest.mark.fault("gradients of one cp rank")
        ),  # not summed over cp
        (lambda c: replace(c, dp=c.data), "rank"),  # batches split over cp as well: fewer samples than planned
    ],
)
def test_wrong_groups_are_seen(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Communicators], Communicators], sees: str
) -> None:
    monkeypatch.setattr(lockstep, "connect", lambda *args: spoil(comm.connect(*args)))
    assert any(complaint.startswith(sees) for complaint in verdict("nanogpt", sound("nanogpt")))


@pytest.mark.fault("a loss for each cp rank")
def test_counts_that_each_cp_rank_adds_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cp rank counts all labels of its samples: summed over cp as well they are too many."""
    from autoptd.runtime.trainer import Trainer

    right = Trainer._global_counts

    def wrong(self: Trainer, microbatches: list[dict[str, Tensor]]) -> Callable[[], tuple[Tensor, ...]]:
        found = tuple(self.communicators.cp.all_reduce(n.clone()) for n in right(self, microbatches)())
        return lambda: found

    monkeypatch.setattr(Trainer, "_global_counts", wrong)
    assert any(complaint.startswith("loss of step 0") for complaint in verdict("nanogpt", sound("nanogpt")))
