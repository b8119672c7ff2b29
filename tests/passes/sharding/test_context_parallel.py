"""Context parallelism: splits follow from the rules; gathered tokens train like one process, the rest is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import autoptd
from autoptd.compile import program
from autoptd.errors import PlanError
from autoptd.models.nanogpt import GPTSizes, NanoGPT
from autoptd.passes.graph import op_call, op_name
from autoptd.passes.rules.lookup import op_of
from autoptd.passes.sharding.context_parallel import split_tokens
from autoptd.testing.parity import differences, train_alone, train_in_lockstep

WIDTH, VOCAB, TOKENS, SAMPLES = 8, 12, 8, 4


class Base(nn.Module):
    """Token embeddings, a mixing module of a subclass, and a linear."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.places = nn.Parameter(torch.randn(1, 32, WIDTH))
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def vectors(self, ids: Tensor) -> Tensor:
        return torch.tanh(self.mix(self.table(ids) + self.places[:, : ids.shape[1]]))


class FirstToken(Base):
    """Class of a sample from its first token, as in BERT."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.mix(self.vectors(ids)[:, 0]))), labels[:, 0])


class MeanToken(Base):
    """Tokens scaled by a gate that is computed from their average."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.vectors(ids)
        x = x * torch.sigmoid(self.mix(x.mean(1, keepdim=True)))
        logits = self.head(x)
        return F.cross_entropy(logits.transpose(1, 2), labels) + 0.1 * logits.square().mean()


class Shifted(Base):
    """Labels shifted by one token; the last logits of each sample have no label."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.vectors(ids))[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


class ShiftedTwice(Base):
    """Shifted logits that are read twice, so they are gathered."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.vectors(ids))[:, 1:]
        loss = F.cross_entropy(logits.transpose(1, 2), labels[:, :-1])
        return loss + 0.1 * logits.square().mean()


class WrittenOut(Base):
    """Attention as two products and a softmax, with a causal mask in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(32, 32, dtype=torch.bool).tril(), persistent=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.vectors(ids)
        q, k, v = self.mix(x), x * 0.5, x
        scores = (q @ k.transpose(1, 2)) / math.sqrt(WIDTH)
        scores = scores.masked_fill(~self.seen[: x.shape[1], : x.shape[1]], -1e9)
        return F.cross_entropy(self.head(x + scores.softmax(-1) @ v).transpose(1, 2), labels)


class Span(Base):
    """The token of each sample that begins an answer: a softmax over its tokens."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        first = labels[:, 0].clamp(0, TOKENS - 1)
        return F.cross_entropy(self.head(self.vectors(ids))[..., 0], first)


class Queries(Base):
    """Attention of three learnt queries over all tokens."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.vectors(ids)
        q = self.mix(self.places[:, :3]).expand(len(x), -1, -1)
        read = F.scaled_dot_product_attention(*(y.unflatten(-1, (2, -1)).transpose(1, 2) for y in (q, x, x * x)))
        return F.cross_entropy(self.head(read.transpose(1, 2).flatten(2).mean(1)), labels[:, 0])


class Sparse(Base):
    """Attention to three tokens each, written into a mask that is made like the tokens' numbers."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.vectors(ids)
        chosen = (self.mix(x) @ x.transpose(1, 2)).topk(3, -1).indices.to(torch.int32)
        hidden = chosen.new_ones((*x.shape[:2], x.shape[1]), dtype=torch.bool).scatter(-1, chosen.long(), False)
        read = F.scaled_dot_product_attention(*(y.unsqueeze(1) for y in (x, x, x * x)), attn_mask=~hidden[:, None])
        return F.cross_entropy(self.head(read.squeeze(1)).transpose(1, 2), labels)


