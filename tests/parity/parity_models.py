"""Tiny models for parity, each with a feature that distributed training gets wrong; all in float64, train mode.

`MODELS[name]()` gives a `Case`: the module with random values everywhere (a zero bias would hide its mistreatment),
a batch of 16 samples with ragged labels, and the loss if `forward` gives none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
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
    """Return the model in float64, every parameter moved off its initial value."""
    model = model.double().train()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return model


def tokens(ignore: int = -100) -> tuple[Tensor, Tensor]:
    """Return ids and labels [samples, tokens]; neighbouring samples differ in the number of valid labels; some have
    none."""
    ids = torch.randint(0, VOCAB, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(2))
    labels = ids.clone()
    for i in range(SAMPLES):
        labels[i, : (i * 5) % (TOKENS + 1)] = ignore
    labels[2:4] = ignore  # a microbatch of two samples without any valid label
    return ids, labels


def float64_loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """Causal loss of transformers, without its cast to float32."""
    return F.cross_entropy(logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1), ignore_index=-100)


def gpt2(*, dropout: float = 0.0) -> Case:
    """GPT-2: tied embeddings, Conv1D; its loss is computed in float32."""
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
    """Llama: grouped-query attention, rotary positions, norms in float32; the loss in float64."""
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
    """Mixtral: rows sorted by expert, multiplied in groups and put back; the router in float32; the loss in float64."""
    from transformers import MixtralConfig, MixtralForCausalLM

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
    return mixture(MixtralForCausalLM, config)


def mixture(model_class: Callable[[Any], Any], config: Any) -> Case:
    """Return a mixture of experts of transformers, with its loss in float64."""
    from transformers.integrations import moe

    moe._can_use_grouped_mm = lambda *_: False  # torch's kernel has no float64; use transformers' own loop
    torch.manual_seed(0)
    model = model_class(config)
    model.loss_function = float64_loss
    ids, labels = tokens()
    return Case(randomised(model), {"input_ids": ids, "labels": labels})


def mixtral_ties() -> Case:
    """Mixtral whose routers give all experts the same weight: the first two take all tokens, the others none."""
    case = mixtral()
    with torch.no_grad():
        for name, p in case.model.named_parameters():
            if name.endswith("gate.weight"):
                p.zero_()
    return case


def deepseek() -> Case:
    """DeepSeek-V3: keys and values from a latent vector, keys filled by slices, a dense layer, a shared expert, experts
    of the best groups only; norms and router in float64."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as modeling

    modeling.torch = SimpleNamespace(**{**vars(torch), "float32": torch.float64})  # gradients of its router are sums
    config = DeepseekV3Config(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=64,
        moe_intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=8,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        q_lora_rank=12,
        kv_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=6,
        max_position_embeddings=16,
    )
    return mixture(DeepseekV3ForCausalLM, config)


def gpt_oss() -> Case:
    """gpt-oss: a logit per head that takes attention from all tokens, windows in every second layer, biases of experts,
    gates interleaved with what they gate."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=3,
        max_position_embeddings=16,
        rope_parameters={"rope_type": "default", "rope_theta": 150000.0},
    )
    return mixture(GptOssForCausalLM, config)


def t5() -> Case:
    """T5: an encoder read by all decoder layers, position biases shared by all layers, shifted labels."""
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
    """MPT: position biases from the end of a table as long as the longest sequence, which limits the tokens."""
    from transformers import MptConfig, MptForCausalLM

    torch.manual_seed(0)
    config = MptConfig(d_model=WIDTH, n_heads=8, n_layers=2, vocab_size=VOCAB, max_seq_len=2 * TOKENS)
    ids, labels = tokens()
    return Case(randomised(MptForCausalLM(config)), {"input_ids": ids, "labels": labels})


def bert(*, dropout: float = 0.0) -> Case:
    """BERT: padding masks, ragged labels, a tied decoder with a bias, an unused parameter (in the pooler)."""
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
    """ViT: a convolution, a class token that is expanded and prepended."""
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
    """nanoGPT: fused qkv; a tied head; the loss from `forward`, ignoring -1."""
    torch.manual_seed(0)
    sizes = GPTSizes(vocab=VOCAB, max_seq=16, width=WIDTH, layers=4, heads=8, dropout=dropout, bias=True)
    ids, labels = tokens(ignore=-1)
    return Case(randomised(NanoGPT(sizes)), {"idx": ids, "targets": labels})


class OddMLP(nn.Module):
    """Perceptron of prime widths, divisible by no tp."""

    def __init__(self) -> None:
        super().__init__()
        widths = (5, 13, 7, 17, 11, 19, 13, 7, 3)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return F.cross_entropy(self.layers[-1](x), y)


def odd_mlp() -> Case:
    """Model in which no parameter can be split."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (SAMPLES,), generator=generator)
    y[2:5] = -100
    return Case(randomised(OddMLP()), {"x": x, "y": y})


