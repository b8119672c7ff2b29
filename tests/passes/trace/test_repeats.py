"""Equal modules are traced once: the graph equals that of a full trace, down to names and lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from autoptd.errors import AutoptdError
from autoptd.passes.fold import Folded, fold, graph_hash
from autoptd.passes.graph import module_stack, substitute
from autoptd.passes.losses.update_form import buffer_updates
from autoptd.passes.normalise.normalise import normalise
from autoptd.passes.trace import trace as tracing
from autoptd.passes.trace.loss import Objective
from autoptd.passes.trace.repeats import REPEAT
from autoptd.passes.trace.trace import trace
from autoptd.passes.trace.traced import Traced

WIDTH = 8


@dataclass
class Calls:
    """Number of calls that the last trace skipped."""

    count: int = 0


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    found = Calls()
    unfold = tracing.expand_repeats

    def counting(graph: fx.Graph, *rest: Any) -> None:
        found.count = sum(n.target is REPEAT for n in graph.nodes)
        unfold(graph, *rest)
        assert not [n for n in graph.nodes if "autoptd_trace" in str(n.target)]

    monkeypatch.setattr(tracing, "expand_repeats", counting)
    yield found


def text(traced: Traced) -> list[str]:
    """Return everything that later passes may read of a graph, a line per node."""
    number = {n: i for i, n in enumerate(traced.graph.graph.nodes)}
    lines = []
    for n in traced.graph.graph.nodes:
        wired = substitute((n.args, tuple(n.kwargs.items())), lambda o: f"%{number[o]}")
        name = n.name if n.op == "placeholder" else n.target
        lines.append(f"{n.op} {name} {wired} {n.meta.get('info')} {module_stack(n)} {n.meta.get('stack_trace')}")
    return lines


def structure(folded: Folded) -> list[object]:
    traced = folded.traced
    segments = [(s.kind, s.name, [traced.parameters[p.name] for p in s.parameters]) for s in folded.segments]
    return [*segments, *folded.units, [n.name for n in folded.unused_parameters], len(folded.prelude)]


def tables(traced: Traced) -> list[object]:
    named = [traced.parameters, traced.buffers, traced.inputs, traced.sizes, traced.example, traced.aliases]
    return [*named, traced.frozen, traced.transient, {n: x.tolist() for n, x in traced.constants.items()}]


def assert_as_in_full(model: nn.Module, inputs: Mapping[str, Tensor], **options: Any) -> Traced:
    """Assert that both ways of tracing give one graph; return the trace with repeats."""
    once, full = (trace(model, inputs, repeats=repeats, **options) for repeats in (True, False))
    assert len(once.symbol) == len(full.symbol)
    normalise(once), normalise(full)
    for a, b in zip(text(once), text(full), strict=True):
        assert a == b
    assert tables(once) == tables(full)
    assert structure(fold(once)) == structure(fold(full))
    assert graph_hash(once) == graph_hash(full)
    return once


class Mlp(nn.Module):
    def __init__(self, hidden: int = 16, p: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.down(self.up(x).relu()))


class Block(nn.Module):
    """Residual MLP, x + mlp(norm(x)); `index` is an unused argument."""

    def __init__(self, index: int = 0, p: float = 0.0) -> None:
        super().__init__()
        self.index = index
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp(p=p)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Stack(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Linear(4, WIDTH), nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return h.square().mean()


def batch() -> dict[str, Tensor]:
    return {"x": torch.ones(6, 5, 4)}


def stack(block: Callable[[int], nn.Module], count: int = 6) -> Stack:
    return Stack([block(i) for i in range(count)])


def test_equal_blocks_are_run_twice(calls: Calls) -> None:
    assert_as_in_full(stack(Block), batch())
    assert calls.count == 4


def test_no_copies_of_arguments_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's tracer stores copies of the arguments of ops whose strides may matter. Seen in 2.13.0."""
    stored = []
    monkeypatch.setattr(tracing, "expand_repeats", lambda graph, *_: stored.extend(n.meta for n in graph.nodes))
    tracing._Exporter(stack(Block), {"x": ((6, 5, 4), torch.float32)}, Objective(), "fp32", {}).run(repeats=True)
    assert stored and not any("eager_input_vals" in meta for meta in stored)


@pytest.mark.parametrize("precision", ["bf16", "fp64"])
def test_in_any_precision(calls: Calls, precision: str) -> None:
    assert_as_in_full(stack(Block), batch(), precision=precision)


def test_dropout_stays_apart(calls: Calls) -> None:
    assert_as_in_full(stack(lambda i: Block(i, p=0.1)), batch())


