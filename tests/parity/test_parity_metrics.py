"""Metrics of a model's outputs are those of one process, under every plan: each sample counts once."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd import evaluating
from autoptd.api import Parallel
from autoptd.compile import read
from autoptd.cost_models.cluster import Cluster
from autoptd.errors import AutoptdError, InputsError, RuntimeFault, UnsupportedOp
from autoptd.layout.mesh import Mesh
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import run_lockstep
from autoptd.runtime.evaluation import evaluator
from tests.parity.parity_check import MESHES, Variant, bulk, case, parallel, planned

WIDE = 16
SAMPLES, BATCH = 13, 5  # batches of 5, 4 and 4: not equal, and with dp 8 some ranks have no sample


def logits(out: Any) -> Tensor:
    return out.logits if hasattr(out, "logits") else out


def energy(out: Any, batch: Mapping[str, Tensor]) -> Tensor:
    each = logits(out).square().mean(-1)
    return each.sum(-1) if each.ndim > 1 else each


def best(out: Any, batch: Mapping[str, Tensor]) -> Tensor:
    found = logits(out).argmax(-1)
    return found[:, :2] if found.ndim > 1 else found


def right(out: Any, batch: Mapping[str, Tensor]) -> Tensor:
    found = logits(out).argmax(-1) == batch["labels"]
    return found.sum(-1) if found.ndim > 1 else found


METRICS = {"energy": energy, "best": best, "right": right}


def data(name: str) -> dict[str, Tensor]:
    """Return `SAMPLES` samples of a case, no two alike."""
    return {n: torch.cat([x, x.roll(1, -1)])[:SAMPLES] for n, x in case(name).batch.items()}


@cache
def alone(name: str) -> dict[str, Tensor]:
    given = data(name)
    with torch.no_grad():
        out = copy.deepcopy(case(name).model).eval()(**given)
    return {n: metric(out, given) for n, metric in METRICS.items()}


def shares(parallel: Parallel, name: str, batch: int = BATCH) -> list[dict[str, Tensor]]:
    given = data(name)
    return [{n: x[rows] for n, x in given.items()} for rows in parallel.eval_sampler(SAMPLES, batch)]


def evaluated(made: Parallel, name: str) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Return means and values of each rank, by batches of another size."""
    values = made.initial_values()
    made.layout  # noqa: B018  before the ranks are threads

    def body(c: Communicators) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        mine = copy.copy(made)
        mine.start(c, values)
        found = mine.predict(shares(mine, name), METRICS)
        return mine.evaluate(shares(mine, name, 4), METRICS), found

    return run_lockstep(made.layout.mesh, body)


def wrong(found: list[tuple[dict[str, Tensor], dict[str, Tensor]]], name: str) -> list[str]:
    expected, faults = alone(name), []
    for rank, (means, values) in enumerate(found):
        for metric, x in expected.items():
            if values[metric].dtype != x.dtype or values[metric].shape != x.shape:
                faults.append(f"rank {rank}: {metric} is {values[metric].dtype} {list(values[metric].shape)}")
            elif not torch.allclose(values[metric].double(), x.double(), rtol=1e-10, atol=0):
                faults.append(f"rank {rank}: {metric} is {values[metric].tolist()} instead of {x.tolist()}")
            if not torch.allclose(means[metric], x.double().mean(0), rtol=1e-10, atol=0):
                faults.append(f"rank {rank}: mean of {metric} is {means[metric]} instead of {x.double().mean(0)}")
    return faults


