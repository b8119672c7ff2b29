"""Blocks under torch.compile: the same training; each class is compiled once, and never after the first step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from autoptd.errors import RuntimeFault
from autoptd.layout.mesh import Mesh
from autoptd.ops import offload as offloading
from autoptd.parallel import Parallel
from autoptd.runtime import torch_compile as compiled
from autoptd.testing.parity import differences, train_in_lockstep
from tests.parity.parity_check import Variant, alone, batches, complaints, parallel, planned

BULK = Variant(bulk=True)
LATER = replace(BULK, recompute="full", overlap=("dp", "p2p"), clip_norm=0.7)


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    compiled._compiled.cache_clear()
    yield
    torch.compiler.reset()


def of(name: str, mesh: Mesh, variant: Variant = BULK, backend: str = "aot_eager") -> Parallel:
    made = parallel(name, planned(name, mesh, variant), "sgd", variant.clip_norm)
    made._backend = backend
    return made


def share(name: str, samples: int, step: int = 0) -> dict[str, Tensor]:
    return {n: x.roll(step, 0)[:samples] for n, x in batches(name, 1)[0].items()}


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def test_compiled_blocks_train_like_one_process() -> None:
    """Collectives, recomputation, late parameter gathers; then other stages of the same classes."""
    name = "nanogpt"
    made = of(name, Mesh(1, 2, 2), LATER)
    found = train_in_lockstep(made, batches(name))
    assert graphs() and not complaints(name, found, alone(name, "sgd", LATER.clip_norm))
    with torch.compiler.set_stance("fail_on_recompile"):
        assert train_in_lockstep(made, batches(name)).losses == found.losses


def test_products_around_the_ring_stay_outside() -> None:
    how = replace(BULK, overlap=("p2p", "tp"), gathers="again")
    found = train_in_lockstep(of("gpt2", Mesh(1, 2, 1), how), batches("gpt2"))
    assert graphs() and not complaints("gpt2", found, alone("gpt2", "sgd", None))


def test_a_mixture_s_rows_travel_outside() -> None:
    """No graph depends on how many rows a rank sends."""
    variant = replace(BULK, recompute="full")
    made = of("mixtral", Mesh(2, 1, 1, ep=2), variant)
    assert "ep.dispatch(" in made.program.files["blocks.py"] and "keep(torch.topk" in made.program.files["blocks.py"]
    with torch._dynamo.config.patch(error_on_recompile=True):
        found = train_in_lockstep(made, batches("mixtral"))
    assert graphs() and not complaints("mixtral", found, alone("mixtral", "sgd"))


def test_blocks_that_own_no_parameters_are_compiled() -> None:
    """Layers that do not repeat are blocks of their own if they are recomputed; the stage owns their parameters."""
    made = of("gpt_oss", Mesh(), replace(BULK, recompute="full"))
    stage = made.stage_module(0)
    assert not [m for m in stage.modules() if m is not stage and type(m) is not nn.Module]
    assert {type(block).__name__ for block in compiled.blocks_of(stage).values()} >= {"EmbeddingTokens"}
    found = train_in_lockstep(made, batches("gpt_oss"))
    assert graphs() > 9 and not complaints("gpt_oss", found, alone("gpt_oss", "sgd"))


def test_rotations_by_complex_numbers_are_compiled() -> None:
    made = of("deepseek_v2", Mesh(1, 2, 1))
    assert "ops.as_complex(" in "".join(made.program.files.values())
    assert not complaints("deepseek_v2", train_in_lockstep(made, batches("deepseek_v2")), alone("deepseek_v2", "sgd"))


def test_a_block_never_runs_without_its_graph_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputed without its graph, it would save other tensors than with it."""
    monkeypatch.setattr(compiled, "_MOST_GRAPHS", 1)
    made = of("nanogpt", Mesh(), replace(BULK, recompute="full"))
    with pytest.raises(RuntimeFault, match="cannot compile the program"):
        for samples in (16, 15, 14):
            made.train_step(share("nanogpt", samples))


