"""Plans with every choice fixed: products, even cuts, chunks, and the effect of each execution option."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import autoptd
from autoptd.cost_models.cluster import Cluster
from autoptd.cost_models.collectives import collective_s
from autoptd.errors import InputsError, PlanError
from autoptd.models.nanogpt import GPTSizes as NanoSizes
from autoptd.models.nanogpt import NanoGPT
from autoptd.passes.graph import infos
from autoptd.passes.sharding.sharding import ops_of
from autoptd.plans.model import Plan
from autoptd.progress import Silent
from autoptd.search.constraints.assumed import by_keyword, only_predicted
from autoptd.search.constraints.options import ALLOWED, read_constraints
from autoptd.search.pipeline.chunk_cost import ChunkCosts
from autoptd.search.pipeline.partition import even_counts, even_cuts
from autoptd.search.planner import Planner, Task
from autoptd.search.sharding.kind_cost import exposed_s
from autoptd.search.sharding.tensors import Tensors

SEQ, WIDTH, VOCAB, LAYERS = 256, 512, 1024, 4
NODE = Cluster.load("dgx-h100")
BASE: dict[str, Any] = {"dp": 2, "tp": 2, "pp": 2, "micro": 2, "zero": 1, "recompute": "none"}


def gpt() -> nn.Module:
    with torch.device("meta"):
        return NanoGPT(NanoSizes(vocab=VOCAB, max_seq=SEQ, layers=LAYERS, heads=8, width=WIDTH))


@pytest.fixture(scope="module")
def traced() -> autoptd.TracedModel:
    return autoptd.trace(gpt(), seq=SEQ)


def planned(traced: autoptd.TracedModel, world: int = 8, **fix: Any) -> Plan:
    fix, assume = by_keyword(BASE | fix)
    return autoptd.plan(traced, world=world, cluster=NODE, batch=32, fix=fix, assume=assume)


def planner(traced: autoptd.TracedModel, world: int = 8, cluster: Cluster = NODE, **fix: Any) -> Planner:
    fix, assume = by_keyword(BASE | fix)
    constraints = read_constraints(fix, assume=assume).on(cluster.device.kind).searching()
    task = Task(traced.folded, cluster, world, 32, traced.sizes, "bf16", "adamw", constraints)
    return Planner(task, Silent(), traced.known)


def chunks(traced: autoptd.TracedModel, world: int = 8, **fix: Any) -> tuple[ChunkCosts, Tensors]:
    search = planner(traced, world, **fix)
    (candidate,) = search.candidates()
    search.predict(candidate)
    stages = search.costs.stages(candidate)
    return stages.chunks, stages.tensors


# ---- a model that is traced once ----


def test_a_traced_model_plans_as_its_module_does(traced: autoptd.TracedModel) -> None:
    assert planned(traced) == autoptd.plan(gpt(), world=8, cluster=NODE, batch=32, seq=SEQ, fix=BASE)


def test_what_is_kept_is_never_of_another_question(traced: autoptd.TracedModel) -> None:
    """Every plan after all the others equals that of a fresh trace."""
    slow = Cluster.of("H100-SXM5-80GB", 4, 100e9, 10e9)
    asked: list[dict[str, Any]] = [
        {"cluster": NODE, "fix": BASE},
        {"cluster": slow, "fix": BASE},
        {"cluster": NODE, "fix": BASE | {"kernels": "eager"}},
        {"cluster": NODE, "fix": BASE | {"sequence_parallel": False}},
        {"cluster": NODE, "fix": BASE | {"recompute": "selective"}},
        {"cluster": NODE, "fix": BASE | {"splits": {"*.qkv.weight": "S1"}}},
        {"cluster": NODE, "fix": BASE | {"cp": 2, "dp": 1}},
        {"cluster": NODE, "fix": BASE, "optimizer": "sgd"},
    ]
    texts = [autoptd.plan(traced, world=8, batch=32, **constraints).to_json() for constraints in asked]
    again = [autoptd.plan(traced, world=8, batch=32, **constraints).to_json() for constraints in asked]
    fresh = [autoptd.plan(replace(traced, known=type(traced.known)(traced.folded)), world=8, batch=32, **w).to_json()
             for w in asked]  # fmt: skip
    assert texts == again == fresh
    assert len(set(texts)) == len(texts)


def test_what_is_kept_goes_by_all_that_it_depends_on(traced: autoptd.TracedModel) -> None:
    known, values = traced.known, tuple(traced.sizes.items())
    shorter = tuple((symbol, 3) for symbol, _ in values)
    keys = [(2, values, True), (2, values, False), (4, values, True), (2, shorter, True)]
    counts = [sum(len(o) for kind in known.legal(*key).values() for o in kind.values()) for key in keys * 2]
    assert counts[:4] == counts[4:] and counts[1] < counts[0] and counts[3] < counts[0]
    assert known.legal(*keys[0]) is known.legal(*keys[0]) and known.legal(*keys[0]) is not known.legal(*keys[2])
    books = [known.workbook(*key) for key in (("fused", ""), ("eager", ""), ("fused", "triton"))]
    assert [(b.kernels, b.attention) for b in books] == [("fused", ""), ("eager", ""), ("fused", "triton")]


@pytest.mark.parametrize(
    "other",
    [{"seq": 128}, {"precision": "fp32"}, {"inputs": {}}, {"loss": lambda out: out}],
    ids=lambda o: next(iter(o)),
)
def test_a_traced_model_is_not_another(traced: autoptd.TracedModel, other: dict[str, Any]) -> None:
    with pytest.raises(InputsError, match=f"the model was traced with.*passes {next(iter(other))}"):
        autoptd.plan(traced, world=8, batch=32, **other)
    same = autoptd.plan(traced, world=8, batch=32, cluster=NODE, seq=SEQ, precision="bf16", fix=BASE)
    assert same == planned(traced)


def test_a_traced_model_is_parallelized(traced: autoptd.TracedModel) -> None:
    plan = planned(traced)
    assert autoptd.parallelize(traced, world=8, plan=plan).program == autoptd.parallelize(gpt(), plan=plan).program


def test_one_candidate_is_predicted_as_it_is_planned(traced: autoptd.TracedModel) -> None:
    search = planner(traced)
    (candidate,) = search.candidates()
    plan = planned(traced, schedule="1f1b", shards=0)
    assert search.predict(candidate).seconds == plan.predicted.step_time_s


# ---- effect of an execution option ----


def test_gathering_again_takes_as_long_as_gathering(traced: autoptd.TracedModel) -> None:
    """An attention's input, 16 × 256 × 512 in bf16, is gathered once more in backward; a full recomputation has it."""
    many = {"micro": 16, "sequence_parallel": True}
    (kept, _), (again, _) = chunks(traced, **many), chunks(traced, gathers="again", **many)
    segment = next(i for i, s in enumerate(traced.folded.segments) if "attention" in s.kind)
    nbytes = 16 * SEQ * WIDTH * 2
    assert ("all_gather", nbytes) in kept.cost(segment).work.forward_collectives
    more_s = again.least(segment).backward_s - kept.least(segment).backward_s
    assert more_s == pytest.approx(collective_s("all_gather", nbytes, NODE, 2, 1, 8))
    assert again.least(segment).forward_s == kept.least(segment).forward_s
    runs = [each.chunk(segment, segment, {segment: "full"}).backward_s for each in (kept, again)]
    assert runs[0] == pytest.approx(runs[1]), "a recomputed forward pass gathers anyway"
    # by hand it is beside the product of the input's gradient; overlapped, its first half is exposed
    for options, share in (({"kernels": "fused"}, 0.0), ({"overlap": ["tp"]}, 0.5)):
        (kept, _), (again, _) = chunks(traced, **many, **options), chunks(traced, gathers="again", **many, **options)
        assert again.least(segment).backward_s - kept.least(segment).backward_s == pytest.approx(share * more_s)


