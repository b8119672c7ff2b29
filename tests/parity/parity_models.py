"""Models for parity, tiny, each with something that distributed training gets wrong; all in float64, train mode.

`MODELS[name]()` gives a `Case`: the module with random values everywhere (a zero bias hides what happens to it), a
batch of 16 samples with ragged labels, and the loss where `forward` gives none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoptd.models.nanogpt import GPTSizes, NanoGPT

SAMPLES, TOKENS, VOCAB, WIDTH = 16, 8, 64, 32


@dataclass(frozen=True)
class Case:
    """A model and a global batch to train it on."""

    model: nn.Module
    batch: Mapping[str, Tensor]
    loss: Callable[..., Tensor] | None = None


def randomised(model: nn.Module) -> nn.Module:
    """In float64, every parameter moved off its initial value."""
    model = model.double().train()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return model


def tokens(ignore: int = -100) -> tuple[Tensor, Tensor]:
    """Ids and labels [samples, tokens]; no two neighbouring samples have as many valid labels, some have none."""
    ids = torch.randint(0, VOCAB, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(2))
    labels = ids.clone()
    for i in range(SAMPLES):
        labels[i, : (i * 5) % (TOKENS + 1)] = ignore
    labels[2:4] = ignore  # a microbatch without any, even of two samples
    return ids, labels


def float64_loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """The causal loss of transformers, but not in float32."""
    return F.cross_entropy(logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1), ignore_index=-100)


def gpt2(*, dropout: float = 0.0) -> Case:
    """Tied embeddings, Conv1D; its loss is computed in float32."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB,
        n_embd=WIDTH,
        n_layer=4,
        n_head=8,
        n_positions=16,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        resid_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
    )
    ids, labels = tokens()
    return Case(randomised(GPT2LMHeadModel(config)), {"input_ids": ids, "labels": labels})


def llama(kv_heads: int = 4) -> Case:
    """Grouped-query attention, rotary positions, norms in float32; the loss in float64."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=kv_heads,
        max_position_embeddings=16,
    )
    model = LlamaForCausalLM(config)
    model.loss_function = float64_loss
    ids, labels = tokens()
    return Case(randomised(model), {"input_ids": ids, "labels": labels})


def mixtral() -> Case:
    """Experts: rows that are sorted, multiplied in groups and put back; the router in float32; the loss in float64."""
    from transformers import MixtralConfig, MixtralForCausalLM
    from transformers.integrations import moe

    moe._can_use_grouped_mm = lambda *_: False  # torch's kernel knows no float64; transformers' own loop does
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=16,
    )
    model = MixtralForCausalLM(config)
    model.loss_function = float64_loss
    ids, labels = tokens()
    return Case(randomised(model), {"input_ids": ids, "labels": labels})


def t5() -> Case:
    """An encoder that all layers of the decoder read, position biases that all layers add, labels that are shifted."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCAB,
        d_model=WIDTH,
        d_kv=4,
        d_ff=64,
        num_layers=1,
        num_decoder_layers=2,
        num_heads=8,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=6,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    ids, labels = tokens()
    return Case(randomised(T5ForConditionalGeneration(config)), {"input_ids": ids.flip(1), "labels": labels})


def mpt() -> Case:
    """Position biases from the end of a table, as long as the longest sequence: more tokens cannot be."""
    from transformers import MptConfig, MptForCausalLM

    torch.manual_seed(0)
    config = MptConfig(d_model=WIDTH, n_heads=8, n_layers=2, vocab_size=VOCAB, max_seq_len=2 * TOKENS)
    ids, labels = tokens()
    return Case(randomised(MptForCausalLM(config)), {"input_ids": ids, "labels": labels})


def bert(*, dropout: float = 0.0) -> Case:
    """Padding masks, ragged labels, a tied decoder with a bias, a parameter that is not used (the pooler has none)."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=8,
        max_position_embeddings=16,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    ids, labels = tokens()
    mask = torch.ones_like(ids)
    for i in range(SAMPLES):
        mask[i, TOKENS - (i * 3) % TOKENS :] = 0
    return Case(
        randomised(BertForMaskedLM(config)),
        {"input_ids": ids, "labels": labels.masked_fill(mask == 0, -100), "attention_mask": mask},
    )


def vit() -> Case:
    """A convolution, a class token that is expanded and prepended."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=8,
        image_size=16,
        patch_size=8,
        num_labels=10,
    )
    generator = torch.Generator().manual_seed(2)
    pixels = torch.randn(SAMPLES, 3, 16, 16, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 10, (SAMPLES,), generator=generator)
    return Case(randomised(ViTForImageClassification(config)), {"pixel_values": pixels, "labels": labels})


