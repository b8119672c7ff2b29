"""Bad input is answered with one error that names what, where and the fix, before anything is written or started."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import autoptd
import autoptd.cli.main as cli
import autoptd.cost_models.cluster as cluster_module
from autoptd.cost_models.memory import MOST_MEASURED
from autoptd.errors import (
    AutoptdError,
    ClusterError,
    DoesNotFit,
    InputsError,
    ModelError,
    PlanError,
    PlanFileError,
    TraceError,
    UnsupportedOp,
)
from autoptd.models import load_model
from autoptd.models.nanogpt import GPTSizes, NanoGPT
from autoptd.plans.model import Plan
from autoptd.search.constraints.options import read_constraints
from autoptd.search.constraints.without_effect import idle_notes
from tests.runtime.optimizers.whole_optimizers import Coupled, Early, Noisy

EIGHT: dict[str, Any] = {"world": 8, "cluster": "dgx-h100", "batch": 16}
X = {"x": torch.empty(4, 8)}


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()


class Vector(Scalar):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Router(Scalar):
    def forward(self, x: Tensor) -> Tensor:
        chosen = (x[:, 0] > 0).nonzero()
        return self.layer(x)[chosen + 1].sum()


class Branch(Scalar):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if y.sum() > 0:
            y = -y
        return y.sum()


class Number(Scalar):
    def forward(self, x: Tensor) -> Tensor:
        count = int(x.sum().item())
        return self.layer(x)[:count].sum()


class Factor(Scalar):
    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) / float(x.max())).sum()


class Scaled(Scalar):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum() * x.sum().item()


class Same(Scalar):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum() if torch.equal(x, x.abs()) else self.layer(-x).sum()


class Loop(Scalar):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        while y.norm() > 1:
            y = y / 2
        return y.sum()


class Rows(Scalar):
    def __init__(self, rows: nn.Module) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(self.rows(ids)).square().mean()


class Recurrent(Scalar):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.layer(x))[0].square().mean()


class Holder(nn.Module):
    """Puts a module two levels down, so that its path has to be found."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def gpt(**sizes: int) -> NanoGPT:
    with torch.device("meta"):
        return NanoGPT(GPTSizes(**{"vocab": 64, "max_seq": 16, "width": 24, "layers": 2, "heads": 12} | sizes))


@cache
def traced() -> autoptd.TracedModel:
    """Trace for refusals that do not depend on the model."""
    return autoptd.trace(gpt())


def refusal(kind: type[AutoptdError], model: Any, **constraints: Any) -> AutoptdError:
    """Return the error that `plan` raises; it must be complete, short, and without a chained exception."""
    with pytest.raises(AutoptdError) as caught:
        autoptd.plan(model, **constraints)
    complete(caught.value)
    assert type(caught.value) is kind
    return caught.value


def complete(error: AutoptdError) -> None:
    assert error.what
    assert error.fix
    assert len(error.what) < 300
    assert all(len(line) < 400 for line in str(error).splitlines())
    assert "\n" not in error.what


def line_of(kind: type, text: str) -> str:
    """Return `file.py:41`, the line that holds `text` in a class of this file."""
    import inspect

    lines, start = inspect.getsourcelines(kind)
    return f"{Path(__file__).name}:{start + next(i for i, line in enumerate(lines) if text in line)}"


# --- the model and its inputs -------------------------------------------------------------------------------------


def test_no_example_inputs_and_no_way_to_make_them():
    error = refusal(InputsError, Scalar(), **EIGHT)
    assert error.what == "the inputs of Scalar are not known"
    assert "inputs={" in error.fix
    assert "example_inputs(batch, seq)" in error.fix


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ([torch.empty(4, 8)], "inputs is of type list"),
        (torch.empty(4, 8), "inputs is of type Tensor"),
        ({}, "no example inputs"),
        ({"x": None}, "input 'x' is NoneType"),
        ({"x": torch.tensor(1.0)}, "no input has a dim that counts samples"),
        ({"x": torch.eye(8).to_sparse()}, "input 'x' has the layout torch.sparse_coo"),
    ],
)
def test_inputs_that_are_none(inputs: Any, said: str):
    assert said in refusal(InputsError, Scalar(), **EIGHT, inputs=inputs).what


@pytest.mark.parametrize(
    ("inputs", "said", "fix"),
    [
        ({"y": X["x"]}, "unexpected keyword argument 'y'", "name the inputs as forward does: Scalar.forward(x"),
        ({"x": torch.empty(4, 9)}, "reduction dim", "check that model(**inputs) runs"),
    ],
)
def test_inputs_that_the_model_refuses(inputs: Any, said: str, fix: str):
    error = refusal(TraceError, Scalar(), **EIGHT, inputs=inputs)
    assert said in error.what
    assert error.fix.startswith(fix)
    assert error.where


def test_no_loss():
    error = refusal(InputsError, Vector(), **EIGHT, inputs=X)
    assert "holds no scalar loss" in error.what
    assert "loss=" in error.fix
    assert "is of type str" in refusal(InputsError, Vector(), **EIGHT, inputs=X, loss="mse").what
    assert (
        "loss returned a tensor of 2 dims"
        in refusal(InputsError, Vector(), **EIGHT, inputs=X, loss=lambda out: out).what
    )


