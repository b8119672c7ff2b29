"""Custom backward passes of the user: equal to one process up to rounding, or refused with their place.

14 samples for two data-parallel ranks in microbatches of two, so that the last one of each is ragged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import autoptd
from autoptd.api import Parallel
from autoptd.compile.make_plan import make_plan
from autoptd.compile.program import make_program, read_sharding
from autoptd.compile.read import read_model
from autoptd.compile.traced import TracedModel
from autoptd.cost_models.cluster import Cluster
from autoptd.errors import AutoptdError, PlanError, UnsupportedOp
from autoptd.layout.mesh import Mesh
from autoptd.passes.custom_grad import calls as own_calls
from autoptd.passes.custom_grad.ops import OwnHook
from autoptd.passes.custom_grad.proof import prove_own
from autoptd.passes.normalise import normalise
from autoptd.passes.trace import trace
from autoptd.progress import Silent
from autoptd.runtime import torch_compile as compiled
from autoptd.search.constraints.options import read_constraints
from autoptd.testing.parity import differences, train_alone, train_in_lockstep
from tests.parity import own_passes as own
from tests.parity.own_passes import WIDTH, Net
from tests.parity.parity_check import OPTIONS, TOLERANCE, Variant
from tests.parity.parity_models import TOKENS, VOCAB, randomised, tokens

CUBE, PLAIN = Mesh(2, 2, 2), Variant()
SAMPLES = 14
Body = Callable[[Any, Tensor], Tensor]


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, 8, generator=generator, dtype=torch.float64)
    return {"x": x, "y": torch.randint(0, 5, (SAMPLES,), generator=generator)}


def read(model: nn.Module, given: Mapping[str, Tensor], precision: str = "fp64") -> TracedModel:
    inputs = {n: x[:2] for n, x in given.items()}
    return read_model(model, inputs=inputs, loss=None, seq=None, precision=precision, progress=Silent())


def made(
    model: nn.Module,
    given: Mapping[str, Tensor],
    mesh: Mesh = CUBE,
    variant: Variant = PLAIN,
    precision: str = "fp64",
) -> Parallel:
    source = read(model, given, precision)
    constraints = {"dp": mesh.dp, "tp": mesh.tp, "pp": mesh.pp, "cp": mesh.cp, "micro": variant.micro}
    constraints |= {
        "zero": variant.zero,
        "recompute": variant.recompute,
        "schedule": variant.schedule,
        "loss": variant.loss,
    }
    plan = make_plan(
        source,
        world=mesh.world,
        cluster=Cluster.load("dgx-h100"),
        batch=16,
        precision=precision,
        optimizer="sgd",
        constraints=read_constraints(constraints),
        progress=Silent(),
    )
    program = make_program(source, plan, read_sharding(source, plan))
    return Parallel(plan, source, program, "sgd", OPTIONS["sgd"], None, 0)


def wrong(model: nn.Module, given: Mapping[str, Tensor], part: Parallel) -> list[str]:
    """Return the differences from one process after two steps."""
    steps = [given, {n: x.roll(1, 0) for n, x in given.items()}]
    found = train_in_lockstep(part, steps)
    wanted = train_alone(model, steps, optimizer="sgd", optimizer_options=OPTIONS["sgd"])
    errors = differences(found.gradients, wanted.gradients)
    errors |= {f"state {n}": e for n, e in differences(found.state, wanted.state).items()}
    errors |= {f"loss {i}": abs(a - b) for i, (a, b) in enumerate(zip(found.losses, wanted.losses, strict=True))}
    return [f"{name}: {error:.1e}" for name, error in errors.items() if not error <= TOLERANCE]


def net(body: Body, blocks: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return randomised(Net(body, blocks))


def hooked(*hooks: Callable[[Tensor], Any]) -> Body:
    """Return a block with these hooks on its layer's output."""

    def body(self: Any, h: Tensor) -> Tensor:
        out = self.layer(h)
        for hook in hooks:
            out.register_hook(hook)
        return out.tanh()

    return body


def clamp(grad: Tensor) -> Tensor:
    return grad.clamp(-1e-3, 1e-3)