@pytest.mark.parametrize(
    ("fix", "reason"),
    [
        ({"overlap": ["tp"]}, "overlap of tp"),
        ({"overlap": []}, "overlap of nothing"),
        ({"kernels": "fused"}, "fused kernels"),
        ({"attention": "cudnn"}, "cudnn attention"),
        ({"gradients": "both"}, "gradients in both types"),
        ({"gradients": "fused"}, "gradients added by products"),
    ],
    ids=str,
)
def test_what_can_be_predicted_and_not_run(traced: autoptd.TracedModel, fix: dict[str, Any], reason: str) -> None:
    world = 8
    plan = planned(traced, world, **fix)
    assert plan.not_runnable == (reason,)
    assert Plan.from_json(plan.to_json()) == plan and plan.mesh.ranks == world
    assert f"predicted only: {reason}" in plan.explain()
    assert sum(plan.predicted.time_s.values()) == pytest.approx(plan.predicted.step_time_s)
    with pytest.raises(PlanError, match=f"predicted, but not run: {reason}"):
        autoptd.parallelize(traced, world=world, plan=plan)


CHOICES = [(name, value) for name in ("attention", "gradients", "kernels") for value in ALLOWED[name]]
CHOICES += [("overlap", streams) for streams in ((), ("dp",), ("p2p",), ("tp",), ("dp", "p2p"), ("dp", "p2p", "tp"))]


