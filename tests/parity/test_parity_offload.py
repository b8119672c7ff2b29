"""Optimizer state in host memory computes what it computes on the device, bit by bit where the kernels are the same.

On a CPU the host is the device; copies, buffers and views are those of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import autoptd
from autoptd.errors import PlanError, RuntimeFault
from autoptd.layout.mesh import Mesh
from autoptd.layout.state_bytes import state_bytes
from autoptd.models.nanogpt import GPTSizes, NanoGPT
from autoptd.parallel import Parallel
from autoptd.runtime.zero import flat_buffer as storage
from autoptd.testing.parity import Trained, differences, train_in_lockstep
from tests.parity.parity_check import Variant, check

WAYS: tuple[tuple[str, Mesh, Variant, str], ...] = (
    ("nanogpt", Mesh(4, 1, 1), Variant(offload=1.0, clip_norm=0.7), "adamw"),
    ("gpt2", Mesh(2, 1, 2), Variant(offload=0.5, zero=2, micro=1, schedule="zero-bubble"), "adamw"),
    ("llama", Mesh(2, 2, 1), Variant(offload=0.3, zero=0), "sgd"),
    ("oddities", Mesh(2, 2, 2), Variant(offload=1.0, micro=1, schedule="interleaved", virtual=2), "adamw"),
    ("bert", Mesh(4, 1, 1), Variant(offload=0.6, shards=2, recompute="full"), "adamw"),
    ("mixtral", Mesh(4, 1, 1, ep=2), Variant(offload=0.5, micro=1), "adamw"),
)
SIZES = GPTSizes(vocab=66, max_seq=8, width=24, layers=4, heads=4)
BATCH, BUCKET = 16, 6000  # samples; bytes: several buckets on a rank, of which some are on the host


@pytest.mark.parametrize(("name", "mesh", "variant", "optimizer"), WAYS, ids=str)
def test_state_on_the_host_trains_like_one_process(name: str, mesh: Mesh, variant: Variant, optimizer: str) -> None:
    assert not check(name, mesh, variant, optimizer)


def batches(steps: int = 3) -> list[dict[str, Tensor]]:
    tokens = torch.randint(SIZES.vocab, (BATCH, 9), generator=torch.Generator().manual_seed(1))
    return [{"idx": t[:, :-1], "targets": t[:, 1:]} for t in (tokens.roll(step, 0) for step in range(steps))]


@cache
def source(precision: str) -> autoptd.TracedModel:
    torch.manual_seed(0)
    return autoptd.trace(NanoGPT(SIZES), seq=8, precision=precision)


def made(precision: str, offload: float | list[float], optimizer: str = "adamw", **fix: Any) -> Parallel:
    mesh = {"dp": 2, "tp": 1, "pp": 2, "zero": 1, "schedule": "1f1b", "micro": 2} | fix
    return autoptd.parallelize(
        source(precision),
        world=4,
        batch=BATCH,
        cluster="dgx-h100",
        optimizer=optimizer,
        optimizer_options={"lr": 1e-2, "weight_decay": 0.1},
        clip_norm=0.5,
        fix={**mesh, "offload": offload, "bucket_bytes": BUCKET},
    )


def trained(precision: str, offload: float | list[float], **fix: Any) -> Trained:
    return train_in_lockstep(made(precision, offload, **fix), batches())


@pytest.mark.parametrize("share", [0.4, 1.0])
@pytest.mark.parametrize(
    ("precision", "fix"),
    [
        ("fp64", {}),
        ("fp32", {"zero": 0}),
        ("fp32", {"zero": 2, "dp": 4, "pp": 1}),
        ("bf16", {}),
        ("bf16", {"gradients": "compute", "zero": 2}),
        ("bf16", {"overlap": ["dp", "p2p"]}),
        ("fp16", {"tp": 2, "pp": 1}),
        ("bf16", {"optimizer": "lion", "dp": 1, "pp": 4, "zero": 0}),
        ("fp32", {"schedule": "interleaved", "virtual": 2}),
    ],
    ids=str,
)
def test_the_host_changes_no_bit(precision: str, share: float, fix: dict[str, Any]) -> None:
    with_it, without = trained(precision, share, **fix), trained(precision, 0.0, **fix)
    assert with_it.losses == without.losses and with_it.norms == without.norms
    assert max(differences(with_it.state, without.state).values()) == 0


def test_ranks_may_have_shares_of_their_own() -> None:
    with_it, without = trained("bf16", [1.0, 0.0]), trained("bf16", 0.0)
    assert with_it.losses == without.losses
    assert max(differences(with_it.state, without.state).values()) == 0


def test_a_share_is_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first buckets, with at least the share, are there, and none of tied parameters."""
    seen: list[tuple[int, int, int]] = []
    allocate = storage.Buffer.allocate

    def noted(self: storage.Buffer, dtype: torch.dtype, device: torch.device) -> None:
        allocate(self, dtype, device)
        seen.append((self.tied.size, len(self.host), sum(self.own(b).stop - self.own(b).start for b in self.buckets)))

    monkeypatch.setattr(storage.Buffer, "allocate", noted)
    trained("bf16", 0.4)
    assert all(held == 0 for tied, held, _ in seen if tied > 1)
    alone = [(held, shard) for tied, held, shard in seen if tied == 1]
    assert all(held >= 0.4 * shard for held, shard in alone) and any(held < shard for held, shard in alone)