@pytest.mark.parametrize(
    ("loss", "targets", "fix"),
    [
        (
            lambda out, batch: cross_entropy(out, batch["targets"]),
            torch.zeros(4, dtype=torch.int64),
            "check that it runs as loss(outputs, targets), where targets is the tensor that was given as targets=",
        ),
        (
            lambda out, y: cross_entropy(out, y["labels"]),
            {"label": torch.zeros(4, dtype=torch.int64)},
            "check that it runs as loss(outputs, targets), where targets is a mapping with 'label'; "
            "inputs that it reads too are given as further targets, under other names",
        ),
        (
            lambda out, *, label: cross_entropy(out.flatten(), label),
            {"label": torch.zeros(4, dtype=torch.int64)},
            "check that it runs as loss(outputs, label=…)",
        ),
        (
            lambda out, batch: out.sum() * batch["labels"],
            None,
            "check that it runs as loss(outputs, batch), where batch is a mapping with 'input'",
        ),
    ],
)
def test_errors_of_a_loss_are_not_those_of_the_model(loss: Any, targets: Any, fix: str):
    with pytest.raises(TraceError, match="the loss cannot be traced: ") as error:
        autoptd.plan(nn.Linear(8, 3), world=1, inputs={"input": torch.ones(4, 8)}, loss=loss, targets=targets)
    assert error.value.fix == fix
    assert error.value.where.startswith("loss (test_bad_input.py:")


def test_precisions_by_the_names_of_torch():
    for given, ours in ((torch.bfloat16, "bf16"), ("float16", "fp16"), ("float32", "fp32")):
        with pytest.raises(PlanError, match="unknown precision") as error:
            autoptd.plan(nn.Linear(8, 3), world=1, inputs={"input": torch.ones(4, 8)}, precision=given)
        assert error.value.fix.startswith(f"did you mean {ours!r}?")


def test_not_a_module_or_nothing_to_train():
    assert "the model is list" in refusal(InputsError, ["gpt2"], **EIGHT).what
    assert "there is no model 'gpt-two'" in refusal(ModelError, "gpt-two", **EIGHT).what
    assert "no trainable parameter" in refusal(InputsError, Scalar().requires_grad_(False), **EIGHT, inputs=X).what


@pytest.mark.parametrize(
    ("model", "path", "kind", "text"),
    [
        (Holder(Router()), "body.1", Router, ".nonzero()"),
        (Router(), "", Router, ".nonzero()"),
        (Holder(Branch()), "body.1", Branch, "if y.sum() > 0"),
        (Holder(Loop()), "body.1", Loop, "while y.norm() > 1"),
        (Holder(Number()), "body.1", Number, ".item()"),
        (Holder(Factor()), "body.1", Factor, "float(x.max())"),
        (Holder(Scaled()), "body.1", Scaled, ".item()"),
        (Holder(Same()), "body.1", Same, "torch.equal(x, x.abs())"),
    ],
    ids=["nonzero", "nonzero at the root", "branch", "loop", "size by item", "float", "factor by item", "equal"],
)
def test_shapes_that_depend_on_data(
    model: nn.Module, path: str, kind: type, text: str, capfd: pytest.CaptureFixture[str]
):
    error = refusal(UnsupportedOp, model, **EIGHT, inputs=X)
    assert capfd.readouterr() == ("", ""), "torch shows its graph, or logs"
    said = "a branch or a loop" if kind in (Branch, Loop) else "nonzero" if kind is Router else "a number is read"
    assert error.what.startswith(said) or (kind is Router and said in error.what)
    assert "data" in error.what
    assert error.where.startswith(path)
    assert line_of(kind, text) in error.where
    assert text in error.where
    assert "torch.where" in error.fix


class Queue(nn.Linear):
    """A layer with a place in a queue of earlier features, as MoCo has it."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, : int(self.place) + 4].mean()


def test_a_number_read_from_a_buffer():
    error = refusal(UnsupportedOp, Queue(), **EIGHT, inputs=X)
    assert error.what.startswith("a number is read from the buffer place")
    assert line_of(Queue, "int(self.place)") in error.where
    assert "between steps" in error.fix and "other samples of the batch" in error.fix


@pytest.mark.parametrize("rows", [nn.Embedding(16, 8, sparse=True), nn.EmbeddingBag(16, 8, sparse=True)])
def test_sparse_gradients(rows: nn.Module):
    ids = {"ids": torch.zeros(4, 6, dtype=torch.int64)}
    error = refusal(UnsupportedOp, Rows(rows), **EIGHT, inputs=ids)
    assert "with sparse=True gives its weight a sparse gradient" in error.what
    assert error.where.startswith("rows (")
    assert "remove sparse=True" in error.fix


class SparseProduct(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        places = torch.tensor([[0, 1], [1, 2]])
        change = torch.sparse_coo_tensor(places, self.bias[:2], self.weight.shape)
        return nn.functional.linear(x, self.weight * change.to_dense()).mean()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_tensors():
    error = refusal(UnsupportedOp, SparseProduct(8, 8), **EIGHT, inputs={"x": torch.ones(4, 8)})
    assert "makes a tensor of the layout torch.sparse_coo" in error.what
    assert "torch.sparse_coo_tensor(places" in error.where
    assert "index_put" in error.fix


def test_modules_that_torch_has_compiled():
    inner = torch.jit.script(nn.Linear(8, 8))
    error = refusal(TraceError, Holder(inner), **EIGHT, inputs=X)
    assert error.what.startswith("body.1 was compiled by torch.jit.script")
    root = torch.jit.trace(Scalar(), X["x"])
    assert refusal(TraceError, root, **EIGHT, inputs=X).what.startswith("the model was compiled by torch.jit")


class Several(Scalar):
    """A dictionary of losses, as detectors return."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.layer(x)
        return {"kind": h.square().mean(), "box": h.abs().mean()}


def test_several_losses():
    error = refusal(InputsError, Several(), **EIGHT, inputs=X)
    assert error.what == "the model returns several losses, dict with 'kind', 'box'"
    assert "loss=lambda losses: sum(losses.values())" in error.fix
    error = refusal(InputsError, Several(), **EIGHT, inputs=X, loss=lambda losses: list(losses.values()))
    assert error.fix == "return their sum: sum(losses)"
    autoptd.plan(Several(), **EIGHT, inputs=X, loss=lambda losses: sum(losses.values()))