@pytest.mark.parametrize(("name", "value"), CHOICES, ids=str)
def test_what_is_only_predicted_is_what_does_not_run(traced: autoptd.TracedModel, name: str, value: Any) -> None:
    """Options are only predicted if they cannot run; `assume` also accepts the attention that runs anyway, and
    FlashAttention-2, which it is on some devices."""
    how = {"fix": BASE | {name: value}} if not only_predicted(name, value) else {"fix": BASE, "assume": {name: value}}
    plan = autoptd.plan(traced, world=8, cluster=NODE, batch=32, **how)
    assert bool(plan.not_runnable) == (only_predicted(name, value) and value not in ("torch", "flash"))


RUNS = [
    {"virtual": 2, "dp": 1},
    {"schedule": "zero-bubble"},
    {"schedule": "gpipe"},
    {"overlap": ["dp", "p2p"]},
    {"sends": "slices"},
    {"bucket_bytes": 10**7},
    {"loss": "in_place"},
    {"recompute": "selective"},
    {"recompute": "ops"},
    {"recompute": "ops", "cp": 2, "dp": 1},
    {"gathers": "again"},
    {"gradients": "compute"},
]


@pytest.mark.parametrize("fix", RUNS, ids=str)
def test_every_schedule_overlap_and_policy_runs(traced: autoptd.TracedModel, fix: dict[str, Any]) -> None:
    assert planned(traced, 4 if "virtual" in fix else 8, **fix).not_runnable == ()


def test_what_the_search_finds_by_itself_runs(traced: autoptd.TracedModel) -> None:
    plan = autoptd.plan(traced, world=8, cluster=NODE, batch=32)
    assert plan.not_runnable == () and "predicted only" not in plan.explain()


@pytest.mark.parametrize(
    ("slower", "quicker"),
    [
        ({"kernels": "eager"}, {"kernels": "fused"}),
        ({"recompute": "full"}, {"recompute": "selective"}),
        ({"recompute": "selective"}, {"recompute": "none"}),
        ({"overlap": []}, {"overlap": ["p2p"]}),
        ({"overlap": ["p2p"]}, {"overlap": ["dp", "p2p"]}),
        ({"zero": 3, "overlap": []}, {"zero": 3, "overlap": ["dp"]}),
    ],
    ids=str,
)
def test_what_does_less_or_hides_more_is_quicker(
    traced: autoptd.TracedModel, slower: dict[str, Any], quicker: dict[str, Any]
) -> None:
    times = [planned(traced, **fix).predicted.step_time_s for fix in (slower, quicker)]
    assert times[0] > times[1]