@pytest.mark.parametrize("name", ["gpt2", "vit"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_over_every_mesh(name: str, mesh: Mesh) -> None:
    zero = (1, 3, 0, 2)[MESHES.index(mesh) % 4] if mesh.dp > 1 else 1
    made = parallel(name, planned(name, mesh, Variant(bulk=True, micro=1, zero=zero)), "sgd")
    assert not wrong(evaluated(made, name), name)


OTHERS = [
    ("llama", Mesh(2, 2, 2), Variant(schedule="interleaved", virtual=2, micro=2)),
    ("llama", Mesh(1, 2, 2, cp=2), Variant(bulk=True, micro=2)),
    ("gpt2", Mesh(2, 1, 2, cp=2), Variant(micro=2, zero=3, context="ulysses")),
    ("gpt2", Mesh(2, 2, 2), Variant(micro=2, schedule="zero-bubble", zero=2)),
    ("gpt2", Mesh(2, 2, 2), Variant(bulk=True, micro=2, overlap=("dp", "p2p"), sends="slices")),
    ("bert", Mesh(4, 1, 2), Variant(micro=2, zero=3, recompute="full")),
    ("t5", Mesh(2, 2, 2), Variant(bulk=True, micro=2)),
    ("mixtral", Mesh(4, 1, 2, ep=2), Variant(micro=2, zero=3)),
    ("mixtral", Mesh(2, 2, 2, ep=2, etp=1), Variant(micro=2)),
    ("mixtral", Mesh(1, 2, 2, cp=2), Variant(micro=2)),
    ("deepseek", Mesh(2, 2, 2), Variant(micro=2)),
    ("gpt_oss", Mesh(2, 2, 2), Variant(micro=2)),
    ("gpt2_dropout", Mesh(2, 2, 2), Variant(micro=2)),
]


@pytest.mark.parametrize(("name", "mesh", "variant"), OTHERS, ids=[f"{n}-{m}" for n, m, _ in OTHERS])
def test_over_schedules_experts_and_cut_tokens(name: str, mesh: Mesh, variant: Variant) -> None:
    assert not wrong(evaluated(parallel(name, planned(name, mesh, variant), "sgd"), name), name)


def correct(out: Any, batch: Mapping[str, Tensor]) -> Tensor:
    return logits(out)[:, :-1].argmax(-1) == batch["labels"][:, 1:]


OVER_TOKENS = {
    "mean": lambda out, batch: logits(out).square().mean((1, 2)),
    "mean of predictions": lambda out, batch: correct(out, batch).double().mean(-1),
    "mean of counted tokens": lambda out, batch: (
        (correct(out, batch) * (batch["labels"][:, 1:] > 3)).sum(-1) / (batch["labels"][:, 1:] > 3).sum(-1).clamp(min=1)
    ),
    "variance": lambda out, batch: logits(out).mean(-1).var(-1),
    "largest": lambda out, batch: logits(out).amax((1, 2)),
}


@pytest.mark.parametrize(
    ("name", "mesh", "variant"),
    [
        ("gpt2", Mesh(2, 1, 1, cp=2), Variant(micro=2)),
        ("gpt2", Mesh(1, 2, 2, cp=2), Variant(micro=2, context="ulysses")),
        ("llama", Mesh(1, 1, 2, cp=4), Variant(micro=2)),
        ("mixtral", Mesh(1, 2, 2, cp=2), Variant(micro=2)),
    ],
    ids=lambda value: str(value) if isinstance(value, (str, Mesh)) else "",
)
def test_means_over_tokens_that_cp_cuts(
    name: str, mesh: Mesh, variant: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "METRICS", OVER_TOKENS)
    monkeypatch.setitem(globals(), "alone", alone.__wrapped__)
    assert not wrong(evaluated(parallel(name, planned(name, mesh, variant), "sgd"), name), name)


def test_a_norm_over_tokens_that_cp_cuts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = {"norm": lambda out, batch: logits(out).flatten(1).norm(dim=1)}
    monkeypatch.setitem(globals(), "METRICS", norm)
    with pytest.raises(RuntimeFault, match="mixes positions: it needs all tokens"):
        evaluated(parallel("gpt2", planned("gpt2", Mesh(2, 1, 1, cp=2), Variant(micro=2)), "sgd"), "gpt2")


SPOILT = {  # what is edited in the evaluator
    "every tp rank counts": (r"if comm\.tp\.rank != 0:", "if False:"),
    "no dp rank's place": (r"sum\(sizes\[: self\._comm\.dp\.rank\]\)", "0"),
    "padding of microbatches counts": (r"counted=own\)", "counted=None)"),
    "ended ranks count a sample": (r"own = 0 if batch is None else", "own = 1 if batch is None else"),
}


@pytest.mark.parametrize("fault", SPOILT)
def test_a_planted_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern, by = SPOILT[fault]
    text = Path(evaluator.__file__).read_text("utf-8")
    spoilt = re.sub(pattern, by, text)
    assert spoilt != text, "nothing was planted"
    module = ModuleType("spoilt")
    exec(compile(spoilt, "spoilt", "exec"), module.__dict__)
    monkeypatch.setattr(evaluating, "Evaluator", module.__dict__["Evaluator"])
    made = parallel("gpt2", planned("gpt2", Mesh(4, 2, 1), Variant(bulk=True, micro=1, zero=3)), "sgd")
    try:
        found = evaluated(made, "gpt2")
    except (AutoptdError, RuntimeError):
        return
    assert wrong(found, "gpt2")


def test_metrics_of_a_model_in_training_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    made = parallel("gpt2_dropout", planned("gpt2_dropout", Mesh(4, 2, 1), Variant(bulk=True, micro=1)), "sgd")
    traced = read.trace
    monkeypatch.setattr(read, "trace", lambda *args, evaluating, **options: traced(*args, **options))
    assert wrong(evaluated(made, "gpt2_dropout"), "gpt2_dropout")


def test_a_sample_that_is_evaluated_twice_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares of equal size, the last ones filled up with samples that another rank has too."""
    made = parallel("vit", planned("vit", Mesh(4, 2, 1), Variant(bulk=True, micro=1)), "sgd")
    assert not wrong(evaluated(made, "vit"), "vit")

    def padded(samples: int, batch: int, rank: int, ranks: int) -> list[list[int]]:
        order = [*range(samples), *range(-samples % ranks)]
        return [order[rank::ranks]]

    monkeypatch.setattr(evaluating, "EvaluationSampler", padded)
    assert wrong(evaluated(made, "vit"), "vit")


class Classifier(nn.Module):
    """Batch norm, a head, and a part whose result the loss does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.GELU()) for _ in range(3)))
        self.head, self.aside = nn.Linear(6, 4), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.layers(x)
        return {"logits": self.head(features), "aside": self.aside(features)}