class OwnGru(nn.GRU):
    """A GRU that calls torch's function itself."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        first = x.new_zeros(self.num_layers, x.size(0), self.hidden_size)
        weights = [getattr(self, name) for layer in self._all_weights for name in layer]
        return torch.gru(x, first, weights, self.bias, 2, 0.5, True, False, True)


def test_dropout_inside_a_recurrent_function():
    model, inputs = Recurrent(OwnGru(8, 8, 2)), {"x": torch.empty(4, 6, 8)}
    error = refusal(UnsupportedOp, model, **EIGHT, inputs=inputs, precision="fp32")
    assert "draws random numbers" in error.what
    assert "use nn.LSTM, nn.GRU or nn.RNN" in error.fix


def test_sequences_that_are_none_or_too_long():
    assert refusal(InputsError, gpt(), **EIGHT, seq=64).fix == "use seq=16 or less"
    for seq in (0, "5", True, 2.0):
        assert refusal(InputsError, gpt(), **EIGHT, seq=seq).where == "seq"


def test_a_parameter_without_gradient_is_allowed_and_reported():
    class Idle(Scalar):
        def __init__(self) -> None:
            super().__init__()
            self.idle = nn.Linear(4, 4)

    plan = autoptd.plan(Idle(), **EIGHT, inputs=X)
    assert "parameters that do not reach the loss are not trained: idle.bias, idle.weight" in plan.notes
    assert plan.splits.parameters["idle.weight"] == "B"


# --- what does not divide -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("constraints", "what", "where", "fix"),
    [
        ({"fix": {"dp": 3}}, "world 8 is not divisible by dp 3", "fix['dp']", "use dp 2 or 4"),
        ({"world": 32, "fix": {"tp": 3}}, "world 32 is not divisible by tp 3", "fix['tp']", "use tp 2 or 4"),
        ({"world": 6, "fix": {"tp": 4}}, "world 6 is not divisible by tp 4", "fix['tp']", "use tp 3 or 6"),
        (
            {"fix": {"tp": 2, "dp": 8}},
            "world 8 is not divisible by dp 8 x tp 2 = 16",
            "fix",
            "use a world of 16, or leave one of them out",
        ),
        ({"fix": {"tp": 2, "dp": 2, "pp": 4}}, "dp 2 x tp 2 x pp 4 is 16, not the world of 8", "fix", "leave one"),
        (
            {"world": 64, "batch": 64, "fix": {"pp": 64}},
            "pp 64 is more than the 8 segments",
            "fix['pp']",
            "use pp <= 8",
        ),
        ({"batch": 4, "fix": {"dp": 8}}, "batch 4 is smaller than dp 8", "batch", "use a batch of 8"),
        ({"fix": {"dp": 8, "micro": 4}}, "batch 16 is smaller than dp 8 x micro 4 = 32", "batch", "use a batch of 32"),
        (
            {"batch": 34, "fix": {"dp": 8, "micro": 4}},
            "batch 34 is not divisible by dp 8 x micro 4 = 32",
            "batch",
            "use a batch of 32 or 64",
        ),
        (
            {"world": 8192, "batch": 1, "fix": {"max_tp": 8}},
            "batch 1 is smaller than dp x micro of any mesh",
            "dp x micro may be",
            "128",
        ),
    ],
)
def test_what_does_not_divide(constraints: dict[str, Any], what: str, where: str, fix: str):
    error = refusal(PlanError, traced(), **EIGHT | constraints)
    assert what in error.what
    assert where in error.where
    assert fix in error.fix


@pytest.mark.fault("heads that do not divide")
def test_heads_that_do_not_divide_by_tp(capsys: pytest.CaptureFixture[str]):
    error = refusal(PlanError, gpt(), **EIGHT, fix={"tp": 8})
    assert error.what == "12 attention heads do not divide by tp 8"
    assert "blocks.0.attention (nanogpt.py:" in error.where
    assert error.fix == "use tp 1, 2, 4"
    words = ["plan", "gpt2", "--world", "8", "--seq", "64", "--fix", "tp=8"]
    code, out, err = run_cli(capsys, *words)
    assert (code, out) == (2, "")
    assert "autoptd: 12 attention heads do not divide by tp 8\n  where  transformer.h.0.attn" in err


# --- unknown names ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fix", "what", "way_out"),
    [
        ({"tpp": 2}, "'tpp' cannot be fixed", "did you mean 'tp'"),
        ({"tensor_parallel": 2}, "'tensor_parallel' cannot be fixed", "did you mean 'tp'? known"),
        ({"pipeline-model-parallel-size": 2}, "cannot be fixed", "did you mean 'pp'? known"),
        ({"data_parallel": 2}, "'data_parallel' cannot be fixed", "did you mean 'dp'? known"),
        ({"microbatch_size": 2}, "'microbatch_size' cannot be fixed", "did you mean 'micro'? known"),
        ({"gradient_checkpointing": True}, "cannot be fixed", "did you mean 'recompute'? known"),
        ({"dp": 1, "cp": 1, "zero": 3}, "zero 3 can have no effect: it acts along dp × cp, which is 1", "out zero"),
        ({"tp": 4, "pp": 2, "zero": 2}, "zero 2 can have no effect", "leave out zero"),
        ({"dp": 1, "cp": 1, "zero": 3, "shards": 2}, "zero 3 can have no effect", "leave out zero, shards"),
        ({"zero": 0, "shards": 2}, "shards 2 with zero 0", "or leave shards out"),
        ({3: 2}, "3 cannot be fixed", "known: bucket_bytes, context, cp, cut_solver, cuts, dispatch, dp"),
        ({"tp": "2"}, "tp is '2'", "a whole number of at least 1"),
        ({"tp": True}, "tp is True", "a whole number of at least 1"),
        ({"micro": 0}, "micro is 0", "a whole number of at least 1"),
        ("tp=2", "fix is 'tp=2', not a mapping", "fix={'tp': 8}"),
        ([("tp", 2)], "fix is [('tp', 2)], not a mapping", "fix={'tp': 8}"),
        ({"zero": 4}, "zero 4 is not possible", "possible: 0, 1, 2, 3"),
        ({"zero": True}, "zero True is not possible", "possible: 0, 1, 2, 3"),
        ({"recompute": "some"}, "recompute 'some' is not possible", "'auto', 'none', 'selective', 'ops', 'full'"),
        ({"recompute": ["full"]}, "recompute ['full'] is not possible", "'none', 'selective'"),
        ({"cp": 0}, "cp is 0", "a whole number of at least 1"),
        ({"cp": 3}, "world 8 is not divisible by cp 3", "use cp 2 or 4"),
        ({"schedule": "gpipes"}, "schedule 'gpipes' is not possible", "'1f1b', 'gpipe'"),
        ({"schedule": "interleaved", "virtual": 1}, "schedule 'interleaved' with virtual 1", "several chunks per"),
        ({"virtual": 2, "schedule": "1f1b"}, "schedule '1f1b' with virtual 2", "several chunks per rank"),
        ({"virtual": 2.0}, "virtual is 2.0", "a whole number of at least 1"),
        ({"shards": -1}, "shards is -1", "a whole number of at least 0"),
        ({"overlap": "dp"}, "overlap is 'dp'", "('dp', 'ep', 'p2p', 'tp')"),
        ({"overlap": ["dp", "pp"]}, "overlap is ['dp', 'pp']", "('dp', 'ep', 'p2p', 'tp')"),
        ({"kernels": "fast"}, "kernels 'fast' is not possible", "possible: 'eager', 'compiled'"),
        (
            {"kernels": "fused"},
            "kernels 'fused' can only be predicted",
            "give assume={'kernels': 'fused'} to autoptd.plan",
        ),
        ({"attention": "cudnn"}, "attention 'cudnn' can only be predicted", "give assume={'attention': 'cudnn'}"),
        ({"gradients": "both"}, "gradients 'both' can only be predicted", "give assume={'gradients': 'both'}"),
        (
            {"overlap": ["dp", "tp"]},
            "overlap ['dp', 'tp'] can only be predicted",
            "give assume={'overlap': ['dp', 'tp']}",
        ),
        ({"overlap": ()}, "overlap () can only be predicted", "give assume={'overlap': ()}"),
        (
            {"overlap": ["p2p", "tp"], "sequence_parallel": False},
            "without sequence parallelism tp has sums, which nothing overlaps",
            "leave tp out of overlap, or sequence_parallel out",
        ),
        (
            {"overlap": ["p2p", "tp"], "recompute": "ops"},
            "recompute 'ops' keeps some products of a gathered tensor and not others",
            "leave tp out of overlap, or choose another policy",
        ),
        ({"gradients": "fp32"}, "gradients 'fp32' is not possible", "'main', 'compute'"),
        ({"stages": 2}, "stages 2 is not possible", "'balanced', 'even'"),
        ({"sends": True}, "sends True is not possible", "'whole', 'slices'"),
        ({"memory": "none"}, "memory 'none' is not possible", "'check', 'ignore'"),
        ({"sequence_parallel": 1}, "sequence_parallel is 1", "True or False"),
        ({"headroom": 1}, "headroom is 1", "from 0 to below 1"),
        ({"headroom": "10%"}, "headroom is '10%'", "0.1 is a tenth"),
        ({"headroom": float("nan")}, "headroom is nan", "from 0 to below 1"),
        ({"max_tp": 0}, "max_tp is 0", "a whole number of at least 1"),
        ({"max_tp": 2, "tp": 4}, "tp 4 is more than max_tp 2", "leave one of them out"),
        ({"cuts": 3}, "cuts is 3", "['model.layers.8', 'model.layers.20']"),
        ({"cuts": ["blocks.2"]}, "no module is called 'blocks.2'", "did you mean 'blocks.1'"),
        ({"cuts": ["blocks.0.up"]}, "it begins inside 'blocks.0.{norm_2,up,down}'", "at 'blocks.0.norm_2'"),
        ({"cuts": ["tokens"]}, "the first stage always begins with 'tokens'", "leave it out"),
        ({"cuts": ["blocks.1", "blocks.0"]}, "'blocks.0' comes before 'blocks.1'", "order: 'blocks.0', 'blocks.1'"),
        ({"cuts": ["blocks.1", "blocks.1.norm_1"]}, "begin the same stage", "leave one of them out"),
        ({"cuts": ["blocks.1"], "pp": 4}, "make 2 stages of the model, but pp × virtual can only be 4", "one module"),
        ({"cuts": ["blocks.1"], "stages": "even"}, "cannot be even and cut by hand", "leave cuts or stages out"),
        (
            {"kernels": "compiled", "schedule": "zero-bubble", "pp": 2},
            "splits backward passes into B and W, which compiled kernels cannot do",
            "leave out kernels",
        ),
        ({"cuts": ["blocks.0.norm_2"], "whole": ["blocks.0"]}, "cuts 'blocks.0', which must stay", "cut elsewhere"),
        ({"whole": [""]}, "whole is ['']", "patterns of modules"),
        ({"whole": ["*.atention"]}, "no module is called '*.atention'", "did you mean 'blocks.*.attention'"),
        ({"whole": ["*"], "pp": 8}, "8 stages are more than the 5 pieces", "keep less whole"),
        ({"whole": ["blocks"], "stages": "even", "pp": 2}, "cut a module that must stay whole", "keep less whole"),
        ({"whole": ["blocks"], "splits": {"*.up.weight": "S0"}}, "cannot be split as S0 and stay", "leave one of"),
        ({"splits": {"*.up.weight": "S0"}, "max_tp": 1}, "cannot be placed as S0 on tp 1", "possible: B"),
        ({"stages": "even", "pp": 8}, "2 blocks cannot be shared evenly by 8 stages", "at most 2 stages"),
        ({"splits": ["S0"]}, "splits is ['S0']", "'*.q_proj.weight': 'S0'"),
        ({"splits": {"*.qkv.weight": "T0"}}, "'T0' is not a placement", "S<dim>"),
        ({"splits": {"*.qkv.weight": 3}}, "'3' is not a placement", "S<dim>"),
        ({"splits": {"*.qvk.weight": "S0"}}, "no parameter is called '*.qvk.weight'", "qkv.weight"),
        ({"tp": 2, "splits": {"*.qkv.weight": "S5"}}, "of shape [72, 24] cannot be placed as S5", "S0, S0/3, S1"),
    ],
    ids=str,
)
def test_what_cannot_be_fixed(fix: Any, what: str, way_out: str):
    error = refusal(PlanError, traced(), **EIGHT, fix=fix)
    assert what in error.what
    assert way_out in error.fix
    assert error.where.startswith("fix")


@pytest.mark.parametrize(
    ("fix", "assume", "what", "fix_says"),
    [
        ({}, {"tp": 2}, "'tp' cannot be assumed", "give it in fix"),
        ({}, {"kernel": "fused"}, "'kernel' cannot be assumed", "did you mean 'kernels'"),
        ({}, {"kernels": "fast"}, "kernels 'fast' is not possible", "'eager', 'fused', 'compiled'"),
        ({}, {"attention": "ring"}, "attention 'ring' is not possible", "'torch', 'flash', 'triton', 'cudnn'"),
        ({}, {"overlap": ["dp", "pp"]}, "overlap is ['dp', 'pp']", "('dp', 'ep', 'p2p', 'tp')"),
        ({}, "kernels", "assume is 'kernels', not a mapping", "assume={'kernels': 'fused'}"),
        ({"kernels": "eager"}, {"kernels": "fused"}, "'kernels' is fixed and assumed", "leave one out"),
    ],
    ids=str,
)
def test_what_cannot_be_assumed(fix: dict[str, Any], assume: Any, what: str, fix_says: str):
    with pytest.raises(PlanError) as told:
        read_constraints(fix, assume=assume)
    assert what in told.value.what and fix_says in told.value.fix and told.value.where.startswith("assume")


@pytest.mark.parametrize(
    ("world", "fix", "note"),
    [
        (8, {"max_tp": 1, "sends": "slices"}, "sends slices can have no effect: it acts along tp, which is 1"),
        (8, {"pp": 1, "sends": "slices"}, "sends slices can have no effect: it acts along pp, which is 1"),
        (8, {"pp": 1, "virtual": 2}, "virtual 2 can have no effect: it acts along pp, which is 1"),
        (8, {"dp": 1, "cp": 1, "zero": 1}, "zero 1 can have no effect: it acts along dp × cp, which is 1"),
        (8, {"pp": 1, "schedule": "gpipe"}, "schedule gpipe can have no effect: it acts along pp, which is 1"),
        (1, {"zero": 3}, "zero 3 can have no effect: it acts along dp × cp, which is 1"),
        (8, {"dp": 2, "zero": 3, "schedule": "gpipe"}, ""),
        (8, {"dp": 1, "cp": 2, "zero": 3}, ""),
        (8, {"tp": 1, "sequence_parallel": False, "sends": "whole"}, ""),
    ],
    ids=str,
)
def test_constraints_without_effect_that_do_no_harm(world: int, fix: dict[str, Any], note: str):
    constraints = read_constraints(fix)
    assert idle_notes(constraints, world) == ([note] if note else [])
    if fix.get("cp", 1) == 1:
        plan = autoptd.plan(traced(), **EIGHT | {"world": world}, fix=fix)
        assert [n for n in plan.notes if "no effect" in n] == ([note] if note else [])


def test_an_axis_that_is_searched_may_have_an_effect():
    assert idle_notes(read_constraints({"dp": 1, "zero": 3}), 8) == []
    with pytest.raises(PlanError, match="zero 3 can have no effect"):
        idle_notes(read_constraints({"dp": 1, "cp": 1, "zero": 3}), 8)


@pytest.mark.parametrize(
    ("constraints", "what", "way_out"),
    [
        ({"precision": "bfloat16"}, "unknown precision 'bfloat16'", "did you mean 'bf16'"),
        ({"precision": torch.bfloat16}, "unknown precision torch.bfloat16", "known: bf16, fp16, fp32, fp64"),
        ({"optimizer": "adam"}, "unknown optimizer 'adam'", "did you mean 'adamw'"),
        ({"optimizer": None}, "unknown optimizer None", "'adamw', 'sgd'"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)])}, "is a SGD that already holds parameters", "a callable"),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS cannot step on a trial of two parameters", "no closure"),
        ({"optimizer": Coupled}, "Coupled does not update each parameter by itself", "clip_norm="),
        ({"optimizer": Early}, "Early reads the values of parameters when it is constructed", "in the first step"),
        ({"optimizer": Noisy}, "Noisy does not update each parameter by itself", "clip_norm="),
        ({"optimizer": lambda: None}, "cannot construct the optimizer", "optimizer="),
        ({"clip_norm": -1}, "clip_norm is -1", "positive"),
        ({"clip_norm": "1"}, "clip_norm is '1'", "positive"),
        ({"clip_norm": float("nan")}, "clip_norm is nan", "positive"),
        ({"world": 0}, "world is 0", "at least 1"),
        ({"world": "8"}, "world is '8'", "at least 1"),
        ({"batch": 0}, "batch is 0", "at least 1"),
        ({"batch": 16.0}, "batch is 16.0", "at least 1"),
        ({"time_limit_s": 0}, "time_limit_s is 0", "positive"),
    ],
)
def test_wrong_keywords(constraints: dict[str, Any], what: str, way_out: str):
    error = refusal(PlanError, gpt(), **EIGHT | constraints)
    assert what in error.what
    assert way_out in error.fix
    assert error.where


def test_an_unknown_cluster(capsys: pytest.CaptureFixture[str]):
    error = refusal(ClusterError, gpt(), **EIGHT | {"cluster": "dgx-h10"})
    assert "did you mean 'dgx-h100'" in str(error)
    assert refusal(ClusterError, gpt(), **EIGHT | {"cluster": 5}).what == "cluster is of type int"
    code, out, err = run_cli(capsys, "plan", "gpt2", "--world", "8", "--cluster", "dgx-h10")
    assert (code, out) == (2, "")
    assert "did you mean 'dgx-h100'" in err


def test_an_unknown_model(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ModelError, match="did you mean 'gpt3-175b'") as caught:
        load_model("gpt3-175")
    complete(caught.value)
    code, out, err = run_cli(capsys, "plan", "gpt3-175", "--world", "8")
    assert (code, out) == (2, "")
    assert "did you mean 'gpt3-175b'" in err


# --- what does not fit --------------------------------------------------------------------------------------------


def test_a_model_that_does_not_fit(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    shipped = (Path(cluster_module.__file__).parent / "clusters" / "dgx-h100.toml").read_text("utf-8")
    text = re.sub(r"(?m)^memory_bytes = .*$", "memory_bytes = 2_000_000_000", shipped, count=1)  # the device's
    text = re.sub(r"(?m)^context_bytes = .*$", "context_bytes = 1_000_000_000", text)
    (tmp_path / "small.toml").write_text(text, "utf-8")

    def code_with(gib: float, *more: str) -> int:
        (tmp_path / "small.toml").write_text(text.replace("= 2_000_000_000", f"= {round(gib * 2**30)}"), "utf-8")
        return run_cli(capsys, *words, "--seq", "16", *more)[0]

    words = ["plan", "tests.test_bad_input:large", "--world", "2", "--cluster", str(tmp_path / "small.toml")]
    code, out, err = run_cli(capsys, *words, "--seq", "16", "-o", str(tmp_path / "plan.json"))
    assert (code, out) == (1, "")
    assert [path.name for path in tmp_path.iterdir()] == ["small.toml"]
    # of 1.86 GiB 12.3 % are left for the error of the prediction, and the driver takes half of the whole
    assert "2 × H100-SXM5-80GB, which have 0.7 GiB each for training, so that it fits with 95% confidence" in err
    assert "stage 0 (tokens … " in err
    assert "GiB" in err.split("lacks")[1]
    # (8 * 12 * 1536^2 + (64 + 16) * 1536 + 17 * 1536) parameters of 2 + 4 bytes, and 12 on the host, are 1.4e9
    assert "GiB" in err and "a world of at least" not in err
    needed = float(err.split("devices of ")[1].split()[0])
    assert (code_with(needed - 0.1), code_with(needed)) == (1, 0), "of the device: context and communicators included"
    (tmp_path / "small.toml").write_text(text, "utf-8")
    code, out, err = run_cli(capsys, *words, "--seq", "16", "--fix", "offload=0", "-o", str(tmp_path / "plan.json"))
    # with 12 bytes more they are 4.1e9: six devices of 0.75e9
    assert "a world of at least 6: parameters, gradients and optimizer state alone are 3.8 GiB" in err
    needed = float(err.split("or devices of ")[1].split()[0])
    without = "--fix", "offload=0"
    assert (code_with(0.9 * needed, *without), code_with(needed, *without)) == (1, 0)
    assert f"{needed} GiB (g2, dgx-a100-40gb, p4d, dgx-a100-80gb and 11 more)" in err, "GPUs, the smallest first"


def test_missing_bytes_are_what_is_missing():
    """A device with exactly the memory that the error asks for is enough; one with a little less is not."""
    constraints: dict[str, Any] = {"world": 2, "batch": 2, "fix": {"pp": 2, "dp": 1, "micro": 1}}
    error = refusal(DoesNotFit, traced_large(), cluster=cluster(1e9), **constraints)
    assert "stage 0 (tokens … " in error.where
    assert "fixing less than dp, micro, pp" in error.fix
    lacking = [float(line.split("lacks ")[1].split()[0]) for line in error.where.splitlines() if "lacks" in line]
    needed = 1e9 + max(lacking) * 2**30
    autoptd.plan(traced_large(), cluster=cluster(needed + 2**24), **constraints)
    refusal(DoesNotFit, traced_large(), cluster=cluster(needed - 2**24), **constraints)


def test_recomputation_that_was_ruled_out_is_offered():
    constraints: dict[str, Any] = {"world": 1, "batch": 64}
    fix = {"micro": 64, "offload": 0}
    none, full = (
        autoptd.plan(traced_large(), cluster=cluster(8e10), **constraints, fix={**fix, "recompute": again})
        for again in ("none", "full")
    )
    between = cluster(MOST_MEASURED * (none.predicted.memory_bytes + full.predicted.memory_bytes) / 2)
    error = refusal(DoesNotFit, traced_large(), cluster=between, **constraints, fix={**fix, "recompute": "none"})
    assert "leave fix['recompute'] out" in error.fix
    plan = autoptd.plan(traced_large(), cluster=between, **constraints, fix=fix)
    assert plan.predicted.memory_bytes <= between.device.usable_bytes


def large() -> NanoGPT:
    """Return a model of 227 million parameters: 4.1 GB of state."""
    return gpt(width=1536, layers=8)


@cache
def traced_large() -> autoptd.TracedModel:
    return autoptd.trace(large(), seq=16)


def cluster(memory_bytes: float) -> autoptd.Cluster:
    data = autoptd.Cluster.load("dgx-h100").to_data()
    data["device"]["memory_bytes"] = int(memory_bytes)
    data["device"]["context_bytes"] = 0
    return autoptd.Cluster.from_data(data)


# --- plans --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_plan() -> Plan:
    return autoptd.plan(traced(), **EIGHT, fix={"tp": 2, "pp": 2, "cp": 1})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data | {"format": "recipe"}, "this is not an autoptd plan: its format is 'recipe'"),
        (lambda data: data | {"version": 2}, "the plan has version 2; this autoptd reads 1"),
        (lambda data: data | {"batch": "16"}, "batch: "),
        (lambda data: data | {"model": "gpt\nrm"}, "model: should be one line of printable text, got 'gpt\\nrm'"),
        (lambda data: data | {"wrld": 8}, "wrld: "),
        (lambda data: {key: data[key] for key in data if key != "mesh"}, "mesh: "),
        (lambda data: data | {"world": 16}, "mesh: dp 2 × tp 2 × pp 2 is 8 ranks, but world is 16"),
        (lambda data: data | {"stages": [{**data["stages"][0], "last": 1}, *data["stages"][1:]]}, "stages[1].first"),
    ],
)
def test_corrupt_and_foreign_plans(
    small_plan: Plan, change: Callable[[dict], Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(change(json.loads(small_plan.to_json()))))
    with pytest.raises(PlanFileError) as caught:
        autoptd.parallelize(gpt(), plan=path)
    complete(caught.value)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)
    code, out, err = run_cli(capsys, "explain", str(path))
    assert (code, out) == (2, "")
    assert said in err


@pytest.mark.parametrize(
    ("field", "key", "value", "said"),
    [
        ("strategies", "gelu", "S9 -> S9", "is not a legal strategy of gelu"),
        ("strategies", "gelu", None, "lacks 'gelu'"),
        ("splits", "blocks.0.up.weight", None, "lacks 'blocks.0.up.weight'"),
    ],
)
def test_plans_that_do_not_suit_their_graph(small_plan: Plan, field: str, key: str, value: str | None, said: str):
    data = json.loads(small_plan.to_json())
    tables = data[field].values() if field == "strategies" else [data[field]["parameters"]]
    table = next(table for table in tables if key in table)
    if value is None:
        del table[key]
    else:
        table[key] = value
    with pytest.raises(PlanFileError) as caught:
        autoptd.parallelize(traced(), plan=Plan.from_json(json.dumps(data)))
    complete(caught.value)
    assert said in caught.value.what
    assert caught.value.where.startswith(field)


def test_a_plan_of_another_model(small_plan: Plan):
    with pytest.raises(PlanFileError) as caught:
        autoptd.parallelize(gpt(width=48), plan=small_plan)
    complete(caught.value)
    assert small_plan.graph_hash in caught.value.what
    assert caught.value.what.count("sha256:") == 2
    assert "plan again" in caught.value.fix


def test_a_plan_for_another_world(small_plan: Plan):
    with pytest.raises(PlanError, match=r"world of 8 ranks .* but the world is 4") as caught:
        autoptd.parallelize(gpt(), plan=small_plan, world=4)
    complete(caught.value)
    with pytest.raises(PlanError, match="world was not given") as caught:
        autoptd.parallelize(gpt())
    complete(caught.value)


@pytest.mark.parametrize(
    ("constraints", "said"),
    [
        ({"fix": {"tp": 2}}, "fix would have no effect"),
        ({"exact": True, "time_limit_s": 5.0}, "exact and time_limit_s would have no"),
        ({"batch": 32}, "the plan is for batch 16, but the call asks for batch 32"),
        ({"seq": 8}, "the plan is for seq 16, but the call asks for seq 8"),
        ({"cluster": "p5"}, "the plan is for cluster dgx-h100, but the call asks for cluster p5"),
        (
            {"precision": "fp32", "optimizer": "sgd"},
            "precision bf16, optimizer adamw, but the call asks for precision fp32, opt",
        ),
    ],
    ids=str,
)
def test_a_plan_with_constraints_that_it_cannot_heed(small_plan: Plan, constraints: dict[str, Any], said: str):
    with pytest.raises(PlanError) as caught:
        autoptd.parallelize(gpt(), plan=small_plan, **constraints)
    complete(caught.value)
    assert said in caught.value.what
    assert all(name in caught.value.where and name in caught.value.fix for name in ("plan", *constraints))


def test_a_plan_with_what_it_says_itself(small_plan: Plan):
    nothing: dict[str, Any] = {"fix": {}, "exact": False, "time_limit_s": None}
    same: dict[str, Any] = {**EIGHT, "seq": 16, "precision": "bf16", "optimizer": "adamw"}
    assert autoptd.parallelize(gpt(), plan=Plan.from_json(small_plan.to_json()), **same, **nothing).plan == small_plan


def test_a_plan_of_a_cluster_that_has_changed(small_plan: Plan):
    changed = small_plan.cluster.model_copy(update={"source": "another"})
    with pytest.raises(PlanError, match="but the call asks for cluster dgx-h100 with other figures"):
        autoptd.parallelize(traced(), plan=small_plan, cluster=changed)


def test_a_plan_with_an_optimizer_that_a_file_cannot_hold():
    plan = autoptd.plan(traced(), **EIGHT, optimizer=torch.optim.Adam)
    assert plan.optimizer == "custom"
    with pytest.raises(PlanError, match="a custom optimizer") as caught:
        autoptd.parallelize(traced(), plan=plan)
    complete(caught.value)
    autoptd.parallelize(traced(), plan=plan, optimizer=torch.optim.Adam)
    with pytest.raises(PlanError, match="by itself"):
        autoptd.parallelize(traced(), plan=plan, optimizer=Coupled)


def test_torchrun_with_another_world_fails_before_any_process_group(
    small_plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Rank 0 is given a plan, and rank 3 is to search for one."""
    small_plan.save(tmp_path / "plan.json")
    unreachable = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "WORLD_SIZE": "4"}
    for name, value in unreachable.items():
        monkeypatch.setenv(name, value)

    def refuse(*_: object, **__: object) -> None:
        pytest.fail("a process group was started")

    monkeypatch.setattr(torch.distributed, "init_process_group", refuse)
    found = []
    for rank, options in (
        ("0", {"plan": tmp_path / "plan.json"}),
        ("3", {"world": 8, "batch": 16, "cluster": "local"}),
    ):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(PlanError) as caught:
            autoptd.parallelize(traced(), **options)  # type: ignore[arg-type]
        found.append(str(caught.value))
    for said in found:
        assert "4" in said and "8" in said
    assert "4 processes are running" in found[1]


