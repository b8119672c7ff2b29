"""Partly recomputed blocks: the numbers of one process, and the predicted bytes saved for backward."""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from threading import get_ident
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autoptd.api import Parallel
from autoptd.compile.make_plan import make_plan
from autoptd.compile.program import make_program, read_sharding
from autoptd.compile.read import read_model
from autoptd.compile.traced import TracedModel
from autoptd.cost_models.cluster import Cluster
from autoptd.errors import PlanFileError
from autoptd.layout.mesh import Mesh
from autoptd.models.nanogpt import GPTSizes, NanoGPT
from autoptd.ops import offload as module
from autoptd.ops.recompute import recompute
from autoptd.passes.analysis.activations import POLICIES, nbytes, saved_activations
from autoptd.passes.analysis.dataflow import flow
from autoptd.passes.opcall import Sizes as Numbers
from autoptd.passes.trace.traced import BATCH
from autoptd.plans.model import Plan
from autoptd.progress import Silent
from autoptd.runtime.comm.interfaces import Communicators
from autoptd.runtime.comm.threaded import run_lockstep
from autoptd.search.constraints.options import read_constraints
from autoptd.testing.parity import train_in_lockstep
from tests.pairwise import pairwise
from tests.parity.parity_check import (
    OPTIONS,
    Variant,
    alone,
    batches,
    bulk,
    check,
    complaints,
    parallel,
    planned,
    with_files,
)
from tests.parity.parity_check import source as read_source
from tests.parity.parity_models import SAMPLES, TOKENS, VOCAB, WIDTH, randomised
from tests.parity.test_parity_dropout import is_alone, trained

CUBE = Mesh(2, 2, 2)
SELECTIVE, OPS = Variant(bulk=True, recompute="selective"), Variant(bulk=True, recompute="ops", micro=1)
CASES = [
    ("gpt2", CUBE, OPS),
    ("llama", CUBE, SELECTIVE),
    ("bert", Mesh(1, 4, 2), replace(OPS, sequence_parallel=False)),
    ("vit", Mesh(4, 2, 1), replace(SELECTIVE, zero=0)),
    ("nanogpt", CUBE, replace(OPS, schedule="zero-bubble")),
    ("nanogpt", CUBE, replace(SELECTIVE, schedule="interleaved", virtual=2, micro=1)),
    ("gpt2", CUBE, replace(OPS, zero=3)),
]


@pytest.mark.parametrize(("name", "mesh", "variant"), CASES, ids=[f"{n}-{v.recompute}-{m}" for n, m, v in CASES])
def test_a_policy_changes_no_number(name: str, mesh: Mesh, variant: Variant) -> None:
    plan = planned(name, mesh, variant)
    assert plan.not_runnable == () and set(plan.partial) <= {variant.recompute}
    assert not check(name, mesh, variant, "sgd")


@pytest.mark.parametrize(
    ("name", "mesh", "variant"),
    [
        ("bert_dropout", CUBE, OPS),
        ("nanogpt_dropout", CUBE, replace(SELECTIVE, schedule="zero-bubble")),
        ("nanogpt_dropout", Mesh(tp=2, pp=2, cp=2), replace(OPS, micro=2)),
        ("bert_dropout", Mesh(tp=2, cp=4), replace(SELECTIVE, micro=4)),
        ("nanogpt_dropout", Mesh(dp=2, cp=4), replace(SELECTIVE, context="ulysses", micro=2)),
    ],
)
def test_what_runs_again_drops_the_same(name: str, mesh: Mesh, variant: Variant) -> None:
    assert is_alone(name, trained(name, mesh, variant))