X, Y = torch.randn(23, 6, generator=torch.Generator().manual_seed(1)).double(), torch.arange(23) % 4


def classifier(world: int = 1, model: nn.Module | None = None, **fix: Any) -> Parallel:
    torch.manual_seed(0)
    return autoptd.parallelize(
        (model or Classifier()).double(),
        world=world,
        inputs={"x": X[:3]},
        targets=Y[:3],
        loss=lambda out, targets: nn.functional.cross_entropy(out["logits"], targets),
        batch=8,
        precision="fp64",
        optimizer="sgd",
        cluster="dgx-h100",
        fix=fix,
    )


def given(rows: Any) -> dict[str, Tensor]:
    return {"x": X[rows], "targets": Y[rows]}


def test_running_statistics_after_steps_and_targets() -> None:
    """Metrics read what the last step left, buffers too, and the targets, which forward does not see."""
    made = classifier(4, dp=2, tp=2)
    values = made.initial_values()

    def body(c: Communicators) -> tuple[dict[str, Tensor], Tensor]:
        mine = copy.copy(made)
        mine.start(c, values)
        for step in range(3):
            mine.train_step(given(torch.arange(8).chunk(2)[mine.dp_rank] + step))
            metrics = {"right": lambda out, batch: out["logits"].argmax(-1) == batch["targets"]}
            metrics["far"] = lambda out, batch: out["logits"].norm(dim=-1)
            found = mine.evaluate([given(rows) for rows in mine.eval_sampler(len(X), 6)], metrics)
        plain = Classifier().double().eval()
        plain.load_state_dict(mine.state_dict())
        out = plain(X)["logits"]
        return found, torch.stack(((out.argmax(-1) == Y).double().mean(), out.norm(dim=-1).mean()))

    for found, expected in run_lockstep(made.layout.mesh, body):
        torch.testing.assert_close(torch.stack((found["right"], found["far"])), expected, rtol=1e-10, atol=0)
    assert len(made._programs._found) == 1  # lambdas made anew in each step are the same metrics


