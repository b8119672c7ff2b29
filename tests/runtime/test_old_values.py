"""Uses of a planned model's own tensors once their trained values are elsewhere: a warning, or an error."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel

import autoptd
from autoptd.errors import InputsError
from autoptd.parallel import Parallel

BATCH = {"x": torch.linspace(-1.0, 1.0, 16).view(4, 4)}


class Scored(nn.Module):
    """A model with layers, a parameter and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.scale = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm(self.layer(x)) * self.scale - x).square().mean()


def trained() -> tuple[Scored, Parallel]:
    torch.manual_seed(0)
    model = Scored()
    parallel = autoptd.parallelize(model, world=1, batch=4, inputs=BATCH, precision="fp32")
    parallel.train_step(BATCH)
    return model, parallel


def averaged(model: Scored) -> None:
    average = AveragedModel(Scored())
    average.update_parameters(model)


def averaged_by_hand(model: Scored) -> None:
    for a, p in zip(Scored().parameters(), model.parameters(), strict=True):
        a.data.lerp_(p.data, 0.1)


CALLED, COPIED, SAVED = "the model is called", "the model is copied", "the model is saved"
STATE, READ = "this state_dict has", "the model's own parameters and buffers have"
USES: dict[str, tuple[Callable[[Scored], object], str]] = {
    "averaged": (averaged, READ),
    "averaged by hand": (averaged_by_hand, READ),
    "a parameter": (lambda m: m.layer.weight.norm(), READ),
    "a buffer": (lambda m: m.norm.running_mean, READ),
    "gradients are clipped": (lambda m: clip_grad_norm_(m.parameters(), 1.0), READ),
    "called": (lambda m: m(BATCH["x"]), CALLED),
    "a layer is called": (lambda m: m.layer(BATCH["x"]), CALLED),
    "the state of a layer": (lambda m: m.layer.state_dict(), STATE),
    "copied": (copy.deepcopy, COPIED),
    "a layer is copied": (lambda m: copy.deepcopy(m.layer), COPIED),
    "a layer is saved": (lambda m: torch.save(m.layer, io.BytesIO()), SAVED),
}


def said(act: Callable[[], object]) -> list[str]:
    """Return the warnings of an act, all of which point to this file."""
    with warnings.catch_warnings(record=True) as seen, torch.no_grad():
        warnings.simplefilter("always")
        act()
    assert all(each.filename == __file__ for each in seen)
    return [str(each.message) for each in seen]


@pytest.mark.fault("a changed model")
@pytest.mark.parametrize("name", USES)
def test_the_values_before_training_are_not_read_unnoticed(name: str) -> None:
    use, text = USES[name]
    model, parallel = trained()
    found = said(lambda: use(model))
    assert len(found) == 1 and found[0].startswith(text) and "par.state_dict()" in found[0]
    model.load_state_dict(parallel.state_dict())
    assert not said(lambda: use(model))
    assert type(model._parameters) is type(model.layer._parameters) is dict


WRITES: dict[str, Callable[[Scored, Parallel], object]] = {
    "loaded": lambda m, par: m.load_state_dict(par.state_dict()),
    "moved": lambda m, _: m.to("cpu"),
    "zeroed": lambda m, _: m.zero_grad(),
    "in another mode": lambda m, _: m.eval().train(),
    "called with others": lambda m, par: torch.func.functional_call(m, par.state_dict(), BATCH["x"]),
    "of the program": lambda m, par: (par.state_dict(), par.gradients(), par.train_step(BATCH), par.eval_step(BATCH)),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_reads_no_old_value_may_be_done(name: str) -> None:
    model, parallel = trained()
    assert not said(lambda: WRITES[name](model, parallel))
    parallel.train_step(BATCH)


def test_trained_values_that_an_evaluation_has_seen_are_not_old() -> None:
    model, parallel = trained()
    model.load_state_dict(parallel.state_dict())
    parallel.eval_step(BATCH)
    assert not said(lambda: model.layer(BATCH["x"]))


def test_a_model_that_gets_hooks_at_its_first_call_is_evaluated_between_steps() -> None:
    """Models of transformers that return the scores of their router get some then."""
    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2, output_router_logits=True,
    )  # fmt: skip
    model, ids = transformers.MixtralForCausalLM(config), torch.arange(16).view(2, 8)
    batch = {"input_ids": ids, "labels": ids}
    par = autoptd.parallelize(model, inputs=batch, world=1, batch=2, precision="fp32")
    par.train_step(batch)
    model.load_state_dict(par.state_dict())
    with torch.no_grad():
        model(**batch)
    assert any(layer._forward_hooks for layer in model.modules())
    par.train_step(batch)


