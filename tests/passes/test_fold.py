"""Folding derives structure from the graph: equal segments are of one kind, any difference makes another."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoptd.passes.fold import Folded, RepeatedUnit, crossing, find_units, fold, graph_hash, needed_prelude
from tests.passes.interpret import normalised

WIDTH = 8


class Block(nn.Module):
    """Residual MLP, x + mlp(norm(x)), with a table of its own that is read or not."""

    def __init__(self, eps: float = 1e-5, p: float = 0.0, hidden: int = 16, table: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, eps=eps)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)
        self.p = p
        self.register_buffer("table", torch.rand(WIDTH) if table else None)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        if self.table is not None:
            h = h * self.table.cos()
        return x + F.dropout(self.down(self.up(h).relu()), self.p)


class Stack(nn.Module):
    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return h.square().mean()


def folded(model: nn.Module, **inputs: Tensor) -> Folded:
    return fold(normalised(model.double(), inputs or {"x": torch.ones(6, 5, 4, dtype=torch.float64)}))


def kinds(found: Folded) -> list[str]:
    """Return the kind of each segment, as a letter in order of appearance."""
    letters: dict[str, str] = {}
    return [letters.setdefault(s.kind, chr(ord("a") + len(letters))) for s in found.segments]


def spelled(found: Folded) -> str:
    return "".join(kinds(found))


def test_equal_blocks_are_one_kind() -> None:
    found = folded(Stack([Block() for _ in range(5)]))
    assert spelled(found) == "a" + "b" * 5 + "c" or spelled(found) == "a" + "b" * 5
    assert [(u.length, u.count) for u in found.units if u.count > 1] == [(1, 5)]
    assert found.multiplicity(found.segments[1].kind) == 5


@pytest.mark.parametrize("other", [{"eps": 1e-6}, {"p": 0.1}, {"hidden": 24}, {"table": True}])
def test_blocks_that_differ_anywhere_differ_in_kind(other: dict[str, float]) -> None:
    found = folded(Stack([Block(), Block(**other), Block()]))  # type: ignore[arg-type]
    first, odd, last = (s.kind for s in found.segments[1:4])
    assert first == last != odd


class Renamed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.zz, self.aa, self.mm = self.norm, self.up, self.down
        del self.norm, self.up, self.down

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mm(self.aa(self.zz(x)).relu())


def test_names_play_no_part() -> None:
    found = folded(Stack([Block(), Renamed(), Block()]))
    assert len({s.kind for s in found.segments[1:4]}) == 1


def test_frozen_parameters_are_another_kind() -> None:
    blocks = [Block() for _ in range(3)]
    for p in blocks[1].parameters():
        p.requires_grad_(False)
    found = folded(Stack(blocks))
    first, odd, last = (s.kind for s in found.segments[1:4])
    assert first == last != odd


def test_alternating_stack_folds_to_a_pair() -> None:
    found = folded(Stack([Block(hidden=16 if i % 2 else 24) for i in range(8)]))
    assert len(set(kinds(found))) <= 4
    assert [(u.first, u.length, u.count) for u in found.units if u.count > 1] == [(1, 2, 4)]


def test_tables_of_each_layer_fold_and_stay_apart() -> None:
    found = folded(Stack([Block(table=True) for _ in range(4)]))
    layers = found.segments[1:5]
    assert len({s.kind for s in layers}) == 1
    assert len({s.prelude for s in layers}) == 4
    for i, layer in enumerate(layers):
        (table,) = [n for n in needed_prelude(found, [layer]) if n.op == "call_function"]
        assert found.traced.buffers[table.args[0].name] == f"blocks.{i}.table"  # type: ignore[union-attr]


def test_a_long_chain_without_gradient_folds() -> None:
    """Regression: the text of a chain was made recursively, which fails at a few hundred ops. Other lengths differ."""

    class Scaled(Block):
        def __init__(self, length: int) -> None:
            super().__init__(table=True)
            self.length = length

        def forward(self, x: Tensor) -> Tensor:
            scale = self.table
            for _ in range(self.length):
                scale = scale.cos()
            return super().forward(x * scale)

    found = folded(Stack([Scaled(300), Scaled(300), Scaled(300), Scaled(299), Scaled(300)]))
    first, second, other = (s.kind for s in found.segments[1:4])  # each scales the input of the next block
    assert first == second != other


def test_shared_parameters_fold() -> None:
    block = Block()
    found = folded(Stack([block] * 4))
    layers = found.segments[1:5]
    assert len({s.kind for s in layers}) == 1 and len({s.parameters for s in layers}) == 1


def test_sharing_within_a_block_is_structure() -> None:
    tied = Block(hidden=WIDTH)
    tied.down = tied.up
    found = folded(Stack([Block(hidden=WIDTH), tied, Block(hidden=WIDTH)]))
    first, odd, last = (s.kind for s in found.segments[1:4])
    assert first == last != odd


class Skips(nn.Module):
    """A U-Net: the first block's output is read a second time at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = skip = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return (h * skip).square().mean()


