"""Library ops against torch's, and keyed randomness."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autoptd.layout.mesh import Mesh
from autoptd.ops.dropout import DropoutKey, Samples
from autoptd.ops.group import SingleRankGroup
from autoptd.ops.library import attention, cross_entropy, dropout, valid_count, vocab_cross_entropy, vocab_embedding
from autoptd.ops.stage import buffer, compose, parameter, parts_of, submodule
from autoptd.ops.tp_axis import Axis
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import run_lockstep

V = 12


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


LABELS = torch.tensor([[3, -100, 11, 0], [-100, 7, 7, 5]])


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("padding", [-1, 0, 7])
def test_vocab_embedding(size: int, padding: int) -> None:
    indices = torch.tensor([[0, 3, 7], [11, 7, 6]])
    weight, grad = random(V, 5).requires_grad_(), random(2, 3, 5, seed=1)
    expected = F.embedding(indices, weight, padding if padding >= 0 else None)
    expected.backward(grad)

    def body(c: Communicators) -> tuple[Tensor, Tensor]:
        local = weight.detach().chunk(size)[c.tp.rank].clone().requires_grad_()
        out = vocab_embedding(local, indices, Axis(c.tp), padding)
        out.backward(grad)
        assert local.grad is not None
        return out.detach(), local.grad

    results = run_lockstep(Mesh(tp=size), body)
    assert torch.equal(torch.stack([r[0] for r in results]).sum(0), expected.detach())
    assert torch.equal(torch.cat([r[1] for r in results]), weight.grad)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("ignore", [-100, 7])
@pytest.mark.parametrize("scale", [1.0, 1000.0])
@pytest.mark.parametrize("in_place", [False, True])
def test_vocab_cross_entropy(size: int, ignore: int, scale: float, in_place: bool) -> None:
    logits = (random(2, 4, V) * scale).requires_grad_()
    labels = LABELS.where(LABELS != -100, ignore)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=ignore, reduction="sum")
    (expected * 1.7).backward()
    torch.testing.assert_close(cross_entropy(logits, labels, ignore), expected)

    def body(c: Communicators) -> tuple[Tensor, Tensor]:
        local = logits.detach().chunk(size, -1)[c.tp.rank].clone().requires_grad_()
        out = vocab_cross_entropy(local * 1, labels, Axis(c.tp), ignore, in_place)
        (out * 1.7).backward()
        assert local.grad is not None
        return out.detach(), local.grad

    results = run_lockstep(Mesh(tp=size), body)
    for out, _ in results:
        torch.testing.assert_close(out, expected.detach(), rtol=1e-13, atol=0)
    assert logits.grad is not None
    torch.testing.assert_close(torch.cat([r[1] for r in results], -1), logits.grad, rtol=1e-12, atol=1e-14)


def test_vocab_cross_entropy_bears_minus_infinity_and_all_ignored() -> None:
    """Padded columns of −inf get no gradient; without a valid label the result is zero, not NaN."""
    logits = random(2, 4, V)
    logits[..., 9:] = -torch.inf
    labels = LABELS.clamp(max=8)

    def body(c: Communicators, labels: Tensor) -> tuple[Tensor, Tensor]:
        local = logits.chunk(4, -1)[c.tp.rank].clone().requires_grad_()
        out = vocab_cross_entropy(local, labels, Axis(c.tp))
        out.backward()
        assert local.grad is not None
        return out.detach(), local.grad

    results = run_lockstep(Mesh(tp=4), lambda c: body(c, labels))
    expected = F.cross_entropy(logits[..., :9].flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(results[0][0], expected)
    assert torch.equal(results[3][1], torch.zeros(2, 4, 3, dtype=torch.float64))
    for out, grad in run_lockstep(Mesh(tp=4), lambda c: body(c, torch.full_like(LABELS, -100))):
        assert float(out) == 0 and not grad.any()


def test_narrow_logits_are_summed_in_float32() -> None:
    logits = random(2, 4, V).bfloat16()
    expected = F.cross_entropy(logits.float().flatten(0, 1), LABELS.flatten(), reduction="sum")
    assert cross_entropy(logits, LABELS).dtype == torch.float32
    torch.testing.assert_close(cross_entropy(logits, LABELS), expected)
    wide = run_lockstep(Mesh(tp=2), lambda c: vocab_cross_entropy(logits.chunk(2, -1)[c.tp.rank], LABELS, Axis(c.tp)))
    torch.testing.assert_close(wide[0], expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_loss_in_place_allocates_nothing_of_the_logits_size(smoothing: float) -> None:
    leaf = random(2, 4, V).requires_grad_()
    expected = F.cross_entropy(leaf.flatten(0, 1), LABELS.flatten(), label_smoothing=smoothing, reduction="sum")
    (wanted,) = torch.autograd.grad(expected * 1.7, leaf)
    logits, seen = leaf * 1, list[int]()
    logits.register_hook(lambda gradient: seen.append(gradient.data_ptr()))
    before = logits.data_ptr()
    loss = cross_entropy(logits, LABELS, label_smoothing=smoothing, in_place=True)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(logits, leaf.softmax(-1))
    (loss * 1.7).backward(retain_graph=True)
    assert leaf.grad is not None and seen == [before]
    torch.testing.assert_close(leaf.grad, wanted)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_label_beyond_the_vocabulary_is_an_error_in_place_too() -> None:
    for in_place in (False, True):
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            cross_entropy(random(2, 4, V), torch.full_like(LABELS, V), in_place=in_place)


def test_label_smoothing_and_counts() -> None:
    logits = random(2, 4, V)
    smooth = F.cross_entropy(logits.flatten(0, 1), LABELS.flatten(), label_smoothing=0.1, reduction="sum")
    torch.testing.assert_close(cross_entropy(logits, LABELS, label_smoothing=0.1), smooth)
    assert float(valid_count(LABELS)) == 6 and valid_count(LABELS).ndim == 0
    assert float(valid_count(LABELS, 7)) == 6


def test_dropout_depends_on_its_key_alone() -> None:
    x, rng = torch.ones(1000), DropoutKey(seed=1)
    first = dropout(x, 0.25, "a", rng)
    assert set(first.unique().tolist()) == {0.0, 1 / 0.75} or first.unique().numel() == 2
    assert float((first == 0).float().mean()) == pytest.approx(0.25, abs=0.05)
    dropout(x, 0.25, "b", rng)
    assert torch.equal(dropout(x, 0.25, "a", rng), first)
    for other in (DropoutKey(2), DropoutKey(1, step=1), DropoutKey(1, share=1000), DropoutKey(1, sample=1000)):
        assert not torch.equal(dropout(x, 0.25, "a", other), first)
    for off in (None, DropoutKey(active=False)):
        assert dropout(x, 0.25, "a", off) is x
    assert dropout(x, 0.0, "a", rng) is x and not dropout(x, 1.0, "a", rng).any()


def test_recompute_replays_dropout() -> None:
    """Another microbatch's forward pass runs in between, as in 1F1B."""
    rng = DropoutKey(seed=1)
    x = torch.ones(100, requires_grad=True)

    def block(y: Tensor) -> Tensor:
        return torch.sin(dropout(y, 0.5, "a", rng))

    out = checkpoint(block, x, use_reentrant=False)
    rng.sample = 100
    checkpoint(block, x, use_reentrant=False)
    rng.sample = 0
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad == 0, out == 0)


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "additive"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention(mask: str, kv_heads: int) -> None:
    q, k, v = random(2, 4, 5, 6), random(2, kv_heads, 5, 6, seed=1), random(2, kv_heads, 5, 6, seed=2)
    keep = torch.rand(5, 5, generator=torch.Generator().manual_seed(0)) > 0.3
    keep.fill_diagonal_(True)
    given = {"bool": keep, "additive": random(5, 5, seed=3)}.get(mask)
    options = {"is_causal": mask == "causal", "scale": 0.3, "enable_gqa": kv_heads < 4}
    expected = F.scaled_dot_product_attention(q, k, v, given, **options)
    torch.testing.assert_close(attention(q, k, v, given, 0.5, **options, rng=None), expected)
    # the path with dropout, at a probability that drops nothing
    torch.testing.assert_close(attention(q, k, v, given, 1e-12, **options, key="a", rng=DropoutKey()), expected)
    keys = (DropoutKey(), DropoutKey(), DropoutKey(sample=1))
    dropped = [attention(q, k, v, given, 0.5, **options, key="a", rng=key) for key in keys]
    assert torch.equal(dropped[0], dropped[1]) and not torch.equal(dropped[0], dropped[2])


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "additive"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_with_dropout_in_stretches(mask: str, kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and all gradients equal those of the formula written out, for any number of queries per chunk."""
    keep = torch.rand(2, 1, 5, 7, generator=torch.Generator().manual_seed(0)) > 0.3
    keep[1, :, 2] = False  # a query that may attend to nothing
    keys = 5 if mask == "causal" else 7
    leaves = [random(2, 4, 5, 6), *(random(2, kv_heads, keys, 6, seed=i) for i in (1, 2)), random(4, 5, 7, seed=3)]
    rng, grad = DropoutKey(1, sample=3), random(2, 4, 5, 6, seed=4)
    dropped = rng.elements((2, 4, 5, keys), "a", Samples(), (), grad.device).keep(0.4).double() / 0.6

    def written_out(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(4 // kv_heads, 1) for x in (k, v))
        scores = 0.3 * q @ k.transpose(-2, -1) + (bias if mask == "additive" else 0)
        scores = scores.masked_fill(~keep, -torch.inf) if mask == "bool" else scores
        scores = scores.masked_fill(~torch.ones(5, 5).bool().tril(), -torch.inf) if mask == "causal" else scores
        return (scores.softmax(-1).nan_to_num() * dropped) @ v

    def ours(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        given = {"bool": keep, "additive": bias}.get(mask)
        return attention(q, k, v, given, 0.4, mask == "causal", 0.3, "a", rng, enable_gqa=kv_heads < 4)

    def gradients(run: Callable[..., Tensor]) -> list[Tensor]:
        mine = [x.clone().requires_grad_() for x in leaves]
        out = run(*mine)
        out.backward(grad)
        return [out.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad for x in mine)]

    expected = gradients(written_out)
    for scores in (1, 2 * 4 * keys * 2, 1 << 24):
        monkeypatch.setattr("autoptd.ops.attention.SCORES", scores)
        for found, wanted in zip(gradients(ours), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)


def test_attention_with_dropout_keeps_no_scores() -> None:
    shapes: list[tuple[int, ...]] = []

    def pack(x: Tensor) -> Tensor:
        shapes.append(tuple(x.shape))
        return x

    q, k, v = (random(2, 4, 50, 6, seed=i).requires_grad_() for i in range(3))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        attention(q, k, v, None, 0.4, True, key="a", rng=DropoutKey())
    assert shapes == [(2, 4, 50, 6)] * 4 + [(2, 4, 50)]


def test_names_are_the_original_ones() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            parameter(self, "mlp.up.weight", (2, 3), torch.float64)
            buffer(self, "mlp.table", (2,), persistent=False)

    root = nn.Module()
    parameter(root, "model.layers.0.extra", (1,), requires_grad=False)
    block = Block()
    submodule(root, "model.layers.0", block)
    submodule(root, "model.layers.1", Block())
    assert [n for n, _ in root.named_parameters()] == [
        "model.layers.0.extra",
        "model.layers.0.mlp.up.weight",
        "model.layers.1.mlp.up.weight",
    ]
    assert root.get_submodule("model.layers.0") is block
    assert list(root.state_dict()) == [n for n, _ in root.named_parameters()]
    with pytest.raises(KeyError, match="already exists"):
        submodule(root, "model.layers.1", Block())
    assert SingleRankGroup().size == 1


class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        parameter(self, "scale", (1,), torch.float64)
        parameter(self, "mlp.up.weight", (2, 3), torch.float64)


class Down(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        parameter(self, "mlp.down.weight", (3, 2), torch.float64)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._parts = compose(self, Up(), Down())


def test_a_module_holds_what_its_parts_declare() -> None:
    root = nn.Module()
    parameter(root, "layers.0.extra", (1,))
    both = submodule(root, "layers.0", Both())
    assert list(root.state_dict()) == [f"layers.0.{n}" for n in ("scale", "extra", "mlp.up.weight", "mlp.down.weight")]
    for copied in (both, copy.deepcopy(both)):
        up, down = parts_of(copied)
        copied._parameters["scale"] = nn.Parameter(torch.ones(1))  # as the runtime puts flat buffers in their place
        copied.get_submodule("mlp.up")._parameters["weight"] = nn.Parameter(torch.zeros(2, 3))
        assert up.scale is copied.scale and up.mlp.up.weight is copied.mlp.up.weight
        assert down.mlp.down.weight is copied.mlp.down.weight
        assert [m for m in copied.modules() if isinstance(m, (Up, Down))] == []
    assert both.scale is not copied.scale
