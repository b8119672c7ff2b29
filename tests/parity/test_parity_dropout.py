"""Dropout depends on the element only: any two plans drop the same elements as one process with the whole batch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch

from autoptd.api import Parallel
from autoptd.layout.mesh import Mesh
from autoptd.ops import recompute
from autoptd.ops.dropout import DropoutKey, Elements
from autoptd.passes.sharding.context_parallel_graph import _SegmentWriter
from autoptd.runtime import executor
from autoptd.runtime.trainer import Trainer
from autoptd.testing.parity import Trained, differences, train_in_lockstep
from tests.parity.parity_check import MESHES, Variant, batches, case, parallel, planned, spoil_ring, with_files
from tests.parity.parity_models import DROPOUT

PLAIN = Variant(bulk=True)
CUBE = Mesh(2, 2, 2)
VARIANTS = (  # in turn over meshes and models
    PLAIN,
    Variant(zero=0, micro=1),
    Variant(bulk=True, recompute="full", micro=1),
    Variant(bulk=True, sequence_parallel=False),
    Variant(bulk=True, recompute="full", zero=0),
)


@cache
def trained(name: str, mesh: Mesh, variant: Variant = PLAIN, seed: int = 0, again: int = 0) -> Trained:
    """Train a plan; different `again` give separate runs under the cache."""
    return train_in_lockstep(parallel(name, planned(name, mesh, variant), "sgd", seed=seed), batches(name))


@cache
def alone(name: str) -> Trained:
    """Train one process with the whole batch at once."""
    return trained(name, Mesh(1, 1, 1), Variant(micro=16))


def apart(one: Trained, other: Trained) -> float:
    losses = torch.tensor(one.losses), torch.tensor(other.losses)
    tensors = differences(one.state, other.state) | differences(one.gradients, other.gradients)
    return max(*tensors.values(), float((losses[0] - losses[1]).abs().max()))


def is_alone(name: str, found: Trained) -> bool:
    """Return whether a run equals one process; the loss of gpt2 is in float32, gradients and parameters are not."""
    tensors = differences(found.gradients, alone(name).gradients) | differences(found.state, alone(name).state)
    close = torch.tensor(found.losses).sub(torch.tensor(alone(name).losses)).abs().max() < 1e-6
    return not found.diverged and bool(close) and max(tensors.values()) <= 1e-10


def in_turn() -> list[tuple[str, Mesh]]:
    """List each model with two meshes of 8 ranks."""
    return [(name, mesh) for i, name in enumerate(DROPOUT) for mesh in MESHES[i + 1 :: 5]]


@pytest.mark.parametrize(("name", "mesh"), in_turn(), ids=str)
def test_every_mesh_drops_what_one_process_drops(name: str, mesh: Mesh) -> None:
    variant = VARIANTS[(list(DROPOUT).index(name) + MESHES.index(mesh)) % len(VARIANTS)]
    if name == "folded_dropout":  # its last microbatch is one sample short, so it needs two
        variant = replace(variant, micro=2)
    assert is_alone(name, trained(name, mesh, variant))


@pytest.mark.parametrize("changed", [{"schedule": "gpipe"}, {"schedule": "interleaved", "virtual": 2}], ids=str)
@pytest.mark.parametrize("name", ["nanogpt_dropout"])
def test_the_schedule_plays_no_part(name: str, changed: dict[str, object]) -> None:
    assert is_alone(name, trained(name, CUBE, replace(PLAIN, micro=1, **changed)))


def test_backward_in_two_halves_plays_no_part() -> None:
    zero_bubble = replace(PLAIN, micro=1, schedule="zero-bubble", recompute="full")
    assert is_alone("nanogpt_dropout", trained("nanogpt_dropout", CUBE, zero_bubble))


TOKENS = [  # split over cp ranks
    ("nanogpt_dropout", Mesh(dp=2, tp=2, cp=2), replace(PLAIN, micro=4)),
    ("nanogpt_dropout", Mesh(pp=2, cp=4), replace(PLAIN, micro=8, recompute="full")),
    ("gpt2_dropout", Mesh(tp=2, pp=2, cp=2), replace(PLAIN, micro=4)),
    ("gpt2_dropout", Mesh(dp=2, cp=4), replace(PLAIN, micro=8, zero=0, context="ulysses")),
    ("bert_dropout", Mesh(dp=2, tp=2, cp=2), replace(PLAIN, micro=4, context="ulysses")),
    ("written_dropout", Mesh(tp=2, cp=4), replace(PLAIN, micro=8)),
    ("folded_dropout", Mesh(dp=2, tp=2, cp=2), replace(PLAIN, micro=4)),
    ("folded_dropout", Mesh(pp=2, cp=4), replace(PLAIN, micro=8, recompute="full")),
]


@pytest.mark.parametrize(("name", "mesh", "variant"), TOKENS, ids=[f"{n}-{m}" for n, m, _ in TOKENS])
def test_cut_tokens_play_no_part(name: str, mesh: Mesh, variant: Variant) -> None:
    assert is_alone(name, trained(name, mesh, variant))


def test_a_run_repeats_to_the_bit_and_recompute_replays_it() -> None:
    one = trained("nanogpt_dropout", CUBE)
    assert apart(one, trained("nanogpt_dropout", CUBE, again=1)) == 0
    assert apart(one, trained("nanogpt_dropout", CUBE, replace(PLAIN, recompute="full"))) < 1e-12


@pytest.mark.parametrize("name", ["nanogpt_dropout", "gpt2_dropout"])
def test_seed_and_dropout_matter(name: str) -> None:
    without = edited(name, lambda text: text.replace("rng=self.dropout", "rng=None"))
    plain = train_in_lockstep(without, batches(name))
    assert apart(trained(name, CUBE), plain) > 1e-4
    assert apart(trained(name, CUBE), trained(name, CUBE, seed=1)) > 1e-4


def test_every_step_and_sample_draws_anew() -> None:
    """All samples are equal and the learning rate is 0: losses differ by dropout only."""
    name = "nanogpt_dropout"
    alike = {n: x[15:].expand(16, *x.shape[1:]) for n, x in case(name).batch.items()}
    made = parallel(name, planned(name, Mesh(1, 1, 1), Variant(micro=1)), "sgd")
    made._optimizer_options = {"lr": 0.0}
    losses = train_in_lockstep(made, [alike, alike]).losses
    assert losses[0] != losses[1]
    one = {n: x[:1] for n, x in alike.items()}
    made.__dict__["layout"] = replace(made.layout, microbatches=1)
    assert abs(train_in_lockstep(made, [one]).losses[0] - losses[0]) > 1e-6, "the mean over samples is not one of them"


def test_shares_need_not_be_equal() -> None:
    """4, 4, 3 and 3 samples: each rank knows where its share begins."""
    name = "nanogpt_dropout"
    fewer = [{n: x[:14] for n, x in batch.items()} for batch in batches(name)]
    runs = [(Mesh(4, 2, 1), PLAIN), (Mesh(1, 1, 1), Variant(micro=16))]
    found = [train_in_lockstep(parallel(name, planned(name, *run), "sgd"), fewer) for run in runs]
    assert apart(*found) < 1e-10


def test_every_place_of_samples_is_met() -> None:
    """The program of `folded_dropout` states the dim of the samples wherever it is not the first."""
    made = parallel("folded_dropout", planned("folded_dropout", Mesh(1, 4, 1), PLAIN), "sgd")
    text = "".join(made.program.files.values())
    places = set(re.findall(r"samples=(?:ops\.Samples\(([^)]*)\)|(None|ops\.MICROBATCH))", text))
    assert places == {("inner=s", ""), ("dim=1", ""), ("outer=s", ""), ("", "None")}
    assert "parts=[tp.part(" in text


# ---- planted ----


def edited(name: str, edit: Callable[[str], str], mesh: Mesh = CUBE, variant: Variant = PLAIN) -> Parallel:
    """Return a program with every Python file edited; at least one must change."""
    made = parallel(name, planned(name, mesh, variant), "sgd")
    files = {n: edit(text) if n.endswith(".py") else text for n, text in made.program.files.items()}
    assert files != made.program.files, "nothing was planted"
    return with_files(made, files)


@pytest.mark.parametrize(
    ("name", "pattern", "by"),
    [
        pytest.param(
            "nanogpt_dropout",
            r",\s*parts=\[tp\.part\([^)]*\)\]",
            "",
            marks=pytest.mark.fault("masks of local positions"),
        ),
        pytest.param(
            "nanogpt_dropout",
            r"parts=\[tp\.part\(dim=\d",
            r"parts=[tp.part(dim=0",
            marks=pytest.mark.fault("masks of local positions"),
        ),
        pytest.param(
            "folded_dropout",
            r"samples=ops\.Samples\(inner=s\)",
            "samples=None",
            marks=pytest.mark.fault("masks that repeat"),
        ),
        pytest.param(
            "folded_dropout",
            r"ops\.Samples\(inner=s\)",
            "ops.Samples()",
            marks=pytest.mark.fault("masks of local samples"),
        ),
        pytest.param(
            "folded_dropout",
            r"ops\.Samples\(outer=s\)",
            "ops.Samples(inner=s)",
            marks=pytest.mark.fault("masks of local samples"),
        ),
        pytest.param(
            "folded_dropout",
            r"samples=None",
            "samples=ops.MICROBATCH",
            marks=pytest.mark.fault("masks of local samples"),
        ),
        pytest.param(
            "bert_dropout",
            r'key=f"\{self\._first \+ (\d+)\}',
            r'key=f"{self._first + tp.rank + \1}',
            marks=pytest.mark.fault("masks differ on replicas"),
        ),
    ],
)
def test_an_edited_place_is_seen(name: str, pattern: str, by: str) -> None:
    made = edited(name, lambda text: re.sub(pattern, by, text))
    assert not is_alone(name, train_in_lockstep(made, batches(name)))


def no_samples(sizes: Iterable[int]) -> Iterator[int]:
    """Yield 0 as the first sample of every microbatch."""
    return (0 for _ in sizes)


def of_the_first_step(self: DropoutKey, key: str, right: Callable[..., int] = DropoutKey.word) -> int:
    return right(replace(self, step=0), key)


def none_when_run_again(self: Elements, p: float, right: Callable[..., torch.Tensor] = Elements.keep) -> torch.Tensor:
    run = getattr(recompute._HERE, "run", None)
    return right(self, 1 - 1e-9 if run is not None and run.second_run else p)


@pytest.mark.parametrize(
    ("owner", "attribute", "wrong"),
    [
        pytest.param(executor, "accumulate", no_samples, marks=pytest.mark.fault("masks of local samples")),
        pytest.param(Trainer, "_share_starts", lambda *_: 0, marks=pytest.mark.fault("masks of local samples")),
        pytest.param(DropoutKey, "word", of_the_first_step, marks=pytest.mark.fault("masks that repeat")),
        pytest.param(Elements, "keep", none_when_run_again, marks=pytest.mark.fault("masks drawn anew")),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_planted_fault_is_seen(
    owner: object, attribute: str, wrong: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, variant = "nanogpt_dropout", replace(PLAIN, recompute="full", micro=1)
    assert is_alone(name, trained(name, CUBE, variant))
    monkeypatch.setattr(owner, attribute, wrong)
    made = parallel(name, planned(name, CUBE, variant), "sgd")
    assert not is_alone(name, train_in_lockstep(made, batches(name)))


SMALL, ONE_SHARE = Mesh(tp=2, cp=2), replace(PLAIN, micro=8)


@pytest.mark.parametrize(
    ("name", "pattern", "by", "context"),
    [
        pytest.param(
            "nanogpt_dropout", r", cp\.part\(dim=1\)", "", "ring", marks=pytest.mark.fault("masks of local positions")
        ),
        pytest.param(
            "nanogpt_dropout", r", cp\.part\(dim=2\)", "", "ring", marks=pytest.mark.fault("masks of local positions")
        ),
        pytest.param(
            "nanogpt_dropout",
            r"(tp\.part\(dim=1\)), (cp\.\S+\))\]",
            r"\2, \1]",
            "ring",
            marks=pytest.mark.fault("masks of local positions"),
        ),
        pytest.param(
            "bert_dropout",
            r"\[cp\.part\(dim=1\), ",
            "[",
            "ulysses",
            marks=pytest.mark.fault("masks of local positions"),
        ),
        pytest.param(
            "folded_dropout",
            r"(cp\.part\(dim=0), groups=b\)",
            r"\1)",
            "ring",
            marks=pytest.mark.fault("masks of local positions"),
        ),
        pytest.param(
            "folded_dropout",
            r"(cp\.part\(dim=0), groups=8\)",
            r"\1)",
            "ring",
            marks=pytest.mark.fault("masks of local positions"),
        ),
    ],
)
def test_an_edited_place_of_tokens_is_seen(name: str, pattern: str, by: str, context: str) -> None:
    variant = replace(ONE_SHARE, context=context)
    assert is_alone(name, trained(name, SMALL, variant))
    made = edited(name, lambda text: re.sub(pattern, by, text), SMALL, variant)
    assert not is_alone(name, train_in_lockstep(made, batches(name)))


@pytest.mark.parametrize(
    ("pattern", "by"),
    [
        pytest.param(
            r"cp\.part_of\(owner, -1\)",
            "cp.part_of(self.cp.rank, -1)",
            marks=pytest.mark.fault("masks of local positions"),
        ),
        pytest.param(
            r"\.narrow\(-2, query\.start, query\.stop\)",
            ".narrow(-2, 0, query.stop - query.start)",
            marks=pytest.mark.fault("masks of local positions"),
        ),
        (r"weights\.sum\(-1, keepdim=True\)", "self._kept(weights, tile).sum(-1, keepdim=True)"),
        (r"kept\.transpose", "weights.transpose"),
        (r"to_scores = kept", "to_scores = weights"),
        (r" - weights \* inner", ""),
        (r"\.tril\(query\.start\)", ".tril(query.start + 1)"),
    ],
)
def test_an_edited_ring_is_seen(pattern: str, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_ring(monkeypatch, pattern, by)
    name, mesh = "nanogpt_dropout", Mesh(cp=2)
    made = parallel(name, planned(name, mesh, ONE_SHARE), "sgd")
    assert not is_alone(name, train_in_lockstep(made, batches(name)))


@pytest.mark.fault("masks of conversions")
def test_keys_that_count_conversions_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values are gathered before the probabilities are dropped, which shifts the positions of later ops."""
    right = _SegmentWriter._op
    monkeypatch.setattr(_SegmentWriter, "_op", lambda self, node, _, tp: right(self, node, len(self.nodes), tp))
    name, mesh = "written_dropout", Mesh(cp=2)
    made = parallel(name, planned(name, mesh, ONE_SHARE), "sgd")
    assert not is_alone(name, train_in_lockstep(made, batches(name)))