def test_modes_of_the_caller_do_not_matter() -> None:
    """Loops of others call model.eval() before an evaluation, and model.train() after it."""
    model = Classifier()
    made = classifier(model=model)
    made.train_step(given(slice(0, 8)))
    model.load_state_dict(made.state_dict())
    metrics = {"far": lambda out, batch: out["logits"].norm(dim=-1)}
    for plain in (model.eval(), model.train()):
        found = made.evaluate([given(slice(0, 23))], metrics)["far"]
        with torch.no_grad():
            assert abs(float(found - copy.deepcopy(plain).eval()(X)["logits"].norm(dim=-1).mean())) < 1e-12
    model.eval()
    made.evaluate([given(slice(0, 5))], metrics)
    made.predict([given(slice(0, 5))], {"new": lambda out, batch: out["logits"].argmax(-1)})
    with pytest.raises(InputsError, match="training of the model was True"):
        made.train_step(given(slice(0, 8)))


def test_a_changed_threshold_is_another_metric() -> None:
    par, level = classifier(), [0.0]
    above = {"above": lambda out, batch: (out["logits"] > level[0]).double().mean(-1)}
    assert float(par.evaluate([given(slice(None))], above)["above"]) > 0
    level[0] = 1e9
    assert float(par.evaluate([given(slice(None))], above)["above"]) == 0


def test_outputs_that_the_loss_does_not_read() -> None:
    par = classifier()
    plain = Classifier().double().eval()
    plain.load_state_dict(par.state_dict())
    found = par.predict([given(slice(None))], {"aside": lambda out, batch: out["aside"]})["aside"]
    torch.testing.assert_close(found, plain(X)["aside"], rtol=1e-10, atol=0)


@pytest.mark.parametrize(
    ("metric", "says"),
    [
        (lambda out, batch: out["logits"].mean(), "one number for all samples"),
        (lambda out, batch: float(out["logits"].shape[1]), "returned float"),
        (lambda out, batch: out["logits"] - out["logits"].mean(0), "samples"),
        (lambda out, batch: out["logits"].sum(-1).sort().values, "samples"),
        (lambda out, batch: out["logits"] @ out["logits"].T, "returned ["),
        (lambda out, batch: out["logits"].sum(-1) / batch["targets"].sum(), "combines several samples"),
        (lambda out, batch: out["logits"].T, "samples"),
        (lambda out, batch: out["logits"].flip(0), "samples"),
    ],
    ids=["one number", "no tensor", "centred", "sorted", "pairs", "a count", "turned", "in another order"],
)
def test_what_is_no_value_of_each_sample_is_refused(metric: Any, says: str) -> None:
    with pytest.raises(AutoptdError) as caught:
        classifier().evaluate([given(slice(None))], {"it": metric})
    assert isinstance(caught.value, (InputsError, UnsupportedOp)) and says in str(caught.value), caught.value
    assert "fix" in str(caught.value)


def test_norms_without_running_statistics_are_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.Linear(6, 4)).double()
    par = autoptd.parallelize(
        model, world=1, inputs={"input": X[:3]}, loss=lambda out: out.square().mean(), batch=8, precision="fp64"
    )
    with pytest.raises(UnsupportedOp, match="batch_norm sums over samples"):
        par.evaluate([{"input": X}], {"it": lambda out, batch: out.sum(-1)})


def test_no_samples_and_no_metrics_are_refused() -> None:
    par = classifier()
    with pytest.raises(InputsError, match="no sample"):
        par.evaluate([], {"it": lambda out, batch: out["logits"].sum(-1)})
    with pytest.raises(InputsError, match="no mapping of functions"):
        par.evaluate([given(slice(None))], {})


def test_whole_numbers_that_float64_does_not_have_are_refused() -> None:
    with pytest.raises(InputsError, match="2\\^53"):
        classifier().predict([given(slice(None))], {"id": lambda out, batch: batch["targets"] + 2**53 + 1})