def test_skip_connection_crosses_every_cut() -> None:
    found = folded(Skips())
    skip = found.segments[0].sends[0]
    last = len(found.segments) - 1
    assert all(skip in crossing(found, place) for place in range(1, last))
    assert all(len(crossing(found, place)) == 2 for place in range(2, last))


class CrossBlock(nn.Module):
    """Self-attention, attention to a memory, and an MLP, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.q, self.kv = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.mlp = Block()

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + self.out[0](self.attend(*self.qkv(self.norms[0](x)).chunk(3, -1)))
        x = x + self.out[1](self.attend(self.q(self.norms[1](x)), *self.kv(memory).chunk(2, -1)))
        return self.mlp(x)


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.encoder = nn.ModuleList(Block() for _ in range(3))
        self.decoder = nn.ModuleList(CrossBlock() for _ in range(6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        memory = self.embed(x)
        for block in self.encoder:
            memory = block(memory)
        h = self.embed(y)
        for block in self.decoder:
            h = block(h, memory)
        return h.square().mean()


def test_decoder_layers_that_read_one_memory_fold() -> None:
    ones = torch.ones(6, 5, 4, dtype=torch.float64)
    found = folded(EncoderDecoder(), x=ones, y=torch.ones(6, 7, 4, dtype=torch.float64))
    assert any(u.count >= 4 and found.segments[u.first].name.startswith("decoder.") for u in found.units)
    memory = next(s for s in found.segments if s.name.startswith("encoder.2")).sends[-1]
    assert sum(memory in s.receives for s in found.segments) == 6


def test_segments_cover_main_in_order_and_nothing_twice() -> None:
    for model in (Stack([Block() for _ in range(3)]), Skips()):
        found = folded(model)
        nodes = [n for s in found.segments for n in s.nodes]
        order = {n: i for i, n in enumerate(found.traced.graph.graph.nodes)}
        assert [order[n] for n in nodes] == sorted({order[n] for n in nodes})
        assert found.loss in nodes
        covered = [i for u in found.units for i in range(u.first, u.last + 1)]
        assert covered == list(range(len(found.segments)))


def test_unused_parameters_are_listed() -> None:
    model = Stack([Block()])
    model.spare = nn.Parameter(torch.ones(3))
    found = folded(model)
    assert [found.traced.parameters[n.name] for n in found.unused_parameters] == ["spare"]


@pytest.mark.parametrize(
    ("text", "units"),
    [
        ("abababc", [(0, 2, 3), (6, 1, 1)]),
        ("eamamamh", [(0, 1, 1), (1, 2, 3), (7, 1, 1)]),
        ("aaaa", [(0, 1, 4)]),
        ("abcd", [(0, 1, 1), (1, 1, 1), (2, 1, 1), (3, 1, 1)]),
        ("aabaabaab", [(0, 3, 3)]),
        ("", []),
    ],
)
def test_units(text: str, units: list[tuple[int, int, int]]) -> None:
    assert list(find_units(list(text))) == [RepeatedUnit(*u) for u in units]


# ---- the hash of a graph ----


def hash_of(model: nn.Module, length: int = 5) -> str:
    return graph_hash(normalised(model.double(), {"x": torch.ones(6, length, 4, dtype=torch.float64)}))


def test_hash_tells_every_change() -> None:
    frozen = Stack([Block(), Block()])
    frozen.blocks[0].up.bias.requires_grad_(False)
    models = [
        Stack([Block(), Block()]),
        Stack([Block(), Block(), Block()]),
        Stack([Block(eps=1e-6), Block()]),
        Stack([Block(), Block(eps=1e-6)]),
        Stack([Block(p=0.1), Block()]),
        Stack([Block(p=0.2), Block()]),
        Stack([Block(hidden=24), Block()]),
        Stack([Block(table=True), Block()]),
        Stack([Renamed(), Block()]),
        frozen,
    ]
    hashes = [hash_of(m) for m in models]
    assert len(set(hashes)) == len(hashes)


def test_hash_does_not_depend_on_values_or_the_example() -> None:
    assert hash_of(Stack([Block()])) == hash_of(Stack([Block()]), length=7)