@pytest.mark.parametrize(
    ("more", "less"),
    [
        ({"zero": 0}, {"zero": 1}),
        # of four layers ZeRO 3 holds two whole
        ({"zero": 1, "kernels": "eager", "dp": 4, "pp": 1}, {"zero": 3, "shards": 4, "dp": 4, "pp": 1}),
        ({"recompute": "none"}, {"recompute": "selective"}),
        ({"recompute": "selective"}, {"recompute": "full"}),
    ],
    ids=str,
)
def test_what_keeps_less_needs_less(traced: autoptd.TracedModel, more: dict[str, Any], less: dict[str, Any]) -> None:
    kept = [planned(traced, **fix).predicted.memory[0] for fix in (more, less)]
    held = [sum(m[name] for name in ("parameters", "gradients", "optimizer", "activations")) for m in kept]
    assert held[0] > held[1]


# ---- products ----


def test_backward_products_are_of_the_gradients_shapes(traced: autoptd.TracedModel) -> None:
    """y [m, n] = x [m, k] w [n, k]: dx [m, k] sums over n, dw over m."""
    _, tensors = chunks(traced, tp=1, dp=4)
    found = {}
    for kind, segment in traced.folded.representatives.items():
        for i, node in ops_of(segment):
            if "linear" in str(node.target):
                forward, backward = tensors.kernels(node, tensors.legal[kind][i][0])
                n, k = (int(s) for s in infos(node.args[1])[0].shape)
                found[n, k] = [(w.m, w.n, w.k) for w in (*forward, *backward) if w.kind == "matmul"]
                assert all(w.flops == 2 * 2 * SEQ * n * k for w in (*forward, *backward) if w.kind == "matmul")
    m = 2 * SEQ
    assert (4 * WIDTH, WIDTH) in found
    for (n, k), shapes in found.items():
        assert shapes[0] == (m, n, k)
        assert sorted(map(sorted, shapes[1:])) == [sorted((m, n, k))] * 2
        assert {shape[2] for shape in shapes[1:]} == {n, m}


# ---- cuts and chunks ----


def test_even_counts() -> None:
    assert even_counts(8, 4) == [2, 2, 2, 2]
    assert even_counts(30, 8) == [3, 4, 4, 4, 4, 4, 4, 3], "embedding and head count as a block each"
    assert even_counts(10, 4) == [2, 3, 3, 2]
    assert even_counts(9, 4) == [3, 2, 2, 2]
    assert even_counts(5, 1) == [5]


def test_even_cuts_cover_the_model(traced: autoptd.TracedModel) -> None:
    cuts = even_cuts(traced.folded, 2)
    assert cuts[0][0] == 0 and cuts[-1][1] == len(traced.folded.segments) - 1 and cuts[0][1] + 1 == cuts[1][0]
    with pytest.raises(PlanError, match="4 blocks cannot be shared evenly by 16 stages"):
        even_cuts(traced.folded, 16)


def test_a_gather_of_parameters_is_hidden_or_not(traced: autoptd.TracedModel) -> None:
    last = len(traced.folded.segments) - 1
    fix = {"zero": 3, "pp": 1, "tp": 1, "dp": 8, "micro": 1}
    shown, hidden = (chunks(traced, **fix, overlap=o)[0].chunk(0, last, {}) for o in ([], ["dp"]))
    own, _ = chunks(traced, **fix | {"zero": 1})
    trained, units = own.numel(0, last), 6  # four layers, and what is before and behind them
    # gathered for the forward and for the backward pass, in bf16; gradients scattered in fp32
    gather = units * collective_s("all_gather", trained * 2 / units, NODE, 8)
    scatter = units * collective_s("reduce_scatter", trained * 4 / units, NODE, 8)
    assert shown.sharding_s == pytest.approx(2 * gather + scatter)
    assert 0 < hidden.sharding_s < shown.sharding_s
    assert own.chunk(0, last, {}).sharding_s == 0.0


