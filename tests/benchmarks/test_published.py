"""Published runs: models that train and trace, clusters and plans from rows, statistics, the report."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import autoptd
from autoptd.cost_models.memory import Memory, allocator_bytes, communicator_bytes
from benchmarks.published.__main__ import chosen, main
from benchmarks.published.bars import fitting_verdicts, memory_verdicts, set_verdicts, skip_verdict, time_verdicts
from benchmarks.published.clusters import cluster_of, network
from benchmarks.published.compare import Fitting, PlanSet, compare, is_mixture
from benchmarks.published.engines import beside
from benchmarks.published.fix import chunk_counts, fix_of, layout_cuts, nanotron_cuts, uneven_cuts
from benchmarks.published.predict import Prediction, _read, predict, staged
from benchmarks.published.report import WIDTH, data, plan_text, summary, text
from benchmarks.published.rows import BadRuns, Row, Unsupported, read_rows, unit_bytes
from benchmarks.published.run import run
from benchmarks.published.shapes import Shape, build, shape_of
from benchmarks.published.statistics import errors, ranks, regret, spearman
from tests.benchmarks.sample_runs import OF_ROW, SAMPLE, tiny

# ---- clusters ----


def test_cluster_has_the_links_of_the_row() -> None:
    row = tiny(inter_node_bw_Gbps_per_gpu=100, intra_node_bw_GBps_per_gpu_per_direction=250, gpus_per_node=4)
    cluster = cluster_of(row)
    assert cluster.device.name == "A100-SXM4-80GB"
    assert [(level.ranks, level.bytes_per_s) for level in cluster.levels] == [(4, 250e9), (None, 12.5e9)]


def test_cluster_is_chosen_by_memory_and_unstated_links_are_its_own() -> None:
    small = cluster_of(tiny(gpu_type="A100-SXM4", gpu_memory_gb=40, inter_node_link="InfiniBand HDR"))
    assert small == autoptd.Cluster.load("dgx-a100-40gb")
    assert cluster_of(tiny(gpu_type="H100-SXM5-80GB", gpu_memory_gb=80)) == autoptd.Cluster.load("dgx-h100")


def test_a_device_that_is_not_shipped_is_a_reason() -> None:
    with pytest.raises(Unsupported, match="no shipped cluster has A100-SXM4-64GB with 64 GB"):
        cluster_of(tiny(gpu_type="A100-SXM4-64GB", gpu_memory_gb=64))


def test_networks_are_distinguished() -> None:
    assert network("4x Omni-Path 100Gb/s per 8-GPU node") == "omni-path"
    assert network("AWS EFA 3200 Gb/s per node") == "efa"
    assert network("RoCE 1600 Gb/s per node") == "roce"
    assert network("InfiniBand NDR") == network("not stated") == "infiniband"


@pytest.mark.parametrize(("stated", "shared"), [(352.0, 14336), (341.3, 0), (346.0, 0), (None, 0)])
def test_a_shared_expert_that_only_the_total_has(stated: float | None, shared: int) -> None:
    """MegaScale-MoE (Jin et al. 2025), table 2: 60 layers of 32 experts are 341.3e9 parameters, printed as 352B."""
    row = tiny(
        arch="moe", n_layers=60, hidden_size=4096, ffn_hidden_size=14336, n_heads=32, n_kv_heads=8, head_dim=128,
        vocab_size=65536, tied_embeddings=False, n_experts=32, moe_top_k=3, moe_ffn_hidden_size=14336, tp=8, dp=1,
        n_params_billion=stated,
    )  # fmt: skip
    experts = shape_of(row).experts
    assert experts is not None and experts.shared == shared


# ---- plans ----


def fix(row: Row) -> dict:
    return fix_of(row, shape_of(row))


def test_fix_of_published_plans() -> None:
    selective = fix(OF_ROW["korthikanti_table5:0001"])
    wanted = {"dp": 1, "tp": 8, "pp": 1, "micro": 4, "zero": 0, "recompute": "selective", "sequence_parallel": True}
    assert {k: selective[k] for k in wanted} == wanted
    assert (selective["gradients"], selective["kernels"], selective["overlap"]) == ("main", "fused", ())
    titan = fix(OF_ROW["torchtitan_2024:0001"])
    assert (titan["zero"], titan["recompute"], titan["kernels"]) == (3, "ops", "compiled")
    assert (titan["overlap"], titan["gradients"]) == (("dp",), "main")
    assert "splits" not in titan and titan["shards"] == 0


def test_every_fix_is_one_that_plan_takes() -> None:
    from autoptd.search.constraints.assumed import by_keyword
    from autoptd.search.constraints.options import read_constraints

    for row in OF_ROW.values():
        if not row.arch.startswith("hybrid") and row.status == "ok":
            carried_out, assume = by_keyword(fix(row))
            read_constraints(carried_out, assume=assume)


def test_interleaved_and_sharded_plans() -> None:
    row = tiny(dp=2, pp=2, tp=2, n_layers=8, vpp_chunks_per_stage=2, global_batch_size_seqs=8, framework="NeMo")
    assert (fix(row)["schedule"], fix(row)["virtual"], fix(row)["overlap"]) == ("interleaved", 2, ("p2p",))
    assert (fix(row)["stages"], fix(row)["sends"]) == ("even", "whole")
    assert fix(row.model_copy(update={"framework": "nanotron"}))["stages"] == "balanced"
    hybrid = tiny(dp=8, tp=1, sharding="hsdp(zero3 within node)", fsdp_shard_size=4)
    assert (fix(hybrid)["zero"], fix(hybrid)["shards"]) == (3, 4)
    assert fix(tiny(sharding="fsdp_shard_grad_op(zero2)"))["zero"] == 2
    assert fix(tiny(notes="…; grads accumulated fp16; …"))["gradients"] == "compute"
    for name in ("MegaScale-MoE", "HAI-LLM, DualPipe"):  # compiled pointwise kernels, gradients added by products
        own = fix(tiny(framework=name))
        assert (own["kernels"], own["gradients"]) == ("compiled", "fused")


def test_fix_of_nanotron() -> None:
    """DistributedDataParallel, which wraps the model without ZeRO, has buckets in the compute type."""
    row = tiny(framework="nanotron", precision="bf16", sharding="none", dp=4, tp=2)
    assert fix(row)["gradients"] == "both" and fix(row)["loss"] == "in_place"
    for changes in ({"sharding": "zero1"}, {"dp": 1, "n_gpus": 2}):
        assert fix(row.model_copy(update=changes))["gradients"] == "main"


def test_what_megatron_deepspeed_holds_beside() -> None:
    row = tiny(framework="Megatron-DeepSpeed", precision="fp16", sharding="zero1", dp=4, tp=2, pp=2)
    five = communicator_bytes([2, 4, 2, 4, 2])  # tp, dp, pp, a replica, tied stages
    assert beside(row, parameters=10**9) == Memory(communication=10**9 + five)
    assert beside(row, parameters=10**10) == Memory(communication=10**10 // 4 + five), "the partition's gradients"
    assert beside(row.model_copy(update={"precision": "bf16"}), 10**10).communication == 2 * 10**9 + five
    alone = row.model_copy(update={"dp": 1, "pp": 1})
    assert beside(alone, 10**9).communication == 10**9 + communicator_bytes([2, 2]), "tp, and it again"
    for changes in ({"sharding": "none"}, {"framework": "Megatron-LM"}):
        assert beside(row.model_copy(update=changes), 10**9) == Memory()


def test_logits_in_float32_beside_probabilities_of_nanotron() -> None:
    row = tiny(framework="nanotron", tp=2, dp=4, micro_batch_size_seqs=2, seq_len_tokens=1024, vocab_size=50_000)
    assert beside(row, parameters=10**9) == Memory(temporary=2 * 2 * 1024 * 25_000)
    assert beside(row.model_copy(update={"pp": 2}), 10**9) == Memory(), "the first stage has none"


def test_chunks_that_the_source_of_a_figure_states_elsewhere(tmp_path: Path) -> None:
    """Korthikanti et al. 2022, figure 1 (B): 18 bytes of each parameter of 3 layers, and 34 s b h / t per layer."""
    row = {"id": "a", "group": "korthikanti_fig1_memory", "model_name": "GPT 530B", "vpp_chunks_per_stage": 1}
    both = row, row | {"id": "b", "group": "korthikanti_table5"}
    (tmp_path / "runs.jsonl").write_text("\n".join(map(json.dumps, both)))
    figure, other = read_rows(tmp_path / "runs.jsonl")
    assert (figure.vpp_chunks_per_stage, other.vpp_chunks_per_stage) == (3, 1)
    in_flight = 1 + (35 - 1) / (35 * figure.vpp_chunks_per_stage)
    state, activations = 18 * 3 * 12 * 20480**2 / 8, 34 * 2048 * 20480 * 105 / 8
    assert (state + in_flight * activations) / 2**30 == pytest.approx(54.717, abs=1e-3)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dp": 8}, "dp 8 × tp 2 × pp 1 × cp 1 is 16, not 8 GPUs"),
        ({"global_batch_size_seqs": 10}, "10 is not a multiple of dp × micro = 4"),
        ({"sharding": "zero9"}, "unknown sharding 'zero9'"),
        ({"recompute": "some"}, "unknown recompute 'some'"),
        ({"pp": 8, "dp": 1, "tp": 1}, "2 layers are too few for 8 chunks"),
        ({"recompute": "selective", "recompute_detail": "a fraction of them"}, "unpublished fraction"),
    ],
)
def test_a_plan_that_contradicts_itself_is_a_reason(changes: dict, reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        fix(tiny(**changes))


# ---- statistics ----


def test_errors_by_hand() -> None:
    # absolute errors 0, 10, 20, 30, 40 %: median 20, the 90th percentile 6/10 of the way from 30 to 40; mean +8
    found = errors([(1.0, 1.0), (2.2, 2.0), (0.8, 1.0), (1.3, 1.0), (1.4, 1.0)])
    assert found is not None and found.count == 5
    assert (found.median, found.p90, found.mean) == pytest.approx((0.2, 0.36, 0.12))
    assert errors([]) is None


def test_spearman_by_hand() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    # 1 - 6 Σd² / (n (n² - 1)), d = 1, 1, 0, 0, 0: 1 - 12 / 120
    assert spearman([1, 2, 3, 4, 5], [2, 1, 3, 4, 5]) == pytest.approx(0.9)
    assert list(ranks([5, 1, 5, 7])) == [2.5, 1, 2.5, 4]
    assert spearman([1, 1, 1], [1, 2, 3]) == 0


def test_regret_by_hand() -> None:
    assert regret([3, 1, 2], [2.0, 2.1, 4.0]) == pytest.approx(0.05)
    assert regret([1, 2, 3], [2.0, 2.1, 4.0]) == 0
    assert regret([1, 1, 3], [2.0, 3.0, 4.0]) == 0.5  # the two best predictions tie: neither plan is preferred


# ---- the report ----


def predicted(seconds: float, gib: float = 1.0, fits: bool = True) -> Prediction:
    size = int(gib * 2**30)
    return Prediction(seconds, size, 2 * size, 3 * size, 4 * size, fits, fits)


def as_measured(factor: float) -> Callable[[Row], Prediction]:
    return lambda row: predicted(factor * (row.iteration_time_s or 1.0))


def test_memory_is_compared_by_its_kind() -> None:
    kinds = {"analytic: params": 1, "peak allocated (nanotron)": 2, "torch max_reserved": 3, "nvidia-smi used": 4}
    for kind, gib in kinds.items():
        assert predicted(1.0).bytes_of(kind) == gib * 2**30
    assert predicted(1.0).bytes_of("torch.cuda.max_memory_allocated on the logging rank") == 2 * 2**30
    with pytest.raises(Unsupported, match="unknown kind of peak memory 'guess'"):
        predicted(1.0).bytes_of("guess")
    assert unit_bytes("GB (1e9)") == unit_bytes("GB") == 10**9
    assert unit_bytes("GiB") == unit_bytes("GB (nvidia-smi)") == unit_bytes("GB (as labelled; logs MiB/1024)") == 2**30


def test_layers_and_shares_of_each_stage_are_those_of_the_row() -> None:
    pipeline = {"dp": 2, "tp": 1, "pp": 4, "n_layers": 8, "sharding": "zero1", "precision": "fp16", "framework": "Mist"}
    shares = [{"optimizer": share, "activations": 0.0} for share in (0.0, 0.5, 0.25, 0.0)]
    row = tiny(**pipeline, layers_per_stage=(1, 3, 2, 2), offload_ratios_per_stage=shares)
    fix = fix_of(row, shape_of(row))
    assert (fix["cuts"], fix["offload"]) == (["blocks.1", "blocks.4", "blocks.6"], [0.0, 0.5, 0.25, 0.0])
    plain, _ = staged(row)
    assert plain.offload == (0.0, 0.5, 0.25, 0.0) and not any(plain.solution.policies)
    some, _ = staged(row.model_copy(update={"full_recompute_layers_per_stage": (1, 2, 0, 0)}))
    assert [len(policies) for policies in some.solution.policies] == [2, 4, 0, 0], "two segments a block"
    assert {policy for stage in some.solution.policies for policy in stage.values()} == {"full"}
    kept, before = ([memory.activations for memory in p.memory] for p in (some, plain))
    assert [now < then for now, then in zip(kept, before, strict=True)] == [True, True, False, False]
    assert [m.optimizer for m in some.memory] == [m.optimizer for m in plain.memory] and some.seconds > plain.seconds
    every, _ = staged(row.model_copy(update={"full_recompute_layers_per_stage": (1, 3, 2, 2)}))
    whole, _ = staged(row.model_copy(update={"recompute": "full"}))
    assert (every.seconds, every.memory, every.solution) == (whole.seconds, whole.memory, whole.solution)
    read = predict(row.model_copy(update={"full_recompute_layers_per_stage": (1, 2, 0, 0)}))
    assert read.step_time_s == some.seconds and read.surely
    for update in (
        {"layers_per_stage": (1, 3, 2)},
        {"layers_per_stage": (1, 3, 2, 1)},
        {"offload_ratios_per_stage": [{**share, "activations": 0.5} for share in shares]},
        {"full_recompute_layers_per_stage": (1, 2, 0)},
    ):
        with pytest.raises(Unsupported):
            staged(row.model_copy(update=update))


def test_memory_is_that_of_the_stages_it_is_about() -> None:
    cluster = autoptd.Cluster.load("dgx-a100-80gb")
    context = cluster.device.context_bytes
    big, small = 10**10, 10**9
    stages = [
        {"parameters": small, "temporary": 5, "communication": 11, "overhead": 7, "context": context},
        {"parameters": big, "context": context},
        {"parameters": 2 * small, "context": context},
    ]

    def read(kind: str) -> Prediction:
        return _read(1.0, [Memory(**stage) for stage in stages], tiny(peak_memory_kind=kind), cluster)

    assert read("torch peak allocated").allocated_bytes == big
    assert read("nvidia-smi on first/last pipeline nodes").total_bytes == 2 * small + context
    assert read("max_memory_allocated on the logging rank").allocated_bytes == 2 * small
    assert read("peak allocated (nanotron peak_allocated)").allocated_bytes == small + 5
    stages[1:] = []
    only = read("reserved")
    assert (only.analytic_bytes, only.allocated_bytes) == (small, small + 5)
    held = 5 + allocator_bytes(5)
    assert (only.reserved_bytes, only.total_bytes, only.fits) == (small + held, small + held + 11 + context, True)
    stages.append({"parameters": cluster.device.memory_bytes, "context": context})
    assert not read("nvidia-smi on first/last").fits


def test_a_report_counts_every_run() -> None:
    report = compare(run(list(OF_ROW.values()), predict=as_measured(1.1)))
    lines = {line.name: line for line in report.lines}
    assert sum(line.rows for line in report.lines) == len(OF_ROW)
    assert report.everything.rows == sum(not is_mixture(row) for row in OF_ROW.values())
    assert lines["korthikanti_table5"].time.median == pytest.approx(0.1)
    assert lines["bloom_prequel (64 heads)"].skipped == {"its status is 'inconsistent'": 1}
    fitting = report.fitting
    assert fitting == Fitting(1, ("bloom_prequel:0081",), fitting.ran, (), fitting.tensors)
    assert fitting.tensors == tuple(sorted(fitting.tensors)) and len(fitting.tensors) == 4
    assert replace(fitting, tensors=(0.9, 1.0, 1.1)).most_measured == pytest.approx(1.09)
    shown = text(report, {"matmul.tile": "a sweep"})
    assert max(map(len, shown.splitlines())) <= WIDTH
    assert "its status is 'inconsistent'" in shown and "≤ 8 % MISS" in shown and "constants: 1" in shown
    assert "| korthikanti_table5 | 2 of 2 | 10.0% |" in summary(report)
    assert json.loads(json.dumps(data(report), allow_nan=False))["lines"][0]["time"]["count"] == 2


def test_a_skip_is_shown_with_its_reason() -> None:
    def fails(row: Row) -> Prediction:
        raise Unsupported("the planner said no") if row.id == "toy:1" else TypeError("a fault")

    report = compare(run([tiny(id="toy:1"), tiny(id="toy:2"), tiny(id="toy:3", status="odd")], predict=fails))
    shown = text(report)
    assert "skipped: 3 of 3 runs" in shown
    assert "toy: the planner said no" in shown and "fault: TypeError: a fault" in shown and "'odd'" in shown
    assert "the planner said no" in summary(report)


def test_sets_hold_plans_of_one_problem() -> None:
    rows = [
        tiny(id="a:1", group="a", dp=8, tp=1, iteration_time_s=1.0),
        tiny(id="a:2", group="a", dp=4, tp=2, iteration_time_s=2.5),
        tiny(id="a:3", group="a", dp=2, tp=4, iteration_time_s=1.5),
        tiny(id="a:4", group="a", dp=2, tp=4, iteration_time_s=2.9),  # the same plan a second time: 2.2 s
        tiny(id="a:5", group="a", dp=4, tp=2, iteration_time_s=9.0, global_batch_size_seqs=16),  # another problem
    ]
    times = {8: 5.0, 4: 1.0, 2: 7.0}
    report = compare(run(rows, predict=lambda row: predicted(times[row.dp])))
    (found,) = report.sets
    assert (found.plans, found.spearman, found.regret) == (3, -0.5, 1.5)


def test_out_of_memory_is_confused_both_ways() -> None:
    rows = [tiny(id=f"toy:{i}", status="oom" if i < 2 else "ok") for i in range(4)]
    rows.append(tiny(id="toy:4", is_memory_estimate_analytic=True))  # an estimate: never run
    report = compare(run(rows, predict=lambda row: predicted(1.0, fits=row.id in ("toy:0", "toy:3"))))
    assert report.fitting == Fitting(2, ("toy:0",), 2, ("toy:2",))
    assert [v.met for v in fitting_verdicts(report.fitting)] == [False, False]
    assert report.lines[0].time.count == 3  # a run that ran out of memory has no time


def test_bars() -> None:
    met = errors([(1.05, 1.0)])
    assert [v.met for v in time_verdicts("vtrain_multi", met)] == [True]
    assert time_verdicts("vtrain_single", met) == []
    assert [v.met for v in time_verdicts("torchtitan", None)] == [False]  # a verdict without data is not met
    assert [v.met for v in time_verdicts("all rows", errors([(1.07, 1.0)]))] == [False, True]
    ranked = PlanSet("vtrain_multi", "", 3, 0.89, 0.04)
    assert [v.met for v in set_verdicts(ranked)] == [False, True]
    assert [v.met for v in set_verdicts(replace(ranked, line="bloom_prequel (64 heads)", regret=0.05))] == [False]
    (line,) = compare(run([OF_ROW["nanotron_ultrascale_best:0000"]], predict=as_measured(1))).lines
    assert [v.met for v in memory_verdicts(line)] == [False]


def test_nanotron_cuts_where_a_stage_has_more_than_its_share() -> None:
    """Cuts by hand: the head of 131,072 rows weighs as much as four blocks of width 2,048, so 16 blocks are cut 11 and
    5: one more than half, since the eleventh is assigned before the sum is compared."""
    row = tiny(
        framework="nanotron",
        dp=2,
        pp=2,
        n_layers=16,
        hidden_size=2048,
        ffn_hidden_size=8192,
        n_heads=32,
        vocab_size=131072,
    )
    assert nanotron_cuts(shape_of(row), 2) == ["blocks.11"]
    assert fix_of(row, shape_of(row))["cuts"] == ["blocks.11"]


@pytest.mark.parametrize(
    ("layout", "starts"),
    [
        ("Et*2|(tt|)*2t|tmL", ["blocks.2", "blocks.4", "blocks.6", "blocks.7"]),
        ("Et*4|t*4|L", ["blocks.4", "norm"]),
    ],
)
def test_layouts_of_megatron(layout: str, starts: list[str]) -> None:
    shape = shape_of(tiny(n_layers=8))
    assert layout_cuts(layout, shape, len(starts) + 1) == starts
    with pytest.raises(Unsupported, match="layers in"):
        layout_cuts(layout, shape, 9)


def test_uneven_stages() -> None:
    assert uneven_cuts(shape_of(tiny(n_layers=8)), 3) == ["blocks.3", "blocks.6"]
    assert uneven_cuts(shape_of(tiny(n_layers=10)), 4) == ["blocks.2", "blocks.5", "blocks.8"]  # 2, 3, 3, 2


def test_fix_of_mixtures() -> None:
    proxy = fix(OF_ROW["megatron_release_golden_moe:0005"])
    assert {k: proxy[k] for k in ("ep", "etp", "dispatch", "routing")} == {
        "ep": 16,
        "etp": 1,
        "dispatch": "merged",
        "routing": "natural",
    }
    assert proxy["cuts"][0] == "blocks.2" and "*.experts.up" not in proxy["splits"]
    grok = fix(OF_ROW["dgxc_llmb_moe:0009"])
    assert (grok["fp8"], grok["etp"], grok["dispatch"], grok["routing"]) == ("tensor", 4, "slices", "balanced")
    assert grok["splits"]["*.experts.up"] == "S2/2" and "tp" not in grok["overlap"]
    assert "ep" in fix(OF_ROW["bridge_skills_moe:0001"])["overlap"]
    for detail, policy in {
        "moe_act, layernorm": "none",
        "['core_attn', 'moe_act']": "selective",
        "moe, layernorm": "full",
    }.items():
        row = tiny(recompute="selective", recompute_detail=detail)
        assert fix(row)["recompute"] == policy, detail


@pytest.mark.parametrize(
    ("framework", "stated", "routing"),
    [
        ("NeMo/Megatron-Core", "", "balanced"),
        ("NeMo/Megatron-Core", "natural, no drop", "natural"),
        ("MegaScale-MoE", "not stated", "natural"),
        ("torchtitan", "forced balanced, dropless", "balanced"),
        ("torchtitan", "token drop, capacity factor 1", "balanced"),
    ],
)
def test_routing_that_a_row_does_not_state(framework: str, stated: str, routing: str) -> None:
    row = tiny(arch="moe", n_experts=8, moe_top_k=2, moe_ffn_hidden_size=64, tp=1, dp=8, ep=4)
    assert fix(row.model_copy(update={"framework": framework, "moe_routing": stated}))["routing"] == routing


def test_attention_that_a_row_does_not_state() -> None:
    h100 = tiny(framework="Megatron-Core", gpu_type="H100-SXM5-80GB")
    assert fix(h100)["attention"] == "cudnn"
    assert fix(h100.model_copy(update={"attention_impl": "flash"}))["attention"] == "flash"
    assert fix(tiny(framework="Megatron-Core"))["attention"] == "flash"  # an A100
    titan = h100.model_copy(update={"framework": "torchtitan"})
    assert fix(titan)["attention"] == "flash"
    assert fix(titan.model_copy(update={"gpu_type": "B200-SXM"}))["attention"] == "torch"


def test_chunks_that_a_row_does_not_publish() -> None:
    """A stage of 6 layers may be cut into 2, 3 or 6 chunks, if its 8 microbatches are a multiple of the 2 stages."""
    kind = "read (tp, pp); mbs, vpp not published"
    row = tiny(framework="Megatron-Core", n_layers=12, pp=2, dp=2, global_batch_size_seqs=16, config_source_kind=kind)
    assert chunk_counts(row) == [2, 3, 6]
    changes = {"config_source_kind": "read"}, {"global_batch_size_seqs": 18}, {"pp": 1}, {"framework": "torchtitan"}
    assert not any(chunk_counts(row.model_copy(update=change)) for change in changes)
    assert predict(row).step_time_s < predict(row.model_copy(update={"config_source_kind": "read"})).step_time_s


def test_norms_of_heads() -> None:
    names = [name for name, _ in build(shape_of(tiny(arch="llama", model_name="Qwen3 32B"))).named_parameters()]
    assert sum(name.endswith(("q_norm.weight", "k_norm.weight")) for name in names) == 2 * 2
    assert not shape_of(tiny(arch="llama", model_name="Qwen2-57B-A14B")).head_norm


@pytest.mark.parametrize(
    ("run_id", "time", "memory"),
    [
        ("simumax_b200:0003", 0.08, 0.08),
        ("dgxc_llmb_moe:0009", 0.12, None),
        ("megatron_release_golden_moe:0005", 0.08, 0.15),
        ("bridge_skills_moe:0001", 0.08, 0.08),
    ],
)
def test_mixtures_of_the_sample(run_id: str, time: float, memory: float | None) -> None:
    row = OF_ROW[run_id]
    found = predict(row)
    assert abs(found.step_time_s / row.measured_time_s - 1) <= time
    if memory is not None:
        assert abs(found.bytes_of(row.peak_memory_kind) / row.measured_bytes - 1) <= memory


def test_mixtures_have_bars_of_their_own() -> None:
    rows = [OF_ROW[name] for name in ("simumax_b200:0003", "dgxc_llmb_moe:0009", "sc21_table1:0000")]
    report = compare(run(rows, predict=as_measured(1.1)))
    assert [line.name for line in report.mixtures] == ["mixtures in bf16", "mixtures in fp8"]
    assert [[v.met for v in time_verdicts(line.name, line.time)] for line in report.mixtures] == [[False, True], [True]]
    assert report.everything.rows == 1 and skip_verdict(report.mixtures).met
    hybrid = compare(run([OF_ROW["megatron_bridge_moe_fp8:0018"]]))
    assert not skip_verdict(hybrid.mixtures).met


def test_plan_text() -> None:
    row = tiny(pp=2, vpp_chunks_per_stage=3, sharding="zero1", recompute="full", sequence_parallel=True)
    assert plan_text(row) == "dp4 tp2 pp2×3 mb1 z1 full sp"


# ---- the command ----


def test_the_command_predicts_a_file(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file, out, page = tmp_path / "runs.jsonl", tmp_path / "out.json", tmp_path / "accuracy.md"
    rows = [tiny(), tiny(id="toy:1", arch="hybrid(moe)", group="experts")]
    file.write_text("\n".join(row.model_dump_json() for row in rows) + "\n\n", encoding="utf-8")
    assert main([str(file), "--json", str(out), "--markdown", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "experts (moe): architecture 'hybrid(moe)' is not modelled" in shown
    written = json.loads(out.read_text("utf-8"))
    assert [r["id"] for r in written["runs"]] == ["toy:0", "toy:1"]
    assert written["runs"][0]["predicted"]["step_time_s"] > 0, written["runs"][0]["skipped"]
    assert page.read_text("utf-8").startswith("| runs |")
    assert main([str(file), "--group", "experts"]) == 0
    shown = capsys.readouterr().out
    assert "skipped: 1 of 1 runs" in shown and "toy" not in shown.replace("skipped", "").splitlines()[0]


def test_processes_agree_with_one(tmp_path: Path) -> None:
    rows = [tiny(id=f"toy:{i}", arch="moe", n_layers=i) for i in range(1, 4)]
    assert run(rows, jobs=2) == run(rows, jobs=1)
    assert [o.row.id for o in run(rows, jobs=1)] == ["toy:1", "toy:2", "toy:3"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "a"', "runs.jsonl:2"),
        ('{"id": "a"}', "group: Field required"),
        ('{"id": "a", "group": "g", "n_gpus": "many"}', "n_gpus"),
        ("[1]", "runs.jsonl:2"),
    ],
)
def test_a_malformed_line_is_named(line: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "runs.jsonl"
    file.write_text('{"id": "g:0", "group": "g"}\n' + line + "\n", encoding="utf-8")
    assert main([str(file)]) == 2
    shown = capsys.readouterr().err
    assert message in shown and shown.count("error:") == 1 and "Traceback" not in shown


def test_bad_arguments(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main([str(tmp_path / "none.jsonl")]) == 2
    assert "cannot read" in capsys.readouterr().err
    assert main([str(SAMPLE), "--group", "sc21_table"]) == 2
    assert "did you mean 'sc21_table1'" in capsys.readouterr().err
    assert main([str(SAMPLE), "--json", str(tmp_path / "no" / "out.json")]) == 2
    with pytest.raises(BadRuns, match="no runs"):
        chosen([], [])
    with pytest.raises(SystemExit):
        main([str(SAMPLE), "--jobs", "0"])


def test_ids_are_unique(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    file.write_text('{"id": "g:0", "group": "g"}\n' * 2, encoding="utf-8")
    with pytest.raises(BadRuns, match="two runs have the id 'g:0'"):
        read_rows(file)


def test_shape_is_hashable() -> None:
    assert isinstance(hash(shape_of(tiny())), int) and isinstance(shape_of(tiny()), Shape)
