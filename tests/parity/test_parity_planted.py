"""Parity detects classic silent mistakes, planted in an emitted file or in the arguments of the runtime."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from autoptd.api import Parallel
from autoptd.errors import AutoptdError
from autoptd.layout.mesh import Mesh
from autoptd.layout.placements import B, parse_placement
from autoptd.testing.parity import train_in_lockstep
from tests.parity.parity_check import Variant, alone, batches, complaints, parallel, planned, with_files

BULK = Variant(bulk=True)
CUBE = Mesh(2, 2, 2)


def verdict(name: str, made: Parallel) -> list[str]:
    """Return the differences that parity finds, or the error of a plan that is refused."""
    try:
        return complaints(name, train_in_lockstep(made, batches(name)), alone(name, "sgd"))
    except AutoptdError as error:
        return [str(error)]


def sound(name: str, mesh: Mesh = CUBE, variant: Variant = BULK) -> Parallel:
    return parallel(name, planned(name, mesh, variant), "sgd")


def edited(made: Parallel, edit: Callable[[str], str]) -> Parallel:
    """Return a program with every Python file edited; at least one must change."""
    files = {n: edit(text) if n.endswith(".py") else text for n, text in made.program.files.items()}
    assert files != made.program.files, "nothing was planted"
    return with_files(made, files)


def once(pattern: str, by: str) -> Callable[[str], str]:
    return lambda text: re.sub(pattern, by, text, count=1)


@pytest.mark.parametrize(
    ("name", "pattern", "by"),
    [
        pytest.param(
            "llama", r"tp\.all_gather\(", "tp.all_gather_whole(", marks=pytest.mark.fault("gradient of a gather")
        ),
        pytest.param(
            "gpt2", r"tp\.all_gather\(", "tp.all_gather_whole(", marks=pytest.mark.fault("gradient of a gather")
        ),
        pytest.param(
            "gpt2", r"tp\.reduce_scatter\(", "tp.slice(", marks=pytest.mark.fault("partial values not summed")
        ),
        pytest.param(
            "one_layer", r"tp\.reduce_scatter\(", "tp.slice(", marks=pytest.mark.fault("partial values not summed")
        ),
        pytest.param(
            "nanogpt",
            r"tp\.pad\((self\.[\w.]+), dim=0\)",
            r"tp.all_gather_whole(\1, dim=0)",
            marks=pytest.mark.fault("a bias on every rank"),
        ),
        pytest.param("nanogpt", r",\s*ignore_index=-1\b", "", marks=pytest.mark.fault("labels across the cut")),
        pytest.param(
            "llama", r"/ counts\[0\]", "/ loss_counts(labels=labels)[0]", marks=pytest.mark.fault("mean of means")
        ),
        pytest.param("bert", r"/ counts\[0\]", "/ counts[0] / 2", marks=pytest.mark.fault("a factor too many")),
        pytest.param("vit", r"/ counts\[0\]", "* 1.0", marks=pytest.mark.fault("a factor too many")),
        ("awkward", r"torch\.tanh", "torch.sigmoid"),
        ("oddities", r"counts\[1\]", "counts[0]"),
    ],
)
def test_an_edited_line_is_seen(name: str, pattern: str, by: str) -> None:
    made = sound(name)
    assert not verdict(name, made)
    assert verdict(name, edited(made, once(pattern, by)))


@pytest.mark.fault("swapped wires")
def test_swapped_wires_are_seen() -> None:
    made = sound("skip_mlp", Mesh(1, 1, 8))

    def swap(text: str) -> str:
        return re.sub(r"return \((\w+), (\w+),\)", r"return (\2, \1,)", text, count=1)

    assert not verdict("skip_mlp", made)
    assert verdict("skip_mlp", edited(made, swap))


@pytest.mark.fault("swapped stages")
def test_swapped_stages_are_refused() -> None:
    """Two stages run each other's layers."""
    made = sound("nanogpt", Mesh(1, 4, 2))
    assert not verdict("nanogpt", made)
    made.program = replace(made.program, stages=tuple(reversed(made.program.stages)))
    assert any("in the plan, not in the stage" in complaint for complaint in verdict("nanogpt", made))


def test_swapped_layers_are_seen() -> None:
    """Two layers get each other's values."""
    made = sound("nanogpt")
    values = made.initial_values()
    names = {n: n.replace("blocks.0.", "blocks.x.").replace("blocks.1.", "blocks.0.") for n in values}
    swapped = {n: values[names[n].replace("blocks.x.", "blocks.1.")] for n in values}
    made.__dict__["initial_values"] = lambda stage=None: swapped
    assert any(c.startswith("loss of step 0") for c in verdict("nanogpt", made))


def plant(made: Parallel, name: str, **changes: object) -> None:
    """Change the runtime's specification of one parameter."""
    layout = made.layout
    spec = replace(layout.parameters[name], **changes)
    made.__dict__["layout"] = replace(layout, parameters={**layout.parameters, name: spec})


@pytest.mark.fault("a norm's gradient not summed")
def test_a_norm_s_missing_gradient_sum_is_seen() -> None:
    """The gradient of a norm whose input is split over the sequence is a partial value on every rank."""
    made = sound("llama")
    name = next(n for n, p in made.layout.parameters.items() if p.placement == parse_placement("Bp"))
    plant(made, name, placement=B)
    wrong = verdict("llama", made)
    assert any(c.startswith(f"gradient {name}") for c in wrong)
    assert any(c.startswith("copies of") for c in wrong), "and its copies drift apart"


@pytest.mark.fault("summed twice")
def test_a_gradient_summed_twice_is_seen() -> None:
    made = sound("gpt2", variant=Variant())
    name = next(n for n, p in made.layout.parameters.items() if p.placement == B)
    plant(made, name, placement=parse_placement("Bp"))
    assert any(c.startswith(f"gradient {name}") for c in verdict("gpt2", made))


@pytest.mark.fault("a parameter nobody updates")
def test_a_parameter_that_nobody_updates_is_seen() -> None:
    made = sound("bert")
    name = next(n for n in made.layout.parameters if n.endswith("layer.1.output.dense.weight"))
    plant(made, name, trainable=False)
    assert any(c.startswith(f"gradient {name}: off by inf") for c in verdict("bert", made))


def test_labels_of_other_samples_are_seen() -> None:
    made = sound("odd_mlp", Mesh(2, 1, 4))
    mixed = [{**batch, "y": batch["y"].roll(1, 0)} for batch in batches("odd_mlp")]
    assert complaints("odd_mlp", train_in_lockstep(made, mixed), alone("odd_mlp", "sgd"))