def test_frozen_parameters_are_gathered_and_not_summed() -> None:
    """No gradient passes behind a frozen encoder: its parameters are gathered in the forward pass only."""
    model = gpt()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(("tokens", "positions", "blocks.0", "blocks.3")))
    frozen = autoptd.trace(model, seq=SEQ)
    last = len(frozen.folded.segments) - 1
    shown, _ = chunks(frozen, zero=3, pp=1, tp=1, dp=8, micro=1, overlap=[])
    still, trained, units = shown.frozen_bytes(0, last), shown.numel(0, last), shown.units(0, last)
    behind = shown.frozen_bytes(0, last, backward=True)
    assert 0 < behind < still and still == 2 * sum(p.numel() for p in model.parameters() if not p.requires_grad)
    forward, backward = (
        units * collective_s("all_gather", (trained * 2 + n) / units, NODE, 8) for n in (still, behind)
    )
    scatter = units * collective_s("reduce_scatter", trained * 4 / units, NODE, 8)
    assert shown.chunk(0, last, {}).sharding_s == pytest.approx(forward + backward + scatter)
    whole, _ = chunks(frozen, zero=2, pp=1, tp=1, dp=8, micro=1, overlap=[])
    gather = units * collective_s("all_gather", trained * 2 / units, NODE, 8)
    assert whole.chunk(0, last, {}).sharding_s == pytest.approx(scatter), "parameters are whole in every pass"
    assert whole.gather_s([(0, last)]) == pytest.approx(gather) and shown.gather_s([(0, last)]) == 0.0


def test_exposed_by_hand() -> None:
    assert exposed_s(10.0, 100.0, 5) == 2.0  # the first piece
    assert exposed_s(10.0, 3.0, 5) == 2.0 + 8.0 - 3.0  # plus the time beyond the compute


def test_keys_and_values_go_round_a_ring(traced: autoptd.TracedModel) -> None:
    ring, _ = chunks(traced, cp=2, dp=1)
    alone, _ = chunks(traced, dp=2)
    kinds = [(ring.sharded.costs[k], alone.sharded.costs[k]) for k in ring.sharded.costs]
    ((split, whole),) = [(a, b) for a, b in kinds if b.work.ring_bytes]
    assert split.work.ring_bytes == whole.work.ring_bytes // 2  # of half the tokens
    # half the queries times all the keys
    flops = [sum(w.flops for w in c.work.forward if w.kind == "attention") for c in (split, whole)]
    assert flops[0] == pytest.approx(flops[1] / 2)
    assert split.work.ring_sums_bytes == 2 * split.work.ring_bytes  # of their gradients, in float32
    assert min(ring._context_s(split)) > 0 and alone._context_s(whole) == (0, 0)


def test_attention_that_runs_again_asks_the_ring_again(traced: autoptd.TracedModel) -> None:
    ring, _ = chunks(traced, cp=2, dp=1, recompute="selective", micro=4)
    again, _ = chunks(traced, cp=2, dp=1, recompute="ops", micro=4)
    (segment,) = {s.kind: s.index for s in ring.folded.segments if ring.cost(s.index).work.ring_bytes}.values()
    cost, kept = ring.cost(segment), again.cost(segment)
    again_s = cost.again_s["selective", False] + ring._context_s(cost)[0]
    assert ring.added_s(segment, "selective")[1] == pytest.approx(again_s)
    again_s = kept.again_s["ops", False] + kept.again_comm_s["ops", False]  # the result of attention is saved
    assert again.added_s(segment, "ops")[1] == pytest.approx(again_s)


def test_a_compiled_block_runs_again_to_its_end(traced: autoptd.TracedModel) -> None:
    """An eager one stops before its last product: of a layer, "ops" saves the results of two others of the four."""
    width = WIDTH * WIDTH * SEQ * 2 * 2  # FLOPs of a product of width by width, of two samples

    def repeated(kernels: str, policy: str) -> float:
        own, _ = chunks(traced, 1, dp=1, tp=1, pp=1, recompute=policy, kernels=kernels)
        ends = own.tensors.workbook.facts.block_ends
        layer = [own.cost(i).work.recomputed[policy, i in ends].works for i in (2, 3)]
        return sum(w.flops for works in layer for w in works if w.kind == "matmul") / width

    assert [repeated(kernels, "ops") for kernels in ("eager", "compiled", "fused")] == [1, 5, 5]
    assert [repeated(kernels, "full") for kernels in ("eager", "compiled", "fused")] == [8, 12, 12]