@pytest.mark.parametrize("fix", [{}, {"zero": 2, "dp": 4, "pp": 1}, {"tp": 2, "pp": 1}], ids=str)
def test_the_plan_counts_what_is_left_on_the_device(fix: dict[str, Any]) -> None:
    found = made("bf16", 0.4, **fix)
    for rank, memory in enumerate(found.plan.predicted.memory):
        assert memory["optimizer"] == state_bytes(found.layout, rank, "adamw").optimizer
    assert found.layout.offload == (0.4,) * found.plan.mesh.pp
    assert any("in host memory" in note for note in found.plan.notes)


# ---- planted bugs ----


def stale_gradients(patch: pytest.MonkeyPatch) -> None:
    """The host steps with what it had before."""
    patch.setattr(storage.ParameterShard, "stepped_grad", lambda self: self.grad if self.host_grad is None else None)


def kept_parameters(patch: pytest.MonkeyPatch) -> None:
    """New parameters do not come back."""
    rounded = storage.Buffer._rounded

    def late(self: storage.Buffer, bucket: Any, dtype: torch.dtype) -> Tensor:
        rounded(self, bucket, dtype)
        return self.own_part(self.whole(bucket), bucket).clone()

    patch.setattr(storage.Buffer, "_rounded", late)


def unrounded_memory(patch: pytest.MonkeyPatch) -> None:
    """The bytes of gradients are sent instead of the parameters in the compute type."""
    patch.setattr(
        storage.Buffer,
        "_rounded",
        lambda self, bucket, dtype: self._host_grad[self._in_shards[bucket.start]].view(dtype)[
            : len(self.shard(bucket))
        ],
    )


@pytest.mark.parametrize(
    "bug",
    [
        pytest.param(stale_gradients, marks=pytest.mark.fault("gradients stay on the device")),
        pytest.param(kept_parameters, marks=pytest.mark.fault("new values stay on the host")),
        pytest.param(unrounded_memory, marks=pytest.mark.fault("gradients come back")),
    ],
)
def test_a_bug_on_the_way_to_the_host_is_caught(bug: Callable[[pytest.MonkeyPatch], None]) -> None:
    without = trained("bf16", 0.0)
    with pytest.MonkeyPatch.context() as patch:
        bug(patch)
        try:
            found = trained("bf16", 1.0)
        except RuntimeFault:  # not finite
            return
    assert max(differences(found.state, without.state).values()) > 0


# ---- what is refused ----


def test_what_cannot_be_offloaded_is_refused() -> None:
    with pytest.raises(PlanError, match="ZeRO 3"):
        made("bf16", 0.5, zero=3)
    with pytest.raises(PlanError, match=r"offload is 1\.5"):
        made("bf16", 1.5)
    with pytest.raises(PlanError, match="3 shares for 2 pipeline ranks"):
        made("bf16", [0.5, 0.5, 0.0])
    with pytest.raises(PlanError, match="whole"):
        made("bf16", 0.5, optimizer="muon")
