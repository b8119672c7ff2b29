"""Weights written at the end of training, by one call on all ranks: a plain model computes with them what it did."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import autoptd
from autoptd.api import Parallel
from autoptd.checkpoint import huggingface
from autoptd.errors import CheckpointError
from autoptd.layout.mesh import Mesh
from autoptd.runtime.batch import share_of
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import run_lockstep
from tests.parity.parity_check import Variant, batches, case, parallel, planned


def on_ranks(made: Parallel, body: Callable[[Parallel], Any]) -> list[Any]:
    values = made.initial_values()
    made.layout  # noqa: B018  before the ranks are threads

    def started(c: Communicators) -> Any:
        mine = copy.copy(made)
        mine.start(c, values)
        return body(mine)

    return run_lockstep(made.layout.mesh, started)


PLANS = [
    ("gpt2", Mesh(2, 2, 2), Variant(zero=3, micro=2)),
    ("llama", Mesh(2, 2, 2), Variant(schedule="interleaved", virtual=2, micro=2)),
    ("mixtral", Mesh(2, 2, 2, ep=2, etp=1), Variant(micro=2)),
]


@pytest.mark.parametrize(("name", "mesh", "variant"), PLANS, ids=[f"{n}-{m}" for n, m, _ in PLANS])
def test_from_pretrained_gives_the_trained_model(
    name: str, mesh: Mesh, variant: Variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface, "SHARD_BYTES", 60_000)
    made, (batch, *_) = parallel(name, planned(name, mesh, variant), "sgd"), batches(name)

    def body(mine: Parallel) -> dict[str, Tensor]:
        mine.train_step(share_of(batch, mine.layout.specs, mine.dp_rank, mine.dp_size))
        mine.export_weights(tmp_path / "out")
        return mine.state_dict()

    state = on_ranks(made, body)[0]
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64).eval()
    plain = copy.deepcopy(case(name).model).eval()
    assert any(not torch.equal(x, state[n]) for n, x in plain.state_dict().items())
    plain.load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(found(**batch).logits, plain(**batch).logits)
    assert all(torch.equal(x, found.state_dict()[n]) for n, x in plain.state_dict().items())


class Tied(nn.Module):
    """A model of no library: tied weights, a frozen part, a buffer, and one that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        self.layers[1].requires_grad_(False)
        self.register_buffer("scale", torch.tensor([0.5] * 8))
        self.register_buffer("unread", torch.arange(3))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(ids)) * self.scale)


class Weighted(nn.Module):
    """A loss with a parameter that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, out: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy((out * self.logit_scale).flatten(0, 1), targets.flatten())


IDS = torch.randint(12, (8, 6), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_load_state_dict_gives_the_trained_model(precision: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, loss = Tied(), Weighted()
    made = autoptd.parallelize(
        model,
        loss=loss,
        world=4,
        inputs={"ids": IDS[:2]},
        targets=IDS[:2],
        batch=8,
        precision=precision,
        cluster="dgx-h100",
        optimizer_options={"lr": 0.1},
        fix={"dp": 2, "tp": 2, "zero": 3},
    )

    def body(mine: Parallel) -> dict[str, Tensor]:
        share = IDS.chunk(2)[mine.dp_rank]
        mine.train_step({"ids": share, "targets": share})
        mine.export_weights(tmp_path / "out")
        return mine.state_dict()

    state = on_ranks(made, body)[0]
    plain = Tied().to(torch.bfloat16 if precision == "bf16" else torch.float32)
    assert plain.load_state_dict(found := load_file(tmp_path / "out" / "model.safetensors")) is not None
    assert all(torch.equal(x, state[n]) for n, x in found.items())
    assert not torch.equal(found["embed.weight"].float(), model.embed.weight)
    trained = load_file(tmp_path / "out" / "loss.safetensors")
    assert list(trained) == ["logit_scale"] and torch.equal(trained["logit_scale"], state["loss.logit_scale"])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["loss.safetensors", "model.safetensors"]


def test_what_cannot_be_written_is_an_error_of_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = parallel("gpt2", planned("gpt2", Mesh(2, 2, 2), Variant(zero=3, micro=2)), "sgd")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface, "save_file", full)

    def body(mine: Parallel) -> list[str]:
        said = []
        for folder in ("full", "new"):
            with pytest.raises(CheckpointError) as caught:
                mine.export_weights(tmp_path / folder)
            said.append(str(caught.value))
        return said

    results = on_ranks(made, body)
    assert all(said == results[0] for said in results)
    assert "not empty" in results[0][0] and "No space left" in results[0][1]
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