def nanogpt(*, dropout: float = 0.0) -> Case:
    """Fused qkv; a tied head; the loss from `forward`, ignoring -1."""
    torch.manual_seed(0)
    sizes = GPTSizes(vocab=VOCAB, max_seq=16, width=WIDTH, layers=4, heads=8, dropout=dropout, bias=True)
    ids, labels = tokens(ignore=-1)
    return Case(randomised(NanoGPT(sizes)), {"idx": ids, "targets": labels})


class OddMLP(nn.Module):
    """Prime widths: nothing divides by any tp."""

    def __init__(self) -> None:
        super().__init__()
        widths = (5, 13, 7, 17, 11, 19, 13, 7, 3)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return F.cross_entropy(self.layers[-1](x), y)


def odd_mlp() -> Case:
    """Nothing here can be split."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (SAMPLES,), generator=generator)
    y[2:5] = -100
    return Case(randomised(OddMLP()), {"x": x, "y": y})


class Level(nn.Module):
    """As many residual layers as keep a U-Net's skip connections apart."""

    def __init__(self, depth: int = 9) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return x


class SkipMLP(nn.Module):
    """A U-Net of perceptrons: each level going down also feeds its counterpart going up."""

    def __init__(self, levels: int = 2) -> None:
        super().__init__()
        self.stem = nn.Linear(8, WIDTH)
        self.down = nn.ModuleList(Level() for _ in range(levels))
        self.join = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(levels))
        self.up = nn.ModuleList(Level() for _ in range(levels))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        kept = []
        for level in self.down:
            x = level(x)
            kept.append(x)
        for join, level in zip(self.join, self.up, strict=True):
            x = level(torch.tanh(join(torch.cat((x, kept.pop()), -1))))
        return self.head(x)


def squared_error(out: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """A loss that is handed in: its count is that of the elements."""
    return F.mse_loss(out, inputs["x"].flip(-1))


def skip_mlp() -> Case:
    """Relays over many stages, a regression, and a batch that is one sample short."""
    torch.manual_seed(0)
    x = torch.randn(SAMPLES - 1, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return Case(randomised(SkipMLP()), {"x": x}, squared_error)


class Layer(nn.Module):
    """A residual perceptron with a buffer of its own."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH) + index)
        self.register_buffer("shift", torch.full((WIDTH,), 0.01 * index), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x) * self.scale + self.shift)))


class Oddities(nn.Module):
    """A parameter for all layers, one that is frozen, one that nobody reads, a module called twice, many buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH, padding_idx=3)
        self.layers = nn.ModuleList(Layer(i) for i in range(4))
        self.everywhere = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3, 5))
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.twice(self.table(ids))
        for layer in self.layers:
            x = layer(x) + torch.tanh(self.everywhere(x)) * self.gain
        x = self.twice(self.frozen(x))
        logits = self.head(x)
        loss = F.cross_entropy(logits.transpose(1, 2), labels)
        return {"loss": loss + 0.01 * logits.pow(2).mean(), "logits": logits}


def oddities() -> Case:
    """See `Oddities`; two terms in the loss, with counts of their own."""
    torch.manual_seed(0)
    ids, labels = tokens()
    return Case(randomised(Oddities()), {"ids": ids, "labels": labels})


class FoldedLayer(nn.Module):
    """Drops where a dim counts samples among others, on either side of them, and where none does."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        rows = F.dropout(x.reshape(b * s, h), 0.2)
        up = F.dropout(torch.tanh(self.up(rows)), 0.2)
        heads = up.view(b, s, 8, h // 4).permute(2, 1, 0, 3)
        heads = F.dropout(heads.reshape(8 * s, b, h // 4), 0.2).view(8, s, b, h // 4)
        heads = F.dropout(heads.permute(1, 2, 0, 3).reshape(s * b, 8, h // 4), 0.2).reshape(s, b, 2 * h)
        return x + self.down(heads).transpose(0, 1) * F.dropout(self.gain, 0.2)


class Folded(nn.Module):
    """See `FoldedLayer`; a dropout of a table, and one of a number per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(FoldedLayer() for _ in range(6))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = F.embedding(ids, F.dropout(self.table.weight, 0.1))
        for layer in self.layers:
            x = layer(x)
        x = x * F.dropout(x.mean((1, 2)), 0.5)[:, None, None]
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def folded_dropout() -> Case:
    """See `Folded`; one sample short of a round number."""
    torch.manual_seed(0)
    ids, labels = tokens()
    return Case(randomised(Folded()), {"ids": ids[1:], "labels": labels[1:]})


