"""Models in any state: modes, dtypes, bare parameters, wrappers. As in one process, or one error beforehand."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

import autoptd
from autoptd.errors import AutoptdError, InputsError, TraceError
from autoptd.models.load import load_model
from autoptd.models.nanogpt import GPTSizes, NanoGPT
from autoptd.passes.trace.unwrap import unwrap
from autoptd.testing.parity import train_alone
from autoptd.verification.verdict import verify_plan
from tests.parity.front_check import CUBE, MESHES, SAMPLES, WIDTH, Plain, Scored, planned, random, wrong, x
from tests.parity.parity_models import randomised


def sources(made: autoptd.Parallel) -> str:
    return "".join(text for name, text in made.program.files.items() if name.endswith(".py"))


# ---- modes ----


class Pictures(nn.Module):
    """An encoder with batch norms and dropout, and a head with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5),
            nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8, affine=False), nn.ReLU(),
        )  # fmt: skip
        self.drop, self.head = nn.Dropout(0.0), nn.Linear(8, 5)
        for norm in (self.encoder[1], self.encoder[5]):
            norm.running_mean.normal_(generator=torch.Generator().manual_seed(3))
            norm.running_var.uniform_(0.5, 2, generator=torch.Generator().manual_seed(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.encoder(x).mean((2, 3))))


PICTURES = {"x": random(SAMPLES, 3, 8, 8)}
CLASSES = torch.randint(0, 5, (SAMPLES,), generator=torch.Generator().manual_seed(6))


@pytest.mark.parametrize(("mesh", "frozen"), [*((mesh, False) for mesh in MESHES), (CUBE, True)], ids=str)
def test_an_encoder_in_eval_mode(mesh: tuple[int, int, int], frozen: bool) -> None:
    model = randomised(Pictures())
    model.encoder.eval().requires_grad_(not frozen)
    assert wrong(model, PICTURES, nn.CrossEntropyLoss(), CLASSES, mesh) == []
    made = planned(model, PICTURES, nn.CrossEntropyLoss(), CLASSES, mesh)
    (note,) = [note for note in made.plan.notes if "eval" in note]
    assert note.startswith("passed in eval mode: encoder: no dropout there")
    assert "passed in eval mode: encoder" in made.plan.explain()
    assert model.drop.training and not model.encoder.training


def test_a_model_in_eval_mode_is_trained_so_and_says_so() -> None:
    model = randomised(Pictures())
    model.encoder[1], model.encoder[5] = nn.Identity(), nn.Identity()
    made = planned(model, PICTURES, nn.CrossEntropyLoss(), CLASSES)
    assert "dropout(" in sources(made) and not any("eval" in note for note in made.plan.notes)
    model.eval()
    assert wrong(model, PICTURES, nn.CrossEntropyLoss(), CLASSES) == []
    made = planned(model, PICTURES, nn.CrossEntropyLoss(), CLASSES)
    assert "dropout(" not in sources(made)
    assert any(note.startswith("the model was passed in eval mode: no dropout") for note in made.plan.notes)


def test_one_module_of_many_alike_in_eval_mode() -> None:
    model = randomised(NanoGPT(GPTSizes(vocab=40, max_seq=8, width=16, layers=4, heads=2, dropout=0.3)))
    for block in (model.blocks[1], model.blocks[3]):
        block.eval()
    model.drop.eval()
    ids = {name: torch.randint(0, 40, (2, 8)) for name in ("idx", "targets")}
    made = planned(model, ids, mesh=(1, 1, 1))
    assert any(note.startswith("passed in eval mode: drop, blocks.1, blocks.3:") for note in made.plan.notes)
    assert sources(made).count("ops.dropout(") == 2  # of the two blocks in training mode, one class


def test_verify_leaves_out_layers_and_keeps_the_modes_of_the_others() -> None:
    model = randomised(NanoGPT(GPTSizes(vocab=40, max_seq=8, width=16, layers=6, heads=2, dropout=0.3)))
    for block in model.blocks:  # their list stays in training mode
        block.eval()
    ids = {name: torch.randint(0, 40, (2, 8)) for name in ("idx", "targets")}
    found = verify_plan(planned(model, ids, mesh=(1, 1, 1)).plan, model, inputs=ids)
    assert found.agrees and any("layers" in text or "blocks" in text for text in found.subject.shown), (
        found.subject.shown
    )


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_frozen_batch_norm_keeps_its_statistics_in_float32(precision: str) -> None:
    model = Pictures()
    model.encoder.eval()
    inputs = {"x": PICTURES["x"].float()}
    made = planned(model, inputs, nn.CrossEntropyLoss(), CLASSES, mesh=(1, 1, 1), precision=precision)
    loss = float(made.train_step({**inputs, "targets": CLASSES}))
    alone = train_alone(model, [{**inputs, "targets": CLASSES}], loss=nn.CrossEntropyLoss(), targets=CLASSES)
    assert loss == pytest.approx(alone.losses[0], rel=3e-2)
    assert made.local_tensors()["encoder.1.running_mean"].dtype == torch.float32