def test_parts_are_compiled_with_the_block_that_calls_them() -> None:
    """Graphs do not end between parts, and layers share them."""
    counted, variant = list[int](), replace(BULK, recompute="selective")
    for cuts in ((), ("blocks.1.norm_2",)):
        torch.compiler.reset()
        counters.clear()
        compiled._compiled.cache_clear()
        made = of("nanogpt", Mesh(1, 1, 2), replace(variant, cuts=cuts))
        assert bool(cuts) == ("compose(" in made.program.files["blocks.py"])
        assert not complaints("nanogpt", train_in_lockstep(made, batches("nanogpt")), alone("nanogpt", "sgd"))
        counted.append(graphs())
    assert counted[1] == counted[0] + 3, "those of the parts by themselves: two around attention, and the other part"


def test_compiled_blocks_find_gathered_parameters() -> None:
    """Graphs take parameters whose storage is freed and allocated (ZeRO 3)."""
    made = of("nanogpt", Mesh(2, 1, 1), replace(BULK, zero=3))
    found = train_in_lockstep(made, batches("nanogpt"))
    assert graphs() and not complaints("nanogpt", found, alone("nanogpt", "sgd"))


@pytest.mark.parametrize("context", ["ring", "ulysses"])
def test_compiled_blocks_over_cut_tokens(context: str) -> None:
    """The ring, and the choice of a rank's tokens, stay outside of the graphs."""
    found = train_in_lockstep(of("nanogpt", Mesh(cp=2), replace(BULK, context=context, micro=8)), batches("nanogpt"))
    assert graphs() and not complaints("nanogpt", found, alone("nanogpt", "sgd"))


def test_compiled_blocks_drop_over_cut_tokens() -> None:
    """Compiled blocks drop the same elements as eager ones, in the ring and outside of it."""
    name, run = "nanogpt_dropout", (Mesh(cp=2), replace(BULK, micro=8))
    found, plain = (train_in_lockstep(of(name, *run, backend), batches(name)) for backend in ("aot_eager", ""))
    wrong = differences(found.gradients, plain.gradients)
    assert graphs() and not found.diverged and max(wrong.values()) <= 1e-10


def test_a_class_is_compiled_once_and_a_ragged_microbatch_once_more() -> None:
    """Dropout included: its key changes with step and microbatch, and must not be a constant of a graph."""
    name, counted = "nanogpt_dropout", []
    made = of(name, Mesh(), replace(BULK, micro=4))
    plain = of(name, Mesh(), replace(BULK, micro=4), "")
    layers = len(compiled.blocks_of(made.stage_module(0)))
    for step in range(3):
        assert made.train_step(share(name, 15, step)) == plain.train_step(share(name, 15, step))
        counted.append(graphs())
    assert layers == 4 and counted[0] == counted[2]
    blocks = made.program.files["blocks.py"]
    parts = 1 + blocks.count("ops.dropout(") + blocks.count("ops.attention(")
    around = 2  # the embedding and the head with its loss
    assert counted[0] == 2 * (parts + around), "for four samples, and for any number"
    with torch.compiler.set_stance("fail_on_recompile"):
        assert made.train_step(share(name, 14)) == plain.train_step(share(name, 14))
    assert made.eval_step(share(name, 16)) == plain.eval_step(share(name, 16))


@pytest.mark.parametrize("zero", [1, 3])
def test_what_compiled_blocks_save_goes_to_the_host(zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs save their tensors through autograd, so that hooks around a block see them."""
    moved, to_host = list[int](), offloading._to_host

    def noted(x: Tensor) -> Tensor:
        moved.append(len(x))
        return to_host(x)

    monkeypatch.setattr(offloading, "_to_host", noted)
    made = of("nanogpt", Mesh(2, 2, 1), replace(BULK, recompute="offload", zero=zero))
    found = train_in_lockstep(made, batches("nanogpt"))
    assert graphs() and moved and not complaints("nanogpt", found, alone("nanogpt", "sgd"))