@pytest.mark.parametrize(("dispatch_s", "tp", "said"), [(1e-4, 2, True), (1e-4, 1, False), (1e-9, 2, False)])
def test_the_note_on_what_is_best_leaves_out_who_waits_for_the_host(
    traced: autoptd.TracedModel, dispatch_s: float, tp: int, said: bool
) -> None:
    """The splits program adds up kernels, so that it proves nothing where the host takes longer."""
    cluster = NODE.model_copy(update={"device": NODE.device.model_copy(update={"dispatch_s": dispatch_s})})
    fix = {"tp": tp, "pp": 1, "kernels": "eager"}
    note = autoptd.plan(traced, world=2, cluster=cluster, batch=8, fix=fix).notes[-1]
    assert "none is faster" in note and ("waited for the host" in note) == said


@pytest.mark.parametrize(
    ("rate", "fix", "said"),
    [
        (1e8, {"tp": 2, "sequence_parallel": False}, True),
        (1e15, {"tp": 2, "sequence_parallel": False}, False),
        (1e8, {"tp": 1}, False),
    ],
)
def test_the_note_on_what_is_best_leaves_out_splits_that_send_less(
    traced: autoptd.TracedModel, rate: float, fix: dict[str, Any], said: bool
) -> None:
    """The splits program knows no messages between stages: two splits that it weighs alike may send different bytes."""
    levels = tuple(level.model_copy(update={"bytes_per_s": rate, "latency_s": 0.0}) for level in NODE.levels)
    fix = {"pp": 2, "micro": 2, "kernels": "eager", **fix}
    cluster = NODE.model_copy(update={"levels": levels})
    note = autoptd.plan(traced, world=2 * fix["tp"], cluster=cluster, batch=8, fix=fix).notes[-1]
    assert "none is faster" in note and ("messages between stages" in note) == said


def test_scores_of_a_cp_rank_have_all_columns() -> None:
    """Attention written out has half the rows, so half the operations and half the bytes."""
    config = transformers.BertConfig(
        hidden_size=64, num_attention_heads=8, num_hidden_layers=2, vocab_size=512, attn_implementation="eager"
    )
    with torch.device("meta"):
        model = transformers.BertForMaskedLM(config)
    written = autoptd.trace(model, seq=SEQ)
    (half, _), (whole, _) = chunks(written, 4, tp=1, cp=2, dp=1), chunks(written, 4, tp=1, dp=2)
    for kind, cost in half.sharded.costs.items():
        works = [(w.flops, w.nbytes) for w in cost.work.forward]
        wholes = [(w.flops, w.nbytes) for w in whole.sharded.costs[kind].work.forward]
        assert [flops for flops, _ in works] == pytest.approx([flops / 2 for flops, _ in wholes])
        assert all(nbytes >= other / 2 for (_, nbytes), (_, other) in zip(works, wholes, strict=True))
    sizes = [max(c.work.activation_bytes for c in each.sharded.costs.values()) for each in (half, whole)]
    assert sizes[0] == sizes[1] / 2


def test_heads_are_exchanged_for_tokens(traced: autoptd.TracedModel) -> None:
    ring, _ = chunks(traced, cp=2, dp=1, context="ring")
    exchanged, _ = chunks(traced, cp=2, dp=1, context="ulysses")
    ((kind, cost),) = [(k, c) for k, c in exchanged.sharded.costs.items() if c.work.ring_bytes]
    assert cost.work.exchanged_bytes == 2 * cost.work.ring_bytes  # queries and results are as large as keys and values
    seconds = collective_s("all_to_all", 2 * cost.work.exchanged_bytes, NODE, 2, exchanged.candidate.tp)
    assert exchanged._context_s(cost) == (seconds, seconds)
    cost, tp = ring.sharded.costs[kind], ring.candidate.tp
    keys_s = collective_s("all_gather", 2 * cost.work.ring_bytes, NODE, 2, tp)  # one step
    sums_s = 2 * collective_s("all_gather", 4 * cost.work.ring_bytes, NODE, 2, tp)  # two, in float32
    shown_s = exposed_s(keys_s, cost.attention_s, 2), exposed_s(keys_s + sums_s, 2 * cost.attention_s, 2)
    assert ring._context_s(cost) == pytest.approx(shown_s)