def test_models_from_a_callable_stay_as_they_are(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "given.py").write_text("from torch import nn\ndef build():\n    return nn.Linear(2, 2).eval()\n")
    monkeypatch.chdir(tmp_path)
    assert not load_model("given:build")[0].training
    assert load_model("gpt2")[0].training


# ---- types ----


def test_parameters_of_several_types_are_one_precision() -> None:
    model = randomised(Scored()).float()
    model.middle.bfloat16()
    model.last.requires_grad_(False).half()
    assert wrong(model, x(), plain=copy.deepcopy(model).double()) == []


@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp64"])
def test_float_inputs_of_a_float_model(precision: str) -> None:
    model = randomised(Scored()).float()
    inputs = {"x": x()["x"].float()}
    made = planned(model, inputs, precision=precision, mesh=(1, 1, 1))
    loss = float(made.train_step(inputs))
    with torch.no_grad():
        assert loss == pytest.approx(float(model(**inputs)), rel=2e-2 if precision == "bf16" else 1e-5)


class Timed(Scored):
    """Uses an input in arithmetic before a layer reads it."""

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return (
            super().forward(x) + self.last(F.pad(torch.sin(t[:, None] * torch.ones(32, dtype=t.dtype)), (0, 0))).mean()
        )


def test_types_that_meet_in_a_layer_are_refused_before_training() -> None:
    with pytest.raises(InputsError, match=r"linear gets operands of torch.float32 and torch.float64") as caught:
        planned(randomised(Scored()).float(), x(), precision="fp32")
    assert "pass 'x' as torch.float32" in caught.value.fix
    inputs = {"x": x()["x"].float(), "t": torch.arange(SAMPLES).float()}
    planned(Timed(), inputs, precision="bf16")
    with pytest.raises(InputsError, match=r"linear gets operands of torch.bfloat16 and torch.float64") as caught:
        planned(Timed(), inputs | {"t": torch.arange(SAMPLES).double()}, precision="bf16")
    assert "pass 't' as torch.bfloat16" in caught.value.fix


# ---- parameters ----


