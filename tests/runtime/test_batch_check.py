"""A batch that is wrong on one rank ends the step on all ranks with one error; no rank hangs and nothing changes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.errors import InputsError
from autoptd.models.nanogpt import GPTSizes, NanoGPT
from autoptd.runtime import batch_check as agreement
from autoptd.runtime.batch import digest
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import run_lockstep

SAMPLES, SEQ = 8, 8
Batch = dict[str, Tensor]
PLANS: dict[str, dict[str, Any]] = {
    "stages": {"dp": 2, "pp": 2, "tp": 1, "micro": 2},
    "shards": {"dp": 4, "zero": 3, "micro": 1},
    "tensors": {"dp": 1, "tp": 2, "pp": 2, "micro": 4},
    "tokens": {"dp": 2, "cp": 2, "micro": 2},
}


@cache
def made(plan: str) -> autoptd.Parallel:
    torch.manual_seed(0)
    model: nn.Module = NanoGPT(GPTSizes(vocab=32, max_seq=16, width=16, layers=2, heads=2)).double()
    options = {
        "batch": SAMPLES,
        "seq": SEQ,
        "precision": "fp64",
        "optimizer": "sgd",
        "optimizer_options": {"lr": 0.1},
    }
    return autoptd.parallelize(model, world=4, cluster="dgx-h100", fix=PLANS[plan], **options)


def share(parallel: autoptd.Parallel, step: int) -> Batch:
    ids = torch.randint(0, 32, (SAMPLES, SEQ), generator=torch.Generator().manual_seed(step))
    own = {"idx": ids, "targets": ids.roll(-1, 1)}
    return {name: x.tensor_split(parallel.dp_size)[parallel.dp_rank] for name, x in own.items()}


def on_ranks(plan: str, body: Callable[[autoptd.Parallel, Communicators], Any]) -> list[Any]:
    parallel = made(plan)
    values = parallel.initial_values()
    mesh = parallel.layout.mesh

    def run(c: Communicators) -> Any:
        mine = copy.copy(parallel)
        mine._meter = copy.deepcopy(parallel._meter)
        mine.start(c, values)
        return body(mine, c)

    return run_lockstep(mesh, run, timeout_s=30)


def told(plan: str, faulty: Callable[[int, int], bool], spoil: Callable[[Batch], Any], how: str = "train_step") -> str:
    """Return the one error of all ranks; a step before and one after must have the losses that they have without it."""

    def body(parallel: autoptd.Parallel, c: Communicators) -> tuple[str, float, float]:
        first = float(parallel.train_step(share(parallel, 0)))
        bad = share(parallel, 1)
        with pytest.raises(InputsError) as caught:
            getattr(parallel, how)(spoil(bad) if faulty(c.rank, parallel.dp_rank) else bad)
        assert caught.value.fix
        return str(caught.value), first, float(parallel.train_step(share(parallel, 2)))

    results = on_ranks(plan, body)
    assert len({text for text, *_ in results}) == 1, results
    assert {losses for _, *losses in map(tuple, results) for losses in [tuple(losses)]} == {clean(plan)}
    return results[0][0]


@cache
def clean(plan: str) -> tuple[float, float]:
    """Return the losses of the two valid steps alone."""

    def body(parallel: autoptd.Parallel, _: Communicators) -> tuple[float, float]:
        return float(parallel.train_step(share(parallel, 0))), float(parallel.train_step(share(parallel, 2)))

    (found,) = set(on_ranks(plan, body))
    return found


def one_rank(rank: int, _: int) -> bool:
    return rank == 2


def one_share(_: int, dp: int) -> bool:
    return dp == 0


def each(change: Callable[[Tensor], Any]) -> Callable[[Batch], dict[str, Any]]:
    return lambda batch: {name: change(x) for name, x in batch.items()}


SPOILT: list[tuple[Callable[[Batch], Any], str]] = [
    (lambda _: None, "the data loader ran dry"),
    (list, "a batch is a mapping of keyword tensors, not a list"),
    (each(Tensor.int), "'idx' is of type torch.int32, but the plan was made for torch.int64"),
    (each(lambda x: torch.cat((x, x), 1)), "dim 1 of 'idx' is 16, longer than the planned 8"),
    (each(lambda x: x[:, :0]), "dim 1 of 'idx' is 0"),
    (lambda b: b | {"targets": b["targets"][:, :4]}, "dim 1 of 'targets' is 4, but that of 'idx' is 8"),
    (lambda b: b | {"idx": b["idx"][:, 0]}, "'idx' has 1 dims"),
    (each(lambda x: x[:0]), "the batch is empty"),
    (lambda b: {"idx": b["idx"]}, "lacks ['targets']"),
    (lambda b: b | {"mask": b["idx"]}, "has ['mask'] which the plan does not know"),
    (lambda b: b | {"targets": b["targets"].tolist()}, "['targets'] must be tensors"),
    (lambda b: b | {"targets": b["targets"].to_sparse()}, "['targets'] have the layout torch.sparse_coo"),
    (each(lambda x: x.to("meta")), "['idx', 'targets'] are on the meta device"),
]


@pytest.mark.parametrize(("spoil", "said"), SPOILT, ids=[said for _, said in SPOILT])
def test_what_one_rank_alone_can_see_reaches_all(spoil: Callable[[Batch], Any], said: str) -> None:
    text = told("stages", one_rank, spoil)
    assert said in text
    assert "where  rank 2" in text


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("how", ["train_step", "eval_step"])
def test_every_way_to_run_keeps_step(plan: str, how: str) -> None:
    text = told(plan, one_share, lambda _: None, how)
    assert "ran dry" in text and "evaluate(…) goes on with those of the other ranks" in text
    others = {"stages": " and 1 more", "tokens": " and 1 more", "tensors": " and 3 more", "shards": ""}[plan]
    assert f"where  rank 0{others}\n" in text


@pytest.mark.parametrize("plan", ["stages", "tensors", "tokens"])
def test_ranks_of_a_share_with_different_batches(plan: str) -> None:
    text = told(plan, one_rank, each(lambda x: x.roll(1, 0)))
    assert "the same share of the batch were given different batches" in text
    expected = {
        "stages": "share 0: ranks 0, 2",
        "tensors": "share 0: ranks 0, 1, 2, 3",
        "tokens": "share 1: ranks 2, 3",
    }
    assert expected[plan] in text
    assert text.count("data-parallel share") == 1


@pytest.mark.parametrize("plan", ["stages", "shards", "tokens"])
def test_equal_samples_on_all_data_parallel_ranks_are_named_once(plan: str) -> None:
    dp = made(plan).layout.mesh.dp
    ids = torch.randint(0, 32, (SAMPLES // dp, SEQ), generator=torch.Generator().manual_seed(0))
    same = {"idx": ids, "targets": ids.roll(-1, 1)}

    def steps(*batches: Callable[[autoptd.Parallel], Batch]) -> list[str]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            on_ranks(plan, lambda mine, c: [mine.train_step(batch(mine)) for batch in batches])
        return [str(each.message) for each in found if "took the same samples" in str(each.message)]

    (text,) = steps(lambda _: same, lambda _: same)
    assert f"each counts {dp} times" in text and "parallel.sampler(…)" in text
    assert steps(lambda mine: share(mine, 0), lambda _: same) == []


def test_a_wrong_batch_after_an_evaluation_of_uneven_shares() -> None:
    """The zeros in its place are of the planned samples, not of those of the evaluation."""

    def steps(mine: autoptd.Parallel, c: Communicators) -> str:
        ids = torch.randint(0, 32, (5, SEQ), generator=torch.Generator().manual_seed(0))
        own = {name: ids.tensor_split(mine.dp_size)[mine.dp_rank] for name in ("idx", "targets")}
        mine.eval_step(own)
        with pytest.raises(InputsError) as error:
            mine.train_step({**own, "targets": own["targets"].float()})
        mine.train_step(share(mine, 0))
        return error.value.what

    assert len(set(on_ranks("stages", steps))) == 1


def test_shorter_samples_are_taken() -> None:
    def body(parallel: autoptd.Parallel, _: Communicators) -> float:
        return float(parallel.train_step({name: x[:, :6] for name, x in share(parallel, 0).items()}))

    assert len(set(on_ranks("stages", body))) == 1


def test_a_digest_tells_samples_their_order_and_their_type_apart() -> None:
    ids = torch.arange(12).view(4, 3)
    found = [ids, ids.roll(1, 0), ids + 1, ids.flip(0), ids.double(), ids.double() * (1 + 1e-15), ids > 3, ids[:3]]
    assert len({float(digest([x])) for x in found}) == len(found)
    assert float(digest([ids, ids + 1])) != float(digest([ids + 1, ids]))
    assert float(digest([ids])) == float(digest([ids.clone()])) < 2**20
    numbers = torch.zeros(4096, dtype=torch.float64)  # 1.0 has 52 zeros at its end
    assert float(digest([numbers])) != float(digest([numbers.index_fill(0, torch.tensor(4095), 1.0)]))


def test_ranks_that_keep_their_error_to_themselves_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a rank that sees a wrong batch raises at once, and the others wait for it."""
    monkeypatch.setattr(agreement, "stand_in", lambda *_: {})
    with pytest.raises(Exception) as caught:
        told("stages", one_rank, lambda _: None)
    assert not isinstance(caught.value, InputsError)