@pytest.mark.parametrize("rate", [1e9, 3e10, 1e12])
@pytest.mark.parametrize("cp", [2, 4, 8])
def test_attention_over_cp_is_the_quicker_one(traced: autoptd.TracedModel, cp: int, rate: float) -> None:
    """Unless it cannot be: eight heads divide by tp 2 and cp 2 or 4, and 256 tokens by 2 cp."""
    levels = tuple(level.model_copy(update={"bytes_per_s": rate}) for level in NODE.levels)
    cluster = NODE.model_copy(update={"levels": levels})
    contexts = ["ring", "ulysses"] if cp < 8 else ["ring"]
    own = [planner(traced, 4 * cp, cluster, cp=cp, dp=1, context=context) for context in contexts]
    each = {search.answer().staged.seconds: context for search, context in zip(own, contexts, strict=True)}
    answer = planner(traced, 4 * cp, cluster, cp=cp, dp=1).answer()
    assert answer.staged.seconds == min(each)
    assert answer.staged.method.context == answer.question.context == each[min(each)]


def test_gradients_are_added_up_unless_matmuls_do(traced: autoptd.TracedModel) -> None:
    eager, tensors = chunks(traced, kernels="eager")
    fused, _ = chunks(traced, kernels="fused")
    trained = eager.numel(1, 2)
    device = tensors.cluster.device
    rate = device.memory_bytes_per_s * device.memory_sustained.fraction
    # in 7 of 8 microbatches the fp32 sum is read and written, in the first only written; the bf16 gradient is read
    assert eager.accumulation_s(eager.numel(1, 2)) == pytest.approx(trained * (7 / 8 * 4 + 4 + 2) / rate)
    assert fused.accumulation_s(fused.numel(1, 2)) == 0.0
    compiled, _ = chunks(traced, kernels="compiled")
    assert compiled.accumulation_s(trained) == eager.accumulation_s(trained), "hooks run beside compiled kernels"
    added, _ = chunks(traced, kernels="compiled", gradients="fused")
    assert added.accumulation_s(trained) == 0.0, "but products may add, whatever fuses the rest"
    # ZeRO 2: to a bucket (2 + 4), whose half of dp 2 is read, and copied or added
    sharded, _ = chunks(traced, kernels="eager", zero=2)
    assert sharded.accumulation_s(trained) == pytest.approx(trained * (6 + (4 + 4 * 15 / 8) / 2) / rate)