def test_a_wrong_batch_of_one_rank_is_refused_on_all() -> None:
    made = classifier(2, dp=2)
    values = made.initial_values()

    def body(c: Communicators) -> str:
        mine = copy.copy(made)
        mine.start(c, values)
        batch = given(slice(3)) if mine.rank == 0 else {"x": X[:3].float(), "targets": Y[:3]}
        with pytest.raises(InputsError) as caught:
            mine.evaluate([batch], {"it": lambda out, batch: out["logits"].sum(-1)})
        return str(caught.value)

    first, second = run_lockstep(made.layout.mesh, body)
    assert first == second and "rank 1" in first and "float32" in first


class Apart(nn.Module):
    """Two outputs that the loss alone ties: their samples, their tokens, and sizes of inputs to those of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up = nn.Embedding(12, 6), nn.Linear(6, 6)
        self.double()

    def forward(self, pooled: Tensor, ids: Tensor, wanted: Tensor) -> dict[str, Tensor]:
        return {"found": self.up(self.table(ids)), "wanted": torch.sin(wanted), "pooled": pooled + 1}


def apart(out: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    off = (out["found"] - out["wanted"]).square().sum()
    return off + (out["found"].sum(1) * batch["pooled"]).sum() + out["pooled"].sum()


@pytest.mark.parametrize(
    "fix", [{"dp": 2, "micro": 2}, {"tp": 2, "zero": 1}, {"pp": 2}, {"cp": 2}, {"dp": 2, "cp": 2}], ids=str
)
def test_outputs_and_sizes_that_the_loss_alone_ties(fix: dict[str, Any]) -> None:
    random = torch.Generator().manual_seed(0)
    batch = {
        "pooled": torch.randn(4, 6, generator=random, dtype=torch.float64),
        "ids": torch.randint(12, (4, 8), generator=random),
        "wanted": torch.randn(4, 8, 6, generator=random, dtype=torch.float64),
    }
    metrics = {
        "found": lambda out, batch: out["found"].sum((1, 2)),
        "wanted": lambda out, batch: out["wanted"].sum((1, 2)),
        "pooled": lambda out, batch: out["pooled"],
    }
    torch.manual_seed(0)
    model, world = Apart(), fix.get("dp", 1) * fix.get("tp", 1) * fix.get("pp", 1) * fix.get("cp", 1)
    with torch.no_grad():
        out = model(**batch)
        expected = {name: metric(out, batch) for name, metric in metrics.items()}
    made = autoptd.parallelize(model, world=world, inputs=batch, loss=apart, batch=4, precision="fp64", fix=fix)
    values = made.initial_values()

    def body(c: Communicators) -> dict[str, Tensor]:
        mine = copy.copy(made)
        mine.start(c, values)
        return mine.predict([{n: x.tensor_split(mine.dp_size)[mine.dp_rank] for n, x in batch.items()}], metrics)

    for found in run_lockstep(made.layout.mesh, body):
        for name, x in expected.items():
            torch.testing.assert_close(found[name], x)


class Headed(nn.Module):
    """A head that the metrics do not read, on a body that they do."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
        self.double()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = torch.tanh(self.body(x))
        return {"x": x, "logits": self.head(x)}


@pytest.mark.parametrize("fix", [{"tp": 2}, {"dp": 2, "tp": 2, "zero": 3}], ids=str)
def test_parameters_that_metrics_do_not_read_may_be_split(fix: dict[str, Any]) -> None:
    torch.manual_seed(0)
    x, world = torch.randn(4, WIDE, dtype=torch.float64), fix.get("dp", 1) * fix["tp"]
    model, cluster = Headed(), bulk(Cluster.load("dgx-h100"))
    asked = {"loss": lambda out: out["logits"].square().mean(), "batch": 4, "precision": "fp64", "cluster": cluster}
    made = autoptd.parallelize(model, world=world, inputs={"x": x}, fix=fix, **asked)  # type: ignore[arg-type]
    assert made.plan.splits.parameters["head.weight"].startswith("S")
    values = made.initial_values()

    def body(c: Communicators) -> Tensor:
        mine = copy.copy(made)
        mine.start(c, values)
        share = {"x": x.tensor_split(mine.dp_size)[mine.dp_rank]}
        return mine.predict([share], {"x": lambda out, batch: out["x"]})["x"]

    for found in run_lockstep(made.layout.mesh, body):
        torch.testing.assert_close(found, model(x)["x"].detach())
