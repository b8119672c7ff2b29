"""Splits of real blocks found by the search: Megatron's, and the reasons for exceptions."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
import transformers
from torch import nn

from autoptd.cost_models.cluster import Cluster
from autoptd.layout.placements import BP, B, O, Split
from autoptd.passes.fold import Folded, fold
from autoptd.passes.normalise.normalise import normalise
from autoptd.passes.opcall import Sizes, TensorInfo
from autoptd.passes.sharding.sharding import from_text, parameter_splits, to_text
from autoptd.passes.trace.trace import trace
from autoptd.passes.trace.traced import BATCH, SEQUENCE
from autoptd.search.sharding.ilp import solve_splits
from autoptd.search.sharding.op_table import GraphFacts
from autoptd.search.sharding.problem import evaluate
from autoptd.search.sharding.strategies import legal_strategies
from autoptd.search.sharding.tensors import Sharded, Tensors

_H100 = Cluster.load("dgx-h100")  # eight GPUs on NVLink
# without launch overhead, which the splits ILP (a sum over ops) does not see where whole segments are launch-bound
NODE = _H100.model_copy(update={"device": _H100.device.model_copy(update={"dispatch_s": 0.0})})


def folded(model: nn.Module, seq: int, precision: str = "bf16") -> Folded:
    ids = {n: torch.empty(2, seq, dtype=torch.long, device="meta") for n in ("input_ids", "labels")}
    return fold(normalise(trace(model, ids, precision=precision)))


def llama(layers: int = 3) -> nn.Module:
    config = transformers.LlamaConfig(  # the widths of Llama 3 8B
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        num_hidden_layers=layers,
        max_position_embeddings=8192,
    )
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config)


def gpt2(layers: int = 3, vocab: int = 50304) -> nn.Module:
    config = transformers.GPT2Config(  # the widths of GPT-3 6.7B; the vocabulary as Megatron pads it
        n_embd=4096, n_head=32, n_layer=layers, vocab_size=vocab, n_positions=2048, bos_token_id=0, eos_token_id=0
    )
    with torch.device("meta"):
        return transformers.GPT2LMHeadModel(config)


def solved(graph: Folded, tp: int, seq: int = 2048, **options: object) -> tuple[Tensors, Sharded]:
    tensors = Tensors(graph, NODE, tp, {BATCH: 1, SEQUENCE: seq}, microbatches=64, **options)  # type: ignore[arg-type]
    return tensors, tensors.solve()


@pytest.fixture(scope="module")
def llama_split() -> tuple[Folded, Sharded]:
    graph = folded(llama(), 2048)
    return graph, solved(graph, 8)[1]


@pytest.fixture(scope="module")
def gpt2_split() -> tuple[Folded, Sharded]:
    graph = folded(gpt2(), 2048)
    return graph, solved(graph, 8)[1]


def of_block(graph: Folded, answer: Sharded) -> list[str]:
    """Return the collectives of one transformer layer, the unit that repeats."""
    unit = max(graph.units, key=lambda u: u.count)
    kinds = [graph.segments[unit.first + i].kind for i in range(unit.length)]
    works = [answer.costs[kind].work for kind in kinds]
    return [name for w in works for name, _ in (*w.forward_collectives, *w.backward_collectives)]


def test_llama_is_split_column_then_row(llama_split: tuple[Folded, Sharded]) -> None:
    graph, answer = llama_split
    found = parameter_splits(graph, answer.sharding)
    for i in range(3):
        layer = f"model.layers.{i}"
        for column in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            assert found[f"{layer}.{column}.weight"] == "S0"
        for row in ("self_attn.o_proj", "mlp.down_proj"):
            assert found[f"{layer}.{row}.weight"] == "S1"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            assert found[f"{layer}.{norm}.weight"] == "Bp"  # on a share of the tokens: its gradient is a partial value


def test_gpt2_is_split_column_then_row(gpt2_split: tuple[Folded, Sharded]) -> None:
    graph, answer = gpt2_split
    found = parameter_splits(graph, answer.sharding)
    for i in range(3):
        layer = f"transformer.h.{i}"  # Conv1D weights are [in, out]
        assert found[f"{layer}.attn.c_attn.weight"] == "S1/3"  # each rank's heads of query, key and value
        assert found[f"{layer}.attn.c_proj.weight"] == "S0"
        assert found[f"{layer}.mlp.c_fc.weight"] == "S1"
        assert found[f"{layer}.mlp.c_proj.weight"] == "S0"
        assert found[f"{layer}.ln_1.weight"] == found[f"{layer}.ln_2.bias"] == "Bp"


@pytest.mark.parametrize("which", ["llama_split", "gpt2_split"])
def test_a_layer_has_megatrons_sequence_parallel_collectives(which: str, request: pytest.FixtureRequest) -> None:
    graph, answer = request.getfixturevalue(which)
    # forward: gather before each of attention and MLP, scatter behind; backward the conjugate of each
    assert Counter(of_block(graph, answer)) == {"all_gather": 4, "reduce_scatter": 4}


@pytest.mark.parametrize("which", ["llama_split", "gpt2_split"])
def test_norms_are_split_along_the_sequence(which: str, request: pytest.FixtureRequest) -> None:
    graph, answer = request.getfixturevalue(which)
    unit = max(graph.units, key=lambda u: u.count)
    for i in range(unit.length):
        decided = answer.sharding.kinds[graph.segments[unit.first + i].kind]
        assert [str(p) for p in (*decided.receives, *decided.sends)] == ["S1", "S1"]


@pytest.mark.parametrize("which", ["llama_split", "gpt2_split"])
def test_cross_entropy_is_vocabulary_parallel(which: str, request: pytest.FixtureRequest) -> None:
    _, answer = request.getfixturevalue(which)
    chosen = [str(s) for d in answer.sharding.kinds.values() for s in d.strategies.values()]
    assert "S2, B -> B [vocab_parallel]" in chosen


def test_an_indivisible_vocabulary_is_not_split() -> None:
    graph = folded(gpt2(vocab=50257), 2048)
    found = parameter_splits(graph, solved(graph, 8)[1].sharding)
    assert found["transformer.wte.weight"] == "S1"


def test_without_sequence_parallelism_no_tensor_is_split_along_the_sequence() -> None:
    graph = folded(llama(), 2048)
    _, answer = solved(graph, 8, sequence_parallel=False)
    assert all(str(p) != "S1" for d in answer.sharding.kinds.values() for p in (*d.receives, *d.sends))
    assert answer.seconds > solved(graph, 8)[1].seconds
    found = parameter_splits(graph, answer.sharding)
    assert found["model.layers.1.mlp.up_proj.weight"] == "S0" and found["model.layers.1.mlp.down_proj.weight"] == "S1"


def test_a_pin_holds_and_the_rest_is_found() -> None:
    graph = folded(llama(), 2048)
    free = solved(graph, 8)[1]
    _, pinned = solved(graph, 8, pins={"*.q_proj.weight": "S1"})
    found = parameter_splits(graph, pinned.sharding)
    assert {found[f"model.layers.{i}.self_attn.q_proj.weight"] for i in range(3)} == {"S1"}
    assert pinned.seconds > free.seconds


def test_decisions_read_back_from_their_text(llama_split: tuple[Folded, Sharded]) -> None:
    graph, answer = llama_split
    tensors = Tensors(graph, NODE, 8, {BATCH: 1, SEQUENCE: 2048}, microbatches=64)
    chosen, boundaries = to_text(graph, answer.sharding)
    again = from_text(graph, 8, tensors.sizes, chosen, boundaries, parameter_splits(graph, answer.sharding))
    assert again == answer.sharding


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))).sum()


def test_the_optimum_of_a_traced_graph_is_brute_forces() -> None:
    graph = fold(normalise(trace(Mlp(1024), {"x": torch.empty(2, 512, 1024)}, precision="bf16")))
    problem = Tensors(graph, NODE, 4, {BATCH: 1, SEQUENCE: 512}, microbatches=8).problem
    best = float("inf")
    edges = {b: a for a, b in problem.ties}  # receiver -> sender
    free = [n for n in problem.nodes if n.name not in edges]
    tied = {n.name: {c.label: c for c in n.choices} for n in problem.nodes if n.name in edges}
    assert len(problem.nodes) >= 8
    for combination in itertools.product(*(n.choices for n in free)):
        taken = {n.name: c for n, c in zip(free, combination, strict=True)}
        for b, a in edges.items():
            if taken[a].label not in tied[b]:
                break
            taken[b] = tied[b][taken[a].label]
        else:
            best = min(best, evaluate(problem, taken).seconds)
    assert solve_splits(problem).seconds == pytest.approx(best, rel=1e-9)


def test_what_is_paid_is_what_the_segments_cost(llama_split: tuple[Folded, Sharded]) -> None:
    """The ILP's objective, less the reductions of parameters once per step, is the sum of the costs of segments."""
    graph, answer = llama_split
    tensors = Tensors(graph, NODE, 8, {BATCH: 1, SEQUENCE: 2048}, microbatches=64)
    solution = solve_splits(tensors.problem)
    by_name = {n.name: {c.label: c for c in n.choices} for n in tensors.problem.nodes}
    sync = sum(by_name[name][label].seconds for name, label in solution.choices.items() if "/parameter:" in name)
    assert answer.seconds == pytest.approx(solution.seconds - sync, rel=1e-9)