def test_a_tied_embedding_is_summed_over_its_stages() -> None:
    config = transformers.GPT2Config(n_embd=64, n_head=8, n_layer=2, vocab_size=512, bos_token_id=0, eos_token_id=0)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    tied = autoptd.trace(model, seq=SEQ)
    own, _ = chunks(tied)
    last = len(tied.folded.segments) - 1
    # [512, 64] in two over tp, of each rank's half (ZeRO 1) in fp32, between ranks of the two stages, 4 apart
    nbytes = 512 * 64 / 2 * 4 / 2
    halves = ((0, last // 2), (last // 2 + 1, last))
    assert own._tied_s([halves[0]], halves) == pytest.approx(collective_s("all_reduce", nbytes, NODE, 2, 4))
    assert own._tied_s([halves[1]], halves) == own._tied_s([halves[0]], halves)
    assert own._tied_s([(0, last)], ((0, last),)) == 0.0, "one stage has both"


def test_cp_must_divide_the_sequence() -> None:
    with torch.device("meta"):
        odd = NanoGPT(NanoSizes(vocab=VOCAB, max_seq=36, layers=1, heads=8, width=64))
    with pytest.raises(PlanError, match="cp 8 does not divide the sequence of 36 tokens"):
        autoptd.plan(odd, world=8, cluster=NODE, batch=32, seq=36, fix={"cp": 8})


# ---- chunks and gradients in memory ----


def test_more_chunks_on_a_rank_keep_more(traced: autoptd.TracedModel) -> None:
    one, two = (
        planned(traced, stages="even", virtual=chunks, schedule=schedule).predicted.memory
        for chunks, schedule in ((1, "1f1b"), (2, "interleaved"))
    )
    # on the first of two ranks, blocks 0 and 1 or 0 and 2: 2 microbatches of both; or 2 · 1 + 1 · 2 + 1 of either
    assert two[0]["activations"] == pytest.approx(one[0]["activations"] / 2 * 5 / 2, rel=1e-6)
    # on the last: 1 of both; or 0 + 1 · 2 + 1 of either
    assert two[1]["activations"] > one[1]["activations"]
    assert two[0]["parameters"] == one[0]["parameters"]


@pytest.mark.parametrize(("zero", "gradients", "shards"), [(0, "compute", 1), (1, "compute", 2), (1, "main", 0)])
def test_gradients_of_the_compute_type_are_widened_for_the_step(
    traced: autoptd.TracedModel, zero: int, gradients: str, shards: int
) -> None:
    own, _ = chunks(traced, zero=zero, gradients=gradients)
    runs = [(0, 1), (2, 3)]
    trained = own.numel(0, 1) + own.numel(2, 3)
    assert own.update_bytes(runs) == (4 * -(-trained // shards) if shards else 0)


def test_the_step_may_be_the_fullest_moment(traced: autoptd.TracedModel) -> None:
    fix = {"zero": 0, "recompute": "full", "micro": 1, "dp": 4, "pp": 1}
    narrow, wide = (planned(traced, **fix, gradients=g).predicted.memory[0] for g in ("compute", "main"))
    own, _ = chunks(traced, **fix, gradients="compute")
    upcast = own.update_bytes([(0, len(traced.folded.segments) - 1)])
    assert upcast == 4 * own.numel(0, len(traced.folded.segments) - 1)
    assert narrow["activations"] == wide["activations"] and wide["temporary"] < upcast - wide["activations"]
    assert narrow["temporary"] + narrow["activations"] == upcast
    assert wide["gradients"] == 2 * narrow["gradients"]


@pytest.mark.parametrize(("zero", "kind", "gradient"), [(0, "all_reduce", 4), (1, "reduce_scatter", 4)])
def test_gradients_are_reduced_in_buckets(traced: autoptd.TracedModel, zero: int, kind: str, gradient: int) -> None:
    last = len(traced.folded.segments) - 1
    fix = {"zero": zero, "pp": 1, "tp": 1, "dp": 8, "micro": 1}
    cases: list[dict[str, Any]] = [{}, {"bucket_bytes": 10**7}]
    whole, cut = (chunks(traced, **fix | size)[0] for size in cases)
    nbytes = gradient * whole.numel(0, last)
    pieces = -(-nbytes // 10**7)
    assert pieces > 3 and (whole.buckets(nbytes // gradient), cut.buckets(nbytes // gradient)) == (1, pieces)
    assert whole.reduce_s([(0, last)]) == pytest.approx(collective_s(kind, nbytes, NODE, 8))
    assert cut.reduce_s([(0, last)]) == pytest.approx(pieces * collective_s(kind, nbytes / pieces, NODE, 8))
    assert cut.reduce_s([(0, last)]) > whole.reduce_s([(0, last)])
    if zero:
        gathered = 2 * whole.numel(0, last)
        assert whole.gather_s([(0, last)]) == pytest.approx(collective_s("all_gather", gathered, NODE, 8))
        each_s = collective_s("all_gather", gathered / pieces, NODE, 8)
        assert cut.gather_s([(0, last)]) == pytest.approx(pieces * each_s)


@pytest.mark.parametrize(("dropout", "word"), [(0.1, "in blocks of scores"), (0.0, "")])
def test_a_plan_says_which_kernel_does_its_attention(dropout: float, word: str) -> None:
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=64, n_positions=64, attn_pdrop=dropout)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    plan = autoptd.plan(model, world=2, cluster="dgx-h100", batch=4)
    said = [note for note in plan.notes if "attentions are" in note]
    assert len(said) == bool(word) and all(word in note for note in said)