def removed(self: Any, h: Tensor) -> Tensor:
    out = self.layer(h)
    out.register_hook(lambda grad: 3 * grad).remove()
    with out.register_hook(clamp):
        return out.tanh()


def hook_then_in_place(self: Any, h: Tensor) -> Tensor:
    """The hook gets the gradient of the tensor before the in-place change."""
    out = self.layer(h)
    out.register_hook(clamp)
    return out.mul_(2).tanh()


def written_through_views(self: Any, h: Tensor) -> Tensor:
    """Writes through views, which torch has to functionalise."""
    out = own.Gelu.apply(self.layer(h))
    out[:, 0] = 0.5
    out.register_hook(clamp)
    return out.tanh()


def without_gradient(self: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        gate = own.apply_round(self.layer(h), 4)
    return gate * self.layer(h)


def several(self: Any, h: Tensor) -> Tensor:
    first, second, largest = own.Several.apply(self.layer(h), self.scale)
    return (first + second / (1 + largest**2)).tanh()


def in_vmap(self: Any, h: Tensor) -> Tensor:
    return torch.func.vmap(lambda row: self.layer(row).tanh())(h)


def in_jvp(self: Any, h: Tensor) -> Tensor:
    return torch.func.jvp(torch.tanh, (self.layer(h),), (torch.ones_like(h),))[1]


@torch.inference_mode()
def inferred(self: Any, h: Tensor) -> Tensor:
    return self.layer(h)


def in_inference_mode(self: Any, h: Tensor) -> Tensor:
    return self.layer(h) + inferred(self, h)


def checkpointed(reentrant: bool) -> Body:
    return lambda self, h: checkpoint(lambda x: own.Gelu.apply(self.layer(x)), h, use_reentrant=reentrant)


KEPT: dict[str, Body] = {
    "straight_through": lambda self, h: own.apply_round(self.layer(h), 8).tanh(),
    "by_default_argument": lambda self, h: own.Round.apply(self.layer(h)).tanh(),
    "reversal": lambda self, h: own.Reverse.apply(self.layer(h), 0.3).tanh(),
    "elements_clipped": lambda self, h: own.Clip.apply(self.layer(h)).tanh(),
    "rows_normalised": lambda self, h: own.RowNorm.apply(self.layer(h)).tanh(),
    "setup_context": lambda self, h: own.Gelu.apply(self.layer(h)),
    "several_results": several,
    "own_product": lambda self, h: own.Product.apply(h, self.layer.weight, self.layer.bias).tanh(),
    "weight_quantised": lambda self, h: F.linear(h, own.Quantised.apply(self.layer.weight, 4)).tanh(),
    "bits_of_float32": lambda self, h: own.Bits.apply(self.layer(h).float()).to(h.dtype).tanh(),
    "size_as_argument": lambda self, h: own.BySize.apply(self.layer(h), h.shape[1]).tanh(),
    "in_no_grad": without_gradient,
    "hook_scales": hooked(lambda grad: grad * 0.5),
    "hooks_in_order": hooked(clamp, lambda grad: grad * 3, clamp),
    "hook_removed": removed,
    "hook_then_in_place": hook_then_in_place,
    "through_views": written_through_views,
    "library_op": lambda self, h: own.running(self.layer(h), self.scale).tanh(),
    "library_op_by_name": lambda self, h: torch.ops.autoptd_tests.halved(self.layer(h)).tanh(),
    "vmap": in_vmap,
    "jvp": in_jvp,
    "inference_mode": in_inference_mode,
    "jvp_of_mm": lambda self, h: (
        h @ torch.func.jvp(lambda w: w.tanh() + w.mm(w), (self.layer.weight,), (torch.ones_like(self.layer.weight),))[1]
    ).tanh(),
    "checkpoint": checkpointed(False),
    "checkpoint_reentrant": checkpointed(True),
    "fresh_leaf": lambda self, h: self.layer(h).tanh() + self.layer(h).detach().requires_grad_(),
}


@pytest.mark.parametrize("name", KEPT)
def test_kept(name: str) -> None:
    model = net(KEPT[name], blocks=2)
    assert not wrong(model, batch(), made(model, batch()))


@pytest.mark.parametrize(
    "variant",
    [
        Variant(recompute="full", zero=3),
        Variant(recompute="ops"),
        Variant(schedule="zero-bubble", zero=2),
    ],
    ids=["full-zero3", "ops", "zero-bubble"],
)
def test_kept_however_it_is_carried_out(variant: Variant) -> None:
    def body(self: Any, h: Tensor) -> Tensor:
        return hooked(clamp)(self, own.running(own.Gelu.apply(h), self.scale)) + several(self, h)

    model = net(body)
    assert not wrong(model, batch(), made(model, batch(), CUBE, variant))


class Tokens(nn.Module):
    """Samples of tokens, merged into one dim for the function if `flat`; the logits are read twice."""

    def __init__(self, function: Callable[[Tensor], Tensor], flat: bool = False) -> None:
        super().__init__()
        self.table, self.layer, self.head = nn.Embedding(VOCAB, 32), nn.Linear(32, 32), nn.Linear(32, VOCAB)
        self.function, self.flat = function, flat

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.layer(self.table(ids))
        rows = h.reshape(-1, 32) if self.flat else h
        logits = self.head(self.function(rows).reshape(h.shape))
        reversed_ = own.Reverse.apply(logits, -2.0)
        return F.cross_entropy(reversed_.reshape(-1, VOCAB), labels.reshape(-1)) + 0.01 * logits.square().mean()


@pytest.mark.parametrize(
    ("function", "flat", "mesh"),
    [
        (own.RowNorm.apply, False, Mesh(2, 2, 1, cp=2)),
        (own.Clip.apply, True, CUBE),
        (lambda h: own.BySize.apply(h, h.shape[1]), False, Mesh(2, 2, 1, cp=2)),
    ],
    ids=["tokens-cut", "rows-of-samples", "tokens-as-argument"],
)
def test_kept_over_tokens(function: Callable[[Tensor], Tensor], flat: bool, mesh: Mesh) -> None:
    ids, labels = tokens()
    given = {"ids": ids[:SAMPLES], "labels": labels[:SAMPLES]}
    model = randomised(Tokens(function, flat))
    assert ids.shape[1] == TOKENS
    assert not wrong(model, given, made(model, given, mesh, Variant(loss="in_place")))


class Summed(nn.Module):
    """A custom loss function beside the usual one."""

    def __init__(self, own_loss: Any) -> None:
        super().__init__()
        self.net, self.own_loss = Net(KEPT["setup_context"], 2), own_loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.net(x, y) + 0.1 * self.own_loss.apply(self.net.first(x))


def test_a_sum_over_samples_may_be_the_loss() -> None:
    model = randomised(Summed(own.SquareSum))
    assert not wrong(model, batch(), made(model, batch()))


def test_a_mean_of_its_own_is_refused() -> None:
    with pytest.raises(UnsupportedOp, match="mixes samples") as error:
        made(randomised(Summed(own.SquareMean)), batch())
    assert "own_loss.apply" in error.value.where and "not averaged" in error.value.fix


def test_parametrisations_are_kept() -> None:
    model = net(KEPT["setup_context"], 2)
    parametrizations.weight_norm(model.blocks[0].layer)

    class Rounded(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return own.Quantised.apply(weight, 4)

    parametrize.register_parametrization(model.blocks[1].layer, "weight", Rounded())
    model.last.register_forward_hook(lambda module, args, out: 2 * out)
    model.last.register_forward_pre_hook(lambda module, args: (own.apply_round(args[0], 64),))
    assert not wrong(model, batch(), made(model, batch()))


def test_gradient_checkpointing_of_transformers_is_left_to_the_plan() -> None:
    """The traced graph is the same with and without checkpointing, reentrant or not."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 16}
    config = LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
    model, (ids, labels) = LlamaForCausalLM(config), tokens()
    hashes = [read(model, {"input_ids": ids, "labels": labels}).graph_hash]
    for reentrant in (False, True):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        hashes.append(read(model, {"input_ids": ids, "labels": labels}).graph_hash)
    assert len(set(hashes)) == 1


def test_functions_that_cannot_be_imported_are_handed_over() -> None:
    """Two classes with the same name and source: each program calls its own. Neither program can be written to disk."""
    for factor in (0.5, 2.0):
        sign = own.straight_sign(factor)
        model = net(lambda self, h, sign=sign: sign.apply(self.layer(h)) + self.layer(h).tanh(), 2)
        part = made(model, batch())
        assert list(part.program.objects) == ["Sign"] and "Sign" in part.program.files["own.py"]
        assert not wrong(model, batch(), part)
    with pytest.raises(PlanError, match="cannot be imported") as error:
        part.emit("nowhere")
    assert "straight_sign.Sign (own_passes.py:" in error.value.where


def test_functions_are_called_by_name(tmp_path: Any) -> None:
    part = made(net(KEPT["straight_through"]), batch())
    says = "\nimport tests.parity.own_passes\n\nRound = tests.parity.own_passes.Round\n"
    assert part.program.files["own.py"].endswith(says)
    assert part.program.files["blocks.py"].count(" = own.Round.apply(layer, 8)") == 1  # one block for all
    assert (part.emit(tmp_path) / "own.py").exists()


def test_compiled_blocks_call_them(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    compiled._compiled.cache_clear()

    def body(self: Any, h: Tensor) -> Tensor:
        return hooked(clamp)(self, own.running(own.Gelu.apply(h), self.scale))

    model = net(body, 1)
    part = made(model, batch(), Mesh(2, 1, 1))
    part._backend = "aot_eager"
    assert not wrong(model, batch(), part)
    torch.compiler.reset()


# ---- what is refused ----


def closed_over(self: Any, h: Tensor) -> Tensor:
    weight = self.layer.weight

    class Closed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x @ weight

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return grad @ weight.t()

    return Closed.apply(h)


def penalised(self: Any, h: Tensor) -> Tensor:
    out = self.layer(h).tanh()
    return torch.autograd.grad(out.sum(), h, create_graph=True)[0]


def packed(self: Any, h: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.round(), lambda x: x):
        return self.layer(h).tanh()


def kept_gradient(self: Any, h: Tensor) -> Tensor:
    out = self.layer(h)
    out.retain_grad()
    return out.tanh()


def on_parameter(self: Any, h: Tensor) -> Tensor:
    self.layer.weight.register_hook(lambda grad: grad / 2)
    return self.layer(h).tanh()


def on_node(self: Any, h: Tensor) -> Tensor:
    out = self.layer(h)
    out.grad_fn.register_hook(lambda into, out: None)
    return out.tanh()


def on_module(self: Any, h: Tensor) -> Tensor:
    self.layer.register_full_backward_hook(lambda module, into, out: (into[0] / 2,))
    return self.layer(h).tanh()


def frozen_within(self: Any, h: Tensor) -> Tensor:
    self.layer.weight.requires_grad = False
    return self.layer(h).tanh()


def on_weight(function: Any) -> Body:
    return lambda self, h: F.linear(h, function.apply(self.layer.weight)).tanh()


def jvp_of_weight(self: Any, h: Tensor) -> Tensor:
    def squared(weight: Tensor) -> Tensor:
        return weight.tanh() + weight @ weight

    weight = self.layer.weight
    return h @ torch.func.jvp(squared, (weight,), (torch.ones_like(weight),))[1]


def dual_weight(self: Any, h: Tensor) -> Tensor:
    with forward_ad.dual_level():
        weight = forward_ad.make_dual(self.layer.weight, torch.ones_like(self.layer.weight))
        return h @ forward_ad.unpack_dual(weight.tanh() + weight @ weight).tangent


BODY = "blocks.0 (own_passes.py"  # places in the graph are lines of forward
REFUSED: dict[str, tuple[Body, str, str]] = {  # body, what, where
    "batch_norm_of_gradient": (lambda self, h: own.ClipNorm.apply(self.layer(h)), "ClipNorm mixes samples", BODY),
    "centred_gradient": (lambda self, h: own.Centred.apply(self.layer(h)), "Centred mixes samples", BODY),
    "mean_in_backward": (lambda self, h: own.PerSample.apply(self.layer(h)), "PerSample mixes", BODY),
    "branch_on_gradient": (
        lambda self, h: own.Branch.apply(self.layer(h)),
        "branch or a loop depends on data",
        "grad.norm()",
    ),
    "weights_clipped": (on_weight(own.Clip), "Clip has a backward pass that is not linear", BODY),
    "batch_as_argument": (lambda self, h: own.BySize.apply(h, h.shape[0]), "given the number of samples", BODY),
    "in_place": (lambda self, h: own.InPlace.apply(self.layer(h)), "in place", "own.InPlace"),
    "random": (lambda self, h: own.Noise.apply(self.layer(h)), "draws random numbers", "torch.rand_like"),
    "data_dependent_size": (lambda self, h: own.Positive.apply(h).sum() + h, "size depends on data", "own.Positive"),
    "closed_over": (closed_over, "reads a tensor [16, 16] that it is not given", "x @ weight"),
    "module_as_argument": (lambda self, h: own.Reverse.apply(h, self), "argument of type Block", "own.Reverse"),
    "under_vmap": (lambda self, h: torch.func.vmap(own.Gelu.apply)(h), "under a transform", "own.Gelu"),
    "hook_mixes": (hooked(lambda grad: grad / grad.norm()), "hook mixes samples", "blocks.0"),
    "hook_looks": (hooked(lambda grad: None), "only looks at one", "register_hook"),
    "hook_on_parameter": (on_parameter, "hook on a parameter", "weight.register_hook"),
    "hook_on_node": (on_node, "grad_fn", "out.grad_fn"),
    "hook_on_module": (on_module, "register_full_backward_hook", "self.layer.register"),
    "retain_grad": (kept_gradient, "retain_grad", "out.retain_grad"),
    "frozen_within": (frozen_within, "freezes or unfreezes", "requires_grad = False"),
    "autograd_grad": (penalised, "forward differentiates", "torch.autograd.grad"),
    "func_grad": (
        lambda self, h: torch.func.grad(lambda x: self.layer(x).tanh().sum())(h),
        "forward differentiates",
        "torch.func.grad",
    ),
    "jvp_of_product": (jvp_of_weight, "matmul.default within torch.func.jvp would lose the tangent", BODY),
    "jvp_of_layer": (
        lambda self, h: torch.func.jvp(lambda x: F.linear(x, self.layer.weight), (h,), (torch.ones_like(h),))[1],
        "linear.default within torch.func.jvp would lose the tangent",
        BODY,
    ),
    "dual_numbers": (dual_weight, "dual numbers of torch.autograd.forward_ad", BODY),
    "saved_tensors_packed": (packed, "what autograd saves", "saved_tensors_hooks"),
    "library_op_mixes": (lambda self, h: own.centred(self.layer(h)), "centred mixes samples", BODY),
    "library_op_without_backward": (lambda self, h: own.forward_only(self.layer(h)), "no autograd formula", BODY),
    "library_op_without_cpu": (lambda self, h: own.elsewhere(self.layer(h)), "cannot be proved", BODY),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    body, what, where = REFUSED[name]
    with pytest.raises(UnsupportedOp) as error:
        made(net(body, blocks=2), batch())
    assert what in error.value.what and where in error.value.where and error.value.fix
    assert "test_parity_custom.py:" in error.value.where or "own_passes.py:" in error.value.where


def test_hooks_that_a_program_would_not_call_are_all_named() -> None:
    model = net(KEPT["setup_context"], 2)
    model.blocks[1].register_full_backward_hook(lambda module, into, out: None)
    model.blocks[1].register_full_backward_pre_hook(lambda module, out: None)
    model.first.weight.register_hook(clamp)
    model.last.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(UnsupportedOp, match="hooks that run in the backward pass") as error:
        made(model, batch())
    kinds = [line.split(",")[0] for line in error.value.where.splitlines()]
    assert kinds == [
        "blocks.1: a backward hook",
        "blocks.1: a backward pre-hook",
        "first.weight: a hook on its gradient",
        "last.bias: a hook after its gradient is accumulated",
    ]
    assert "test_parity_custom.clamp (test_parity_custom.py:" in error.value.where


def test_forward_hooks_that_only_look_are_refused() -> None:
    seen: list[Tensor] = []
    model = net(KEPT["setup_context"], 2)
    model.blocks[1].register_forward_hook(lambda module, args, out: seen.append(out))
    with pytest.raises(UnsupportedOp, match="only looks at tensors") as error:
        made(model, batch())
    assert error.value.where.startswith("blocks.1: ")


def test_forward_hooks_that_keep_tensors_for_the_same_pass_are_called() -> None:
    """Use the hooks by which transformers returns hidden states, and a loss of all of them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, vocab_size=8)
    ids = {"input_ids": torch.arange(8).view(2, 4) % 8}
    model = LlamaForCausalLM(config)
    model(**ids, output_hidden_states=True)
    config.output_hidden_states = True
    traced = autoptd.trace(model, inputs=ids, loss=lambda out: sum(h.square().mean() for h in out.hidden_states))
    assert sum("square" in str(n.target) for n in traced.folded.traced.graph.graph.nodes) == 3


def test_scaled_gradients_must_not_be_clipped() -> None:
    model = net(KEPT["elements_clipped"], 2).half()
    with pytest.raises(UnsupportedOp, match="fp16 training scales gradients"):
        made(model, {"x": batch()["x"].half(), "y": batch()["y"]}, precision="fp16")


# ---- planted ----


def planted(body: Body) -> list[str]:
    """Return the differences that parity finds, or the error of a program that fails."""
    model = net(body, 2)
    try:
        return wrong(model, batch(), made(model, batch()))
    except AutoptdError as error:
        return [str(error)]


@pytest.mark.fault("only the forward traced")
@pytest.mark.parametrize("name", ["straight_through", "elements_clipped", "several_results", "hook_scales"])
def test_a_backward_pass_that_is_not_kept_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "record_own_calls", nullcontext)
    assert any(".weight" in line for line in planted(KEPT[name]))