class Scaled(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (self.index + 1)


class Every(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu() if self.index % 2 else super().forward(x)


class Named(Block):
    """Block that passes its index to C++ code of torch, where a subclass of int would go unnoticed."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.full((), self.index, dtype=x.dtype)


@pytest.mark.parametrize("kind", [Scaled, Every, Named])
def test_a_block_that_reads_its_number_is_its_own(kind: type[Block], calls: Calls) -> None:
    assert_as_in_full(stack(kind), batch())
    assert calls.count == 4  # of the MLPs, which have no index


class Alternating(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.kind = "local" if index % 4 < 2 else "global"

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.kind == "local" else super().forward(x).tanh()


def test_blocks_of_two_kinds_are_two(calls: Calls) -> None:
    assert_as_in_full(stack(Alternating, 8), batch())
    assert calls.count == 4 + 2  # two blocks of each kind are run; of their MLPs, which are all equal, two


def test_blocks_that_differ_in_shape_or_flags(calls: Calls) -> None:
    model = stack(Block, 9)
    model.blocks[3].mlp = Mlp(24)
    model.blocks[5].norm.eps = 1e-3
    model.blocks[6].mlp.down.weight.requires_grad_(False)
    assert_as_in_full(model, batch())


class Wired(Stack):
    """Skips a block, gives others numbers and masks of their own, and joins ends as a U-Net does."""

    def forward(self, x: Tensor) -> Tensor:
        h, left = self.embed(x), []
        for i, block in enumerate(self.blocks[: len(self.blocks) // 2]):
            if i != 1:
                h = block(h, 0.5)
            left.append(h)
        for i, block in enumerate(self.blocks[len(self.blocks) // 2 :]):
            h = block(h + left.pop(), 0.5 * (i // 2), mask=x.sum(-1, keepdim=True) > i)
        return h.square().mean()


class Weighted(Block):
    def forward(self, x: Tensor, weight: float, mask: Tensor | None = None) -> Tensor:
        y = super().forward(x) * weight
        return y if mask is None else torch.where(mask, y, x)


def test_what_the_parent_does_with_blocks(calls: Calls) -> None:
    assert_as_in_full(Wired([Weighted(i) for i in range(12)]), batch())
    assert calls.count == 3 + 6  # blocks with the weight 0.5 and no mask; MLPs of blocks that are run


class Numbering(Stack):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for i, block in enumerate(self.blocks):
            block.gain = float(i // 3)
            h = block(h)
        return h.square().mean()


class Gained(Block):
    gain = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


def test_attributes_that_the_parent_sets(calls: Calls) -> None:
    assert_as_in_full(Numbering([Gained(i) for i in range(5)]), batch())


class Counting(Block):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Counting.calls = Counting.calls % 6 + 1  # of six blocks: each pass counts anew
        return super().forward(x) * Counting.calls


def test_what_differs_from_call_to_call_is_traced_in_full() -> None:
    Counting.calls = 0
    traced = trace(stack(Counting), batch())
    factors = [n.args[1] for n in traced.graph.graph.nodes if n.target is torch.ops.aten.mul.Tensor]
    assert factors == [1, 2, 3, 4, 5, 6]


class Clock:
    time = 0


class Ticking(Block):
    """Blocks with a shared counter: the first calls are equal."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def forward(self, x: Tensor) -> Tensor:
        self.clock.time = self.clock.time % 6 + 1  # of six blocks
        return super().forward(x) * (self.clock.time // 4)


def test_objects_that_blocks_change_are_noticed() -> None:
    clock = Clock()
    assert_as_in_full(Stack([Ticking(clock) for _ in range(6)]), batch())


class Remembering(Block):
    """Blocks that share a list: each reads what the one before it left there."""

    def __init__(self, seen: list[Tensor]) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return super().forward(x) + self.seen[0]


class Forgetful(Stack):
    def forward(self, x: Tensor) -> Tensor:
        self.blocks[0].seen.clear()
        return super().forward(x)


def test_state_that_blocks_share_is_traced_in_full(calls: Calls) -> None:
    seen: list[Tensor] = []
    assert_as_in_full(Forgetful([Remembering(seen) for _ in range(5)]), batch())


class Collecting(Block):
    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        seen.append(super().forward(x))
        return seen[-1]


class Collector(Stack):
    def forward(self, x: Tensor) -> Tensor:
        h, total = self.embed(x), 0.0
        for block in self.blocks:
            seen: list[Tensor] = []
            h = block(h, seen)
            total = total + seen[0].square().mean()
        return total


def test_arguments_that_blocks_change_are_traced_in_full(calls: Calls) -> None:
    assert_as_in_full(Collector([Collecting(i) for i in range(5)]), batch())


class Outputs(Block):
    """Returns a dict of tensors, numbers and its arguments."""

    def forward(self, x: Tensor, bias: Tensor | None = None) -> dict[str, Any]:
        y = super().forward(x)
        bias = y.mean(-1, keepdim=True) if bias is None else bias
        return {"y": (y, y.detach()), "bias": bias, "none": None, "number": 3, "again": y}


class Passing(Stack):
    def forward(self, x: Tensor) -> Tensor:
        h, bias, total = self.embed(x), None, 0.0
        for block in self.blocks:
            out = block(h, bias)
            assert out["again"] is out["y"][0] and out["none"] is None
            assert out["y"][0].requires_grad and not out["y"][1].requires_grad
            h, bias = out["y"][0] * out["number"] + out["bias"], out["bias"]
            total = total + out["y"][1].mean()
        return h.square().mean() + total


def test_results_of_any_form(calls: Calls) -> None:
    assert_as_in_full(Passing([Outputs(i) for i in range(6)]), batch())
    assert calls.count == 3 + 1


class Shared(Stack):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for _ in range(6):
            h = self.blocks[0](h)
        return h.square().mean()


def test_one_module_called_often(calls: Calls) -> None:
    assert_as_in_full(Shared([Block()]), batch())
    assert calls.count >= 3


def test_modules_of_two_names(calls: Calls) -> None:
    one, other = Block(0), Block(1)
    assert_as_in_full(Stack([one, other, one, Block(2), other, Block(3)]), batch())


def test_parameters_tied_across_blocks_and_outside(calls: Calls) -> None:
    model = stack(Block, 7)
    model.blocks[4].mlp.up.weight = model.blocks[1].mlp.up.weight
    model.blocks[5].mlp.up.weight = model.blocks[5].mlp.down.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
    model.blocks[5].mlp.up.bias = model.blocks[2].norm.bias
    model.blocks[6].norm.weight = model.embed.bias
    assert_as_in_full(model, batch())


class Tabled(Block):
    """Block with its own table, a constant, and a part without gradient."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("table", torch.full((WIDTH,), float(index)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.table.cos() + x.detach().mean((1, 2), keepdim=True)
        return super().forward(x) * scale


def test_buffers_and_parts_without_gradient(calls: Calls) -> None:
    traced = assert_as_in_full(stack(Tabled), batch())
    assert len(traced.buffers) == 6
    assert calls.count == 4


class Constant(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.tensor([0.5] * WIDTH)


def test_constants_are_each_blocks_own(calls: Calls) -> None:
    traced = assert_as_in_full(stack(Constant), batch())
    assert len(traced.constants) == 6


class Frozen(Stack):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        with torch.no_grad():
            t = h
            for block in self.blocks:
                t = block(t)
        for block in self.blocks:
            h = block(h)
        return (h - t).square().mean()


def test_a_teacher_without_gradients(calls: Calls) -> None:
    assert_as_in_full(Frozen([Block(i) for i in range(4)]), batch())


class Sized(Block):
    """Takes and returns a size; views by the sizes of its argument."""

    def forward(self, x: Tensor, rows: int) -> tuple[Tensor, int]:
        y = super().forward(x.reshape(rows * x.shape[1], WIDTH)).view(x.shape)
        return y.transpose(0, 1).contiguous().transpose(0, 1), x.shape[0]


class Sizes(Stack):
    def forward(self, x: Tensor) -> Tensor:
        h, rows = self.embed(x), x.shape[0]
        for block in self.blocks:
            h, rows = block(h, rows)
        return h.square().mean() * rows


def test_sizes_in_and_out(calls: Calls) -> None:
    assert_as_in_full(Sizes([Sized(i) for i in range(5)]), batch())
    assert calls.count == 3


class Writing(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y[:, 0] = 0.0
        return y.add_(1.0)


class Overwriting(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(super().forward(x).tanh())


class Silent(Block):
    def forward(self, x: Tensor) -> None:
        x.mul_(super().forward(x).tanh())


class Ignoring(Stack):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            block(h)
        return h.square().mean()


class Adding(Stack):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
            h += 1.0
        return h.square().mean()


def test_writes_in_place(calls: Calls) -> None:
    assert_as_in_full(stack(Writing, 4), batch())
    assert_as_in_full(stack(Overwriting, 4), batch())
    assert_as_in_full(Ignoring([Silent(i) for i in range(4)]), batch())
    assert_as_in_full(Adding([Block(i) for i in range(5)]), batch())


class Statistics(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1.0)
        return super().forward(x)


class Replacing(Statistics):
    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1.0
        return Block.forward(self, x)


class Rows(Statistics):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen[1] += x.sum()
            self.seen.mul_(0.5)
        return Block.forward(self, x)


@pytest.mark.parametrize("kind", [Statistics, Replacing, Rows])
def test_every_block_updates_its_own_buffer(kind: type[Block], calls: Calls) -> None:
    assert_as_in_full(stack(kind), batch())
    traced = normalise(trace(stack(kind), batch()))
    updated = [traced.buffers[name] for name in buffer_updates(traced.graph).values]
    assert sorted(updated) == [f"blocks.{i}.seen" for i in range(len(updated))] and len(updated) > 2


def test_hooks_run_for_every_block(calls: Calls) -> None:
    model = stack(Block)
    for i, block in enumerate(model.blocks):
        block.mlp.up.register_forward_hook(lambda module, args, out, i=i: out * i)
    assert_as_in_full(model, batch())


def test_hooks_that_a_parent_installs(calls: Calls) -> None:
    class Hooking(Stack):
        def forward(self, x: Tensor) -> Tensor:
            seen: list[Tensor] = []
            hook = lambda module, args, out: seen.append(out)  # noqa: E731
            handles = [block.mlp.register_forward_hook(hook) for block in self.blocks]
            y = super().forward(x) + torch.stack(seen).square().mean()
            for handle in handles:
                handle.remove()
            return y

    assert_as_in_full(Hooking([Block(i) for i in range(5)]), batch())


class Grouped(nn.Module):
    """Equal modules inside equal modules."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.experts = index, nn.ModuleList([Block(i) for i in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([expert(x) for expert in self.experts]).mean(0)


def test_equal_modules_inside_of_equal_modules(calls: Calls) -> None:
    assert_as_in_full(stack(Grouped), batch())
    assert calls.count == 2 + 4 + 4  # experts of the first group, those of the second, groups


def test_a_containers_items(calls: Calls) -> None:
    assert_as_in_full(Stack([nn.Sequential(*[Block(i) for i in range(3)]) for _ in range(4)]), batch())


def test_the_model_and_its_classes_are_left_alone() -> None:
    model = stack(Block)
    kinds = [type(m) for m in model.modules()]
    members = dict(vars(Block))
    trace(model, batch())
    assert [type(m) for m in model.modules()] == kinds
    assert dict(vars(Block)) == members


class Typed(Block):
    """Asks for the type of its own inner module, and of itself."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.inner = Block(index)

    def forward(self, x: Tensor) -> Tensor:
        ours = type(self) is Typed and type(self.inner) is Block
        return self.inner(x) if ours else super().forward(x)


def test_a_forward_that_asks_for_types_runs_as_the_model_does(calls: Calls) -> None:
    traced = assert_as_in_full(stack(Typed), batch())
    assert calls.count
    used = [module_stack(n) for n in traced.graph.graph.nodes if n.op == "call_function"]
    assert any("inner" in str(path) for path in used)


SMALL = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 64}
GROUPED = {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8}


@pytest.mark.parametrize(
    ("name", "config", "repeated"),
    [
        ("Llama", GROUPED, 2),
        ("Gemma2", {**GROUPED, "num_hidden_layers": 6, "sliding_window": 8}, 2),
        ("Bert", {**SMALL, "intermediate_size": 48}, 2),
        ("Albert", {**SMALL, "num_hidden_layers": 5, "intermediate_size": 48, "embedding_size": 16}, 2),
    ],
)
def test_hugging_face_models(name: str, config: dict[str, Any], repeated: int, calls: Calls) -> None:
    import transformers

    task = "ForMaskedLM" if "ert" in name else "ForCausalLM"
    with torch.device("meta"):
        model = getattr(transformers, name + task)(getattr(transformers, name + "Config")(**config))
    ids = {n: torch.empty(2, 16, dtype=torch.int64, device="meta") for n in ("input_ids", "labels")}
    assert_as_in_full(model, ids, precision="bf16")
    assert calls.count >= repeated


class Failing(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.index < 4 else x @ x


def test_an_error_names_the_block_that_fails() -> None:
    with pytest.raises(AutoptdError) as error:
        trace(stack(Failing), batch())
    assert "blocks.4 (test_repeats.py:" in str(error.value) and "x @ x" in str(error.value)