class Bare(Scored):
    """Parameters of the model itself: of no dims, of one, in a list, in a mapping, of integers and of booleans."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.one = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(1))
        self.listed = nn.ParameterList([torch.ones(32), torch.ones(32)])
        self.named = nn.ParameterDict({"mix": torch.eye(32)})
        self.order = nn.Parameter(torch.arange(32).flip(0), requires_grad=False)
        self.kept = nn.Parameter(torch.arange(32) % 5 > 0, requires_grad=False)
        self.register_buffer("shift", torch.tensor([3]))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x)) * self.listed[0]
        h = torch.where(self.kept, self.middle(h), 0.0)[:, self.order] @ self.named["mix"] + self.shift
        return (self.last(h * self.listed[1]) * self.gain * self.one).square().mean()


@pytest.mark.parametrize("zero", [1, 3])
def test_bare_parameters(zero: int) -> None:
    model = Bare()
    generator = torch.Generator().manual_seed(1)
    for p in model.double().parameters():
        if p.requires_grad:
            p.data += 0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    assert wrong(model, x(), fix={"zero": zero}) == []


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).mT


def strided(model: Plain) -> None:
    model.middle.weight = nn.Parameter(model.middle.weight.detach().t().clone().t())
    model.last.bias = nn.Parameter(model.last.bias.detach()[:1].expand(WIDTH), requires_grad=False)


def tied(model: Plain) -> None:
    model.spare = nn.Linear(32, 32).double()
    model.spare.weight = model.middle.weight
    model.middle = nn.Sequential(model.middle, nn.Tanh(), model.spare)


def spectral(model: Plain) -> None:
    parametrizations.spectral_norm(model.middle).eval()


CHANGED: dict[str, Callable[[Plain], object]] = {
    "parametrized": lambda model: parametrize.register_parametrization(model.middle, "weight", Symmetric()),
    "weight norm": lambda model: parametrizations.weight_norm(model.middle),
    "weight norm of columns": lambda model: parametrizations.weight_norm(model.middle, dim=1),
    "weight norm by hook": lambda model: torch.nn.utils.weight_norm(model.middle),
    "spectral norm": lambda model: parametrizations.spectral_norm(model.middle),
    "spectral norm by hook": lambda model: nn.utils.spectral_norm(model.middle),
    "spectral norm in eval mode": spectral,
    "orthogonal": lambda model: parametrizations.orthogonal(model.middle),
    "pruned": lambda model: prune.random_unstructured(model.middle, "weight", 0.5),
    "other strides": strided,
    "tied": tied,
}


@pytest.mark.parametrize("name", CHANGED)
def test_parameters_that_are_computed_or_laid_out_otherwise(name: str) -> None:
    torch.manual_seed(0)
    model = randomised(Scored())
    CHANGED[name](model)
    assert wrong(model, x()) == []


# ---- wrappers ----


def compiled_inside(model: nn.Module) -> nn.Module:
    model.middle = torch.compile(model.middle)
    return torch.compile(model)


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile()
    return model


@pytest.mark.parametrize("wrap", [torch.compile, compiled_inside, compiled_in_place])
def test_a_compiled_model_is_what_was_compiled(wrap: Callable[[nn.Module], nn.Module]) -> None:
    plain = randomised(Scored())
    model = wrap(copy.deepcopy(plain))
    made = planned(model, x())
    assert "_orig_mod" not in made.plan.to_json() + sources(made) and made.plan.model == "Scored"
    assert set(made._source.model.state_dict()) == set(plain.state_dict())
    assert any("torch.compile of the model" in note for note in made.plan.notes)
    assert wrong(model, x(), plain=plain) == []


def test_unwrapping_leaves_the_model_alone() -> None:
    model = compiled_inside(Scored())
    names = list(model.state_dict())
    found = unwrap(model)
    assert list(model.state_dict()) == names and "_orig_mod.middle._orig_mod.weight" in names
    assert found.middle.weight is model._orig_mod.middle._orig_mod.weight
    assert unwrap(found) is found


def by_data(model: Plain) -> nn.Module:
    model.middle = nn.Sequential(model.middle, nn.Linear(32, 32))
    model.middle[1].weight.data = model.middle[0].weight.data
    return model


def by_attribute(model: Plain) -> nn.Module:
    model.first_row = model.middle.weight.data[0]
    return model


def expanded(model: Plain) -> nn.Module:
    model.middle.bias = nn.Parameter(torch.ones(1).expand(32))
    return model


def lazy(model: Plain) -> nn.Module:
    model.middle = nn.LazyLinear(32)
    return model


def quantised(model: Plain) -> nn.Module:
    model.middle = torch.ao.quantization.quantize_dynamic(nn.Sequential(model.middle))
    return model


def complex_(model: Plain) -> nn.Module:
    model.turn = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    return model


def sharded(model: Plain) -> nn.Module:
    from torch.distributed.fsdp import FSDPModule

    model.middle.__class__ = type("FSDPLinear", (FSDPModule, nn.Linear), {})
    return model


def computed(model: Plain) -> nn.Module:
    model.forward = lambda x, w=model.middle.weight * 2: (model.first(x) @ w).mean()  # type: ignore[method-assign]
    return model


def in_a_list(model: Plain) -> nn.Module:
    class Listed(Scored):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [nn.Linear(WIDTH, WIDTH)]

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.layers[0](x))

    return Listed()


def locked(model: Plain) -> nn.Module:
    model.lock = threading.Lock()
    return model


REFUSED: dict[str, tuple[Callable[[Any], nn.Module], type[AutoptdError], str, str]] = {
    "data parallel": (nn.DataParallel, InputsError, "the model (DataParallel)", "model.module"),
    "data parallel inside": (
        lambda m: nn.Sequential(nn.DataParallel(m)),
        InputsError,
        "0 (DataParallel)",
        "model.module",
    ),
    "fully sharded": (sharded, InputsError, "middle (FSDPModule)", "fix={'zero': 3}"),
    "lazy": (lazy, InputsError, "middle.weight", "run one batch"),
    "quantised": (quantised, InputsError, "middle.0 (Linear)", "before it is quantised"),
    "complex": (complex_, InputsError, "turn", "real and imaginary part"),
    "expanded": (expanded, InputsError, "middle.bias", "nn.Parameter(x.clone())"),
    "tied by data": (by_data, InputsError, "middle.0.weight and middle.1.weight", "tie the parameters themselves"),
    "an alias": (by_attribute, InputsError, "first_row and middle.weight", "compute one from the other"),
    "computed once": (
        computed,
        InputsError,
        "a trainable tensor [32, 32] is used that no module registers",
        "make it an nn.Parameter of the model",
    ),
    "layers in a list": (in_a_list, InputsError, "no module registers", "nn.ModuleList"),
    "a lock": (locked, TraceError, "cannot be copied", "copy.deepcopy(model)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    change, kind, what, fix = REFUSED[name]
    with pytest.raises(kind) as caught:
        autoptd.plan(change(Scored()), world=2, inputs={"x": torch.zeros(2, WIDTH)}, precision="fp32")
    assert what in str(caught.value) and fix in caught.value.fix and len(str(caught.value)) < 600


def test_on_meta_tensors_of_one_storage_are_found_as_well() -> None:
    with torch.device("meta"):
        tied_model = by_data(Scored())
        with pytest.raises(InputsError, match="share memory"):
            autoptd.plan(tied_model, world=2, inputs={"x": torch.zeros(2, WIDTH)})
        autoptd.plan(Scored(), world=2, inputs={"x": torch.zeros(2, WIDTH)})