def test_a_process_that_is_not_one_of_the_ranks(small_plan: Plan):
    parallel = autoptd.parallelize(traced(), plan=small_plan)
    with pytest.raises(AutoptdError, match="not one of the plan's 8 ranks") as caught:
        parallel.train_step({})
    complete(caught.value)
    assert "torchrun" in caught.value.fix
    with pytest.raises(PlanError, match="rank 8 is not in a world of 8"):
        parallel.stage_module(8)


# --- writing ------------------------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_written(small_plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    parallel = autoptd.parallelize(traced(), plan=small_plan)
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(PlanFileError) as caught:
            parallel.emit(place)
        complete(caught.value)
        assert str(tmp_path / "file") in str(caught.value)
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.raises(PlanFileError, match="does not exist"):
        small_plan.save(tmp_path / "no" / "plan.json")
    small_plan.save(tmp_path / "plan.json")
    words = ["emit", str(tmp_path / "plan.json"), "--model", "tests.test_bad_input:gpt", "-o", str(tmp_path / "file")]
    code, out, err = run_cli(capsys, *words)
    assert (code, out) == (2, "")
    assert "cannot write into" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "plan.json"]


# --- a step -------------------------------------------------------------------------------------------------------

IDS = torch.zeros(4, 16, dtype=torch.int64)


