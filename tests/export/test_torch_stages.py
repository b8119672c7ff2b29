"""Stages of exported programs: models whose code between modules would run in every stage are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoptd.errors import PlanError
from autoptd.export.torch_program import torch_program
from autoptd.export.torch_stages import check_split, check_stages
from autoptd.plans.data import MeshSizes
from tests.export.export_plans import VOCAB, WIDTH, Llama, llama_plan

STAGES = (("embed", "layers.0", "layers.1"), ("layers.2", "layers.3", "norm", "head"))


class Scaled(Llama):
    """Multiplies the embeddings, as Gemma does."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * WIDTH**0.5
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class ScaledInPlace(Llama):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x.mul_(2.0)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Capped(Llama):
    """Caps the logits, which stages before the last one would do to the hidden state."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).tanh()


class Skipping(Llama):
    """Adds the embeddings to the last hidden state."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = first = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x + first))


class Pooled(Llama):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)[:, 0])


class Listed(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.layer(x),)


class OfTuples(Llama):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Listed(layer) for layer in self.layers)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)[0]
        return self.head(self.norm(x))


class Positioned(Llama):
    """Adds a second table, and casts and views what it hands on."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(64, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x).to(x.dtype)
        return self.head(self.norm(x.view(x.shape))).float()


class Flattened(Llama):
    """Takes tokens apart in a way that a hidden state cannot be."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens.view(-1, tokens.shape[1]))


def checked(model: nn.Module, stages: Any = STAGES) -> str:
    return check_stages(model, stages, (2, 16), torch.long)


@pytest.mark.parametrize(
    ("made", "what"),
    [
        (Scaled, "what layers.0 reads first was changed between modules, by mul"),
        (ScaledInPlace, "what layers.0 reads first was changed between modules, by mul"),
        (Capped, "the model's result was changed between modules, by tanh"),
        (Skipping, "what norm reads first was changed between modules, by add"),
        (Pooled, "what head reads first was changed between modules, by select"),
        (OfTuples, "layers.0 returns a tuple"),
        (Flattened, "stage 1 does not run without the modules of other stages"),
    ],
)
def test_code_between_modules_is_refused(made: type[nn.Module], what: str) -> None:
    with pytest.raises(PlanError, match=what) as error:
        checked(made())
    assert "pp=1" in error.value.fix


def test_what_is_handed_on_as_it_is_passes() -> None:
    assert checked(Llama()) == ""
    assert checked(Positioned(), (("embed", "positions", *STAGES[0][1:]), STAGES[1])) == ""
    with torch.device("meta"):
        made = Llama()
    assert checked(made) == ""


def test_a_model_that_takes_more_is_said_not_to_be_checked() -> None:
    class Two(Llama):
        def forward(self, tokens: Tensor, scale: Tensor) -> Tensor:
            return super().forward(tokens) * scale

    said = checked(Two())
    assert "were not checked: the model raises TypeError" in said


def test_only_stages_are_checked() -> None:
    assert torch_program(llama_plan(mesh=MeshSizes(dp=2, tp=1, pp=1)), Scaled()).text
    with pytest.raises(PlanError, match=r"layers\.0 reads first"):
        torch_program(llama_plan((5,), mesh=MeshSizes(dp=1, tp=1, pp=2)), Scaled())


def test_the_check_leaves_the_model_as_it_was() -> None:
    model = Llama()
    checked(model)
    assert model(torch.zeros(1, 4, dtype=torch.long)).shape == (1, 4, VOCAB)


class Attention(nn.Module):
    """Attention that names its number of heads, and leaves the length, or the number of samples, to be found."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(16, 16), nn.Linear(16, 16)
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.q_proj(x).view([{0: b, 1: s}.get(n, n) for n in self.shape]).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(q, q, q)
        return self.o_proj(y.transpose(1, 2).reshape(b, s, -1))


@pytest.mark.parametrize(
    ("shape", "runs"), [((0, 1, -1, 4), True), ((0, -1, 4, 4), False), ((-1, 1, 4, 4), False), ((0, 1, 4, 4), False)]
)
@pytest.mark.parametrize("tp", [2, 4])
def test_code_that_names_the_number_of_heads_is_refused(shape: tuple[int, ...], runs: bool, tp: int) -> None:
    model = Llama()
    for layer in model.layers:
        layer.attention = Attention(shape)
    styles = {
        "layers.*.attention.q_proj": "ColwiseParallel()",
        "layers.*.attention.o_proj": "RowwiseParallel()",
        "head": "ColwiseParallel(output_layouts=Replicate())",
    }
    if runs:
        assert check_split(model, styles, tp, (2, 16), torch.long) == ""
        return
    with pytest.raises(PlanError, match="does not run on a part of its heads") as error:
        check_split(model, styles, tp, (2, 16), torch.long)
    assert "-1" in error.value.fix


def test_pairs_of_columns_run_on_their_parts() -> None:
    styles = {
        "layers.*.mlp.up_proj": "ColwiseParallel()",
        "layers.*.mlp.gate_proj": "ColwiseParallel()",
        "layers.*.mlp.down_proj": "ColwiseParallel(input_layouts=Shard(-1), output_layouts=Replicate())",
    }
    assert check_split(Llama(), styles, 2, (2, 16), torch.long) == ""