@pytest.mark.fault("hooks in another order")
def test_hooks_in_another_order_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    place = own_calls._put_after

    def reordered(graph: Any, x: Any, mark: Any, target: Any) -> None:
        last = x
        while found := [user for user in last.users if isinstance(user.target, OwnHook)]:
            (last,) = found
        place(graph, last, mark, target)

    monkeypatch.setattr(own_calls, "_put_after", reordered)
    assert planted(hooked(clamp, lambda grad: grad * 3))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("centred_gradient", marks=pytest.mark.fault("gradients of samples mixed")),
        pytest.param("mean_in_backward", marks=pytest.mark.fault("gradients of samples mixed")),
        pytest.param("library_op_mixes", marks=pytest.mark.fault("gradients of samples mixed")),
        pytest.param("weights_clipped", marks=pytest.mark.fault("parts of gradients clipped")),
    ],
)
def test_what_is_refused_would_be_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = [p for p in normalise.PREPARE if p is not prove_own]
    monkeypatch.setattr(normalise, "PREPARE", passes)
    assert planted(REFUSED[name][0])


@pytest.mark.fault("backward hooks ignored")
def test_a_hook_that_is_lost_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "refuse_unseen_hooks", lambda model: None)
    model = net(KEPT["setup_context"], 2)
    model.first.weight.register_hook(clamp)
    found = train_in_lockstep(made(model, batch()), [batch()]).gradients
    model(**batch()).backward()
    errors = differences(found, {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert [n for n, error in errors.items() if not error <= TOLERANCE] == ["first.weight"]


@pytest.mark.fault("another function of that name")
def test_a_function_of_another_s_name_is_seen() -> None:
    sign = own.straight_sign(0.5)
    model = net(lambda self, h: sign.apply(self.layer(h)), 2)
    part = made(model, batch())
    part.program = replace(part.program, objects={"Sign": own.straight_sign(2.0)})
    assert wrong(model, batch(), part)


def test_private_parts_of_torch_are_where_they_were() -> None:
    """Seen in torch 2.13.0: see the module docstring of `passes/custom_grad/trace_calls.py`."""
    from torch.autograd import function

    assert "apply" not in vars(function._SingleLevelFunction) and "apply" in vars(torch.autograd.Function)
    assert function.Function.__mro__[1] is function._SingleLevelFunction
    assert callable(function.custom_function_call) and callable(torch.autograd._engine_run_backward)
    assert WIDTH == 16