@pytest.fixture(scope="module")
def running() -> autoptd.Parallel:
    plan = {"world": 1, "cluster": "dgx-h100", "batch": 4, "seq": 16, "precision": "fp32", "fix": {"micro": 2}}
    return autoptd.parallelize(gpt(), **plan)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ([IDS], "a batch is a mapping"),
        ({"idx": IDS}, "lacks ['targets']"),
        ({"idx": IDS, "targets": IDS, "mask": IDS}, "has ['mask'] which the plan does not know"),
        ({"idx": IDS, "targets": 3}, "['targets'] must be tensors"),
        ({"idx": IDS, "targets": IDS[:3]}, "different numbers of samples"),
        ({"idx": IDS[:0], "targets": IDS[:0]}, "the batch is empty"),
        ({"idx": IDS[:2], "targets": IDS[:2]}, "2 samples is 1 microbatches of up to 2, but the plan runs 2"),
    ],
)
def test_wrong_batches(running: autoptd.Parallel, batch: Any, said: str):
    before = {name: value.clone() for name, value in running.state_dict().items()}
    with pytest.raises(InputsError) as caught:
        running.train_step(batch)
    assert said in caught.value.what
    complete(caught.value)
    assert all(torch.equal(before[name], value) for name, value in running.state_dict().items())