def test_a_lazy_negation_has_the_digest_of_its_values() -> None:
    x = torch.randn(4, 3, dtype=torch.complex128)
    assert x.conj().imag.is_neg()
    assert digest([x.conj().imag, x.conj()]) == digest([-x.imag, x.conj().resolve_conj()])


@pytest.mark.parametrize("micro", [1, 4])
def test_inputs_that_require_a_gradient_are_refused_by_steps_alone(micro: int) -> None:
    """The step would write to `.grad` of what made them, on the ranks with the first stage, a part of it each."""
    model = nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 2)).double()
    x, fix = torch.randn(4, 3, dtype=torch.float64), {"micro": micro}
    options = {"world": 1, "batch": 4, "precision": "fp64", "fix": fix, "loss": lambda out: out.square().mean()}
    par = autoptd.parallelize(model, inputs={"input": x[:3]}, **options)
    made_by = nn.Linear(3, 3).double()
    for given in (x.clone().requires_grad_(), made_by(x)):
        with pytest.raises(InputsError, match=r"require a gradient(?s:.)*input.detach\(\)"):
            par.train_step({"input": given})
        par.eval_step({"input": given})
        par.predict([{"input": given}], {"sum": lambda out, batch: out.sum(-1)})
        par.train_step({"input": given.detach()})
    assert made_by.weight.grad is None