class LearntMask(Base):
    """Attention with a bias that is computed from the keys, and has a gradient."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.vectors(ids)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        bias = torch.tanh(self.mix(x)).sum(-1)[:, None, None].expand(-1, -1, x.shape[1], -1).masked_fill(later, -1e9)
        read = F.scaled_dot_product_attention(*(y.unsqueeze(1) for y in (x, x, x * x)), attn_mask=bias)
        return F.cross_entropy(self.head(x + read.squeeze(1)).transpose(1, 2), labels)


class Pointwise(Base):
    """A linear written as a convolution whose kernel has one element, as in SqueezeBERT."""

    def __init__(self, kernel: int = 1, groups: int = 2) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, kernel, padding=kernel // 2, groups=groups)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x, conv = self.vectors(ids).transpose(1, 2), self.conv
        x = torch.tanh(F.conv1d(x, conv.weight, conv.bias, padding=conv.padding[0], groups=conv.groups))
        return F.cross_entropy(self.head(x.transpose(1, 2)).transpose(1, 2), labels)


class Neighbours(Pointwise):
    """A convolution that reads three tokens, and all channels of these."""

    def __init__(self) -> None:
        super().__init__(3, 1)


class ShortConv(Base):
    """A gated convolution of each channel over three tokens, before attention, as in LFM2."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH)
        self.split = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.vectors(ids)
        for _ in range(2):
            before, after, y = self.split(x).transpose(1, 2).chunk(3, 1)
            x = x + self.mix((after * self.conv(before * y)[..., : x.shape[1]]).transpose(1, 2))
            heads = x.unflatten(-1, (8, -1)).transpose(1, 2)
            x = x + F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(x).transpose(1, 2), labels)


class Looped(Base):
    """A loop over tokens, which a trace holds for one number of them."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.vectors(ids)
        last, states = x[:, 0], []
        for i in range(x.shape[1]):
            last = torch.tanh(self.mix(last + x[:, i]))
            states.append(last)
        return F.cross_entropy(self.head(torch.stack(states, 1)).transpose(1, 2), labels)


class Tabled(Base):
    """A check of the number of positions."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        if ids.shape[1] != TOKENS:
            raise ValueError("another length than that of the table")
        return F.cross_entropy(self.head(self.vectors(ids)).transpose(1, 2), labels)


class Running(Base):
    """A decayed cumulative sum over tokens for each head, whose decay is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.linspace(-1, 1, WIDTH))
        self.register_buffer("scale", torch.linspace(1, 2, WIDTH))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.vectors(ids).unflatten(-1, (WIDTH, 1))
        steps = torch.arange(x.shape[1])[None, :, None, None] * self.decay.sigmoid()[:, None] * self.scale[:, None]
        x = x * self.decay[:, None] + (x * steps.exp()).cumsum(1) * (-steps).exp()
        return F.cross_entropy(self.head(x.flatten(2)).transpose(1, 2), labels)


class Flattened(Base):
    """Tokens and features merged into one dim."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.vectors(ids)
        weights = x.flatten(1).softmax(1).view(x.shape)
        return F.cross_entropy(self.head(x * weights).transpose(1, 2), labels)


class Dropped(Base):
    """Dropout of rows of all tokens in the order of a sort."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.vectors(ids)
        order = x[..., 0].flatten().argsort()
        rows = F.dropout(x.flatten(0, 1)[order], 0.5, training=True)[order.argsort()]
        return F.cross_entropy(self.head(rows.view(x.shape)).transpose(1, 2), labels)


def batch() -> Mapping[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (SAMPLES, TOKENS), generator=draw)
    labels = ids.roll(-1, 1).masked_fill(torch.rand(ids.shape, generator=draw) < 0.3, -100)
    labels[:, 0] = ids[:, 0]
    return {"ids": ids, "labels": labels}


def traced(model: nn.Module) -> autoptd.TracedModel:
    return autoptd.trace(model.double(), inputs=dict(batch()), precision="fp64")


GATHERED = [
    FirstToken,
    MeanToken,
    Shifted,
    ShiftedTwice,
    WrittenOut,
    Span,
    Queries,
    Sparse,
    LearntMask,
    Pointwise,
    ShortConv,
    Running,
]


@pytest.mark.parametrize("model", GATHERED)
@pytest.mark.parametrize("mesh", [{"cp": 4}, {"cp": 2, "tp": 2, "pp": 2}], ids=str)
def test_what_is_gathered_trains_like_one_process(model: type[Base], mesh: dict[str, int]) -> None:
    source = traced(model())
    made = autoptd.parallelize(
        source,
        world=math.prod(mesh.values()),
        cluster="dgx-h100",
        batch=SAMPLES,
        precision="fp64",
        optimizer="sgd",
        optimizer_options={"lr": 0.1},
        fix={"micro": 2, **mesh},
    )
    batches = [dict(batch())] * 2
    found = train_in_lockstep(made, batches)
    expected = train_alone(source.model, batches, optimizer="sgd", optimizer_options={"lr": 0.1})
    assert found.losses == pytest.approx(expected.losses, rel=1e-12)
    assert found.norms == pytest.approx(expected.norms, rel=1e-12)
    assert not found.diverged
    wrong = differences(found.gradients, expected.gradients) | differences(found.state, expected.state)
    assert max(wrong.values()) < 1e-10, wrong


def test_each_node_carries_its_own_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of a rank's graph are made from those of the whole one, whose op has the sizes of all tokens."""
    seen: list[fx.Graph] = []
    cut = program.cut_tokens

    def kept(*args: Any) -> Any:
        found = cut(*args)
        seen.extend([args[0].traced.graph.graph, found[0].traced.graph.graph])
        return found

    monkeypatch.setattr(program, "cut_tokens", kept)
    model = NanoGPT(GPTSizes(vocab=VOCAB, max_seq=TOKENS, width=WIDTH, layers=1, heads=2))
    inputs = {"idx": batch()["ids"], "targets": batch()["labels"]}
    source = autoptd.trace(model.double(), inputs=inputs, precision="fp64")
    made = autoptd.parallelize(source, world=4, cluster="dgx-h100", batch=SAMPLES, fix={"cp": 2, "tp": 2, "micro": 2})
    assert made.program.files
    assert len(seen) == 2
    for graph in seen:
        carried = [node for node in graph.nodes if "op" in node.meta]
        assert carried and all(op_of(node).call == op_call(node) for node in carried)