@pytest.mark.parametrize(
    ("keyword", "said"),
    [({"zero": 3}, "fix={'zero': 3}"), ({"bach": 8}, "did you mean 'batch'"), ({"presicion": "fp32"}, "precision")],
)
def test_keywords_that_there_are_not(keyword: dict[str, Any], said: str):
    with pytest.raises(InputsError, match=f"plan has no keyword '{next(iter(keyword))}'") as caught:
        autoptd.plan(Scalar(), inputs=X, **EIGHT, **keyword)
    assert said in caught.value.fix


VERIFIED = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("table", torch.arange(8.0))
    def forward(self, x):
        return (self.layer(x) * self.table).square().mean()
    def example_inputs(self, samples, seq):
        return {"x": torch.empty(samples, 8)}
"""


def test_a_module_with_a_table_of_its_own_is_verified_by_its_name(tmp_path: Path, monkeypatch, capsys):
    (tmp_path / "tabled.py").write_text(VERIFIED)
    monkeypatch.chdir(tmp_path)
    words = ("--world", "2", "--cluster", "local", "--batch", "4", "-o", "plan.json")
    assert run_cli(capsys, "plan", "tabled:Net", *words)[0] == 0
    code, out, err = run_cli(capsys, "verify", "plan.json", "--model", "tabled:Net")
    assert code == 0, out + err
    assert "certificate stored" in out


def run_cli(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = cli.main(list(words))
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return code, out, err