def test_a_part_of_two_planned_models_warns_for_each() -> None:
    model, first = trained()
    model.load_state_dict(first.state_dict())
    second = autoptd.parallelize(model, world=1, batch=4, inputs=BATCH, precision="fp32")
    first.train_step(BATCH)
    assert len(said(lambda: model.layer.weight)) == 1
    second.train_step(BATCH)
    assert len(said(lambda: model.layer.weight)) == 2


@pytest.mark.fault("a changed model")
def test_an_optimizer_of_the_models_own_tensors_steps_nothing_unnoticed() -> None:
    torch.manual_seed(0)
    model = Scored()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    parallel = autoptd.parallelize(model, world=1, batch=4, inputs=BATCH, precision="fp32")
    optimizer.step()
    parallel.train_step(BATCH)
    with pytest.raises(InputsError, match="this optimizer has the model's own parameters") as caught:
        optimizer.step()
    assert "schedulers par.optimizer" in str(caught.value)
    with pytest.warns(UserWarning, match=CALLED):
        model(BATCH["x"]).backward()
    optimizer.step()
    with pytest.raises(InputsError, match="has other values than when"):
        parallel.train_step(BATCH)


class Headed(nn.Module):
    """A model with a layer that others may have too."""

    def __init__(self, body: nn.Linear) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh()).square().mean()


def two() -> tuple[Parallel, Parallel]:
    torch.manual_seed(0)
    body = nn.Linear(4, 4)
    made = [
        autoptd.parallelize(model, world=1, batch=4, inputs=BATCH, precision="fp32")
        for model in (Headed(body), Headed(body))
    ]
    return made[0], made[1]


@pytest.mark.fault("a changed model")
def test_a_layer_that_two_programs_train_by_turns_is_refused() -> None:
    first, second = two()
    first.train_step(BATCH)
    assert [text[:48] for text in said(lambda: second.train_step(BATCH))] == [
        "the model has the values that its training began"
    ]
    with pytest.raises(InputsError, match=r"body\.weight was trained by another program") as caught:
        first.train_step(BATCH)
    assert "train one module that has both models" in str(caught.value)
    second.train_step(BATCH)


def test_programs_of_copies_are_trained_by_turns() -> None:
    torch.manual_seed(0)
    body = nn.Linear(4, 4)
    models = (Headed(body), Headed(copy.deepcopy(body)))
    made = [autoptd.parallelize(model, world=1, batch=4, inputs=BATCH, precision="fp32") for model in models]
    assert not said(lambda: [each.train_step(BATCH) for each in made * 2])


@pytest.mark.fault("a changed model")
def test_two_programs_of_one_model_are_not_trained_by_turns_unnoticed() -> None:
    model = Headed(nn.Linear(4, 4))
    first, second = (
        autoptd.parallelize(model, world=1, batch=4, inputs=BATCH, precision="fp32", loss=loss)
        for loss in (torch.neg, torch.abs)
    )
    first.train_step(BATCH)
    second.train_step(BATCH)
    text = "another program of this model has trained body.weight since this one did: each has values of its own"
    assert said(lambda: first.train_step(BATCH)) == [text] == said(lambda: second.train_step(BATCH))
    assert not said(lambda: second.train_step(BATCH))