class Level(nn.Module):
    """Enough residual layers to keep a U-Net's skip connections in different stages."""

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
    """Loss passed by the user: its count is the number of elements."""
    return F.mse_loss(out, inputs["x"].flip(-1))


def skip_mlp() -> Case:
    """Skip connections relayed over many stages, a regression, and a batch that is one sample short."""
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
    """Model with a parameter of all layers, a frozen one, an unused one, a module called twice, and many buffers."""

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
    """Dropout and noise on dims that merge samples with other dims on either side, and on one without samples."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        rows = x.reshape(b * s, h)
        rows = F.dropout(rows + 0.1 * torch.rand_like(rows), 0.2)
        up = F.dropout(torch.tanh(self.up(rows)), 0.2)
        heads = up.view(b, s, 8, h // 4).permute(2, 1, 0, 3)
        heads = F.dropout(heads.reshape(8 * s, b, h // 4), 0.2).view(8, s, b, h // 4)
        heads = F.dropout(heads.permute(1, 2, 0, 3).reshape(s * b, 8, h // 4), 0.2).reshape(s, b, 2 * h)
        return x + self.down(heads).transpose(0, 1) * F.dropout(self.gain, 0.2)


class Folded(nn.Module):
    """See `FoldedLayer`; also dropout of an embedding table, and of one number per sample."""

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
    """See `Folded`; the batch is one sample short."""
    torch.manual_seed(0)
    ids, labels = tokens()
    return Case(randomised(Folded()), {"ids": ids[1:], "labels": labels[1:]})


class WrittenLayer(nn.Module):
    """Attention as two products and a softmax, with dropout of the probabilities."""

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
    """See `Written`: over cp ranks keys and values are gathered before the dropout."""
    torch.manual_seed(0)
    ids, labels = tokens()
    return Case(randomised(Written()), {"ids": ids, "labels": labels})


class OneLayerManyTimes(nn.Module):
    """One module called as every layer, as in ALBERT."""

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
    """Every stage holds all parameters of the layers."""
    torch.manual_seed(0)
    ids, labels = tokens()
    return Case(randomised(OneLayerManyTimes()), {"ids": ids, "labels": labels})


class AwkwardLayer(nn.Module):
    """Attributes with the names that an emitted block uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.second = nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.drop(self.second(torch.tanh(self.first(x)))))


class Awkward(nn.Module):
    """Inputs, sizes and attributes with the names that emitted code uses."""

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
    """Llama with fewer key heads than most tp sizes."""
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

OFTEN = ("gpt2", "llama", "bert", "vit", "nanogpt")  # trained with every variant; the others with some

# Trained on one mesh only, which covers what they add to the others.
FEW_MESHES: dict[str, Callable[[], Case]] = {"mixtral": mixtral, "t5": t5}

# Trained with experts on ranks of their own.
SKEWED: dict[str, Callable[[], Case]] = {"mixtral_ties": mixtral_ties}

# Trained once.
ONCE: dict[str, Callable[[], Case]] = {"mpt": mpt, "deepseek": deepseek, "gpt_oss": gpt_oss}

DROPOUT: dict[str, Callable[[], Case]] = {
    "gpt2_dropout": lambda: gpt2(dropout=0.2),
    "nanogpt_dropout": lambda: nanogpt(dropout=0.2),
    "bert_dropout": lambda: bert(dropout=0.2),
    "folded_dropout": folded_dropout,
    "written_dropout": written_dropout,
}