def test_shifted_logits_are_not_gathered() -> None:
    for model, gathers in ((Shifted, False), (ShiftedTwice, True)):
        plan = {"world": 2, "batch": SAMPLES, "precision": "fp64", "fix": {"cp": 2}}
        files = autoptd.parallelize(traced(model()), cluster="dgx-h100", **plan).program.files
        assert any("cp.all_gather" in text for text in files.values()) is gathers, model


@pytest.mark.parametrize(("model", "gathers"), [(Queries, 2), (Pointwise, 0)])
def test_tokens_are_gathered_only_by_what_sums_them(model: type[Base], gathers: int) -> None:
    """Keys and values are gathered for queries of another length; a convolution of single tokens needs none."""
    files = autoptd.parallelize(
        traced(model()), world=2, cluster="dgx-h100", batch=SAMPLES, precision="fp64", fix={"cp": 2}
    ).program.files
    assert sum(text.count("cp.all_gather") for text in files.values()) == gathers


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (Neighbours, "conv1d mixes positions: it needs all tokens of transpose"),
        (Flattened, "softmax mixes positions: it needs all tokens of flatten"),
        (Dropped, "dropout of rows in another order than that of tokens: its mask would depend on cp"),
    ],
)
def test_what_mixes_positions_is_refused(model: type[Base], says: str) -> None:
    with pytest.raises(PlanError, match=f"cp 2: {says}") as error:
        split_tokens(traced(model()).folded, 2, TOKENS)
    assert "test_context_parallel.py" in error.value.where


@pytest.mark.parametrize(
    ("model", "line"), [(Looped, "for i in range(x.shape[1]):"), (Tabled, "if ids.shape[1] != TOKENS:")]
)
def test_a_length_that_is_a_number_is_refused_with_the_line_that_needs_it(model: type[Base], line: str) -> None:
    with pytest.raises(PlanError, match="cp 2 cuts a sequence, but the model runs at the length of the example") as e:
        autoptd.plan(traced(model()), world=2, cluster="dgx-h100", batch=SAMPLES, precision="fp64", fix={"cp": 2})
    assert "test_context_parallel.py" in e.value.where and line in e.value.where


def test_a_causal_sequence_is_cut_into_two_chunks_a_rank() -> None:
    model = NanoGPT(GPTSizes(vocab=12, width=8, heads=2, layers=2, max_seq=16))
    ids = torch.zeros(2, 8, dtype=torch.long)
    folded = autoptd.trace(model, inputs={"idx": ids, "targets": ids}, precision="fp32").folded
    splits = split_tokens(folded, 2, 8)
    assert splits.zigzag and splits.chunks == 4
    assert not split_tokens(folded, 2, 8, "ulysses").zigzag
    texts = {op_name(n): str(s) for n, s in splits.strategies.items()}
    assert texts["embedding"] == "Bp, S0 -> S0"  # of the position embedding, the second of the two
    assert texts["scaled_dot_product_attention"] == "S2, S2, S2 -> S2 [ring]"
    assert texts["layer_norm"] == "S1, Bp -> S1"
    assert texts["cross_entropy"] == "S1, S1 -> P"
    assert texts["div"] == "P, B -> P"
    with pytest.raises(PlanError, match="a sequence of 6 tokens is not divisible by 4, the number of chunks of cp 2"):
        split_tokens(folded, 2, 6)