def mixed(name: str, length: int) -> Plan:
    """Return a plan whose layers take all policies in turn, each for `length` segments of a layer."""
    plan = planned(name, Mesh(2, 2, 1), SELECTIVE)
    unit = max(read_source(name).folded.units, key=lambda u: u.count)
    assert unit.length == 2
    again = tuple(range(unit.first, unit.first + unit.count * unit.length))
    policies = tuple(("ops", "full", "selective")[i // length % 3] for i in range(len(again)))
    (stage,) = plan.stages
    return plan.model_copy(update={"stages": (stage.model_copy(update={"recompute": again, "policies": policies}),)})


def test_a_policy_for_each_layer() -> None:
    made = parallel("nanogpt", mixed("nanogpt", 2), "sgd")
    text = "".join(made.program.files.values())
    assert all(word in text for word in ("recompute(block, ", "recompute(core, ", "keep(F.linear, "))
    assert not complaints("nanogpt", train_in_lockstep(made, batches("nanogpt")), alone("nanogpt", "sgd"))


def test_a_layer_has_one_policy() -> None:
    with pytest.raises(PlanFileError, match=r"segments \d+ to \d+ are one block, .* not ops for \d+, full for \d+"):
        parallel("nanogpt", mixed("nanogpt", 1), "sgd")


# ---- bytes ----


class Alive(TorchDispatchMode):
    """Tracks the storages that ops allocate, while they are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {_storage(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and _storage(x) not in given:  # neither a view nor an existing storage
                storage = x.untyped_storage()
                self.made[_storage(x)] = StorageWeakRef(storage), storage.nbytes()
        return out

    def nbytes(self, but: set[int]) -> int:
        return sum(n for key, (ref, n) in self.made.items() if key not in but and not ref.expired())


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


@dataclass(frozen=True)
class Kind:
    """A model of equal layers."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]


def ids(*names: str) -> dict[str, Tensor]:
    made = torch.randint(0, VOCAB, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(2))
    return {name: made.clone() for name in names}


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    return LlamaForCausalLM(config)


def eager_bert() -> nn.Module:
    """Make a BERT whose scores are written out, masked and dropped: a core of many ops."""
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 64, "num_attention_heads": 8}
    return BertForMaskedLM(BertConfig(**sizes, num_hidden_layers=3, attn_implementation="eager"))


def nanogpt() -> nn.Module:
    return NanoGPT(GPTSizes(vocab=VOCAB, max_seq=16, width=WIDTH, layers=3, heads=8, dropout=0.2, bias=True))


class SummedLayer(nn.Module):
    """A layer in which sums over tokens read the operand of a product too, so that tp gathers it for both."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256), nn.Linear(256, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(self.up(y).relu()) * y.cumsum(1)


class SummedLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(SummedLayer() for _ in range(3))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


KINDS = {
    "llama": Kind(llama, lambda: ids("input_ids", "labels")),
    "eager_bert": Kind(eager_bert, lambda: ids("input_ids", "labels")),
    "nanogpt": Kind(nanogpt, lambda: ids("idx", "targets")),
}
OTHERS = {"summed": Kind(SummedLayers, lambda: ids("ids", "labels"))}


@cache
def source(name: str) -> TracedModel:
    torch.manual_seed(0)
    kind = (KINDS | OTHERS)[name]
    model = randomised(kind.build()).float()
    given = {n: x[:2] for n, x in kind.inputs().items()}
    return read_model(model, inputs=given, loss=None, seq=None, precision="fp32", progress=Silent())


def made_for(name: str, tp: int, policy: str, cp: int = 1, **how: Any) -> Parallel:
    origin = source(name)
    constraints = {"dp": 1, "cp": cp, "context": "ring", "tp": tp, "pp": 1, "micro": 2, "recompute": policy, **how}
    plan = make_plan(
        origin,
        world=tp * cp,
        cluster=bulk(Cluster.load("dgx-h100")),
        batch=SAMPLES,
        precision="fp32",
        optimizer="sgd",
        constraints=read_constraints(constraints),
        progress=Silent(),
    )
    program = make_program(origin, plan, read_sharding(origin, plan))
    return Parallel(plan, origin, program, "sgd", OPTIONS["sgd"], None, 0)


def predicted(name: str, made: Parallel, policy: str) -> int:
    """Return the bytes that the last layer saves, less its output."""
    folded, mesh = source(name).folded, made.plan.mesh
    sharding = read_sharding(source(name), made.plan)
    unit = max(folded.units, key=lambda u: (u.count, u.length))
    last = folded.segments[unit.first + (unit.count - 1) * unit.length : unit.first + unit.count * unit.length]
    sent = {value.storage for value in flow(last, sharding.kinds).sent}
    again = made.plan.method.gathers == "again"
    items = [
        item for item in saved_activations(last, sharding.kinds, policy, regather=again) if item.storage not in sent
    ]
    sizes = Numbers({**dict.fromkeys(folded.traced.sizes, TOKENS // mesh.cp), BATCH: 2})
    return nbytes(items, sizes, mesh.tp, mesh.cp)


@contextmanager
def copies_of_ranks() -> Iterator[dict[int, set[int]]]:
    """Note the storages of copies in host memory, which on a CPU is the device's, of each rank's thread."""
    moved, to_host = defaultdict[int, set[int]](set), module._to_host

    def noted(x: Tensor) -> Tensor:
        copy = to_host(x)
        moved[get_ident()].add(_storage(copy))
        return copy

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_to_host", noted)
        yield moved


OF_LAYERS = [policy for policy in POLICIES if policy != "logits"]  # that one is of a head


def measured(name: str, made: Parallel, policy: str) -> int:
    """Return the bytes alive on the device after the last layer's forward pass, on one rank."""
    by = {"full": recompute, "ops": recompute, "offload": module.offload}.get(policy, lambda f, *args: f(*args))
    values = made.initial_values()
    made.stage_module(0, 0)

    def body(communicators: Communicators) -> int:
        mine = copy.copy(made)
        mine.start(communicators, values)
        stage = mine._running.stage
        lists = [x for x in vars(stage).values() if isinstance(x, list) and isinstance(x[0], nn.Module)]
        block, got = max(lists, key=len)[-1], list[Any]()
        handle = block.register_forward_pre_hook(lambda _, args: got.extend(args))
        batch = {n: x[:2] for n, x in (KINDS | OTHERS)[name].inputs().items()}
        stage(**{n: batch[n] for n in stage.inputs}, counts=(torch.ones(()),))
        handle.remove()
        before = {_storage(x) for x in (*stage.parameters(), *stage.buffers(), *got) if isinstance(x, Tensor)}
        with Alive() as alive:
            given = [x.detach().requires_grad_().clone() if getattr(x, "requires_grad", False) else x for x in got]
            out = by(block, *given)
            del given
            return alive.nbytes(before | moved[get_ident()] | {_storage(x) for x in tree_leaves(out)})

    with copies_of_ranks() as moved:
        found = run_lockstep(made.layout.mesh, body)
    assert len(set(found)) == 1
    return found[0]


def saved_by_norms(name: str, policy: str, cp: int = 1) -> int:
    """Return the bytes of normalised rows of a layer's two RMS norms, which a CPU saves: it has no kernel for them."""
    return 4 * 2 * (2 * TOKENS // (2 * cp) * WIDTH) if name == "llama" and policy in ("none", "selective") else 0


@pytest.mark.parametrize(("name", "policy", "cp"), pairwise(product(KINDS, OF_LAYERS, (1, 2))))
def test_kept_bytes_are_those_predicted(name: str, policy: str, cp: int) -> None:
    """Exact, except on a cp rank, for a term that the model omits: a ring that is written out saves a maximum and a
    sum of each row, not only their log-sum-exp.

    Attention written out saves the keys and values that it gathered unless it is recomputed.
    """
    made = made_for(name, 2, policy, cp=cp)
    rows = 2 * 4 * TOKENS // 2  # samples, a rank's heads and tokens
    gathered = 2 * rows * WIDTH // 8  # keys and values of the other rank
    more = {"none": gathered} if name == "eager_bert" else {"none": rows, "ops": rows}
    left_out = 4 * more.get(policy, 0) if cp > 1 and name != "llama" else 0
    left_out += saved_by_norms(name, policy, cp)
    assert measured(name, made, policy) == predicted(name, made, policy) + left_out


# ---- planted ----

EDITS = [
    ("llama", "selective", r"recompute\(core, ", "core("),  # the core saves what it should recompute
    ("eager_bert", "selective", r"recompute\(core, ", "core("),
    ("llama", "ops", r"keep\(F\.linear, ", "F.linear("),  # nothing is saved of what should be
    ("llama", "ops", r"= F\.linear\(", "= keep(F.linear, "),  # all products are saved
    ("nanogpt", "ops", r"keep\(\s*ops\.attention,", "ops.attention("),
]


@pytest.mark.fault("kept after all")
@pytest.mark.parametrize(("name", "policy", "pattern", "by"), EDITS)
def test_an_edited_policy_is_seen_in_bytes(name: str, policy: str, pattern: str, by: str) -> None:
    made = made_for(name, 2, policy)
    files = {n: re.sub(pattern, by, text) if n == "blocks.py" else text for n, text in made.program.files.items()}
    assert files != made.program.files, "nothing was planted"
    right = predicted(name, made, policy) + saved_by_norms(name, policy)
    assert measured(name, with_files(made, files), policy) != right