class WrittenLayer(nn.Module):
    """Attention as two products and a softmax, whose probabilities are dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = (t.view(b, s, 4, h // 4).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        weights = F.dropout(torch.softmax(q @ k.transpose(-2, -1) / (h // 4) ** 0.5, -1), 0.2)
        return x + F.dropout(self.out((weights @ v).transpose(1, 2).reshape(b, s, h)), 0.2)


class Written(nn.Module):
    """See `WrittenLayer`; the last dropout is of a mean over all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(WrittenLayer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = F.dropout(self.table(ids), 0.2)
        for layer in self.layers:
            x = layer(x)
        x = x + F.dropout(x.mean(1), 0.5)[:, None]
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def written_dropout() -> Case:
    """See `Written`: over cp ranks keys and values are gathered before what is dropped."""
    torch.manual_seed(0)
    ids, labels = tokens()
    return Case(randomised(Written()), {"ids": ids, "labels": labels})


class OneLayerManyTimes(nn.Module):
    """As in ALBERT: every layer is the same module."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.layer = Layer(0)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids)
        for _ in range(6):
            x = self.layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def one_layer() -> Case:
    """All parameters of the layers are held by every stage."""
    torch.manual_seed(0)
    ids, labels = tokens()
    return Case(randomised(OneLayerManyTimes()), {"ids": ids, "labels": labels})


class AwkwardLayer(nn.Module):
    """Attributes that an emitted block has too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.second = nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.drop(self.second(torch.tanh(self.first(x)))))


class Awkward(nn.Module):
    """Names that emitted code wants for itself: inputs, sizes, attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(AwkwardLayer() for _ in range(4))
        self.counts = nn.Linear(WIDTH, WIDTH)
        self.stage = nn.Linear(WIDTH, VOCAB)

    def forward(self, input: Tensor, b: Tensor, x: Tensor, device: Tensor) -> Tensor:
        s = self.calls(input) * x.unsqueeze(-1)
        for block in self.blocks:
            s = block(s)
        s = self.stage(self.counts(s) + device[:, None, :])
        return F.cross_entropy(s.flatten(0, 1), b.flatten())


def awkward() -> Case:
    """See `Awkward`."""
    torch.manual_seed(0)
    ids, labels = tokens()
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(SAMPLES, TOKENS, generator=generator, dtype=torch.float64)
    device = torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    return Case(randomised(Awkward()), {"input": ids, "b": labels, "x": x, "device": device})


def llama_2_kv() -> Case:
    """Fewer key heads than most tp sizes."""
    return llama(kv_heads=2)


MODELS: dict[str, Callable[[], Case]] = {
    "gpt2": gpt2,
    "llama": llama,
    "llama_2_kv": llama_2_kv,
    "bert": bert,
    "vit": vit,
    "nanogpt": nanogpt,
    "odd_mlp": odd_mlp,
    "skip_mlp": skip_mlp,
    "oddities": oddities,
    "one_layer": one_layer,
    "awkward": awkward,
}

OFTEN = ("gpt2", "llama", "bert", "vit", "nanogpt")  # trained in every way; the others in some

# Held to on one mesh: what they add to the others shows there.
FEW_MESHES: dict[str, Callable[[], Case]] = {"mixtral": mixtral, "t5": t5}

# Held to once, by a test of its own.
WITH_TABLES: dict[str, Callable[[], Case]] = {"mpt": mpt}

DROPOUT: dict[str, Callable[[], Case]] = {
    "gpt2_dropout": lambda: gpt2(dropout=0.2),
    "nanogpt_dropout": lambda: nanogpt(dropout=0.2),
    "bert_dropout": lambda: bert(dropout=0.2),
    "folded_dropout": folded_dropout,
    "written_dropout": written_dropout,
}