def test_conversions_cost_what_their_kinds_cost() -> None:
    graph = folded(gpt2(1), 512)
    tensors = Tensors(graph, NODE, 4, {BATCH: 1, SEQUENCE: 512}, microbatches=8)
    tensor = TensorInfo((4, 1024), torch.bfloat16)
    assert tensors.conversion_seconds(tensor, Split(0), Split(0)) == (0.0, 0.0)
    assert tensors.conversion_seconds(tensor, B, O) == (0.0, 0.0)
    moved = tensors.conversion_seconds(tensor, Split(0), Split(1))
    assert moved == (tensors.collective("all_to_all", 8192),) * 2
    gathered = tensors.conversion_seconds(tensor, Split(1, 3), BP)
    assert gathered == tuple(tensors.collective(name, 8192) for name in ("all_gather", "reduce_scatter"))
    assert tensors.conversion_seconds(TensorInfo((4, 1024), torch.bfloat16, False), Split(0), BP) == (gathered[0], 0.0)


def test_offers_are_those_of_the_graph() -> None:
    graph, sizes = folded(gpt2(1), 512), Sizes({BATCH: 1, SEQUENCE: 512}, BATCH)
    offers = GraphFacts(graph).offers
    known = legal_strategies(graph, 4, sizes, offers=offers)
    assert known == legal_strategies(graph, 4, sizes)
    assert known != legal_strategies(graph, 4, sizes, offers={kind: {} for kind in offers})
