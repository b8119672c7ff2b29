"""Memory of fused kernels: what torch's own partitioner saves, and the peak that was measured on a GPU."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.compile.program import read_sharding
from autoptd.passes.analysis.activations import block_segments
from autoptd.passes.fold import Folded
from autoptd.plans.model import Plan
from autoptd.runtime.torch_compile import blocks_of
from autoptd.search.sharding.op_table import Workbook
from benchmarks.gpu.cases import CASES, make_model

GIB = 2**30
TINY = {case.name: case for case in CASES["cpu"]}
STATISTICS = 0.5  # of a tensor [b, s, h]: what norms and attention keep of each row


def traced(name: str) -> Any:
    return autoptd.trace(make_model(TINY[name]), seq=TINY[name].seq, precision="bf16")


def kept(folded: Folded, plan: Plan, source: Any, kernels: str) -> int:
    """Return the bytes that a block saves by the model."""
    sizes = {"b": plan.batch, **plan.sizes}

    def number(size: Any) -> int:
        return size if isinstance(size, int) else int(size.subs({s: sizes[s.name] for s in size.free_symbols}))

    sharding = read_sharding(source, plan)
    return Workbook(folded, kernels).walk(block_segments(folded), sharding.kinds, "none").peak(number, 1).kept


def saved_by_torch(block: nn.Module, inputs: list[Tensor], backend: str) -> int:
    """Return the bytes of the storages that autograd saves, without parameters."""
    own = {p.untyped_storage().data_ptr() for p in block.parameters()}
    found: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in own:
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    forward = block.forward if backend == "eager" else torch.compile(block.forward, backend=backend)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = forward(*inputs)
    return sum(found.values()) if result is not None else 0


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny"])
@pytest.mark.parametrize(("kernels", "backend"), [("eager", "eager"), ("compiled", "aot_eager_decomp_partition")])
def test_a_block_saves_what_torch_saves(name: str, kernels: str, backend: str) -> None:
    torch.compiler.reset()
    case, source = TINY[name], traced(name)
    fix = {"micro": case.batch, "recompute": "none"}
    par = autoptd.parallelize(source, world=1, batch=case.batch, precision="bf16", cluster="dgx-h100", fix=fix)
    stage = par._running.stages[0]
    block = next(iter(blocks_of(stage).values()))
    width = case.config.get("n_embd") or case.config["hidden_size"]
    assert case.seq is not None
    x = torch.randn(case.batch, case.seq, width, dtype=torch.bfloat16, requires_grad=True)
    tables = [
        torch.randn(1, case.seq, 16).bfloat16() for _ in list(inspect.signature(type(block).forward).parameters)[2:]
    ]
    rows = STATISTICS * x.nbytes
    found = saved_by_torch(block, [x, *tables], backend) - sum(t.nbytes for t in tables)
    if backend == "eager":  # a CPU decomposes an RMS norm, and saves its operand in float32 in place of bfloat16
        found -= inspect.getsource(type(block)).count("F.rms_norm(") * x.nbytes
    assert kept(source.folded, par.plan, source, kernels) == pytest.approx(found, abs=rows)


def test_compiled_kernels_save_less() -> None:
    source = traced("gpt2-tiny")
    plan = autoptd.plan(source, world=1, batch=2, precision="bf16", cluster="dgx-h100")
    eager, fused, compiled = (kept(source.folded, plan, source, k) for k in ("eager", "fused", "compiled"))
    assert fused == eager and compiled < 0.6 * eager


def test_ops_that_stay_outside_write_what_they_do_in_eager_code() -> None:
    """Dropout after each half of a block: its results and masks are saved beside what the kernels save."""
    case = TINY["gpt2-tiny"]
    dropped = replace(case, config={**case.config, "resid_pdrop": 0.1})
    source = autoptd.trace(make_model(dropped), seq=case.seq, precision="bf16")
    plan = autoptd.plan(source, world=1, batch=2, precision="bf16", cluster="dgx-h100")
    sharding = read_sharding(source, plan)
    segments = block_segments(source.folded)
    walks = {k: Workbook(source.folded, k).walk(segments, sharding.kinds, "none") for k in ("eager", "compiled")}
    masks = {k: {kept.tensor for kept in w.kept if "dropout" in kept.tensor} for k, w in walks.items()}
    assert masks["compiled"] == masks["eager"] != set()
    storages = [s for s in walks["compiled"].storages if s.name.startswith("dropout") and s.origin != "received"]
    assert storages and not any(s.max_elements for s in storages)


@pytest.mark.parametrize("kernels", ["eager", "compiled"])
def test_the_peak_is_that_of_a_gpu(kernels: str) -> None:
    """GPT-2 with 16 samples of 1024 tokens in bf16 on an H200 (docs/gpu.md)."""
    case = next(case for case in CASES["cuda"] if case.name == "gpt2-124m")
    rows = map(json.loads, Path("benchmarks/data/gpu/rows.jsonl").read_text("utf-8").splitlines()[1:])
    (row,) = [row for row in rows if row["name"] == f"{case.name}, {kernels}"]
    measured = float(row["figures"]["measured "].split()[0]) * GIB
    fix = {"micro": case.batch, "recompute": "none", "kernels": kernels}
    plan = autoptd.plan(
        make_model(case), world=1, batch=case.batch, seq=case.seq, precision="bf16", cluster="dgx-h200", fix=fix
    )
    parts = ("parameters", "gradients", "optimizer", "activations", "temporary")
    assert sum(plan.predicted.memory[0][part] for part in parts) == pytest.approx(measured, rel=0.02)
